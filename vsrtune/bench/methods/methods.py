# SPDX-License-Identifier: GPL-2.0-or-later
"""The test methods, each a generator that yields loads and receives the trial of each.

Every method returns its summary as plain JSON data; ``summary["kind"]`` names it. A spread is
{"median", "low", "high", "count"}, its low and high the least and the greatest; rates are frames
per second over all routers.

sweep: peak {offered, pps} (medians); at_highest (pps at the highest load as a share of the
peak, 1.0 for a router that overload does not hurt; None for one load, or several sizes);
drift_per_hour (of traffic; share of the median, of a line through all trials) and r_squared of
that line, for a single load that was tried often.
fairness: unit ("router" or "flow"), points: one for each rate, with rate, shares (by unit: name,
sent_pps, pps, share: the forwarded part of the frames sent to it; medians) and jain (spread over
the trials of the index of the shares: 1 when all units lose the same part, 1/n when only one gets
through).
ndr, pdr (RFC 2544): lower (the highest rate that passed; None when even the lowest failed), upper
(the lowest that failed, None when the highest passed), limited_by ("router"; "generator": it
cannot send more; "high", "low": the ends of the search). With ``latency``, one more trial is made
at each of 10, 50 and 90 % of lower. The search assumes that every rate above a failing one fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from math import floor
from statistics import median
from typing import Any, TypeVar

from vsrtune.bench.spec.checks import fair_loads
from vsrtune.bench.spec.model import Load, Spec, Trial
from vsrtune.core.stats import jain, linear_fit, spread

# A method: yields loads, receives the trial of each, returns its summary.
MethodRun = Generator[Load, Trial, dict[str, Any]]
# What a method yields: Load, or (configuration index, Load) in a comparison.
Order = TypeVar("Order")


def run(
    method: Generator[Order, Trial, dict[str, Any]], do_trial: Callable[[Order], Trial]
) -> tuple[dict[str, Any], list[Trial]]:
    """Run ``method`` to its end. Return its summary, and every trial in order. An exception of
    ``do_trial`` passes through after the method has been closed."""
    trials: list[Trial] = []
    try:
        order = next(method)
        while True:
            trials.append(do_trial(order))
            order = method.send(trials[-1])
    except StopIteration as end:
        return end.value, trials
    finally:
        method.close()


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of everything: the order of configurations, and of the loads in each
    configuration, by index."""

    configurations: tuple[int, ...]
    loads: tuple[int, ...]


def trial_rounds(groups: Sequence[int], loads: int, count: int, seed: int) -> list[Round]:
    """``count`` rounds of as many configurations as ``groups`` has entries. Equal arguments
    give equal rounds.

    Configurations of equal entries follow one another in every round, in a random order,
    because the difference between groups is slow to change (members of a router are plugged
    and unplugged). In as many successive rounds as there are groups, each group stands at
    each place of the order once. All groups then share the effect of a place (after a
    switch, on a warm machine), which independent orders would leave to luck. The loads come
    in the same order within a round, so that the trials of a pair are equally far apart.
    """
    source = random.Random(seed)
    together = [[i for i, g in enumerate(groups) if g == group] for group in dict.fromkeys(groups)]
    orders: list[list[int]] = []
    while len(orders) < count:
        first = source.sample(range(len(together)), len(together))
        turns = source.sample(range(len(together)), len(together))
        orders += [first[turn:] + first[:turn] for turn in turns]
    found = []
    for order in orders[:count]:
        groups_of = [together[group] for group in order]
        mixed = [i for g in groups_of for i in (source.sample(g, len(g)) if len(g) > 1 else g)]
        found.append(Round(tuple(mixed), tuple(source.sample(range(loads), loads))))
    return found


def each_in_turn(
    loads: Sequence[Load], repeats: int, seed: int
) -> Generator[Load, Trial, list[list[Trial]]]:
    """Every load once per round, each round in a random order, so that changes of the machine
    do not look like effects of the load. Returns the trials by load."""
    made: list[list[Trial]] = [[] for _ in loads]
    for turn in trial_rounds([0], len(loads), repeats, seed):
        for index in turn.loads:
            made[index].append((yield loads[index]))
    return made


def even_load(spec: Spec, rate: float, seconds: float, **more: Any) -> Load:
    """``rate`` frames per second shared evenly by the routers."""
    share = rate / len(spec.routers)
    return Load({router.name: share for router in spec.routers}, seconds, **more)


LATENCY_SHARES = (0.1, 0.5, 0.9)
# How often the next value is a guess: what got through of one that failed, or what is as far above
# one that passed as the bounds may be apart.
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
    low, value, guesses = max(1, low), high, GUESSES
    bounds = Bounds(None, None)
    while True:
        passed, reached, guess = yield from attempt(value)
        if passed and (bounds.lower is None or reached > bounds.lower):
            bounds = replace(bounds, lower=min(float(value), reached))
        if not passed or reached < value:
            bounds = replace(bounds, upper=value, by_generator=passed)
        lower, upper = bounds.lower, bounds.upper
        least = low if lower is None else floor(lower) + 1
        # A slow generator may not even have reached ``low``.
        if upper is None or least < low or upper <= max(least, (lower or 0) * (1.0 + precision)):
            return bounds
        guess = value * (1.0 + precision) if passed else min(guess, value / (1.0 + precision))
        if guesses > 0 and least <= int(guess) < upper:
            value, guesses = int(guess), guesses - 1
        else:
            value = low if lower is None else round((lower * upper) ** 0.5)


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
        # The rates really offered; within the generator's tolerance, the rate asked for.
        offered = (t.sent_pps if t.fell_short else t.load.total for t in trials)
        reached = min((float(value), *offered))
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


SEARCHES = ("ndr", "pdr")
# What a search may be limited by, in words.
LIMITS = {
    "router": "the router",
    "generator": "the generator, which cannot send more",
    "high": "the highest rate of the search, which passed",
    "low": "the lowest rate of the search, which failed",
}
# Trials of a single load that show whether the rate drifts.
OFTEN = 10


def start(spec: Spec, seed: int = 1) -> MethodRun:
    """The generator of ``spec.method``; ``seed`` shuffles the order of its loads."""
    match spec.method.kind:
        case "sweep":
            return _sweep(spec, seed)
        case "fairness":
            return _fairness(spec, seed)
    return throughput(spec)


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


def trials(spec: Spec, times: int) -> int | None:
    """How many trials of each load ``times`` are in all; None for a search."""
    return len(loads(spec)) * times or None


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
