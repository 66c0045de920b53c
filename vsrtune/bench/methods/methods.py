"""The test methods, each a generator that yields loads and receives the trial of each.

Every method returns its summary as plain JSON data; ``summary["kind"]`` names it. Points
and spreads are those of aggregate.py, rates are frames per second over all routers.

sweep: points; peak {offered, pps}; at_highest (pps at the highest load as a share of the
peak, 1.0 for a router that overload does not hurt).
soak: rate; trials; pps, loss (spreads); sent, forwarded; lossy_trials; worst {trial, pps,
loss}; drift_per_hour (share of the median, of a line through all trials) and r_squared of
that line, None for a single trial.
ndr, pdr, back-to-back: see rate_search.py; fairness: see fairness.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vsrtune.bench.methods import fairness, rate_search
from vsrtune.bench.methods.aggregate import MethodRun, even_load, point, spread_of
from vsrtune.bench.methods.schedule import each_in_turn
from vsrtune.bench.spec.model import Load, Spec, Trial
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.stats import linear_fit

SEARCHES = ("ndr", "pdr", "back-to-back")


def start(spec: Spec, seed: int = 1) -> MethodRun:
    """The generator of ``spec.method``; ``seed`` shuffles the order of its loads.

    Raises VsrtuneError for a kind that does not exist.
    """
    match spec.method.kind:
        case "sweep":
            return _sweep(spec, seed)
        case "soak":
            return _soak(spec)
        case "fairness":
            return fairness.fairness(spec, seed)
        case "ndr" | "pdr":
            return rate_search.throughput(spec)
        case "back-to-back":
            return rate_search.back_to_back(spec)
        case kind:
            raise VsrtuneError(f"no method is called {kind!r}", where=spec.path or spec.name)


def loads(spec: Spec) -> list[Load]:
    """The different loads of a method that knows them beforehand; none for a search."""
    method = spec.method
    if method.kind in SEARCHES:
        return []
    if method.kind == "fairness":
        return fairness.loads(spec)
    return [
        even_load(spec, rate, method.seconds, latency=method.latency, size=size)
        for size in method.sizes or (None,)
        for rate in method.rates
    ]


def trials(spec: Spec) -> int | None:
    """How many trials ``start(spec)`` will ask for; None for a search."""
    if spec.method.kind in SEARCHES:
        return None
    return (
        _soak_trials(spec) if spec.method.kind == "soak" else len(loads(spec)) * spec.method.repeats
    )


def _sweep(spec: Spec, seed: int) -> MethodRun:
    made = yield from each_in_turn(loads(spec), spec.method.repeats, seed)
    # The sort keeps the order of sizes at a rate.
    return sweep_summary(sorted(made, key=lambda trials: trials[0].load.total))


def sweep_summary(by_load: Sequence[Sequence[Trial]]) -> dict[str, Any]:
    """The summary of trials by load, in rising order of load. ``at_highest`` is None for
    frames of several sizes."""
    points = [point(trials) for trials in by_load]
    several = len({trials[0].load.size for trials in by_load}) > 1
    best = max(points, key=lambda p: float(p["pps"]["median"]))
    peak = float(best["pps"]["median"])
    last = float(points[-1]["pps"]["median"])
    return {
        "kind": "sweep",
        "points": points,
        "peak": {"offered": best["offered"], "pps": peak},
        "at_highest": last / peak if peak > 0 and not several else None,
    }


def _soak_trials(spec: Spec) -> int:
    return max(1, math.ceil(spec.method.duration / spec.method.seconds - 1e-9))


def _soak(spec: Spec) -> MethodRun:
    [load] = loads(spec)
    made: list[Trial] = []
    for _ in range(_soak_trials(spec)):
        made.append((yield load))  # noqa: PERF401 (a generator asks)
    rates = [t.pps for t in made]
    worst = min(range(len(made)), key=lambda i: rates[i])
    pps = spread_of(rates)
    summary: dict[str, Any] = {
        "kind": "soak",
        "rate": load.total,
        "trials": len(made),
        "pps": pps,
        "loss": spread_of(t.loss for t in made),
        "sent": sum(t.sent for t in made),
        "forwarded": sum(t.forwarded for t in made),
        "lossy_trials": sum(t.forwarded < t.sent for t in made),
        "worst": {"trial": worst, "pps": rates[worst], "loss": made[worst].loss},
        "drift_per_hour": None,
        "r_squared": None,
    }
    if len(made) > 1 and pps["median"] > 0:
        # Warm-up and drain take time too, the same for each trial.
        line = linear_fit([i * load.seconds for i in range(len(made))], rates)
        summary["drift_per_hour"] = line.slope * 3600.0 / pps["median"]
        summary["r_squared"] = line.r_squared
    return summary
