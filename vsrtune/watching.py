"""What two looks at the host, one after the other, say about its threads."""

from __future__ import annotations

from collections.abc import Iterable

from vsrtune.deadline import used
from vsrtune.model import Confidence, Guest, Role, SchedClass, Snapshot, ThreadKey


class Budgets:
    """How much of their budgets DEADLINE threads use, from one look at everything to the
    next."""

    def __init__(self) -> None:
        self._at = 0.0
        self._ran: dict[ThreadKey, int] | None = None

    def look(self, snapshot: Snapshot, now: float) -> tuple[tuple[ThreadKey, float], ...]:
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


def worth_tracing(before: Iterable[Guest], now: Iterable[Guest]) -> bool:
    """Whether watching transmissions can make the mapping of some worker surer: one that
    is of no use yet, or one known by order only that has worked since ``before``."""
    used_before = {t.key: t.cpu_ns for g in before for t in g.threads}
    for guest in now:
        for thread in guest.threads:
            if thread.role is not Role.VHOST or thread.confidence in (None, Confidence.EXACT):
                continue
            surely = thread.confidence is not None and thread.confidence.usable
            if not surely or thread.cpu_ns > used_before.get(thread.key, -1):
                return True
    return False
