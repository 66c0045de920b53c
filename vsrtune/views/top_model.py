"""The frame that `vsrtune top` shows of two samples of a host. Pure.

Shares are of one CPU, or of a budget, and lie between 0 and 1 (a budget can be overrun a
little). None means unknown: a counter that the kernel does not have, or a value that takes two
samples while there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

from vsrtune.core.cpuset import CpuSet


@dataclass(frozen=True, slots=True)
class ThreadRow:
    """One thread. ``cpu`` is where it ran last, ``load`` the share of a CPU it had, ``wait``
    the share of the time it stood in the run queue. ``budget`` is the share used of its
    DEADLINE budget; ``pending`` is set while it waits for its root domain.
    ``beside_interrupts``: a thread that handles frames is on a CPU that serves interrupts of
    a guest's NIC."""

    guest: str
    thread: str
    role: str
    tid: int
    cpu: int
    allowed: CpuSet
    sched: str
    load: float | None = None
    wait: float | None = None
    budget: float | None = None
    throttled: bool = False
    pending: bool = False
    beside_interrupts: bool = False


@dataclass(frozen=True, slots=True)
class Resident:
    """A resident of a CPU: a ``thread`` of a guest, an ``irq``, a NIC's ``softirq`` where it was
    observed, ``rps``, a NIC's ``napi`` thread, or ``ksoftirqd``. ``guests`` are those it works
    for, ``rate`` is in interrupts a second."""

    kind: str
    label: str
    guests: tuple[str, ...] = ()
    load: float | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class CpuRow:
    """One online CPU. ``use`` is ``interrupts``, ``interrupts?`` (assumed, because nothing
    tells where the NIC's interrupts are served), ``guests``, ``isolated`` or "". ``busy`` and
    ``softirq`` are shares of its time. ``residents`` lists guests' threads last, the busiest of
    them first."""

    cpu: int
    use: str
    busy: float | None
    softirq: float | None
    residents: tuple[Resident, ...]


@dataclass(frozen=True, slots=True)
class DropRow:
    """Frames dropped at one place: ``rate`` is per second over the interval, ``total`` counts
    since the counter began."""

    where: str
    place: str
    guest: str
    rate: float | None
    total: int


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A change that the policies ask for and that is not made yet, or is refused."""

    guest: str
    setting: str
    now: str
    then: str
    reason: str


@dataclass(frozen=True, slots=True)
class DriftRow:
    """A setting that somebody has changed (plan.Drift), in words."""

    guest: str
    setting: str
    desired: str
    found: str
    by: str
    key: str
    rule: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture of the host. ``seconds`` is the time between the two samples, 0 while
    there is only one. ``guests`` are the refs of the guests shown, the busiest first; their
    ``threads`` have the same order. ``drops`` begins with the fastest. ``pending`` and
    ``drift`` are filled in when ``planned``. ``notes`` say what could not be read."""

    seconds: float
    kernel: str
    guests: tuple[str, ...]
    cpus: tuple[CpuRow, ...]
    threads: tuple[ThreadRow, ...]
    drops: tuple[DropRow, ...]
    planned: bool = False
    pending: tuple[PendingRow, ...] = ()
    drift: tuple[DriftRow, ...] = ()
    notes: tuple[str, ...] = ()
