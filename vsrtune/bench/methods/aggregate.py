"""Combines repeated trials of one load, as plain JSON data for summaries.

A spread is {"median", "low", "high", "count"}; its low and high are the least and the
greatest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from vsrtune.bench.spec.model import Load, Spec, Trial
from vsrtune.core.stats import spread

# A method: yields loads, receives the trial of each, returns its summary.
MethodRun = Generator[Load, Trial, dict[str, Any]]

# Below this share of the load asked for, the generator is the limit, not the router.
SENT_ENOUGH = 0.97


def even_load(spec: Spec, rate: float, seconds: float, **more: Any) -> Load:
    """``rate`` frames per second shared evenly by the routers."""
    share = rate / len(spec.routers)
    return Load({router.name: share for router in spec.routers}, seconds, **more)


def point(trials: Sequence[Trial]) -> dict[str, Any]:
    """The point of the trials of one load, at least one: offered (pps asked for), size (of
    frames, where it is the load's own), sent_pps, pps and loss (spreads), generator_limited
    (the generator fell short in most of the trials)."""
    size = trials[0].load.size
    return {
        "offered": trials[0].load.total,
        **({} if size is None else {"size": size}),
        "sent_pps": spread_of(t.sent_pps for t in trials),
        "pps": spread_of(t.pps for t in trials),
        "loss": spread_of(t.loss for t in trials),
        "generator_limited": sum(fell_short(t) for t in trials) * 2 > len(trials),
    }


def spread_of(values: Iterable[float]) -> dict[str, Any]:
    """The spread of ``values`` as data."""
    return dataclasses.asdict(spread(list(values)))


def fell_short(trial: Trial) -> bool:
    """True when the generator sent clearly less than it was asked to send."""
    if trial.load.frames is not None:
        return trial.sent < SENT_ENOUGH * trial.load.frames
    return trial.sent_pps < SENT_ENOUGH * trial.load.total
