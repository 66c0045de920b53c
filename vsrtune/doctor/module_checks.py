# SPDX-License-Identifier: GPL-2.0-or-later
"""Checks of the kernel module and of the attachments that need it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vsrtune.attach.plan.model import OURS, STACKED, contend
from vsrtune.core.text import counted
from vsrtune.doctor.model import Finding, error, info, ok
from vsrtune.model.host import Link

MODULE = "napi_macvlan"


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """The module that modprobe would load, from ``modinfo``. ``signer`` is "" when it is not
    signed."""

    path: str
    vermagic: str
    srcversion: str
    signer: str


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """Facts as read. ``loaded`` is the srcversion of the loaded module, "" when it has none, None
    when no module is loaded. ``secure_boot``, ``lockdown`` (its mode, such as integrity) and
    ``sig_enforce`` are None where this kernel or firmware does not tell. ``devices`` are the
    devices that vsrtune made for guests. ``unfinished`` tells whether a switch was interrupted
    or is under way, ``boot_unit`` whether vsrtune-devices.service is enabled, None without
    systemd."""

    kernel: str
    file: ModuleFile | None
    loaded: str | None
    secure_boot: bool | None = None
    lockdown: str | None = None
    sig_enforce: bool | None = None
    links: tuple[Link, ...] = ()
    devices: tuple[str, ...] = ()
    unfinished: bool = False
    boot_unit: bool | None = None


def module(facts: ModuleFacts) -> Iterable[Finding]:
    """Whether the module is loaded, or can be."""
    if facts.loaded is not None:
        yield ok(f"{MODULE} is loaded", evidence=f"/sys/module/{MODULE}")
    elif facts.file is not None:
        yield ok(f"{MODULE} is not loaded; the first device loads it")
    else:
        needed = bool(facts.devices)
        tell = error if needed else info
        yield tell(
            f"{MODULE} is not installed for kernel {facts.kernel}"
            + (f", and guests' interfaces need it: {', '.join(facts.devices)}" if needed else ""),
            "install the module (kmod/, with DKMS it follows every kernel); it is needed for "
            "attachment napi-macvlan only",
            f"modinfo {MODULE}: nothing",
        )


def version(facts: ModuleFacts) -> Iterable[Finding]:
    """Whether the installed module fits the running kernel, and is the loaded one."""
    if facts.file is None:
        return
    built_for = facts.file.vermagic.partition(" ")[0]
    if built_for != facts.kernel:
        yield error(
            f"{facts.file.path} is built for kernel {built_for or 'unknown'}, "
            f"this is {facts.kernel}",
            "build it for this kernel: dkms autoinstall",
            f"modinfo {MODULE}, vermagic: {facts.file.vermagic}",
        )
    elif facts.loaded is not None and "" not in (facts.loaded, facts.file.srcversion):
        if facts.loaded == facts.file.srcversion:
            yield ok(f"the installed one is loaded, for {built_for}")
        else:
            yield error(
                f"the loaded module (srcversion {facts.loaded}) is not the installed "
                f"one ({facts.file.srcversion})",
                f"move its guests to macvtap, then rmmod {MODULE} and go back; or reboot",
                f"/sys/module/{MODULE}/srcversion",
            )
    else:
        yield ok(f"the installed module is for this kernel, {built_for}")


def signature(facts: ModuleFacts) -> Iterable[Finding]:
    """Whether the kernel takes the module where it wants signed ones."""
    if facts.file is None:
        return
    reasons = []
    if facts.secure_boot:
        reasons.append("Secure Boot is on")
    if facts.lockdown not in (None, "none"):
        reasons.append(f"the kernel is locked down ({facts.lockdown})")
    if facts.sig_enforce:
        reasons.append("module.sig_enforce is set")
    why = " and ".join(reasons)
    signer = facts.file.signer
    if signer:
        text = f"{facts.file.path} is signed by {signer}"
        if not reasons:
            yield ok(f"{text}; this kernel asks for no signature")
        elif facts.loaded is not None:
            yield ok(f"{text}, and the kernel took it")
        else:
            yield info(
                f"{text}; {why}, so its key must be one that the kernel trusts",
                f"try: modprobe {MODULE}; enroll the key if it is refused: mokutil --import",
            )
    elif not reasons:
        yield ok("not signed, and this kernel asks for no signature")
    elif facts.sig_enforce or facts.lockdown not in (None, "none"):
        yield error(
            f"{facts.file.path} is not signed, and {why}: the kernel refuses it",
            "sign it with an enrolled key (DKMS: mok_signing_key in /etc/dkms/framework.conf)",
            "/sys/module/module/parameters/sig_enforce, /sys/kernel/security/lockdown",
        )
    else:
        yield info(
            f"{facts.file.path} is not signed; {why}, but this kernel does not enforce signatures",
        )


def lower_devices(facts: ModuleFacts) -> Iterable[Finding]:
    """Which devices are held by what, so that napi devices can or cannot come up there."""
    on: dict[int, list[Link]] = {}
    for link in facts.links:
        if link.lower and link.kind in (*STACKED, *OURS):
            on.setdefault(link.lower, []).append(link)
    by_index = {link.index: link for link in facts.links}
    for index, stacked in sorted(on.items()):
        lower = by_index.get(index)
        own = [k.name for k in stacked if k.kind in OURS]
        others = [f"{k.name} ({k.kind})" for k in stacked if k.kind not in OURS]
        where = lower.name if lower is not None else f"device {index}"
        rest = [
            k.name for k in stacked if not k.up and any(o.up and contend(k, o) for o in stacked)
        ]
        down = [k.name for k in stacked if k.kind in OURS and not k.up and k.name not in rest]
        if others and own:
            yield info(
                f"{where} is held by {', '.join(others)}; {', '.join(down or own)} can come up "
                "when these are gone",
                "`vsrtune attach --all-of-lower` moves them together",
            )
        elif others:
            yield info(f"{where} is held by {', '.join(others)}")
        elif down:
            text = f"{', '.join(down)} on {where} is down: its guest gets no frames"
            first = [lower.name] if lower is not None and not lower.up else []
            commands = (f"ip link set {name} up" for name in (*first, *down))
            yield error(text, " && ".join(commands), "`ip -d link`")
        elif rest:
            yield info(
                f"{', '.join(rest)} on {where} is down: another device is up there with its MAC, "
                "or one of them has mode passthrough; if its guest runs, it gets no frames",
                "the daemon, or `vsrtune attach --recover`, brings up the one whose guest runs",
            )
        else:
            yield ok(f"{where} carries {', '.join(own)}")
    for link in facts.links:
        if link.master and (master := by_index.get(link.master)) is not None and not link.kind:
            yield info(
            f"{link.name} is a port of {master.name}, so it carries no "
                "macvtap and no NAPI-macvlan",
            )  # fmt: skip


def switches(facts: ModuleFacts) -> Iterable[Finding]:
    """Whether a switch was interrupted, and whether the devices survive a reboot."""
    if facts.unfinished:
        yield error(
            "a switch of a guest's attachment was interrupted, or is under way",
            "`vsrtune attach --recover` takes it back, and so does the daemon",
            "the ledger of attachments (--attach-ledger)",
        )
    if facts.devices and facts.boot_unit is False:
        yield error(
            f"after a reboot nothing makes {', '.join(facts.devices)} before guests start",
            "systemctl enable vsrtune-devices",
            "systemctl is-enabled vsrtune-devices.service",
        )
    elif not facts.unfinished:
        yield ok(f"{counted(len(facts.devices), 'interface')} on NAPI-macvlan")
