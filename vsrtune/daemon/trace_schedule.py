"""What two looks at the host, one after the other, say about its threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vsrtune.model.deadline import used
from vsrtune.model.guest import Confidence, Guest, Role, SchedClass, Thread, ThreadKey
from vsrtune.model.snapshot import Snapshot


class Budgets:
    """How much of their budgets DEADLINE threads use, from one look at everything to the
    next."""

    def __init__(self) -> None:
        self._at = 0.0
        self._ran: dict[ThreadKey, int] | None = None

    def update(self, snapshot: Snapshot, now: float) -> tuple[tuple[ThreadKey, float], ...]:
        """Shares since the last look; ``now`` in seconds of one clock."""
        elapsed, ran = round((now - self._at) * 1e9), self._ran
        threads = [
            t for g in snapshot.guests for t in g.threads if t.sched.cls is SchedClass.DEADLINE
        ]
        first = ran is None
        self._at, self._ran = now, {t.key: t.cpu_ns for t in threads}
        if first or ran is None or elapsed <= 0:
            return ()
        return tuple(
            (t.key, used(t.sched, t.cpu_ns - ran[t.key], elapsed)) for t in threads if t.key in ran
        )


# After a trace that taught nothing of a worker, so many passes are made without one for its
# sake: 1, 3, 7, ... up to this.
MOST = 31


@dataclass(slots=True)
class _Futile:
    """A worker of which the last trace taught nothing. ``left`` of ``skip`` passes are still
    to be skipped. ``worked``: it had, and could not be seen all the same."""

    worked: bool
    skip: int
    left: int


class Tracing:
    """When watching transmissions can make the mapping of some worker surer. A worker that
    never sends would else cost a trace and another look in every pass."""

    def __init__(self) -> None:
        self._futile: dict[ThreadKey, _Futile] = {}
        # For whose sake a trace is made, and whether they have worked since the look before.
        self._due: dict[ThreadKey, bool] = {}

    def worth(self, before: Iterable[Guest], now: Iterable[Guest]) -> bool:
        """Whether to trace in this pass: for a worker that is of no use yet, or one known by
        order only that has worked since ``before``. One that is new or begins to work does
        not wait."""
        used_before = {t.key: t.cpu_ns for g in before for t in g.threads}
        self._due = {}
        for thread in _unsure(now):
            known = thread.key in used_before
            worked = known and thread.cpu_ns > used_before[thread.key]
            usable = thread.confidence is not None and thread.confidence.usable
            if usable and known and not worked:
                continue
            wait = self._futile.get(thread.key)
            if wait is None or wait.left == 0 or (worked and not wait.worked):
                self._due[thread.key] = worked
            else:
                wait.left -= 1
        return bool(self._due)

    def traced(self, guests: Iterable[Guest]) -> None:
        """All guests as they are after a trace that was worth it. Workers that are gone are
        forgotten, and those that are known by now."""
        for key, worked in self._due.items():
            last = self._futile.get(key)
            skip = 1 if last is None else min(2 * last.skip + 1, MOST)
            self._futile[key] = _Futile(worked, skip, skip)
        unsure = {t.key for t in _unsure(guests)}
        self._futile = {key: wait for key, wait in self._futile.items() if key in unsure}


def _unsure(guests: Iterable[Guest]) -> Iterator[Thread]:
    """Workers that a trace can tell more of."""
    for guest in guests:
        for thread in guest.by_role(Role.VHOST):
            if thread.confidence not in (None, Confidence.EXACT):
                yield thread
