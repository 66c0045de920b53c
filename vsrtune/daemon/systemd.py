# SPDX-License-Identifier: GPL-2.0-or-later
"""What the daemon tells systemd: READY, RELOADING, STOPPING, WATCHDOG, STATUS (sd_notify(3))."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import printable


class Notifier:
    """The notification socket of the service manager, through systemd.daemon; without one nothing
    is sent. ``watchdog_seconds`` is the longest silence allowed between two pings, None without a
    watchdog. Raises VsrtuneError where there is a socket and no binding."""

    def __init__(self) -> None:
        try:
            from systemd import daemon  # imported late: only the daemon needs it
        except ImportError as error:
            if os.environ.get("NOTIFY_SOCKET"):
                raise VsrtuneError(
                    "systemd's Python binding is missing, and the unit waits for it",
                    hint="install python3-systemd, or with pip: vsrtune[systemd]",
                ) from error
            daemon = None

        self._notify = daemon.notify if daemon else _to_nobody
        self.watchdog_seconds = watchdog_from(os.environ, os.getpid())

    def ready(self) -> None:
        self._notify("READY=1")

    def reloading(self) -> None:
        # Type=notify-reload (systemd 253 and later) waits for a READY that is newer
        # than this stamp; older versions ignore the field.
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notify(f"RELOADING=1\nMONOTONIC_USEC={usec}")

    def stopping(self) -> None:
        self._notify("STOPPING=1")

    def status(self, text: str) -> None:
        self._notify("STATUS=" + printable(" ".join(text.split())))

    def ping(self) -> None:
        self._notify("WATCHDOG=1")


def _to_nobody(_: str) -> None:
    """A foreground run without systemd's binding."""


def watchdog_from(environ: Mapping[str, str], pid: int) -> float | None:
    """The watchdog time in seconds that sd_watchdog_enabled(3) would report, or None."""
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    try:
        usec = int(environ["WATCHDOG_USEC"])
    except (KeyError, ValueError):
        return None
    return usec / 1e6 if usec > 0 else None
