"""Drives a method: asks it for loads, has them measured, and sends it the trials.

Pure: the caller passes in the functions that measure and tell the time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vsrtune.bench.methods.methods import Estimate
from vsrtune.bench.spec.model import Trial

# What a method yields: Load, or (configuration index, Load) in a comparison.
Order = TypeVar("Order")


@dataclass(frozen=True, slots=True)
class Progress(Generic[Order]):
    """The report before each trial (``order`` is the next) and once at the end (``order``
    None). ``done`` of ``total`` trials are made; ``last`` is the newest.
    ``seconds_left`` is None while it is unknown; for a search it is a guess."""

    done: int
    total: int
    order: Order | None
    last: Trial | None
    seconds_left: float | None


def run(
    method: Generator[Order, Trial, dict[str, Any]],
    do_trial: Callable[[Order], Trial],
    progress: Callable[[Progress[Order]], None] | None = None,
    *,
    estimate: Estimate | None = None,
    clock: Callable[[], float] | None = None,
) -> tuple[dict[str, Any], list[Trial]]:
    """Run ``method`` to its end. Return its summary, and every trial in order.

    ``clock`` gives seconds (time.monotonic); without it the time left comes from the
    lengths of trials alone. An exception of ``do_trial`` passes through after the method
    has been closed.
    """
    watch = _Watch(estimate, clock)
    tell = progress if progress is not None else _silent
    trials: list[Trial] = []
    try:
        order = next(method)
        while True:
            tell(watch.progress(order, trials))
            trials.append(do_trial(order))
            order = method.send(trials[-1])
    except StopIteration as end:
        tell(Progress(len(trials), len(trials), None, trials[-1] if trials else None, 0.0))
        summary: dict[str, Any] = end.value
        return summary, trials
    finally:
        method.close()


def _silent(_: Progress[Any]) -> None:
    pass


class _Watch:
    """Estimates the time left: the remaining work at the pace so far."""

    def __init__(self, estimate: Estimate | None, clock: Callable[[], float] | None) -> None:
        self.estimate = estimate
        self.clock = clock
        self.began = clock() if clock is not None else 0.0

    def progress(self, order: Order, trials: list[Trial]) -> Progress[Order]:
        done = len(trials)
        # A search that takes longer than guessed has at least one trial left.
        total = max(self.estimate.trials if self.estimate else 0, done + 1)
        last = trials[-1] if trials else None
        return Progress(done, total, order, last, self.left(trials, total))

    def left(self, trials: list[Trial], total: int) -> float | None:
        """The work left in seconds of load, times the cost of a second of load so far: warm-up,
        drain and switching are part of the pace."""
        estimate = self.estimate
        if estimate is None or estimate.trials <= 0:
            return None
        loaded = sum(trial.load.seconds for trial in trials)
        mean = estimate.seconds / estimate.trials
        left = max(estimate.seconds - loaded, mean * (total - len(trials)) * 0.5)
        if self.clock is None or loaded <= 0:
            return left
        return left * (self.clock() - self.began) / loaded
