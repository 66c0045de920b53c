# SPDX-License-Identifier: GPL-2.0-or-later
"""The order in which configurations and loads are measured: interleaved and shuffled.

A method is a generator that asks for trials; ``run`` drives it. Below it is what methods share.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vsrtune.bench.spec.model import Load, Spec, Trial

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
        mixed = [i for group in order for i in _mixed(together[group], source)]
        found.append(Round(tuple(mixed), tuple(source.sample(range(loads), loads))))
    return found


def _mixed(group: Sequence[int], source: random.Random) -> Sequence[int]:
    return source.sample(group, len(group)) if len(group) > 1 else group


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


def generator_limited(trials: Sequence[Trial]) -> bool:
    """Whether the generator, not the router, was the limit in most of the trials."""
    return sum(t.fell_short for t in trials) * 2 > len(trials)
