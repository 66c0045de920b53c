"""Brings the routers under test into the configurations of a bench, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from vsrtune.bench.model import Configuration, Spec
from vsrtune.journal import DEFAULT_PATH

URI = "qemu:///system"


class Records(Protocol):
    """The part of the ledger that is needed here."""

    def add(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Write down, durably, what is about to be changed; the entry's id."""
        ...

    def done(self, entry: Any) -> None:
        """The change is taken back."""
        ...


class Configurator:
    """The routers of ``spec`` in one configuration at a time. A context manager.

    Entering takes the journal of vsrtune for the whole run, so no daemon, `apply` or
    other bench tunes meanwhile; leaving restores the host. ``ready`` is called after the
    interfaces of guests were attached anew, and returns when every router forwards
    again; it raises VsrtuneError when one does not in time.
    """

    def __init__(
        self,
        spec: Spec,
        ledger: Records,
        *,
        ready: Callable[[], None] | None = None,
        uri: str = URI,
        journal: Path = DEFAULT_PATH,
    ) -> None:
        self._spec = spec

    def __enter__(self) -> Self:
        """Raises VsrtuneError when the daemon runs, when another process holds the
        journal, or when it has entries: the host must be untuned to begin with."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def check(self, configurations: Sequence[Configuration]) -> None:
        """Refuse what this host cannot do, before anything is changed. Raises VsrtuneError."""
        raise NotImplementedError

    def apply(self, configuration: Configuration) -> tuple[str, ...]:
        """Take back the present tuning and bring the routers into ``configuration``.

        Returns notes for the operator (what a policy could not do, for one), the same
        ones again when the configuration is the present one, for which nothing is done.
        Raises VsrtuneError; then the tuning is taken back, and ``restore`` does the rest.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Everything as it was on entry. May be called again after it raised."""
        raise NotImplementedError
