"""When to try again after a failure, and what has been said already."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from vsrtune.core.errors import Lasting, VsrtuneError

FIRST, LONGEST = 1.0, 60.0
# A permanent failure is tried again too, rarely: its cause may have been removed.
PERMANENT = 300.0


@dataclass
class _Wait:
    signature: Hashable
    delay: float
    until: float
    due: bool = True


class Backoff:
    """Per guest: whether the same changes, having failed, may be tried again.

    Other changes for the guest (a new plan) are never held up by an old failure.
    """

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}

    def blocked(self, guest: str, signature: Hashable, now: float) -> bool:
        """True while the same failed changes must wait. ``now`` in monotonic seconds."""
        wait = self._waits.get(guest)
        return wait is not None and wait.signature == signature and now < wait.until

    def failed(
        self, guest: str, signature: Hashable, errors: Iterable[VsrtuneError], now: float
    ) -> None:
        """Remember a failure: transient ones wait 1, 2, 4, ... 60 s, permanent ones 300 s."""
        before = self._waits.get(guest)
        delay = FIRST
        if before is not None and before.signature == signature:
            delay = min(LONGEST, 2 * before.delay)
        if all(e.lasting is Lasting.PERMANENT for e in errors):
            delay = PERMANENT
        self._waits[guest] = _Wait(signature, delay, now + delay)

    def refreshed(self, guests: Collection[str] | None, due: Collection[str]) -> None:
        """A pass over ``guests`` (None: all) has changes for ``due`` only. Nothing would be
        tried for the others when their wait ends, so it is kept without being waited for:
        the same changes may come back."""
        for guest, wait in self._waits.items():
            if guests is None or guest in guests:
                wait.due = guest in due

    def succeeded(self, guest: str) -> None:
        """Forget the guest's failures."""
        self._waits.pop(guest, None)

    def failing(self) -> frozenset[str]:
        """The guests that have failed and not succeeded since."""
        return frozenset(self._waits)

    def waiting(self) -> frozenset[str]:
        """The guests that have something due when their wait ends."""
        return frozenset(guest for guest, wait in self._waits.items() if wait.due)

    def clear(self) -> None:
        """Forget everything: a reload tries all at once."""
        self._waits.clear()

    def next_try(self, now: float) -> float | None:
        """Seconds until the first wait ends; None when nobody waits."""
        waits = (max(0.0, w.until - now) for w in self._waits.values() if w.due)
        return min(waits, default=None)


class SaidOnce:
    """Lets a message through when it is new, and again after it had gone away."""

    def __init__(self) -> None:
        self._said: set[Hashable] = set()
        self._now: set[Hashable] = set()

    def new(self, key: Hashable) -> bool:
        """True the first time ``key`` is met; call it in every pass where it holds."""
        self._now.add(key)
        return key not in self._said

    def end_of_pass(self, *, whole: bool = True) -> None:
        """Keys not met in this pass may be said again, unless it was about a part only."""
        if whole:
            self._said = self._now
        else:
            self._said |= self._now
        self._now = set()
