# SPDX-License-Identifier: GPL-2.0-or-later
"""The results of a pass over the host that the next pass needs, and a check whether they hold."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.netdev import Device, DeviceFrames, NetReader, parse_net_dev
from vsrtune.host.procfs import RawThread, read_thread
from vsrtune.model.guest import (
    Confidence,
    Guest,
    Interface,
    NicKind,
    Role,
    Thread,
    ThreadKey,
)
from vsrtune.model.module_counters import parse as parse_counters
from vsrtune.model.plan import Place
from vsrtune.model.snapshot import Problem, Snapshot, SnapshotSlice
from vsrtune.model.targets import TxQueueLen
from vsrtune.observe.passed_devices import passed_device
from vsrtune.observe.qemu_processes import Processes, QemuProcess
from vsrtune.observe.trust import Standing

# The kinds of places that one look at a thread or device tells all about.
_AT_A_GLANCE = ("cpus", "scheduler", TxQueueLen.kind)


@dataclass(frozen=True, slots=True)
class CachedQemu:
    """One QEMU as the last pass read it. ``domain`` is the libvirt name of its domain, ``guest``
    is None when it could not be read, ``threads`` is the number of links of its task directory,
    ``home`` is its own cgroup: libvirt's scope, or the cgroup in which QEMU runs."""

    process: QemuProcess
    domain: str | None
    guest: Guest | None
    problems: tuple[Problem, ...]
    threads: int
    home: str

    @property
    def parent(self) -> str:
        """The cgroup that ``home`` is in."""
        return self.home.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class ObservationCache:
    """The results of a pass that the next one needs. ``held`` is by pid, in pid order; ``problems``
    are those of the host, without its guests'; ``devices`` are the lower devices; ``partitioned``
    says whether there are partitions or cgroups with exclusive CPUs. ``refreshed`` is the slice of
    the guests that the pass read, with the names of those that are gone."""

    snapshot: Snapshot
    processes: Processes
    held: dict[int, CachedQemu]
    problems: tuple[Problem, ...]
    devices: dict[str, Device]
    partitioned: bool
    refreshed: SnapshotSlice

    @property
    def delicate(self) -> bool:
        """Whether the host has to be observed again soon: partitions become invalid and the books
        of class deadline change without an event, and a libvirt that did not answer may do so."""
        booked = any(d.booked is not None for d in self.snapshot.host.deadline)
        return self.partitioned or booked or any(p.reader == "libvirt" for p in self.problems)


def recheck(known: ObservationCache, root: HostRoot) -> tuple[ObservationCache, frozenset[int]]:
    """Read what changes without an event and concerns one guest: its threads, except QEMU's
    workers, which no policy names, and the counters of its devices.

    Returns the cache with the new counters, and the pids of the QEMUs that have to be re-read: a
    thread is gone, has another class, other CPUs or another cgroup, or is a vhost worker that has
    run and whose interface a trace could tell; an interrupt of its devices came, went or moved; or
    no vcpu is known. No policy reaches those of
    other libvirts.
    """
    try:
        frames = parse_net_dev(root.read("/proc/net/dev"))
    except (OSError, ValueError, IndexError):
        frames = {}
    online = known.snapshot.host.online
    held, due = dict(known.held), set()
    for pid, one in known.held.items():
        guest = None
        # A guest that could not be read, or whose monitor has not told its vcpus, may be by now.
        if one.guest is not None and any(t.role is Role.VCPU for t in one.guest.threads):
            guest = _recounted(root, one.guest, online, frames)
        if guest is not None and guest is not one.guest:
            held[pid] = replace(one, guest=guest)
        elif guest is None and one.process.standing is not Standing.FOREIGN:
            due.add(pid)
    snapshot = replace(known.snapshot, guests=listed(held))
    return replace(known, held=held, snapshot=snapshot), frozenset(due)


def glance(
    known: ObservationCache, root: HostRoot, names: frozenset[str], places: frozenset[Place]
) -> ObservationCache | None:
    """Read of the guests with these libvirt names what ``places`` names, and nothing else: the
    class and the CPUs of threads, the queue length of devices. None when that does not suffice.
    Other passes ask libvirt, which takes longer than all the rest of them."""
    # A class bears on the books of class deadline.
    if known.delicate or any(kind not in _AT_A_GLANCE for kind, _ in places):
        return None
    left, online = {what for _, what in places}, known.snapshot.host.online
    held, net = dict(known.held), NetReader(root)
    for pid, one in known.held.items():
        if one.guest is None or one.domain not in names:
            continue
        guest = one.guest
        threads = (_changed(root, t, online) if t.key.tid in left else t for t in guest.threads)
        interfaces = (_resized(net, i) if i.target in left else i for i in guest.interfaces)
        now = replace(
            guest, threads=tuple(filter(None, threads)), interfaces=tuple(filter(None, interfaces))
        )
        if (len(now.threads), len(now.interfaces)) != (len(guest.threads), len(guest.interfaces)):
            return None
        left -= {t.key.tid for t in guest.threads} | {i.target for i in guest.interfaces}
        held[pid] = replace(one, guest=now)
    if left:
        return None
    snapshot = replace(known.snapshot, guests=listed(held))
    return replace(known, held=held, snapshot=snapshot, refreshed=SnapshotSlice.of(snapshot, names))


def _changed(root: HostRoot, thread: Thread, online: CpuSet) -> Thread | None:
    now = _still(root, thread)
    if now is None:
        return None
    affinity = now.affinity & online
    return replace(
        thread, sched=now.sched, affinity=affinity, last_cpu=now.last_cpu, cpu_ns=now.cpu_ns
    )


def _resized(net: NetReader, interface: Interface) -> Interface | None:
    """The interface with the length of its queue; None when more is new of its device."""
    try:
        device = net.device(interface.target)
        now = replace(interface, **net.numbers(device)) if device is not None else None
    except (OSError, ValueError):
        return None
    if device is None or now is None or device.ifindex != interface.ifindex:
        return None
    return now if replace(now, txqueuelen=interface.txqueuelen) == interface else None


def _recounted(
    root: HostRoot, guest: Guest, online: CpuSet, frames: Mapping[str, DeviceFrames]
) -> Guest | None:
    """The guest with its counters as they are now; None when it has to be re-read."""
    if any(passed_device(root, device.address) != device for device in guest.passed):
        return None
    threads: list[Thread] = []
    for thread in guest.threads:
        now = thread if thread.role is Role.WORKER else _thread(root, thread, online)
        if now is None:
            return None
        threads.append(now)
    interfaces = [_interface(root, i, frames) for i in guest.interfaces]
    if all(map(operator.is_, (*threads, *interfaces), (*guest.threads, *guest.interfaces))):
        return guest
    return replace(guest, threads=tuple(threads), interfaces=tuple(interfaces))


def _thread(root: HostRoot, thread: Thread, online: CpuSet) -> Thread | None:
    now = _still(root, thread)
    if now is None or (now.sched, now.affinity & online) != (thread.sched, thread.affinity):
        return None
    if now.cpu_ns == thread.cpu_ns:
        return thread
    if thread.confidence not in (None, Confidence.EXACT):
        return None
    return replace(thread, cpu_ns=now.cpu_ns, last_cpu=now.last_cpu)


def _still(root: HostRoot, thread: Thread) -> RawThread | None:
    """The thread as /proc shows it; None when it is gone or in another cgroup."""
    try:
        now = read_thread(root, thread.key.pid, thread.key.tid)
    except (OSError, ValueError, LookupError):
        return None
    if now is None or (now.key, now.cgroup or "") != (thread.key, thread.cgroup):
        return None
    return now


def _interface(
    root: HostRoot, interface: Interface, frames: Mapping[str, DeviceFrames]
) -> Interface:
    """The interface with the counters that NetReader reads. Of a device that is neither tun nor
    macvtap, nobody knows which counter says that its ring was full."""
    now = frames.get(interface.target)
    if now is None or interface.kind is NicKind.OTHER:
        return interface
    drops = now.tx_dropped if interface.kind is NicKind.TAP else now.rx_dropped
    counters = None
    if interface.counters is not None:
        try:
            counters = parse_counters(root.ethtool_statistics(interface.target))
        except OSError:
            return interface
        if counters is not None and counters.rx_dropped_ring_full is not None:
            drops = counters.rx_dropped_ring_full
    if (drops, counters) == (interface.ring_drops, interface.counters):
        return interface
    return replace(interface, ring_drops=drops, counters=counters)


def listed(held: dict[int, CachedQemu]) -> tuple[Guest, ...]:
    """The guests in the order of a snapshot."""
    found = [h.guest for h in held.values() if h.guest is not None]
    return _one_owner(sorted(_unique(found), key=lambda g: (g.source, g.name, g.pid)))


def _unique(found: list[Guest]) -> list[Guest]:
    """Mark guests that a policy cannot tell apart."""
    count = Counter(g.ref for g in found)
    if len(count) == len(found):
        return found
    return [
        replace(g, problems=(*g.problems, f"{count[g.ref]} guests are named {g.ref}"))
        if count[g.ref] > 1
        else g
        for g in found
    ]


def _one_owner(guests: Iterable[Guest]) -> tuple[Guest, ...]:
    """Leave the NAPI thread of a device that guests share to the first of them; otherwise each of
    their policies would claim it."""
    owner: dict[ThreadKey, str] = {}
    found = []
    for guest in guests:
        if not any(i.threaded for i in guest.interfaces):
            found.append(guest)
            continue
        shared = [
            t for t in guest.by_role(Role.NAPI) if owner.setdefault(t.key, guest.ref) != guest.ref
        ]
        told = (
            f"{t.interface} is shared, its NAPI thread is shown with {owner[t.key]}" for t in shared
        )
        found.append(
            replace(
                guest,
                threads=tuple(t for t in guest.threads if t not in shared),
                problems=(*guest.problems, *told),
            )
            if shared
            else guest
        )
    return tuple(found)
