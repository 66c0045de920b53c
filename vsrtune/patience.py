"""Questions that may never be answered, such as those to a libvirtd that is stopped.

libvirt's calls have no time limit: a call to a daemon that hangs waits for as long as that
hangs, and with it the thread that made it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# A pass waits no longer than this for libvirt, seconds, and only once: as long as that question
# waits, later ones fail at once. It answers in milliseconds; a thousand guests take some
# seconds, and so does a libvirtd that is just being started. The watchdog is at 60 s.
LIBVIRT_SECONDS = 15.0


class _Question(threading.Thread, Generic[T]):
    def __init__(self, ask: Callable[[], T]) -> None:
        super().__init__(name="question", daemon=True)
        self._ask = ask
        self.answer: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.answer = self._ask()
        except BaseException as error:  # whoever asked raises it
            self.error = error


class Patience:
    """Asks in a thread, and leaves that alone when no answer comes. One question waits at most:
    until it is answered, all others fail at once."""

    def __init__(self, seconds: float = LIBVIRT_SECONDS) -> None:
        self._seconds = seconds
        self._waiting: threading.Thread | None = None

    @property
    def silent(self) -> bool:
        """Whether the last question still waits."""
        return self._waiting is not None and self._waiting.is_alive()

    def ask(self, question: Callable[[], T]) -> T:
        """The answer, or what the question raised. Raises TimeoutError without an answer."""
        if self.silent:
            raise TimeoutError("an earlier question was not answered yet")
        asked: _Question[T] = _Question(question)
        self._waiting = asked
        asked.start()
        asked.join(self._seconds)
        if asked.is_alive():
            raise TimeoutError(f"no answer in {self._seconds:g} s")
        self._waiting = None
        if asked.error is not None:
            raise asked.error
        return asked.answer  # type: ignore[return-value]
