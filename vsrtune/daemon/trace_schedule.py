# SPDX-License-Identifier: GPL-2.0-or-later
"""When it is worth a trace to see which interface a vhost worker serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vsrtune.model.guest import Confidence, Guest, Role, Thread, ThreadKey

# After a trace that revealed nothing about a worker, this many passes at most make no trace
# for it: 1, 3, 7, ...
MOST = 31


@dataclass(slots=True)
class _Futile:
    """A worker about which the last trace revealed nothing. ``left`` of ``skip`` passes remain
    to be skipped. ``worked``: the worker had run, and the trace showed nothing all the same."""

    worked: bool
    skip: int
    left: int


class Tracing:
    """Decides when a trace of transmissions can make a worker's mapping more certain.
    Otherwise a worker that never sends would cost a trace and a second observation in every
    pass."""

    def __init__(self) -> None:
        self._futile: dict[ThreadKey, _Futile] = {}
        # Workers for which a trace is made, and whether they have run since the last pass.
        self._due: dict[ThreadKey, bool] = {}

    def worth(self, before: Iterable[Guest], now: Iterable[Guest]) -> bool:
        """Whether to trace in this pass: for a worker whose mapping is not usable yet, or one
        mapped by order only that has run since ``before``. A worker that is new or begins to
        run does not wait."""
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
        """Note a trace; ``guests`` are all guests after it. Forget workers that are gone, and
        those with nothing left to learn."""
        for key, worked in self._due.items():
            last = self._futile.get(key)
            skip = 1 if last is None else min(2 * last.skip + 1, MOST)
            self._futile[key] = _Futile(worked, skip, skip)
        unsure = {t.key for t in _unsure(guests)}
        self._futile = {key: wait for key, wait in self._futile.items() if key in unsure}


def _unsure(guests: Iterable[Guest]) -> Iterator[Thread]:
    """Workers about which a trace can tell more."""
    for guest in guests:
        for thread in guest.by_role(Role.VHOST):
            if thread.confidence not in (None, Confidence.EXACT):
                yield thread
