# SPDX-License-Identifier: GPL-2.0-or-later
"""The test methods, each a generator that yields loads and receives the trial of each.

Every method returns its summary as plain JSON data; ``summary["kind"]`` names it. A spread is
{"median", "low", "high", "count"}, its low and high the least and the greatest; rates are frames
per second over all routers.

sweep: peak {offered, pps} (medians); at_highest (pps at the highest load as a share of the
peak, 1.0 for a router that overload does not hurt; None for one load, or several sizes);
drift_per_hour (share of the median, of a line through all trials) and r_squared of that line, for
a single load that was tried often.
fairness: unit ("router" or "flow"), points: one for each rate, with rate, shares (by unit: name,
sent_pps, pps, share: the forwarded part of the frames sent to it; medians) and jain (spread over
the trials of the index of the shares: 1 when all units lose the same part, 1/n when only one gets
through).
ndr, pdr: see rate_search.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from vsrtune.bench.methods import rate_search
from vsrtune.bench.methods.schedule import (
    MethodRun,
    each_in_turn,
    even_load,
)
from vsrtune.bench.spec.checks import fair_loads
from vsrtune.bench.spec.model import Load, Spec, Trial
from vsrtune.core.stats import jain, linear_fit, spread

SEARCHES = ("ndr", "pdr")
# Trials of a single load that show whether the rate drifts.
OFTEN = 10


def start(spec: Spec, seed: int = 1) -> MethodRun:
    """The generator of ``spec.method``; ``seed`` shuffles the order of its loads."""
    match spec.method.kind:
        case "sweep":
            return _sweep(spec, seed)
        case "fairness":
            return _fairness(spec, seed)
    return rate_search.throughput(spec)


def loads(spec: Spec) -> list[Load]:
    """The different loads of a method that knows them beforehand; none for a search."""
    method = spec.method
    if method.kind in SEARCHES:
        return []
    if method.kind == "fairness":
        return [
            Load(fair_loads(spec, rate), method.seconds, latency=method.latency)
            for rate in method.rates
        ]
    return [
        even_load(spec, rate, method.seconds, latency=method.latency, size=size)
        for size in method.sizes or (None,)
        for rate in method.rates
    ]


def trials(spec: Spec) -> int | None:
    """How many trials ``start(spec)`` will ask for; None for a search."""
    return len(loads(spec)) * spec.method.repeats or None


def _sweep(spec: Spec, seed: int) -> MethodRun:
    """Try every load; the median of its trials counts."""
    made = yield from each_in_turn(loads(spec), spec.method.repeats, seed)
    by_load = sorted(made, key=lambda trials: trials[0].load.total)
    rates = [median(t.pps for t in trials) for trials in by_load]
    peak = max(rates)
    alone = len(by_load) > 1 and len(spec.method.sizes) < 2
    summary = {
        "kind": "sweep",
        "peak": {"offered": by_load[rates.index(peak)][0].load.total, "pps": peak},
        "at_highest": rates[-1] / peak if peak > 0 and alone else None,
    }
    if len(made) == 1 and len(made[0]) >= OFTEN and peak > 0:
        # Warm-up and drain take time too, the same for each trial.
        times = [index * spec.method.seconds for index in range(len(made[0]))]
        line = linear_fit(times, [trial.pps for trial in made[0]])
        summary["drift_per_hour"] = line.slope * 3600.0 / peak
        summary["r_squared"] = line.r_squared
    return summary


def _fairness(spec: Spec, seed: int) -> MethodRun:
    """Try every rate, and share its frames out to the routers, or to the flows of a single one."""
    made = yield from each_in_turn(loads(spec), spec.method.repeats, seed)
    points = [
        {"rate": rate, **_fair_point(spec, trials)}
        for rate, trials in zip(spec.method.rates, made, strict=True)
    ]
    return {"kind": "fairness", "unit": _unit(spec), "points": points}


def _unit(spec: Spec) -> str:
    return "flow" if len(spec.routers) == 1 else "router"


def _fair_point(spec: Spec, trials: Sequence[Trial]) -> dict[str, Any]:
    """The point of the trials of one load, without its rate."""
    units = [_units(spec, trial) for trial in trials]
    shares: list[dict[str, Any]] = []
    for name in units[0]:
        pairs = [found[name] for found in units]
        seconds = [max(trial.seconds, 1e-9) for trial in trials]
        shares.append(
            {
                "name": name,
                "sent_pps": median(s / t for (s, _), t in zip(pairs, seconds, strict=True)),
                "pps": median(f / t for (_, f), t in zip(pairs, seconds, strict=True)),
                "share": median(_share(pair) for pair in pairs),
            }
        )
    return {
        "shares": shares,
        "jain": spread([jain([_share(pair) for pair in one.values()]) for one in units]),
    }


def _units(spec: Spec, trial: Trial) -> dict[str, tuple[float, float]]:
    """Frames (sent, forwarded) by unit."""
    if _unit(spec) == "router":
        return {
            name: (float(trial.sent_by.get(name, 0)), float(trial.forwarded_by.get(name, 0)))
            for name in trial.load.pps
        }
    router = spec.routers[0].name
    flows = spec.traffic.flows * (2 if spec.traffic.bidirectional else 1)
    # The generator takes flows in turn, so each is sent the same.
    each = trial.sent_by.get(router, trial.sent) / flows
    names = [f"{router}/{number}" for number in range(flows)]
    return {name: (each, float(trial.forwarded_by_flow.get(name, 0))) for name in names}


def _share(pair: tuple[float, float]) -> float:
    sent, forwarded = pair
    return forwarded / sent if sent > 0 else 0.0
