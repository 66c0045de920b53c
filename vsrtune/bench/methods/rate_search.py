# SPDX-License-Identifier: GPL-2.0-or-later
"""Throughput (RFC 2544, as NDR and PDR).

ndr, pdr summary: loss (the threshold, a share), seconds (of a full trial), trials (per
rate, the worst decides), precision; lower (the highest rate that passed; None when even
the lowest failed), upper (the lowest that failed, None when the highest passed),
limited_by ("router"; "generator": it cannot send more; "high", "low": the ends of the
search), pps and worst_loss (of the trials at lower), steps (each rate tried: rate, seconds,
trials, short, passed, loss, pps; loss and pps of the worst trial), latency (with ``latency``:
share of lower, rate, sent, lost, p50, p90, p99 in seconds; one for each of 10, 50 and 90 %).

The search keeps two bounds: ``lower`` has passed, ``upper`` has failed. The first guess is the
highest value, because the frames forwarded under overload give a good second guess. Then the
bounds move apart in growing steps until one has passed and one has failed, and are halved on
a logarithmic scale, because the precision is a share. As in MLRsearch there are two passes: a
coarse one of short trials finds the region, and a fine one of full trials takes only its first
guesses from it, so that the answer rests on full trials alone.

The search assumes that every value greater than a failing one fails. A router that passes
again above (its load may make it poll) is described by the lowest such edge found.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from math import floor
from typing import Any

from vsrtune.bench.methods.schedule import MethodRun, even_load
from vsrtune.bench.spec.model import Latency, Load, Spec, Trial

SHORTEST = 0.5
LATENCY_SHARES = (0.1, 0.5, 0.9)
# Width by which an open side is widened; a fine pass after a coarse one uses the precision.
COARSE_WIDTH = 1.0
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
# Tries a value with as many trials as that takes, or with a shorter and single one.
Attempt = Callable[[int, bool], Generator[Load, Trial, Answer]]


def search(
    low: int, high: int, precision: float, attempt: Attempt, *, coarse: bool = True
) -> Generator[Load, Trial, Bounds]:
    """Search the highest value from ``low`` to ``high`` that passes, until the bounds are
    ``precision`` (a share) apart or neighbours. ``coarse`` makes the coarse pass first. No value
    outside the bounds is ever tried."""
    guesses, width = [float(high)], COARSE_WIDTH
    for short in (True, False) if coarse else (False,):
        goal = min(0.5, 2 * precision) if short else precision
        bounds = yield from _pass(max(1, low), high, goal, guesses, width, attempt, short)
        guesses = [bound for bound in (bounds.lower, bounds.upper) if bound is not None]
        width = precision
    return bounds


def _pass(
    low: int,
    high: int,
    precision: float,
    guesses: list[float],
    width: float,
    attempt: Attempt,
    short: bool,
) -> Generator[Load, Trial, Bounds]:
    """One pass, of which nothing is known but ``guesses``; ``width`` widens an open side."""
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
        passed, reached, guess = yield from attempt(value, short)
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


def _short(spec: Spec) -> float:
    """Seconds of a trial of the coarse pass."""
    return min(spec.method.seconds, max(SHORTEST, spec.method.seconds / 4))


def throughput(spec: Spec) -> MethodRun:
    """The generator of an NDR or PDR search."""
    method = spec.method
    steps: list[dict[str, Any]] = []
    at: dict[int, list[Trial]] = {}

    def attempt(value: int, short: bool) -> Generator[Load, Trial, Answer]:
        seconds = _short(spec) if short else method.seconds
        trials: list[Trial] = []
        for _ in range(1 if short else method.trials):
            trials.append((yield even_load(spec, value, seconds)))
            if not _passes(spec, trials[-1]):
                break
        if not short:
            at[value] = trials
        passed = all(_passes(spec, trial) for trial in trials)
        worst = max(trials, key=lambda trial: trial.loss)
        steps.append(
            {
                "rate": value,
                "seconds": seconds,
                "trials": len(trials),
                "short": short,
                "passed": passed,
                "loss": worst.loss,
                "pps": worst.pps,
            }
        )
        reached = min((float(value), *(_reached(trial) for trial in trials)))
        return passed, reached, min(trial.pps for trial in trials)

    coarse = _short(spec) < method.seconds or method.trials > 1
    bounds = yield from search(method.low, method.high, method.precision, attempt, coarse=coarse)
    # A bound that the generator sets is the rate that it reached, not the rate asked for.
    best = [t for trials in at.values() if all(_passes(spec, t) for t in trials) for t in trials]
    best = [t for t in best if bounds.lower is not None and _reached(t) >= bounds.lower]
    limits = {
        "low": bounds.lower is None,
        "high": bounds.upper is None,
        "generator": bounds.by_generator,
        "router": True,
    }
    summary: dict[str, Any] = {
        "kind": method.kind,
        "loss": method.loss,
        "seconds": method.seconds,
        "trials": method.trials,
        "precision": method.precision,
        "lower": bounds.lower,
        "upper": bounds.upper,
        "limited_by": next(name for name, true in limits.items() if true),
        "pps": min((t.pps for t in best), default=0.0),
        "worst_loss": max((t.loss for t in best), default=None),
        "steps": steps,
        "latency": [],
    }
    if method.latency and bounds.lower is not None:
        for share in LATENCY_SHARES:
            load = even_load(spec, bounds.lower * share, method.seconds, latency=True)
            summary["latency"].append(_latency(share, (yield load)))
    return summary


def _passes(spec: Spec, trial: Trial) -> bool:
    return trial.sent > 0 and trial.loss <= spec.method.loss


def _reached(trial: Trial) -> float:
    """The rate really offered; within the generator's tolerance, the rate asked for."""
    return trial.sent_pps if trial.fell_short else trial.load.total


def _latency(share: float, trial: Trial) -> dict[str, Any]:
    latency = trial.latency or Latency(0, 0, None, None, None)
    return {"share": share, "rate": trial.load.total, **asdict(latency)}
