"""When the daemon's loop moves on."""

from __future__ import annotations

import os
import signal
import threading
import time

from vsrtune.daemon.loop import Wakeup


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
