# SPDX-License-Identifier: GPL-2.0-or-later
"""Throughput (RFC 2544, as NDR and PDR).

ndr, pdr summary: lower (the highest rate that passed; None when even the lowest failed), upper
(the lowest that failed, None when the highest passed), limited_by ("router"; "generator": it
cannot send more; "high", "low": the ends of the search). With ``latency``, one more trial is made
at each of 10, 50 and 90 % of lower.

The search keeps two bounds: ``lower`` has passed, ``upper`` has failed. The first guess is the
highest value, because the frames forwarded under overload give a good second guess. Then the
bounds move apart in growing steps until one has passed and one has failed, and are halved on
a logarithmic scale, because the precision is a share.

The search assumes that every value greater than a failing one fails. A router that passes
again above (its load may make it poll) is described by the lowest such edge found.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from math import floor
from typing import Any

from vsrtune.bench.methods.schedule import MethodRun, even_load
from vsrtune.bench.spec.model import Load, Spec, Trial

LATENCY_SHARES = (0.1, 0.5, 0.9)
# An open side is first widened by this share.
WIDTH = 1.0
# How often the part of a failing value that got through is the next guess.
GUESSES = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """``lower`` passed, None when even the lowest value failed; ``upper`` failed, None
    when the highest passed. ``by_generator``: the generator did not reach the upper bound, so
    nothing is known about the router there."""

    lower: float | None
    upper: float | None
    by_generator: bool = False


# Whether the value passed; the value really tried, less than asked for when the generator fell
# short; and a value that might pass where this did not.
Answer = tuple[bool, float, float]
# Tries a value with as many trials as that takes.
Attempt = Callable[[int], Generator[Load, Trial, Answer]]


def search(
    low: int, high: int, precision: float, attempt: Attempt
) -> Generator[Load, Trial, Bounds]:
    """Search the highest value from ``low`` to ``high`` that passes, until the bounds are
    ``precision`` (a share) apart or neighbours. No value outside the bounds is ever tried."""
    low, guesses, width = max(1, low), [float(high)], WIDTH
    bounds, more, stride = Bounds(None, None), GUESSES, precision
    while True:
        lower, upper = bounds.lower, bounds.upper
        # What the bounds leave open; a slow generator may not even have reached ``low``.
        least = low if lower is None else max(low, floor(lower) + 1)
        most = high if upper is None else int(upper) - 1
        guesses = [guess for guess in guesses if least <= round(guess) <= most]
        guessed = bool(guesses)
        if guesses:
            value = round(guesses.pop(0))
        elif lower is None or upper is None:
            # An open side: each step is twice as wide as the one before.
            step, width = 1.0 + width, 2.0 * width
            if lower is not None:
                value = min(high, max(least, round(lower * step)))
            else:
                assert upper is not None, "the first guess sets a bound"
                value = max(low, min(most, round(upper / step)))
        elif upper <= lower * (1.0 + precision):
            return bounds
        else:
            value = round((lower * upper) ** 0.5)
        if not least <= value <= most:
            return bounds
        passed, reached, guess = yield from attempt(value)
        if not passed:
            bounds = replace(bounds, upper=value, by_generator=False)
            if more > 0:
                more -= 1
                guesses.append(guess)
            continue
        if lower is None or reached > lower:
            bounds = replace(bounds, lower=min(float(value), reached))
        if reached < value:
            bounds = replace(bounds, upper=value, by_generator=True)
        elif guessed:
            # The edge is likely just above a good guess, so bound it from there.
            guesses.append(value * (1.0 + stride))
            stride *= 2.0


def throughput(spec: Spec) -> MethodRun:
    """The generator of an NDR or PDR search."""
    method = spec.method

    def attempt(value: int) -> Generator[Load, Trial, Answer]:
        trials: list[Trial] = []
        for _ in range(method.trials):
            trials.append((yield even_load(spec, value, method.seconds)))
            if not _passes(spec, trials[-1]):
                break
        passed = all(_passes(spec, trial) for trial in trials)
        reached = min((float(value), *(_reached(trial) for trial in trials)))
        return passed, reached, min(trial.pps for trial in trials)

    bounds = yield from search(method.low, method.high, method.precision, attempt)
    limits = {
        "low": bounds.lower is None,
        "high": bounds.upper is None,
        "generator": bounds.by_generator,
        "router": True,
    }
    summary: dict[str, Any] = {
        "kind": method.kind,
        "lower": bounds.lower,
        "upper": bounds.upper,
        "limited_by": next(name for name, true in limits.items() if true),
    }
    if method.latency and bounds.lower is not None:
        for share in LATENCY_SHARES:
            yield even_load(spec, bounds.lower * share, method.seconds, latency=True)
    return summary


def _passes(spec: Spec, trial: Trial) -> bool:
    return trial.sent > 0 and trial.loss <= spec.method.loss


def _reached(trial: Trial) -> float:
    """The rate really offered; within the generator's tolerance, the rate asked for."""
    return trial.sent_pps if trial.fell_short else trial.load.total
