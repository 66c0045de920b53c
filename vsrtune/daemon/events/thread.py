# SPDX-License-Identifier: GPL-2.0-or-later
"""Threads that run beside the daemon's loop until they are asked to end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vsrtune.core.retry import SaidOnce
from vsrtune.daemon.systemd import LOGGER


class Background(threading.Thread):
    """A daemon thread that runs from ``start`` to ``stop``: ``run`` of a subclass returns soon
    after ``_stopping`` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ask the thread to end soon; it need not be joined."""
        self._stopping.set()


def survive(work: Callable[[], object], lost: str, said: SaidOnce) -> None:
    """Call ``work``, which the thread must survive whatever it meets: the next call may succeed.
    Log a failure once while it lasts; ``lost`` says what nobody does meanwhile."""
    try:
        work()
    except Exception as error:
        if said.new(repr(error)):
            LOGGER.exception("%s; please report this", lost)
    said.end_of_pass()


class Sampler(Background):
    """Calls ``update`` of a subclass again and again, ``_pause`` seconds apart. ``lost`` says what
    nobody does until the next call that succeeds."""

    def __init__(self, name: str, lost: str) -> None:
        super().__init__(name)
        self._lost = lost

    def run(self) -> None:
        """Sample until asked to stop."""
        said = SaidOnce()
        while not self._stopping.wait(self._pause()):
            survive(self.update, self._lost, said)

    def update(self) -> None:
        """Sample once."""
        raise NotImplementedError

    def _pause(self) -> float:
        raise NotImplementedError
