"""The test methods, each a generator of loads that is sent the trial of each.

Every method returns its summary as plain JSON data; ``summary["kind"]`` names it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from vsrtune.bench.model import Load, Spec, Trial

MethodRun = Generator[Load, Trial, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a run is about to take: ``trials`` of ``seconds`` in all, without
    warm-up and drain. ``exact`` is False for searches."""

    trials: int
    seconds: float
    exact: bool = True


def start(spec: Spec, seed: int = 1) -> MethodRun:
    """The generator of ``spec.method``; ``seed`` shuffles the order of its loads."""
    raise NotImplementedError


def estimate(spec: Spec) -> Estimate:
    """How many trials ``start(spec)`` is about to ask for."""
    raise NotImplementedError
