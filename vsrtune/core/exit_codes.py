# SPDX-License-Identifier: GPL-2.0-or-later
"""The exit codes of all subcommands: one number means one thing everywhere."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """The exit status of a subcommand; ``meaning`` is its text in the manual.

    Codes are never shared, because the number tells a script what to do next: it may wait while a
    host differs, but not when a file is wrong. vsrtune.service relies on WRONG (systemd does not
    restart the service) and HANDED_OVER (systemd restarts it at once).
    """

    meaning: str

    DONE = 0, "Done, or nothing to do; the host is as the policies say."
    FAILED = 1, "Something failed, or an error was found (doctor)."
    WRONG = 2, "The command line or a file that it reads is wrong; nothing was done."
    DIFFERS = (
        3,
        "Not as the policies say (verify, status, plan --detailed-exitcode), or warnings (doctor).",
    )
    UNREAD = (
        4,
        "The host, a guest or a named file could not be read, or there was nothing to compare.",
    )
    REFUSED = (
        5,
        "A guest cannot have what its policy asks and is not changed (plan, apply, verify).",
    )
    UNDECIDED = 6, "The trial decided nothing: too few turns counted, or nothing changed (try)."
    HANDED_OVER = 75, "SIGUSR2 had the daemon hand over to another one; the guests stay tuned."
    INTERRUPTED = 130, "Interrupted."
    NO_READER = 141, "Whoever read the output has gone."

    def __new__(cls, code: int, meaning: str) -> Self:
        made = int.__new__(cls, code)
        made._value_ = code
        made.meaning = meaning
        return made
