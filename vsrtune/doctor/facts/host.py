"""Reads the facts that `vsrtune doctor` judges beside the snapshot, live or recorded."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from vsrtune.core.cpuset import CpuSet
from vsrtune.doctor.model import DeviceState, Facts, Opener
from vsrtune.host.cpus import read_books
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.netdev import parse_softnet
from vsrtune.model.guest import Interface
from vsrtune.model.snapshot import Snapshot

_IRQS = "/sys/kernel/debug/irq/irqs"
_IFF_UP = 1
_RT_GROUPS = re.compile(r"^CONFIG_RT_GROUP_SCHED=y$", re.MULTILINE)
# 6.17: built in, but in force only with rt_group_sched=1 on the kernel's command line.
_RT_GROUPS_OFF = re.compile(r"^CONFIG_RT_GROUP_SCHED_DEFAULT_DISABLED=y$", re.MULTILINE)


def read_facts(root: HostRoot, snapshot: Snapshot) -> Facts:
    """The facts of this host. Those that cannot be read are None or missing."""
    isolated = _text(root, "/sys/devices/system/cpu/isolated")
    softnet = _text(root, "/proc/net/softnet_stat")
    return Facts(
        rt_group_sched=rt_groups(root, snapshot.host.kernel),
        fork_from_owner=_text(root, "/sys/module/vhost/parameters/fork_from_owner_default"),
        default_qdisc=_text(root, "/proc/sys/net/core/default_qdisc"),
        backlog=None if softnet is None else parse_softnet(softnet),
        isolated=None if isolated is None else CpuSet.parse(isolated.replace("(null)", "")),
        managed_irqs=_managed(root, snapshot),
        devices=tuple(_devices(root, snapshot)),
        openers=_openers(root, snapshot),
        books=read_books(root, snapshot.host.online, totals=True),
    )


def parse_flags(text: str) -> bool:
    """Whether /sys/class/net/X/flags says that the device is up."""
    return bool(int(text, 16) & _IFF_UP)


def rt_groups(root: HostRoot, kernel: str) -> str | None:
    """The path of the running kernel's configuration when cgroups need a realtime budget, ""
    when they do not, None when the configuration cannot be read."""
    path = f"/boot/config-{kernel}"
    config = _text(root, path)
    if config is None:
        return None
    line = _text(root, "/proc/cmdline") or ""
    on = _RT_GROUPS.search(config) is not None and "rt_group_sched=0" not in line.split()
    if on and _RT_GROUPS_OFF.search(config) is not None:
        on = "rt_group_sched=1" in line.split()
    return path if on else ""


def _managed(root: HostRoot, snapshot: Snapshot) -> tuple[int, ...] | None:
    numbers = {irq.number for nic in snapshot.host.nics for irq in nic.irqs}
    texts = {number: _text(root, f"{_IRQS}/{number}") for number in sorted(numbers)}
    if all(text is None for text in texts.values()):
        return None
    return tuple(n for n, text in texts.items() if text and "IRQD_AFFINITY_MANAGED" in text)


def _devices(root: HostRoot, snapshot: Snapshot) -> Iterator[DeviceState]:
    for interface in _interfaces(snapshot):
        base = f"/sys/class/net/{interface.target}"
        mac, flags = _text(root, f"{base}/address"), _text(root, f"{base}/flags")
        if mac is not None and flags is not None:
            yield DeviceState(interface.target, mac, parse_flags(flags))


def _openers(root: HostRoot, snapshot: Snapshot) -> tuple[Opener, ...] | None:
    """Processes with a guest's /dev/tapN open that belong to no guest. (Guests that share a
    device have a check of their own.)"""
    taps = {f"/dev/tap{i.ifindex}": i.target for i in _interfaces(snapshot) if i.kind.rings}
    guests = {guest.pid for guest in snapshot.guests}
    try:
        pids = [int(name) for name in root.listdir("/proc") if name.isdecimal()]
    except OSError:
        return None
    links = {pid: _links(root, pid) for pid in pids if pid not in guests}
    if all(found is None for found in links.values()):
        return None
    found = {(taps[link], pid) for pid in links for link in links[pid] or () if link in taps}
    return tuple(Opener(device, pid, _name(root, pid)) for device, pid in sorted(found))


def _links(root: HostRoot, pid: int) -> list[str] | None:
    """The targets of a process's descriptors; None when they cannot be listed."""
    base = f"/proc/{pid}/fd"
    try:
        names = root.listdir(base)
    except OSError:
        return None
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            found.append(root.readlink(f"{base}/{name}"))
    return found


def _name(root: HostRoot, pid: int) -> str:
    return _text(root, f"/proc/{pid}/comm") or "?"


def _interfaces(snapshot: Snapshot) -> list[Interface]:
    return [i for guest in snapshot.guests for i in guest.interfaces]


def _text(root: HostRoot, path: str) -> str | None:
    try:
        return root.read(path).strip()
    except (OSError, ValueError):
        return None
