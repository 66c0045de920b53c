"""Configurations measured in turn, and what their paired ratios show."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from vsrtune.bench.methods import Estimate
from vsrtune.bench.model import Configuration, Load, Spec, Trial

CompareRun = Generator[tuple[int, Load], Trial, dict[str, Any]]


def compare(
    spec: Spec, configurations: Sequence[Configuration], pairs: int = 9, seed: int = 1
) -> CompareRun:
    """Yields (index into ``configurations``, load), is sent the trial, and returns the
    summary. The first configuration is the baseline. In one round every configuration
    meets every load point; a configuration is applied when the index changes.

    Raises VsrtuneError at the first ``next`` for fewer than two configurations, names
    that are not unique, or no pair.
    """
    raise NotImplementedError
    yield


def estimate(spec: Spec, configurations: int, pairs: int) -> Estimate:
    """How many trials ``compare`` is about to ask for."""
    raise NotImplementedError


def pairs_needed(points: int) -> int:
    """The fewest pairs with which a difference at any of ``points`` load points can be
    shown while a comparison without one stays free of claims in 95 % of runs."""
    raise NotImplementedError
