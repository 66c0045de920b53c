"""The share of an offered load that each router, or each flow of a single router, gets.

Summary: kind, unit ("router" or "flow"), points: one for each rate, with rate, offered
(pps in all), pps and loss (spreads), generator_limited, shares (by unit: name, sent_pps, pps,
share: the forwarded part of the frames sent to it; medians), jain (spread over the trials of
the index of the shares: 1 when all units lose the same part, 1/n when only one gets through)
and least_to_most (the median share of the worst unit over that of the best; None when nothing
got through).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from vsrtune.bench.methods.aggregate import MethodRun, point, spread_of
from vsrtune.bench.methods.schedule import each_in_turn
from vsrtune.bench.spec.checks import fair_loads
from vsrtune.bench.spec.model import Load, Spec, Trial
from vsrtune.core.stats import jain


def loads(spec: Spec) -> list[Load]:
    """One load for each rate."""
    method = spec.method
    return [
        Load(fair_loads(spec, rate), method.seconds, latency=method.latency)
        for rate in method.rates
    ]


def fairness(spec: Spec, seed: int) -> MethodRun:
    """The generator of a fairness test."""
    made = yield from each_in_turn(loads(spec), spec.method.repeats, seed)
    points = [fair_point(spec, trials) for trials in made]
    for rate, found in zip(spec.method.rates, points, strict=True):
        found["rate"] = rate
    return {"kind": "fairness", "unit": _unit(spec), "points": points}


def _unit(spec: Spec) -> str:
    return "flow" if len(spec.routers) == 1 else "router"


def fair_point(spec: Spec, trials: Sequence[Trial]) -> dict[str, Any]:
    """The point of the trials of one load, as in the summary."""
    units = [_units(spec, trial) for trial in trials]
    names = list(dict.fromkeys(name for found in units for name in found))
    shares: list[dict[str, Any]] = []
    for name in names:
        pairs = [found.get(name, (0.0, 0.0)) for found in units]
        seconds = [max(trial.seconds, 1e-9) for trial in trials]
        shares.append(
            {
                "name": name,
                "sent_pps": median(s / t for (s, _), t in zip(pairs, seconds, strict=True)),
                "pps": median(f / t for (_, f), t in zip(pairs, seconds, strict=True)),
                "share": median(_share(pair) for pair in pairs),
            }
        )
    found = point(trials)
    parts = [share["share"] for share in shares]
    return {
        "offered": found["offered"],
        "pps": found["pps"],
        "loss": found["loss"],
        "generator_limited": found["generator_limited"],
        "shares": shares,
        "jain": spread_of(jain([_share(pair) for pair in one.values()] or [0.0]) for one in units),
        "least_to_most": min(parts) / max(parts) if parts and max(parts) > 0 else None,
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
