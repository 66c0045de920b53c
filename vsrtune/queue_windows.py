"""What is counted of a guest with an adaptive queue, as windows between two looks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

# Dropped of what came, and used of the CPU time there is, from which on it is overload.
DROPPED = 0.01
BUSY = 0.85


@dataclass(frozen=True, slots=True)
class Sample:
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


def between(before: Sample, after: Sample, crews: Collection[Crew]) -> Window | None:
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
