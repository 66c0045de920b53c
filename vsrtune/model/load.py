"""How much of a CPU each thread asks for, in windows of time.

A window runs from one look at a thread to the first one at least ``LEAST_NS`` later (less,
where an operator wants the host looked at more often: ``least_ns``), so it does not matter how
often, or how regularly, a thread is looked at. What is kept are the latest ``WINDOWS`` of them:
what shall justify a move has to be true in each.

A thread asks for the time it ran and for the time it waited for a CPU (the first two fields
of /proc/TID/schedstat). Waiting counts for three times the running at most: that is what
a thread waits that takes turns with three equals, and of one that stands behind a busy
real-time thread for seconds it is not known what it would do with a CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, Guest, Thread, ThreadKey
from vsrtune.model.plan import Action
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import Target, ThreadAffinity, VcpuPin

LEAST_NS = 4_500_000_000
WINDOWS = 3
_TURNS = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a thread: when (any steady clock), how long it ran, how long it waited;
    nanoseconds."""

    at_ns: int
    run_ns: int
    wait_ns: int


@dataclass(frozen=True, slots=True)
class Windows:
    """A thread's latest windows, the newest last, and where the next one begins."""

    begin: Reading
    load: tuple[float, ...] = ()

    def update(self, now: Reading, least_ns: int = LEAST_NS) -> Windows:
        """With one window more, when it is long enough by now."""
        if now.at_ns - self.begin.at_ns < least_ns:
            return self
        load = demand(self.begin, now)
        return Windows(now, (*self.load, load)[-WINDOWS:])


def demand(before: Reading, now: Reading) -> float:
    """The share of a CPU that was asked for in between, 0 to 1, in thousandths."""
    elapsed = now.at_ns - before.at_ns
    ran = max(now.run_ns - before.run_ns, 0)
    waited = min(max(now.wait_ns - before.wait_ns, 0), _TURNS * ran)
    return round(min((ran + waited) / elapsed, 1.0), 3) if elapsed > 0 else 0.0


def mean(load: Sequence[float]) -> float:
    """The mean of some windows; 0 of none."""
    return round(sum(load) / len(load), 3) if load else 0.0


def merged(load: tuple[float, ...]) -> tuple[float, ...]:
    """All windows as one: what is left of them when threads have moved, because a load
    beside others is not that beside new ones."""
    return (mean(load),) if load else ()


def least_ns(interval: float) -> int:
    """How long a window is at least where everything is looked at every ``interval`` seconds:
    shorter than that, so that each of these looks ends one."""
    return min(LEAST_NS, int(interval * 0.9e9))


def parse_schedstat(text: str, at_ns: int) -> Reading:
    """/proc/TID/schedstat as a reading. Raises ValueError."""
    fields = text.split()
    if len(fields) < 2:
        raise ValueError("schedstat has less than two fields")
    return Reading(at_ns, int(fields[0]), int(fields[1]))


def measured(snapshot: Snapshot, loads: Mapping[ThreadKey, tuple[float, ...]]) -> Snapshot:
    """The snapshot with the windows of its threads."""
    return replace(snapshot, guests=tuple(_measured(g, loads) for g in snapshot.guests))


def _measured(guest: Guest, loads: Mapping[ThreadKey, tuple[float, ...]]) -> Guest:
    if all(loads.get(t.key, ()) == t.load for t in guest.threads):
        return guest
    threads = (replace(t, load=loads.get(t.key, ())) for t in guest.threads)
    return replace(guest, threads=tuple(threads))


def data_plane(snapshot: Snapshot) -> list[Thread]:
    """The threads whose load is worth knowing."""
    return [t for g in snapshot.guests for t in g.threads if t.role in DATA_PLANE]


def is_move(target: Target, before: object, after: object) -> bool:
    """Whether a change takes a thread from one CPU to another."""
    if not isinstance(target, ThreadAffinity | VcpuPin):
        return False
    old, new = _cpus(before), _cpus(after)
    return old is not None and new is not None and moved(old, new)


def moved(old: CpuSet, new: CpuSet) -> bool:
    """Whether a thread that was bound to one CPU is now bound to another one."""
    return len(old) == len(new) == 1 and old != new


def moves(actions: Iterable[Action]) -> int:
    """How many actions take a thread from one CPU to another."""
    return sum(is_move(a.target, a.before, a.after) for a in actions)


def _cpus(value: object) -> CpuSet | None:
    if isinstance(value, CpuSet):
        return value
    found = getattr(value, "cpus", None)
    return found if isinstance(found, CpuSet) else None


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Time of one CPU since the boot, in clock ticks (/proc/stat). ``idle`` holds iowait."""

    total: int
    idle: int
    softirq: int


@dataclass(frozen=True, slots=True, order=True)
class DropPlace:
    """Where frames are dropped: a device or a CPU (``CPU 0``), the place in it, and the guest
    whose interface it is, "" for what serves several."""

    where: str
    place: str
    guest: str = ""


@dataclass(frozen=True, slots=True)
class HostSample:
    """The host at one moment. ``at_ns`` is any steady clock's, in nanoseconds; ``threads``
    have their own. ``drops`` and ``interrupts`` (by number, over all CPUs) count since the
    devices and the boot began."""

    snapshot: Snapshot
    at_ns: int
    threads: Mapping[ThreadKey, Reading] = field(default_factory=dict)
    cpus: Mapping[int, CpuTimes] = field(default_factory=dict)
    drops: Mapping[DropPlace, int] = field(default_factory=dict)
    interrupts: Mapping[int, int] = field(default_factory=dict)


# Dropped of what came, and used of the CPU time there is, from which on it is overload.
DROPPED = 0.01
BUSY = 0.85


@dataclass(frozen=True, slots=True)
class QueueSample:
    """Counters of one guest at a moment (seconds): frames for it, those of them that found
    a ring full, frames it sent, and the time each thread ran, ns, by thread id."""

    at: float
    received: int
    dropped: int
    sent: int
    ran_ns: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Crew:
    """Threads that share CPUs, and how much of CPU time they can have, CPUs."""

    tids: frozenset[int]
    capacity: float


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two samples. ``busy``: of the CPU time that the most loaded
    crew can have, the share it used."""

    begin: float
    end: float
    received: int
    dropped: int
    sent: int
    busy: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def overloaded(self) -> bool:
        return self.drops and self.busy >= BUSY

    @property
    def starved(self) -> bool:
        """Frames were dropped for want of room, not of time."""
        return self.drops and self.busy < BUSY

    @property
    def drops(self) -> bool:
        """Overloaded or starved."""
        return self.dropped > DROPPED * self.received


def window_between(
    before: QueueSample, after: QueueSample, crews: Collection[Crew]
) -> Window | None:
    """The window between two samples; None when a counter began anew or no time passed."""
    counts = (
        after.received - before.received,
        after.dropped - before.dropped,
        after.sent - before.sent,
    )
    seconds = after.at - before.at
    if seconds <= 0 or min(counts) < 0:
        return None
    was: Mapping[int, int] = dict(before.ran_ns)
    ran = {tid: ns - was[tid] for tid, ns in after.ran_ns if tid in was}
    shares = (
        sum(ran.get(tid, 0) for tid in crew.tids) / (seconds * 1e9 * crew.capacity)
        for crew in crews
        if crew.capacity > 0
    )
    return Window(before.at, after.at, *counts, max(shares, default=0.0))
