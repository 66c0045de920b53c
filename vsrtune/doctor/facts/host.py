# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads the facts that `vsrtune doctor` judges beside the snapshot, live or recorded."""

from __future__ import annotations

import configparser
import contextlib
import re
from collections.abc import Collection, Iterable, Iterator

from vsrtune.core.cpuset import CpuSet
from vsrtune.doctor.model import Facts
from vsrtune.host.cpus import read_books
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.host.netdev import parse_softnet
from vsrtune.host.procfs import read_links
from vsrtune.model.guest import Interface
from vsrtune.model.snapshot import Snapshot

_IRQS = "/sys/kernel/debug/irq/irqs"
_IFF_UP = 1
_RT_GROUPS = re.compile(r"^CONFIG_RT_GROUP_SCHED=y$", re.MULTILINE)
# 6.17: built in, but in force only with rt_group_sched=1 on the kernel's command line.
_RT_GROUPS_OFF = re.compile(r"^CONFIG_RT_GROUP_SCHED_DEFAULT_DISABLED=y$", re.MULTILINE)

# Of Debian 13 and 12; an operator's own profile comes before one of the package.
_TUNED_PLACES = tuple(f"{d}/tuned{p}" for d in ("/etc", "/usr/lib") for p in ("/profiles", ""))
_TUNED_ON = ("True", "true", "1")
_TUNED_WRITES = re.compile(
    r"(scheduler (isolated_cores|group\..+)|irq affinity|net (channels|txqueuelen)"
    r"|sysfs .*/([rx]ps_cpus|smp_affinity.*)|sysctl kernel\.sched_rr_timeslice_ms)=.+"
    r"|sysctl kernel\.sched_rt_runtime_us=-1"
)


def read_facts(root: HostRoot, snapshot: Snapshot) -> Facts:
    """The facts of this host. Those that cannot be read are None or missing."""
    isolated = text_of(root, "/sys/devices/system/cpu/isolated")
    softnet = text_of(root, "/proc/net/softnet_stat")
    return Facts(
        rt_group_sched=rt_groups(root, snapshot.host.kernel),
        version=text_of(root, "/proc/sys/kernel/version"),
        fork_from_owner=text_of(root, "/sys/module/vhost/parameters/fork_from_owner_default"),
        default_qdisc=text_of(root, "/proc/sys/net/core/default_qdisc"),
        backlog=None if softnet is None else parse_softnet(softnet),
        isolated=None if isolated is None else CpuSet.parse(isolated.replace("(null)", "")),
        managed_irqs=_managed(root, snapshot),
        devices=dict(_devices(root, snapshot)),
        openers=_openers(root, snapshot),
        books=read_books(root, snapshot.host.online, totals=True),
        tuned=tuned_writes(root),
    )


def parse_flags(text: str) -> bool:
    """Whether /sys/class/net/X/flags says that the device is up."""
    return bool(int(text, 16) & _IFF_UP)


def rt_groups(root: HostRoot, kernel: str) -> str | None:
    """The path of the running kernel's configuration when cgroups need a realtime budget, ""
    when they do not, None when the configuration cannot be read."""
    path = f"/boot/config-{kernel}"
    config = text_of(root, path)
    if config is None:
        return None
    line = text_of(root, "/proc/cmdline") or ""
    on = _RT_GROUPS.search(config) is not None and "rt_group_sched=0" not in line.split()
    if on and _RT_GROUPS_OFF.search(config) is not None:
        on = "rt_group_sched=1" in line.split()
    return path if on else ""


def tuned_writes(root: HostRoot) -> tuple[str, ...]:
    """Plugin and option of all that the active TuneD profile, with what it includes, writes
    of _TUNED_WRITES, sorted. Merges profiles as TuneD does (tuned/profiles/merger.py)."""
    merged: dict[str, dict[str, str]] = {}
    done: set[str] = set()

    def take(names: Iterable[str]) -> None:
        for name in names:
            paths = (f"{place}/{name.lstrip('-')}/tuned.conf" for place in _TUNED_PLACES)
            path = next((p for p in paths if p not in done and text_of(root, p)), "")
            if not path:
                continue
            done.add(path)
            profile = configparser.RawConfigParser(
                delimiters=("=",), inline_comment_prefixes=("#",), strict=False
            )
            # Names of groups keep their case.
            profile.optionxform = str  # type: ignore[assignment,method-assign]
            with contextlib.suppress(configparser.Error):
                profile.read_string(text_of(root, path) or "")
            take(re.split(r"\s*[,;]\s*", profile.get("main", "include", fallback="")))
            for section in profile.sections():
                own = {"enabled": "1", "type": section, **profile[section]}
                above = {} if own.get("replace", "") in _TUNED_ON else merged.get(section, {})
                merged[section] = {**above, **own}

    take((text_of(root, "/etc/tuned/active_profile") or "").split())
    found = {
        f"[{plugin['type']}] {option}"
        for plugin in merged.values()
        for option, value in plugin.items()
        if plugin["enabled"] in _TUNED_ON
        and _TUNED_WRITES.fullmatch(f"{plugin['type']} {option}={value}")
    }
    return tuple(sorted(found))


def _managed(root: HostRoot, snapshot: Snapshot) -> tuple[int, ...] | None:
    numbers = {irq.number for nic in snapshot.host.nics for irq in nic.irqs}
    texts = {number: text_of(root, f"{_IRQS}/{number}") for number in sorted(numbers)}
    if all(text is None for text in texts.values()):
        return None
    return tuple(n for n, text in texts.items() if text and "IRQD_AFFINITY_MANAGED" in text)


def _devices(root: HostRoot, snapshot: Snapshot) -> Iterator[tuple[str, tuple[str, bool]]]:
    for interface in _interfaces(snapshot):
        base = f"/sys/class/net/{interface.target}"
        mac, flags = text_of(root, f"{base}/address"), text_of(root, f"{base}/flags")
        if mac is not None and flags is not None:
            yield interface.target, (mac, parse_flags(flags))


def _openers(root: HostRoot, snapshot: Snapshot) -> tuple[tuple[str, int, str], ...] | None:
    """Processes with a guest's /dev/tapN open that belong to no guest. (Guests that share a
    device have a check of their own.)"""
    taps = {f"/dev/tap{i.ifindex}": i.target for i in _interfaces(snapshot) if i.kind.rings}
    guests = {guest.pid for guest in snapshot.guests}
    try:
        pids = [int(name) for name in root.listdir("/proc") if name.isdecimal()]
    except OSError:
        return None
    links: dict[int, Collection[str]] = {}
    for pid in (p for p in pids if p not in guests):
        with contextlib.suppress(OSError):
            links[pid] = read_links(root, pid, None).values()
    if not links:
        return None
    found = {(taps[link], pid) for pid in links for link in links[pid] if link in taps}
    return tuple(
        (device, pid, text_of(root, f"/proc/{pid}/comm") or "?") for device, pid in sorted(found)
    )


def _interfaces(snapshot: Snapshot) -> list[Interface]:
    return [i for guest in snapshot.guests for i in guest.interfaces]
