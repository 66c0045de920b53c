# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads the facts that the module's checks judge: modules, signatures, links, units."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from vsrtune.core.errors import ObserveError
from vsrtune.doctor.module_checks import MODULE, ModuleFacts, ModuleFile
from vsrtune.host import netlink
from vsrtune.host.filesystem import LiveRoot, text_of
from vsrtune.model.host import Link

BOOT_UNIT = "vsrtune-devices.service"
# The daemon's wants it.
_BOOT_UNITS = (BOOT_UNIT, "vsrtune.service")
# The firmware's variable: four bytes of attributes, then 1 or 0.
_SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_SECONDS = 20.0


def read(devices: tuple[str, ...], unfinished: bool, root: Path = Path("/")) -> ModuleFacts:
    """The facts of this host. ``devices`` and ``unfinished`` come from the ledger of
    attachments. Facts that cannot be read are None or missing. Raises ObserveError when the
    links cannot be read."""
    try:
        links: tuple[Link, ...] = netlink.links()
    except OSError as error:
        raise ObserveError(
            f"network devices cannot be read: {error.strerror}", hint="run as root"
        ) from error
    return ModuleFacts(
        kernel=os.uname().release,
        file=module_file(_output("modinfo", MODULE)),
        loaded=loaded_module(root),
        secure_boot=secure_boot(root),
        lockdown=lockdown(_text(root / "sys/kernel/security/lockdown")),
        sig_enforce=_flag(_text(root / "sys/module/module/parameters/sig_enforce")),
        links=links,
        devices=devices,
        unfinished=unfinished,
        boot_unit=boot_unit_enabled(),
    )


def module_file(modinfo: str | None) -> ModuleFile | None:
    """Parse the output of modinfo, ``key: value`` by line; None without output."""
    if not modinfo:
        return None
    found: dict[str, str] = {}
    for line in modinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and not line.startswith(("\t", " ")):
            found.setdefault(key.strip(), value.strip())
    return ModuleFile(
        path=found.get("filename", ""),
        vermagic=found.get("vermagic", ""),
        srcversion=found.get("srcversion", ""),
        signer=found.get("signer", "") or ("unknown" if "sig_id" in found else ""),
    )


def loaded_module(root: Path) -> str | None:
    """The srcversion of the loaded module, "" when it has none; None when it is not loaded."""
    directory = root / "sys/module" / MODULE
    return (_text(directory / "srcversion") or "") if directory.is_dir() else None


def secure_boot(root: Path) -> bool | None:
    """Whether Secure Boot is on; None without EFI, or when the firmware does not say."""
    try:
        content = (root / _SECURE_BOOT).read_bytes()
    except OSError:
        return None
    return content[4] == 1 if len(content) == 5 else None


def lockdown(text: str | None) -> str | None:
    """The mode in brackets: ``none [integrity] confidentiality``."""
    if text is None or "[" not in text:
        return None
    return text.partition("[")[2].partition("]")[0]


def _text(path: Path) -> str | None:
    return text_of(LiveRoot(), str(path))


def _flag(text: str | None) -> bool | None:
    return None if text is None else text == "Y"


def boot_unit_enabled() -> bool | None:
    """Whether the devices are made when this host boots; None without systemd."""
    if not Path("/run/systemd/system").is_dir():
        return None
    text = _output("systemctl", "is-enabled", *_BOOT_UNITS, check=False)
    return text is not None and any(line.startswith("enabled") for line in text.splitlines())


def _output(*words: str, check: bool = True) -> str | None:
    """The output of a program; None when it is missing, takes too long or, with ``check``,
    fails."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=check,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
