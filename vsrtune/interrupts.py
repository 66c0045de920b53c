"""Signals that would end a command in the middle of what it has to take back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vsrtune.errors import VsrtuneError

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


class Interrupted(VsrtuneError):
    """A signal asked the command to end."""

    exit_code = 130


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Note SIGINT, SIGTERM and SIGHUP; yields what raises Interrupted once one came. A
    second signal ends the process at once, and one that nobody asked for does when the
    block is left. What the process handles in a way of its own, as the daemon does, is
    left to it."""
    noted: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)
        give_back()

    def check() -> None:
        if noted:
            name = signal.Signals(noted.pop()).name
            raise Interrupted(f"interrupted ({name})")

    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if signal.getsignal(number) in _DEFAULT:
                before[number] = signal.signal(number, note)
    try:
        yield check
    finally:
        give_back()
    if noted:
        os.kill(os.getpid(), noted.pop())
