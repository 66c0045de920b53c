# SPDX-License-Identifier: GPL-2.0-or-later
"""Measures configurations in turn, and judges their paired ratios.

A pair is the results of two configurations in the same round. For a sweep or fairness
test, the pps of each load point are compared, ``pairs`` times instead of the method's repeats;
for a search (ndr, pdr), its answers, one search per pair.

Summary: kind "compare", method, pairs, seed, baseline (a name), level (0.95); points:
one for each load with offered (None for a search), size (of frames, where it is the load's own)
and configurations: one for each, in their order, with

    name, values (by round) and their spread, loss and sent_pps (medians, None for a search),
    generator_limited (False for a search), limited_by (by round, of a search alone),
    ratio (None for the baseline): median, low, high (of the interval, None when there is none),
    pairs, p (signed-rank test), verdict ("higher", "lower", "none", "too few pairs"), text (a
    sentence);

notes: sentences.

Each interval holds its own true ratio with 95 %. With several load points, one may differ by
chance. A point's verdict therefore also needs Holm's procedure over the points of its
configuration: a comparison without any true difference is then free of claims in 95 % of runs,
however many loads it has.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import median, mode
from typing import Any

from vsrtune.bench.methods import methods
from vsrtune.bench.methods.methods import SEARCHES, MethodRun, trial_rounds
from vsrtune.bench.spec.model import Configuration, Load, Spec, Trial
from vsrtune.core import stats
from vsrtune.core.errors import VsrtuneError

CompareRun = Generator[tuple[int, Load], Trial, dict[str, Any]]


def compare(
    spec: Spec, configurations: Sequence[Configuration], pairs: int = 9, seed: int = 1
) -> CompareRun:
    """Yield (index into ``configurations``, load), receive the trial, and return the
    summary. The first configuration is the baseline. In one round every configuration
    meets every load point; a configuration is applied when the index changes.

    Raises VsrtuneError at once for names that are not unique.
    """
    names = [one.name for one in configurations]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise VsrtuneError(
            f"several configurations are called {twice[0]!r}",
            hint="give each specification a name of its own",
        )
    # Configurations with the same numbers of members are measured in a row.
    scales = [one.scale for one in configurations]
    groups = [scales.index(s) if s else index for index, s in enumerate(scales)]
    make = _searches if spec.method.kind in SEARCHES else _loads
    return make(spec, names, groups, pairs, seed)


def _loads(
    spec: Spec, names: Sequence[str], groups: Sequence[int], pairs: int, seed: int
) -> CompareRun:
    """Try every load in every configuration in each round."""
    loads = sorted(methods.loads(spec), key=lambda load: load.total)
    made: list[list[list[Trial]]] = [[[] for _ in names] for _ in loads]
    for turn in trial_rounds(groups, len(loads), pairs, seed):
        for index in turn.configurations:
            for at in turn.loads:
                made[at][index].append((yield index, loads[at]))
    points: list[dict[str, Any]] = []
    for load, by_name in zip(loads, made, strict=True):
        size = {} if load.size is None else {"size": load.size}
        each = zip(names, by_name, strict=True)
        found = [_measured(name, [t.pps for t in trials], trials) for name, trials in each]
        points.append({"offered": load.total, **size, "configurations": found})
    summary = _summary(spec, names, points, seed)
    summary["notes"] += _short_notes(points)
    return summary


def _searches(
    spec: Spec, names: Sequence[str], groups: Sequence[int], pairs: int, seed: int
) -> CompareRun:
    """Make one whole search in each configuration in each round."""
    found: list[list[dict[str, Any]]] = [[] for _ in names]
    for turn in trial_rounds(groups, 1, pairs, seed):
        for index in turn.configurations:
            found[index].append((yield from tagged(index, methods.start(spec, seed))))
    answers = [
        _measured(name, [float(one["lower"] or 0.0) for one in each])
        | {"limited_by": [one["limited_by"] for one in each]}
        for name, each in zip(names, found, strict=True)
    ]
    summary = _summary(spec, names, [{"offered": None, "configurations": answers}], seed)
    summary["notes"] += _limit_notes(answers)
    return summary


def _measured(name: str, values: list[float], trials: Sequence[Trial] = ()) -> dict[str, Any]:
    """What was measured in one configuration, ``values`` by round. A search has no trials that
    count."""
    return {
        "name": name,
        "values": values,
        **stats.spread(values),
        "loss": median(t.loss for t in trials) if trials else None,
        "sent_pps": median(t.sent_pps for t in trials) if trials else None,
        "generator_limited": sum(t.fell_short for t in trials) * 2 > len(trials),
        "ratio": None,
    }


def tagged(index: int, method: MethodRun) -> CompareRun:
    """Yield a method's loads with the configuration that they belong to."""
    try:
        load = next(method)
        while True:
            load = method.send((yield index, load))
    except StopIteration as end:
        answer: dict[str, Any] = end.value
        return answer


def _summary(
    spec: Spec, names: Sequence[str], points: list[dict[str, Any]], seed: int
) -> dict[str, Any]:
    """The summary of ``points``, whose ratios are still to be judged."""
    measured = [[one["values"] for one in point["configurations"]] for point in points]
    pairs = len(measured[0][0])
    # Every later configuration is a comparison of its own with the baseline.
    for index, name in enumerate(names[1:], 1):
        ratios = [stats.paired_ratio(values[index], values[0]) for values in measured]
        claimed = stats.holm([ratio.p for ratio in ratios])
        for point, ratio, claim in zip(points, ratios, claimed, strict=True):
            told = verdict(ratio, claim, name, names[0], "pps")
            point["configurations"][index]["ratio"] = told
    return {
        "kind": "compare",
        "method": spec.method.kind,
        "pairs": pairs,
        "seed": seed,
        "baseline": names[0],
        "level": stats.LEVEL,
        "points": points,
        "notes": _notes(pairs, len(points)),
    }


def verdict(ratio: stats.Ratio, claimed: bool, name: str, base: str, what: str) -> dict[str, Any]:
    """A ratio as data, with its verdict. ``claimed`` is False when the other load points
    make a chance result of this size likely."""
    # A tiny difference can be certain: then two decimals would contradict the verdict.
    fine = ratio.shown and "1.00" in (f"{ratio.low:.2f}", f"{ratio.high:.2f}")
    middle, low, high = (f"{v:.{4 if fine else 2}f}" for v in (ratio.median, ratio.low, ratio.high))
    values = f"{middle}, 95 % {low}..{high}, {ratio.pairs} pairs"
    if not ratio.bounded:
        word = "too few pairs"
        text = f"{name}: {ratio.median:.2f} of {base}, {ratio.pairs} pairs are too few to tell"
    elif not ratio.shown:
        word, text = "none", f"{name}: no difference shown from {base} ({values})"
    elif not claimed:
        word = "none"
        text = (
            f"{name}: no difference shown from {base} ({values}; of so many load points "
            "one is likely to be so by chance)"
        )
    else:
        word = "higher" if ratio.low > 1.0 else "lower"
        text = f"{name}: {word} {what} than {base} (ratio {values})"
    unknown = {} if ratio.bounded else {"low": None, "high": None}
    return {**asdict(ratio), **unknown, "verdict": word, "text": text}


def _notes(pairs: int, points: int) -> list[str]:
    """Notes on what the number of pairs cannot show."""
    alone, together = stats.pairs_needed(1), stats.pairs_needed(points)
    if pairs < alone:
        return [f"{pairs} pairs give no 95 % interval; {alone} are the fewest that do"]
    if pairs < together:
        text = f"{pairs} pairs cannot show a difference at one of {points} load points"
        return [f"{text}; {together} are the fewest that can"]
    return []


def _short_notes(points: Iterable[dict[str, Any]]) -> list[str]:
    """Notes on loads that the generator did not reach: the ratio is that of a smaller load."""
    return [
        f"at {found['offered']:,.0f} pps offered the generator sent {one['sent_pps']:,.0f} in "
        f"most trials of {one['name']}"
        for found in points
        for one in found["configurations"]
        if one["generator_limited"]
    ]


def _limit_notes(answers: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Notes on searches that did not end at the router: the ratio is not that of the routers."""
    for one in answers:
        others = [limit for limit in one["limited_by"] if limit != "router"]
        if len(others) * 2 > len(one["limited_by"]):
            end = methods.LIMITS[mode(others)]
            rate = "below that" if mode(others) == "low" else "at least that"
            yield f"most searches of {one['name']} ended at {end}: its rate is {rate}"
