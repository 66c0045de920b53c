# SPDX-License-Identifier: GPL-2.0-or-later
"""When to retry after a failure, and which messages were issued already."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass

from vsrtune.core.errors import Lasting, VsrtuneError

FIRST, LONGEST = 1.0, 60.0
# Permanent failures are retried too, rarely: somebody may have removed the cause.
PERMANENT = 300.0


@dataclass(frozen=True, slots=True)
class Pause:
    """``delay`` seconds without another try, which end at ``until`` on the caller's clock. The
    default is no pause at all."""

    delay: float = 0.0
    until: float = 0.0

    def longer(self, now: float, first: float = FIRST, longest: float = LONGEST) -> Pause:
        """The pause after one more failure: twice as long, within ``first`` and ``longest``
        seconds."""
        delay = min(longest, max(first, 2 * self.delay))
        return Pause(delay, now + delay)

    def left(self, now: float) -> float:
        """Seconds until the next try; 0 when it is due."""
        return max(0.0, self.until - now)


@dataclass
class _Wait:
    signature: Hashable
    pause: Pause
    due: bool = True


class Backoff:
    """Decides, per guest, whether changes that failed may be retried.

    An old failure never delays other changes for the guest (a new plan).
    """

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}

    def blocked(self, guest: str, signature: Hashable, now: float) -> bool:
        """True while the same failed changes must wait. ``now`` is in monotonic seconds."""
        wait = self._waits.get(guest)
        return wait is not None and wait.signature == signature and wait.pause.left(now) > 0

    def failed(
        self, guest: str, signature: Hashable, errors: Iterable[VsrtuneError], now: float
    ) -> None:
        """Record a failure. It waits 1, 2, 4, ... 60 s, or 300 s when all errors are permanent."""
        before = self._waits.get(guest)
        pause = before.pause if before is not None and before.signature == signature else Pause()
        if all(e.lasting is Lasting.PERMANENT for e in errors):
            pause = Pause(PERMANENT, now + PERMANENT)
        else:
            pause = pause.longer(now)
        self._waits[guest] = _Wait(signature, pause)

    def refreshed(self, covers: Callable[[str], bool], due: Collection[str]) -> None:
        """Record that a pass over the guests that it ``covers`` has changes for ``due`` only. The
        waits of the others stay, because the same changes may come back, but nothing is due when
        they end."""
        for guest, wait in self._waits.items():
            if covers(guest):
                wait.due = guest in due

    def succeeded(self, guest: str) -> None:
        """Forget the guest's failures."""
        self._waits.pop(guest, None)

    def failing(self) -> frozenset[str]:
        """The guests that have failed and not succeeded since."""
        return frozenset(self._waits)

    def waiting(self) -> frozenset[str]:
        """The guests that have changes due when their wait ends."""
        return frozenset(guest for guest, wait in self._waits.items() if wait.due)

    def clear(self) -> None:
        """Forget all failures, so that a reload retries everything at once."""
        self._waits.clear()

    def next_try(self, now: float) -> float | None:
        """Seconds until the first wait with due changes ends; None when there is none."""
        return min((w.pause.left(now) for w in self._waits.values() if w.due), default=None)


class SaidOnce:
    """Passes a message when it is new, and again after a pass without it."""

    def __init__(self) -> None:
        self._said: set[Hashable] = set()
        self._now: set[Hashable] = set()

    def new(self, key: Hashable) -> bool:
        """True when ``key`` is new. Call it in every pass in which the message applies."""
        self._now.add(key)
        return key not in self._said

    def end_of_pass(self, *, whole: bool = True) -> None:
        """End the pass. After a ``whole`` pass, keys that it did not have count as new again."""
        if whole:
            self._said = self._now
        else:
            self._said |= self._now
        self._now = set()
