"""wakeup.py and backoff.py: when the daemon's loop moves on."""

from __future__ import annotations

import os
import signal
import threading
import time

from vsrtune.core.errors import Lasting, VsrtuneError
from vsrtune.core.retry import FIRST, LONGEST, PERMANENT, Backoff, SaidOnce
from vsrtune.daemon.loop import Wakeup

SOON = VsrtuneError("busy", lasting=Lasting.TRANSIENT)
NEVER = VsrtuneError("impossible")


class TestWakeup:
    def test_set_before_wait_is_not_lost_and_not_seen_twice(self) -> None:
        wake = Wakeup()
        for _ in range(100_000):
            wake.set()
        assert wake.wait(0)
        assert not wake.wait(0)

    def test_another_thread_wakes_the_waiter(self) -> None:
        wake = Wakeup()
        threading.Timer(0.05, wake.set).start()
        begin = time.monotonic()
        assert wake.wait(30)
        assert time.monotonic() - begin < 20

    def test_a_signal_wakes_through_the_wakeup_descriptor(self) -> None:
        wake = Wakeup()
        old = signal.signal(signal.SIGUSR1, lambda *_: None)
        old_fd = signal.set_wakeup_fd(wake.fd)
        try:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            assert wake.wait(30)
        finally:
            signal.set_wakeup_fd(old_fd)
            signal.signal(signal.SIGUSR1, old)

    def test_set_after_close_is_harmless(self) -> None:
        wake = Wakeup()
        wake.close()
        wake.set()


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
        backoff.looked(None, ["g"])
        assert backoff.waiting() == {"g"}
        backoff.looked(["g"], [])
        assert backoff.next_try(0.0) is None
        backoff.looked(["h"], ["h"])
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
