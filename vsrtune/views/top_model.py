"""What `vsrtune top` knows of a host at one moment, and what it shows of two. Pure.

Shares are of one CPU, or of a budget, and stand between 0 and 1 (a budget can be overrun a
little). None is what cannot be told: a counter that the kernel does not have, or everything
that takes two samples while there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

from vsrtune.core.cpuset import CpuSet


@dataclass(frozen=True, slots=True)
class ThreadRow:
    """One thread. ``cpu`` is where it ran last, ``load`` the share of a CPU it had, ``wait``
    the share of the time it stood in the run queue. ``budget``: the share used of its
    DEADLINE budget; ``pending`` when it waits for its root domain. ``beside_interrupts``: a
    thread that handles frames is on a CPU that serves interrupts of a guest's NIC."""

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
    """What sits on a CPU: a ``thread`` of a guest, an ``irq``, a NIC's ``softirq`` where it was
    seen, ``rps``, its ``napi`` thread, or ``ksoftirqd``. ``guests`` are those it works for,
    ``rate`` interrupts a second."""

    kind: str
    label: str
    guests: tuple[str, ...] = ()
    load: float | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class CpuRow:
    """One CPU that is online. ``use`` is ``interrupts``, ``interrupts?`` (assumed, because
    nothing tells where the NIC's are served), ``guests``, ``isolated`` or "". ``busy`` and
    ``softirq`` are shares of its time. Of ``residents`` interrupts come first, then the
    busiest."""

    cpu: int
    use: str
    busy: float | None
    softirq: float | None
    residents: tuple[Resident, ...]


@dataclass(frozen=True, slots=True)
class DropRow:
    """Frames dropped at one place: a second over the interval, and since it began to count."""

    where: str
    place: str
    guest: str
    rate: float | None
    total: int


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A change that the policies ask for and that is still to be made, or is refused."""

    guest: str
    setting: str
    now: str
    then: str
    reason: str


@dataclass(frozen=True, slots=True)
class DriftRow:
    """A setting that somebody has changed (actions.Drift), in words."""

    guest: str
    setting: str
    desired: str
    found: str
    by: str
    key: str
    rule: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture of the host. ``seconds`` is what lies between the two samples, 0 while
    there is but one. ``guests`` are the refs of all that are shown, the busiest first, as
    their ``threads`` are; ``drops`` have the fastest first. ``pending`` and ``drift``
    are known where it was ``planned``. ``notes`` say what could not be read."""

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
