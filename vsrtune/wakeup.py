"""Waking the daemon's loop from signal handlers and other threads.

A pipe and not a threading.Event: Event.set takes a lock that the interrupted
thread may hold, so a signal handler could wait for itself.
"""

from __future__ import annotations

import os
import select


class Wakeup:
    """``set`` from anywhere makes the current or next ``wait`` return."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        """The end to write to, for signal.set_wakeup_fd."""
        return self._write

    def set(self) -> None:
        """Wake the waiter; safe in signal handlers and threads."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups nobody has read yet: enough
        except OSError:
            pass  # closed while a late event arrived

    def wait(self, seconds: float) -> bool:
        """Sleep at most ``seconds``; True when woken. Forgets all earlier wake-ups."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, seconds))
        if not ready:
            return False
        try:
            while os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass
        return True

    def close(self) -> None:
        """Release the pipe."""
        write, self._write = self._write, -1
        os.close(self._read)
        os.close(write)
