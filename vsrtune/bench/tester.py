"""The router tester: makes a load, and says what became of it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from vsrtune.bench.ledger import Ledger
from vsrtune.bench.model import Load, Spec, Trial
from vsrtune.model import Snapshot


class Tester:
    """Generator, sink and counters of one spec. Use as a context manager.

    Entering it starts an agent for each end (on this host or over ssh), checks that
    the named devices may be used, and puts the sink's counters in place; leaving it
    takes everything away. ``observe`` is asked for the host's threads and devices
    before every trial, because a configuration may have replaced them.
    Raises VsrtuneError for a device that must not be used.
    """

    def __init__(self, spec: Spec, ledger: Ledger, observe: Callable[[], Snapshot]) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raise NotImplementedError

    def ready(self, router: str, seconds: float = 1.0) -> bool:
        """Whether probe frames pass through the router, in both directions when it has
        both legs; waits up to ``seconds`` for them."""
        raise NotImplementedError

    def trial(self, load: Load, configuration_name: str) -> Trial:
        """Warm up, send the load, wait until nothing is under way, and account for it.

        Raises VsrtuneError when the load exceeds the limits of the spec, or the
        generator or a counter failed.
        """
        raise NotImplementedError
