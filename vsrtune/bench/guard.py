"""The guard: a process that puts the host back when the bench cannot.

It has a session of its own and waits on a pipe whose other end only the bench holds.
However the bench ends, by itself, by an error or by SIGKILL, the pipe ends with it; the
guard then resolves what is pending in the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from vsrtune.bench.ledger import Cleaner, Failure, Ledger


class Guard:
    """A running guard. Use as a context manager, or ``stop``."""

    def stop(self) -> None:
        """End the guard: it resolves what is still pending, then exits. Raises
        VsrtuneError saying what could not be put back."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def start(ledger: Ledger) -> Guard:
    """Start a guard for the open ``ledger`` and return once it watches. Start it before
    anything is changed. Raises VsrtuneError when it cannot be started."""
    raise NotImplementedError


def cleaners() -> Mapping[str, Cleaner]:
    """Every cleaner this version has, by the kind of ledger entry."""
    raise NotImplementedError


def clean(ledger: Ledger) -> list[Failure]:
    """Resolve what a killed run left (`vsrtune bench clean`, and each start)."""
    return ledger.resolve(cleaners())
