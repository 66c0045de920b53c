# SPDX-License-Identifier: GPL-2.0-or-later
"""Errors an operator can meet: what happened, where, and what to do next."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from vsrtune.core.exit_codes import ExitCode

E = TypeVar("E", bound=Exception)


class Lasting(Enum):
    """Whether trying again later can help."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"


class VsrtuneError(Exception):
    """Base of every error that reaches an operator.

    ``what`` is one sentence, ``where`` names the file, thread, device or
    guest, ``hint`` says what to do next. ``lasting`` tells the daemon whether
    a later pass may succeed.
    """

    exit_code = ExitCode.FAILED

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        hint: str = "",
        lasting: Lasting = Lasting.PERMANENT,
    ) -> None:
        super().__init__(what, where, hint)
        self.what = what
        self.where = where
        self.hint = hint
        self.lasting = lasting

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.hint}" if self.hint else text


class InputError(VsrtuneError):
    """A file or place that the command line names cannot be used; nothing is done."""

    exit_code = ExitCode.WRONG


class UnknownError(VsrtuneError):
    """Data of a kind, or with a field, that this version does not know; a later one may."""


class PolicyError(InputError):
    """A policy file that cannot be used; nothing is applied."""


class ObserveError(VsrtuneError):
    """A reader could not read its part of the host, or there is nothing to read."""

    exit_code = ExitCode.UNREAD


class WriteError(VsrtuneError):
    """A setting could not be written, or did not read back as written."""


class StaleError(WriteError):
    """The host changed between plan and apply."""


class PendingError(WriteError):
    """The kernel accepts the setting only once the thread has run. A later pass retries it; the
    pass over its guest does not fail."""


class FixedError(WriteError):
    """The kernel manages the setting itself and never accepts a change. vsrtune leaves it alone
    and makes the other planned changes."""


class BusyError(WriteError):
    """libvirt runs a job on the guest and accepts no pins until the job ends."""


class LateError(BusyError):
    """libvirt kept a pin waiting, and gave up after half a minute."""


class SilentJobError(BusyError):
    """libvirt did not say in time whether it has a job on the guest."""


class UntriedError(BusyError):
    """A pin was not tried, because libvirt has kept the pin of another guest waiting, or did not
    say in time whether it has a job on two others."""


class VanishedError(WriteError):
    """The thread, device or guest is gone: a normal event while tuning."""


class JournalError(VsrtuneError):
    """The journal or a ledger cannot be read or written, so vsrtune does not write the host."""


def each(error: E) -> tuple[E, ...]:
    """The errors that one stands for (PolicyErrors), or itself."""
    return getattr(error, "errors", ()) or (error,)
