# SPDX-License-Identifier: GPL-2.0-or-later
"""Throughput (RFC 2544, as NDR and PDR) and back-to-back bursts (RFC 9004).

ndr, pdr summary: loss (the threshold, a share), seconds (of a full trial), trials (per
rate, the worst decides), precision; lower (the highest rate that passed; None when even
the lowest failed), upper (the lowest that failed, None when the highest passed),
limited_by ("router"; "generator": it cannot send more; "high", "low": the ends of the
search), pps and worst_loss (of the trials at lower), steps (each rate tried: rate, seconds,
trials, short, passed, loss, pps; loss and pps of the worst trial), latency (with ``latency``:
share of lower, rate, sent, lost, p50, p90, p99 in seconds; one for each of 10, 50 and 90 %).

back-to-back summary: rate, bursts (frames of each repetition's longest burst without loss,
0 for none), burst (their spread), mean, at_high (number of repetitions that reached the
search's highest), drain_pps (forwarded under the rate held for a trial), buffer_seconds
(mean / rate) and corrected_buffer_seconds (without the frames that left the router while the
burst came, RFC 9004 section 5.4, with drain_pps as the measured throughput).
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

from vsrtune.bench.methods.schedule import MethodRun, even_load, spread_of
from vsrtune.bench.methods.search import Ask, BoundsSearch
from vsrtune.bench.spec.model import Spec, Trial

SHORTEST = 0.5
LATENCY_SHARES = (0.1, 0.5, 0.9)


def _short(spec: Spec) -> float:
    """Seconds of a trial of the coarse pass."""
    return min(spec.method.seconds, max(SHORTEST, spec.method.seconds / 4))


def throughput(spec: Spec) -> MethodRun:
    """The generator of an NDR or PDR search."""
    method = spec.method
    steps: list[dict[str, Any]] = []
    at: dict[int, list[Trial]] = {}
    coarse = _short(spec) < method.seconds or method.trials > 1
    search = BoundsSearch(method.low, method.high, method.precision, coarse=coarse)
    while (ask := search.next()) is not None:
        seconds = _short(spec) if ask.short else method.seconds
        trials: list[Trial] = []
        for _ in range(1 if ask.short else method.trials):
            trials.append((yield even_load(spec, ask.value, seconds)))
            if not _passes(spec, trials[-1]):
                break
        if not ask.short:
            at[ask.value] = trials
        steps.append(_step(spec, ask, seconds, trials))
        passed = all(_passes(spec, trial) for trial in trials)
        reached = min((float(ask.value), *(_reached(trial) for trial in trials)))
        search.note(passed, reached, min(trial.pps for trial in trials))
    bounds = search.bounds
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


def _step(spec: Spec, ask: Ask, seconds: float, trials: list[Trial]) -> dict[str, Any]:
    worst = max(trials, key=lambda trial: trial.loss)
    return {
        "rate": ask.value,
        "seconds": seconds,
        "trials": len(trials),
        "short": ask.short,
        "passed": all(_passes(spec, trial) for trial in trials),
        "loss": worst.loss,
        "pps": worst.pps,
    }


def _latency(share: float, trial: Trial) -> dict[str, Any]:
    found = {"share": share, "rate": trial.load.total}
    if trial.latency is None:
        return found | {"sent": 0, "lost": 0, "p50": None, "p90": None, "p99": None}
    return found | asdict(trial.latency)


def back_to_back(spec: Spec) -> MethodRun:
    """Search the longest burst at the rate that passes without loss, ``repeats`` times."""
    method = spec.method
    rate = float(method.rates[0])
    drained: Trial = yield even_load(spec, rate, method.seconds)
    bursts: list[float] = []
    at_high = 0
    for _ in range(method.repeats):
        search = BoundsSearch(method.low, method.high, method.precision, coarse=False)
        while (ask := search.next()) is not None:
            trial = yield even_load(spec, rate, ask.value / rate, frames=ask.value)
            passed = trial.sent > 0 and trial.forwarded >= trial.sent
            reached = float(trial.sent if trial.fell_short else ask.value)
            search.note(passed, reached, float(trial.forwarded))
        bursts.append(search.bounds.lower or 0.0)
        at_high += search.bounds.upper is None
    mean = fmean(bursts)
    left = min(1.0, drained.pps / rate)
    return {
        "kind": "back-to-back",
        "rate": rate,
        "bursts": bursts,
        "burst": spread_of(bursts),
        "mean": mean,
        "at_high": at_high,
        "drain_pps": drained.pps,
        "buffer_seconds": mean / rate,
        "corrected_buffer_seconds": mean / rate * (1.0 - left),
    }
