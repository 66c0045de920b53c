"""A snapshot as it would be without us, from the originals in the journal.

Planning against it tells which settings the policies ask for at all, satisfied
ones included. The journal's other entries are left-overs of an earlier policy
and are taken back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vsrtune.actions import (
    EmulatorPin,
    Pin,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TxQueueLen,
    Value,
    VcpuPin,
)
from vsrtune.cpuset import CpuSet
from vsrtune.model import Guest, Sched, Snapshot, Thread, ThreadKey


def rewind(snapshot: Snapshot, originals: Mapping[Target, Value]) -> Snapshot:
    """``snapshot`` with every target at its original value. Pure; targets whose object
    is not in the snapshot are ignored."""
    threads: dict[ThreadKey, list[tuple[Target, Value]]] = {}
    lengths: dict[int, int] = {}
    for target, value in originals.items():
        if isinstance(target, TxQueueLen) and isinstance(value, int):
            lengths[target.ifindex] = value
        elif isinstance(
            target, ThreadAffinity | ThreadSched | ThreadCgroup | VcpuPin | EmulatorPin
        ):
            threads.setdefault(target.thread, []).append((target, value))
    online = snapshot.host.online
    guests = tuple(_guest(g, threads, lengths, online) for g in snapshot.guests)
    return replace(snapshot, guests=guests)


def _guest(
    guest: Guest,
    changes: Mapping[ThreadKey, list[tuple[Target, Value]]],
    lengths: Mapping[int, int],
    online: CpuSet,
) -> Guest:
    threads = [_thread(t, changes.get(t.key, []), online) for t in guest.threads]
    # A worker put back into a cgroup gets the CPUs of the threads that are in it.
    by_cgroup = {
        t.cgroup: t
        for t in threads
        if not any(isinstance(target, ThreadCgroup) for target, _ in changes.get(t.key, []))
    }
    for i, thread in enumerate(threads):
        neighbour = by_cgroup.get(thread.cgroup)
        if neighbour is not None:
            threads[i] = replace(
                thread,
                cpuset_cpus=neighbour.cpuset_cpus,
                cpuset_effective=neighbour.cpuset_effective,
            )
    interfaces = tuple(
        replace(i, txqueuelen=lengths.get(i.ifindex, i.txqueuelen)) for i in guest.interfaces
    )
    return replace(guest, threads=tuple(threads), interfaces=interfaces)


def _thread(thread: Thread, changes: list[tuple[Target, Value]], online: CpuSet) -> Thread:
    for target, value in changes:
        if isinstance(value, Pin):
            effective = thread.cpuset_effective
            if value.cpuset is not None:
                effective = CpuSet.parse(value.cpuset) if value.cpuset else online
            thread = replace(
                thread,
                affinity=value.cpus,
                pin=value.cpus,
                cpuset_cpus=value.cpuset,
                cpuset_effective=effective,
            )
        elif isinstance(value, CpuSet):
            thread = replace(thread, affinity=value)
        elif isinstance(value, Sched):
            thread = replace(thread, sched=value)
        elif isinstance(target, ThreadCgroup) and isinstance(value, str):
            thread = replace(thread, cgroup=value)
    return thread
