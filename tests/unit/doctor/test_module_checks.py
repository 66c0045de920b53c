"""What `vsrtune doctor` finds in the kernel module and attachments of hosts of all kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vsrtune.cli.doctor import OF_MODULE
from vsrtune.doctor.facts.module import loaded_module, lockdown, module_file, secure_boot
from vsrtune.doctor.model import Severity, run
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


def test_a_module_that_is_not_there_matters_only_where_it_is_used() -> None:
    (found,) = module(replace(HOST, file=None, loaded=None))
    assert found.level is Severity.INFO
    (found,) = module(replace(HOST, file=None, loaded=None, devices=("nvt1",)))
    assert found.level is Severity.ERROR
    assert "nvt1" in found.what
    (found,) = module(replace(HOST, loaded=None))
    assert found.level is Severity.OK


@pytest.mark.parametrize(
    ("seen", "level", "word"),
    [
        (HOST, Severity.OK, "installed one is loaded"),
        (replace(HOST, kernel="6.1.0"), Severity.ERROR, "6.1.0"),
        (replace(HOST, loaded="OTHER"), Severity.ERROR, "OTHER"),
        (replace(HOST, loaded=""), Severity.OK, "for this kernel"),
        (replace(HOST, loaded=None), Severity.OK, "for this kernel"),
    ],
)
def test_versions(seen: ModuleFacts, level: Severity, word: str) -> None:
    (found,) = version(seen)
    assert found.level is level
    assert word in found.what
    assert bool(found.hint) == (level is Severity.ERROR)


@pytest.mark.parametrize(
    ("file", "loaded", "more", "level"),
    [
        (FILE, True, {}, Severity.OK),
        (FILE, True, {"secure_boot": True}, Severity.INFO),
        (FILE, False, {"secure_boot": True, "lockdown": "integrity"}, Severity.ERROR),
        (FILE, False, {"lockdown": "none"}, Severity.OK),
        (FILE, False, {"sig_enforce": True}, Severity.ERROR),
        (SIGNED, False, {"sig_enforce": True}, Severity.INFO),
        (SIGNED, True, {"sig_enforce": True}, Severity.OK),
        (SIGNED, False, {}, Severity.OK),
    ],
)
def test_signatures(
    file: ModuleFile, loaded: bool, more: dict[str, object], level: Severity
) -> None:
    seen = replace(HOST, file=file, loaded="ABC" if loaded else None, **more)  # type: ignore[arg-type]
    (found,) = signature(seen)
    assert found.level is level


def test_lower_devices_are_named_with_what_holds_them() -> None:
    p0 = Link(2, "p0", up=True)
    tap = Link(3, "macvtap0", "macvtap", lower=2, up=True)
    ours = Link(4, "nvt1", "napi_macvtap", lower=2)
    (found,) = lower_devices(replace(HOST, links=(p0, tap)))
    assert (found.level, "macvtap0" in found.what) == (Severity.INFO, True)
    (found,) = lower_devices(replace(HOST, links=(p0, tap, ours)))
    assert found.level is Severity.INFO
    assert "nvt1" in found.what
    (found,) = lower_devices(replace(HOST, links=(p0, ours)))
    assert found.level is Severity.ERROR
    (found,) = lower_devices(replace(HOST, links=(p0, replace(ours, up=True))))
    assert found.level is Severity.OK
    port = (replace(p0, master=9), Link(9, "br0", "bridge"))
    (found,) = lower_devices(replace(HOST, links=port))
    assert "br0" in found.what


def test_switches_and_reboots() -> None:
    assert [f.level for f in switches(replace(HOST, unfinished=True))] == [Severity.ERROR]
    (found,) = switches(replace(HOST, devices=("nvt1",), boot_unit=False))
    assert "vsrtune-devices" in found.hint
    (found,) = switches(replace(HOST, devices=("nvt1",), boot_unit=True))
    assert found.level is Severity.OK


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
