# SPDX-License-Identifier: GPL-2.0-or-later
"""When it is worth a trace to see which interface a vhost worker serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vsrtune.core.retry import Pause
from vsrtune.model.guest import Confidence, Guest, Role, Thread, ThreadKey

# After a trace that revealed nothing about a worker, the next one for it is made in the second pass
# after, then in the fourth, ..., at most so many later.
FIRST, LONGEST = 2, 32


class Tracing:
    """Decides when a trace of transmissions can make a worker's mapping more certain.
    Otherwise a worker that never sends would cost a trace and a second observation in every
    pass."""

    def __init__(self) -> None:
        self._passes = 0
        # Workers about which the last trace revealed nothing: whether they had run, which the
        # trace showed nothing of, and the number of the pass until which to wait.
        self._futile: dict[ThreadKey, tuple[bool, Pause]] = {}
        # Workers for which a trace is made, and whether they have run since the last pass.
        self._due: dict[ThreadKey, bool] = {}

    def worth(self, before: Iterable[Guest], now: Iterable[Guest]) -> bool:
        """Whether to trace in this pass: for a worker whose mapping is not usable yet, or one
        mapped by order only that has run since ``before``. A worker that is new or begins to
        run does not wait."""
        used_before = {t.key: t.cpu_ns for g in before for t in g.threads}
        self._due = {}
        self._passes += 1
        for thread in _unsure(now):
            known = thread.key in used_before
            worked = known and thread.cpu_ns > used_before[thread.key]
            usable = thread.confidence is not None and thread.confidence.usable
            if usable and known and not worked:
                continue
            had_worked, pause = self._futile.get(thread.key, (False, Pause()))
            if not pause.left(self._passes) or (worked and not had_worked):
                self._due[thread.key] = worked
        return bool(self._due)

    def traced(self, guests: Iterable[Guest]) -> None:
        """Note a trace; ``guests`` are all guests after it. Forget workers that are gone, and
        those with nothing left to learn."""
        for key, worked in self._due.items():
            _, last = self._futile.get(key, (False, Pause()))
            self._futile[key] = worked, last.longer(self._passes, FIRST, LONGEST)
        unsure = {t.key for t in _unsure(guests)}
        self._futile = {key: wait for key, wait in self._futile.items() if key in unsure}


def _unsure(guests: Iterable[Guest]) -> Iterator[Thread]:
    """Workers about which a trace can tell more."""
    for guest in guests:
        for thread in guest.by_role(Role.VHOST):
            if thread.confidence not in (None, Confidence.EXACT):
                yield thread
