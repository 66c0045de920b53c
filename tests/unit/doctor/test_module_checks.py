"""What `vsrtune doctor` finds in the kernel module and attachments of hosts of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vsrtune.cli.doctor import OF_MODULE
from vsrtune.doctor.facts.module import loaded_module, lockdown, module_file, secure_boot
from vsrtune.doctor.model import Finding, Severity, run
from vsrtune.doctor.module_checks import (
    ModuleFacts,
    ModuleFile,
    lower_devices,
    module,
    signature,
    switches,
    version,
)
from vsrtune.model.host import Link

MODINFO = """\
filename:       /lib/modules/6.12.1-amd64/updates/dkms/napi_macvlan.ko.xz
license:        GPL
srcversion:     0123456789ABCDEF0123456
depends:        tap
name:           napi_macvlan
vermagic:       6.12.1-amd64 SMP preempt mod_unload modversions
sig_id:         PKCS#7
signer:         DKMS module signing key
sig_key:        4A:5B
sig_hashalgo:   sha256
signature:      30:82
\t\t01:02
"""
FILE = ModuleFile("/m.ko", "6.12.1-amd64 SMP preempt", "ABC", "")
SIGNED = replace(FILE, signer="somebody")
HOST = ModuleFacts("6.12.1-amd64", FILE, "ABC")


def levels(seen: ModuleFacts) -> dict[str, str]:
    """The worst level of each check."""
    found: dict[str, Severity] = {}
    for one in run(OF_MODULE, seen):
        found[one.check] = max(
            found.get(one.check, Severity.OK), one.level, key=lambda level: level.rank
        )
    return {name: str(level) for name, level in found.items()}


def test_modinfo_is_read() -> None:
    assert module_file(MODINFO) == ModuleFile(
        "/lib/modules/6.12.1-amd64/updates/dkms/napi_macvlan.ko.xz",
        "6.12.1-amd64 SMP preempt mod_unload modversions",
        "0123456789ABCDEF0123456",
        "DKMS module signing key",
    )
    assert module_file(None) is None
    assert module_file("") is None


def test_a_host_that_is_fit() -> None:
    assert set(levels(HOST).values()) == {"ok"}


P0 = Link(2, "p0", up=True)
TAP = Link(3, "macvtap0", "macvtap", lower=2, up=True)
OURS = Link(4, "nvt1", "napi_macvtap", lower=2)
RIVAL = replace(OURS, index=5, name="nvt2", up=True)
PORT = (replace(P0, master=9), Link(9, "br0", "bridge"))
OK, INFO, ERROR = Severity.OK, Severity.INFO, Severity.ERROR


@pytest.mark.parametrize(
    ("check", "changes", "level", "word"),
    [
        (module, {"file": None, "loaded": None}, INFO, "napi-macvlan only"),
        (module, {"file": None, "loaded": None, "devices": ("nvt1",)}, ERROR, "nvt1"),
        (module, {"loaded": None}, OK, ""),
        (version, {}, OK, "installed one is loaded"),
        (version, {"kernel": "6.1.0"}, ERROR, "6.1.0"),
        (version, {"loaded": "OTHER"}, ERROR, "OTHER"),
        (version, {"loaded": ""}, OK, "for this kernel"),
        (version, {"loaded": None}, OK, "for this kernel"),
        (signature, {}, OK, "asks for no signature"),
        (signature, {"secure_boot": True}, INFO, "does not enforce"),
        (signature, {"loaded": None, "lockdown": "integrity"}, ERROR, "locked down"),
        (signature, {"loaded": None, "lockdown": "none"}, OK, "asks for no signature"),
        (signature, {"loaded": None, "sig_enforce": True}, ERROR, "sig_enforce"),
        (signature, {"file": SIGNED, "loaded": None, "sig_enforce": True}, INFO, "must be one"),
        (signature, {"file": SIGNED, "sig_enforce": True}, OK, "took it"),
        (signature, {"file": SIGNED, "loaded": None}, OK, "asks for no signature"),
        (lower_devices, {"links": (P0, TAP)}, INFO, "macvtap0"),
        (lower_devices, {"links": (P0, TAP, OURS)}, INFO, "nvt1 can come up when"),
        (lower_devices, {"links": (P0, OURS)}, ERROR, "gets no frames"),
        (lower_devices, {"links": (P0, OURS, RIVAL)}, INFO, "nvt1 on p0 is down: another"),
        (lower_devices, {"links": (P0, OURS, RIVAL)}, INFO, "if its guest runs, it gets no"),
        (lower_devices, {"links": (P0, replace(OURS, up=True))}, OK, "carries nvt1"),
        (lower_devices, {"links": PORT}, INFO, "br0"),
        (switches, {"unfinished": True}, ERROR, "interrupted"),
        (switches, {"devices": ("nvt1",), "boot_unit": False}, ERROR, "vsrtune-devices"),
        (switches, {"devices": ("nvt1",), "boot_unit": True}, OK, "1 interface on"),
    ],
)
def test_what_is_found(
    check: Callable[[ModuleFacts], Iterable[Finding]],
    changes: dict[str, Any],
    level: Severity,
    word: str,
) -> None:
    (found,) = check(replace(HOST, **changes))
    assert found.level is level
    assert word in f"{found.what}; {found.hint}"
    assert found.hint or level is not ERROR


def test_firmware_and_kernel_are_read(tmp_path: Path) -> None:
    assert lockdown("none [integrity] confidentiality") == "integrity"
    assert lockdown(None) is None
    assert secure_boot(tmp_path) is None
    variable = tmp_path / (
        "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    )
    variable.parent.mkdir(parents=True)
    variable.write_bytes(b"\x06\0\0\0\1")
    assert secure_boot(tmp_path) is True
    variable.write_bytes(b"\x06\0\0\0\0")
    assert secure_boot(tmp_path) is False
    assert loaded_module(tmp_path) is None
    module = tmp_path / "sys/module/napi_macvlan"
    module.mkdir(parents=True)
    assert loaded_module(tmp_path) == ""
    (module / "srcversion").write_text("ABC\n")
    assert loaded_module(tmp_path) == "ABC"
