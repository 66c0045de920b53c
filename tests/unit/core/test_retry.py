"""When to try again, and what has been said already."""

from __future__ import annotations

from vsrtune.core.errors import Lasting, VsrtuneError
from vsrtune.core.retry import FIRST, LONGEST, PERMANENT, Backoff, Pause, SaidOnce

SOON = VsrtuneError("busy", lasting=Lasting.TRANSIENT)
NEVER = VsrtuneError("impossible")


def test_a_pause_doubles_within_its_bounds() -> None:
    pause, now, delays = Pause(), 100.0, []
    assert pause.left(now) == 0
    for _ in range(5):
        pause = pause.longer(now, first=4.0, longest=25.0)
        assert pause.left(now) == pause.delay
        delays.append(pause.delay)
        now = pause.until
        assert pause.left(now) == 0
    assert delays == [4.0, 8.0, 16.0, 25.0, 25.0]


class TestBackoff:
    def test_transient_failures_wait_longer_each_time_up_to_a_limit(self) -> None:
        backoff, now, waits = Backoff(), 0.0, []
        for _ in range(9):
            backoff.failed("g", "same", [SOON], now)
            wait = backoff.next_try(now)
            assert wait is not None
            waits.append(wait)
            assert backoff.blocked("g", "same", now)
            now += wait
            assert not backoff.blocked("g", "same", now)
        assert waits[:3] == [FIRST, 2 * FIRST, 4 * FIRST]
        assert waits[-1] == LONGEST

    def test_permanent_failures_are_tried_rarely(self) -> None:
        backoff = Backoff()
        backoff.failed("g", "same", [NEVER], 0.0)
        assert backoff.next_try(0.0) == PERMANENT

    def test_other_changes_and_other_guests_are_not_held_up(self) -> None:
        backoff = Backoff()
        backoff.failed("g", "same", [SOON], 0.0)
        assert not backoff.blocked("g", "other", 0.0)
        assert not backoff.blocked("h", "same", 0.0)

    def test_only_what_is_due_is_waited_for(self) -> None:
        backoff = Backoff()
        backoff.failed("g", "same", [SOON], 0.0)
        backoff.failed("h", "same", [SOON], 0.0)
        backoff.refreshed("gh".__contains__, ["g"])
        assert backoff.waiting() == {"g"}
        backoff.refreshed("g".__contains__, [])
        assert backoff.next_try(0.0) is None
        backoff.refreshed("h".__contains__, ["h"])
        assert backoff.waiting() == {"h"}
        assert backoff.blocked("g", "same", 0.0)

    def test_success_and_clear_forget(self) -> None:
        backoff = Backoff()
        backoff.failed("g", "same", [SOON], 0.0)
        backoff.failed("h", "same", [SOON], 0.0)
        backoff.succeeded("g")
        assert not backoff.blocked("g", "same", 0.0)
        backoff.clear()
        assert backoff.next_try(0.0) is None


def test_a_message_is_said_once_until_it_has_gone_away() -> None:
    said = SaidOnce()
    heard = []
    for present in (True, True, False, True):
        if present:
            heard.append(said.new("x"))
        said.end_of_pass()
    assert heard == [True, False, True]
