"""The errors this tool stops with."""

from __future__ import annotations


class LabError(Exception):
    """What happened, and what to do about it if that is known."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class BootFailure(LabError):
    """The lab did not come up. ``kernel`` tells that its kernel crashed, perhaps by vsrtune;
    otherwise another boot may well succeed."""

    def __init__(self, message: str, *, kernel: bool = False) -> None:
        super().__init__(message)
        self.kernel = kernel
