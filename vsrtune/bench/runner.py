"""Drives a method: asks it for loads, has them measured, tells it the trials.

Pure: what measures and what tells the time are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vsrtune.bench.methods import Estimate
from vsrtune.bench.model import Trial

# What a method yields: Load, or (configuration index, Load) in a comparison.
Order = TypeVar("Order")


@dataclass(frozen=True, slots=True)
class Progress(Generic[Order]):
    """Told before each trial (``order`` is the next) and once at the end (``order``
    None). ``done`` of ``expected`` trials are made; ``last`` is the newest.
    ``seconds_left`` is None until it can be told."""

    done: int
    expected: int
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
    """Run ``method`` to its end: its summary, and every trial in order.

    ``clock`` gives seconds (time.monotonic); without it the time left is told from the
    lengths of trials alone. What ``do_trial`` raises passes through, after the method
    has been closed.
    """
    raise NotImplementedError
