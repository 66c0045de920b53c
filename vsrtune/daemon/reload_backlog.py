"""What a reload has asked for and has not achieved yet.

A reload takes back what was set by hand before it, and what no policy asks for any more. Where
libvirt is away or busy with a guest, or the pass breaks off, later passes finish the work.
Without the backlog they would take an operator's pin from before the reload for one made after.
"""

from __future__ import annotations

from collections.abc import Callable

from vsrtune.plan.drift import Overruled

# Taking back is tried again after 1, 2, 4, ... seconds, at most:
LONGEST = 60.0


class ReloadBacklog:
    """One instance for the life of a daemon; the reconciler reports every pass to it. Times
    are those of ``clock``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._guests: Overruled = False
        self._settle = False
        self._settling = False
        self._delay = 0.0
        self._until = 0.0

    def begin(self, settle: bool, reassert: bool) -> tuple[bool, Overruled]:
        """Begin a pass. Return whether it takes back what no policy asks for, and for which
        guests it overrules what was set by hand; both include the backlog."""
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
        """End a pass over the guests ``refreshed`` (None: all). ``left`` are the guests that do
        not match their policies yet. ``unsettled``: something that no policy asks for could not
        be taken back."""
        if self._guests is True:
            self._guests = left
        elif self._guests:
            self._guests &= left if refreshed is None else left | (self._guests - refreshed)
        if self._settling:
            self._settle = unsettled
            self._wait()

    def broke_off(self) -> None:
        """End a failed pass: everything that it was asked for stays in the backlog."""
        if self._settling:
            self._wait()

    def next_try(self) -> float | None:
        """Seconds until taking back is tried again; None when nothing waits."""
        return max(0.0, self._until - self._clock()) if self._settle else None

    def _wait(self) -> None:
        if self._settle:
            self._delay = min(LONGEST, max(1.0, 2 * self._delay))
            self._until = self._clock() + self._delay
