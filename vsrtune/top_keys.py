"""The keys of `vsrtune top`: waiting that ends early when somebody wants to go."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

# What ends it; the last is Ctrl-C.
_QUIT = frozenset(b"qQ\x03")
# Where tcgetattr() has the local modes.
_LOCAL = 3


class Keys:
    """``descriptor`` of the terminal that is listened to; None: nobody is there to type."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> bool:
        """Wait for so long; True at once when the operator wants to go, or the terminal has."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
                break
            ready, _, _ = select.select([self._descriptor], [], [], left)
            if ready:
                typed = os.read(self._descriptor, 64)
                if not typed or _QUIT.intersection(typed):
                    return True
        return False


@contextlib.contextmanager
def listening() -> Iterator[Keys]:
    """The keys of standard input, unbuffered and not echoed meanwhile; silent keys where it
    is no terminal."""
    if not sys.stdin.isatty():
        yield Keys()
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # What was typed meanwhile counts: a q before the first frame ends it as well.
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        # Ctrl-C is a key as well: an exception in the middle of drawing can get lost.
        mode = termios.tcgetattr(descriptor)
        mode[_LOCAL] &= ~termios.ISIG
        termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
