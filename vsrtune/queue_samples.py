"""Reads what the rule for adaptive queues needs of a guest, and nothing else: the counters
of its macvtap devices and the run time of its threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vsrtune.host.filesystem import HostRoot
from vsrtune.host.netdev import CLASS
from vsrtune.host.procfs import run_ns
from vsrtune.model.guest import DATA_PLANE, Guest, SchedClass, Thread
from vsrtune.model.load import Crew, QueueSample


@dataclass(frozen=True, slots=True)
class Watched:
    """Where to look: names of devices with rings, (pid, tid) of the threads that carry
    frames, and the crews they form."""

    devices: tuple[str, ...]
    threads: tuple[tuple[int, int], ...]
    crews: tuple[Crew, ...]


def watched(guest: Guest) -> Watched:
    """What is to be looked at for a guest."""
    threads = [t for role in DATA_PLANE for t in guest.by_role(role)]
    return Watched(
        tuple(i.target for i in guest.interfaces if i.kind.rings),
        tuple((t.key.pid, t.key.tid) for t in threads),
        crews(threads),
    )


def crews(threads: Iterable[Thread]) -> tuple[Crew, ...]:
    """Every thread alone, which can have one CPU or its budget (class deadline), and those
    that share the same CPUs together, which can have these CPUs at most."""
    found: list[Crew] = []
    shared: dict[object, list[Thread]] = {}
    for thread in threads:
        found.append(Crew(frozenset([thread.key.tid]), _most(thread)))
        shared.setdefault(thread.affinity, []).append(thread)
    for affinity, members in shared.items():
        if len(members) > 1:
            alone = sum(_most(t) for t in members)
            together = min(alone, float(len(members[0].affinity)) if affinity else alone)
            found.append(Crew(frozenset(t.key.tid for t in members), together))
    return tuple(found)


def _most(thread: Thread) -> float:
    sched = thread.sched
    if sched.cls is SchedClass.DEADLINE and sched.period_ns:
        return sched.runtime_ns / sched.period_ns
    return 1.0


class Sampler:
    """Reads below ``root``. Methods raise OSError and ValueError: a device or thread is
    gone, and the next pass will find out; IndexError where the kernel does not tell how long
    threads ran."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root

    def drops(self, where: Watched) -> int:
        """Frames that found a ring full, over all devices. The cheap look."""
        return sum(self._count(d, "rx_dropped") for d in where.devices)

    def sample(self, where: Watched, at: float) -> QueueSample:
        """Everything, with ``at`` as its time (seconds)."""
        return QueueSample(
            at,
            received=sum(self._count(d, "rx_packets") for d in where.devices),
            dropped=self.drops(where),
            sent=sum(self._count(d, "tx_packets") for d in where.devices),
            ran_ns=tuple(
                (tid, run_ns(self._root, f"/proc/{pid}/task/{tid}")) for pid, tid in where.threads
            ),
        )

    def _count(self, device: str, name: str) -> int:
        return int(self._root.read(f"{CLASS}/{device}/statistics/{name}"))
