# SPDX-License-Identifier: GPL-2.0-or-later
"""Logging: structured journald fields under systemd, plain lines on stderr elsewhere.

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
from typing import Any

from vsrtune.core.text import printable, printable_lines

LOGGER = logging.getLogger("vsrtune")


def fields(**values: object) -> dict[str, Any]:
    """``extra=`` for a log call; None values are left out."""
    return {f"VSRTUNE_{k.upper()}": printable(str(v)) for k, v in values.items() if v is not None}


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
