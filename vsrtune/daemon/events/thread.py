# SPDX-License-Identifier: GPL-2.0-or-later
"""Threads that run beside the daemon's loop until they are asked to end."""

from __future__ import annotations

import threading


class Background(threading.Thread):
    """A daemon thread that runs from ``start`` to ``stop``: ``run`` of a subclass returns soon
    after ``_stopping`` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ask the thread to end soon; it need not be joined."""
        self._stopping.set()
