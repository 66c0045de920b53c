# SPDX-License-Identifier: GPL-2.0-or-later
"""Signals that would end a command in the middle of changes that it has to take back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


class Interrupted(VsrtuneError):
    """A signal asked the command to end."""

    exit_code = ExitCode.INTERRUPTED


class HeldSignal:
    """The signal that came, 0 for none."""

    def __init__(self) -> None:
        self.signal = 0

    def check(self, when: str = "") -> None:
        """Raise Interrupted when a signal has come."""
        if self.signal:
            raise Interrupted(f"interrupted ({signal.Signals(self.signal).name}){when}")


@contextmanager
def held() -> Iterator[HeldSignal]:
    """Note SIGINT, SIGTERM and SIGHUP instead of ending. A second signal ends the process at
    once. A noted signal ends the process when the block is left without an error. Signals for
    which the process has a handler of its own, as the daemon has, keep it."""
    noted = HeldSignal()
    before: dict[signal.Signals, Any] = {}

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: FrameType | None) -> None:
        noted.signal = number
        give_back()

    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if signal.getsignal(number) in _DEFAULT:
                before[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        give_back()
    if noted.signal:
        os.kill(os.getpid(), noted.signal)
