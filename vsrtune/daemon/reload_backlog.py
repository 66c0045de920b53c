"""What a reload has asked for and could not have yet.

A reload takes back what was set by hand before it, and what no policy asks for any more. Where
libvirt is away or busy with a guest, or the pass breaks off, later passes do that. They have to
know of it: else they would hold the operator's pin of before the reload for one of after it.
"""

from __future__ import annotations

from collections.abc import Callable

from vsrtune.plan.drift import Overruled

# What could not be taken back is tried again after 1, 2, 4, ... seconds, at most:
LONGEST = 60.0


class ReloadBacklog:
    """One for the life of a daemon; told of every pass. Times are those of ``clock``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._guests: Overruled = False
        self._settle = False
        self._settling = False
        self._delay = 0.0
        self._until = 0.0

    def begin(self, settle: bool, reassert: bool) -> tuple[bool, Overruled]:
        """Whether the pass that begins takes back what no policy asks for, and of which
        guests it overrules what was set by hand: what is asked of it now and the backlog."""
        if settle:
            self._settle, self._delay = True, 0.0
        self._settling = settle or (self._settle and self._clock() >= self._until)
        if reassert:
            self._guests = True
        return self._settling, self._guests

    @property
    def open(self) -> bool:
        """Whether the pass under way has anything to do for a reload."""
        return self._settling or bool(self._guests)

    def end(self, left: frozenset[str], refreshed: frozenset[str] | None, unsettled: bool) -> None:
        """A pass over the guests ``refreshed`` (None: all) is over. ``left`` are those that are
        not yet as their policies say; ``unsettled``: not all could be taken back that no policy
        asks for."""
        if self._guests is True:
            self._guests = left
        elif self._guests:
            self._guests &= left if refreshed is None else left | (self._guests - refreshed)
        if self._settling:
            self._settle = unsettled
            self._wait()

    def broke_off(self) -> None:
        """The pass ended with an error: all that it was asked for stays in the backlog."""
        if self._settling:
            self._wait()

    def next_try(self) -> float | None:
        """Seconds until what could not be taken back is tried again; None: nothing waits."""
        return max(0.0, self._until - self._clock()) if self._settle else None

    def _wait(self) -> None:
        if self._settle:
            self._delay = min(LONGEST, max(1.0, 2 * self._delay))
            self._until = self._clock() + self._delay
