# SPDX-License-Identifier: GPL-2.0-or-later
"""What the daemon tells systemd: READY, RELOADING, STOPPING, WATCHDOG, EXTEND_TIMEOUT_USEC, STATUS
(sd_notify(3)), and its log: structured journald fields under systemd, plain lines on stderr
elsewhere.

Names in a message come from others, so they pass through ``printable``: a record is one
line, followed only by the indented lines of a traceback.

Call sites pass fields with ``extra=fields(guest="vr1", ...)``; they become
``VSRTUNE_GUEST=vr1`` and can be selected with ``journalctl VSRTUNE_GUEST=vr1``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from vsrtune.core.errors import VsrtuneError, each
from vsrtune.core.text import printable, printable_lines

LOGGER = logging.getLogger("vsrtune")


def fields(**values: object) -> dict[str, Any]:
    """``extra=`` for a log call; None values are left out."""
    return {f"VSRTUNE_{k.upper()}": printable(str(v)) for k, v in values.items() if v is not None}


def log_each(error: Exception) -> None:
    """Log the errors that one stands for (PolicyErrors), or itself."""
    for one in each(error):
        LOGGER.error("%s", one, extra=fields(error=one))


class Printable(logging.Formatter):
    """Formats records as one printable line each."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        # systemd's handler sends all attributes of the record, which must be valid UTF-8.
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        return "  " + printable_lines(super().formatException(ei))


def _on_journal() -> bool:
    """True when stderr is the journal's own stream (systemd.exec(5), JOURNAL_STREAM)."""
    stream = os.environ.get("JOURNAL_STREAM")
    if not stream:
        return False
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


def setup(verbose: bool = False) -> None:
    """Attach the one handler that suits this process to the ``vsrtune`` logger."""
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(Printable("vsrtune: %(levelname)s: %(message)s"))
    # Without the binding systemd takes the lines from standard error.
    with contextlib.suppress(ImportError):
        if _on_journal():
            from systemd.journal import JournalHandler

            handler = JournalHandler(SYSLOG_IDENTIFIER="vsrtune")
            handler.setFormatter(Printable())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.DEBUG if verbose else logging.INFO)
    LOGGER.propagate = False


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
        # While it starts or stops.
        self._limited = True

    def ready(self) -> None:
        self._limited = False
        self._notify("READY=1")

    def reloading(self) -> None:
        # Type=notify-reload (systemd 253 and later) waits for a READY that is newer
        # than this stamp; older versions ignore the field.
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notify(f"RELOADING=1\nMONOTONIC_USEC={usec}")

    def stopping(self) -> None:
        self._limited = True
        self._notify("STOPPING=1")

    def status(self, text: str) -> None:
        self._notify("STATUS=" + printable(" ".join(text.split())))

    def ping(self) -> None:
        """Tell that the daemon moves on. While it starts or stops, systemd then waits for it at
        least until the watchdog would bite: a tuned host is not left half undone."""
        text = "WATCHDOG=1"
        if self._limited and self.watchdog_seconds is not None:
            text += f"\nEXTEND_TIMEOUT_USEC={self.watchdog_seconds * 1e6:.0f}"
        self._notify(text)


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
