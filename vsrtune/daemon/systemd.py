# SPDX-License-Identifier: GPL-2.0-or-later
"""What the daemon tells systemd: READY, RELOADING, STOPPING, WATCHDOG, STATUS (sd_notify(3))."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Protocol

from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import printable


class Notifier(Protocol):
    """The service manager, as far as the daemon talks to it."""

    def ready(self) -> None: ...

    def reloading(self) -> None: ...

    def stopping(self) -> None: ...

    def status(self, text: str) -> None: ...

    def ping(self) -> None: ...

    @property
    def watchdog_seconds(self) -> float | None:
        """Longest silence allowed between two pings; None without a watchdog."""
        ...


class NullNotifier:
    """Nobody is listening: a foreground run, or a host without systemd."""

    watchdog_seconds: float | None = None

    def ready(self) -> None:
        pass

    def reloading(self) -> None:
        pass

    def stopping(self) -> None:
        pass

    def status(self, text: str) -> None:
        pass

    def ping(self) -> None:
        pass


class SystemdNotifier:
    """The notification socket of the service manager, through systemd.daemon. Raises
    VsrtuneError without it."""

    def __init__(self, watchdog_seconds: float | None) -> None:
        try:
            from systemd import daemon  # imported late: only the daemon needs it
        except ImportError as error:
            raise VsrtuneError(
                "systemd's Python binding is missing, and the unit waits for it",
                hint="install python3-systemd, or with pip: vsrtune[systemd]",
            ) from error

        self._notify = daemon.notify
        self.watchdog_seconds = watchdog_seconds

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


def watchdog_from(environ: Mapping[str, str], pid: int) -> float | None:
    """The watchdog time in seconds that sd_watchdog_enabled(3) would report, or None."""
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    try:
        usec = int(environ["WATCHDOG_USEC"])
    except (KeyError, ValueError):
        return None
    return usec / 1e6 if usec > 0 else None


def from_environment(environ: Mapping[str, str] | None = None) -> Notifier:
    """The notifier for this process: SystemdNotifier when systemd listens, otherwise
    NullNotifier."""
    env = os.environ if environ is None else environ
    if not env.get("NOTIFY_SOCKET"):
        return NullNotifier()
    return SystemdNotifier(watchdog_from(env, os.getpid()))
