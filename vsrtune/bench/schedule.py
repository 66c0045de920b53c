"""The order in which configurations and loads are measured: interleaved and shuffled."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from vsrtune.bench.model import Load, Trial


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of everything: the order of configurations, and of the loads within
    each of them, by index."""

    configurations: tuple[int, ...]
    loads: tuple[int, ...]


def rounds(configurations: int, loads: int, count: int, seed: int) -> list[Round]:
    """``count`` rounds. Equal arguments give equal rounds.

    Of as many successive rounds as there are configurations, each configuration is at
    each place of the order once: what a place does (after a switch, at the machine's
    warm time) is then shared by all, which drawing every order alone would leave to luck.
    The loads come in the same order within a round, so that the trials that make a pair
    are equally far apart.
    """
    source = random.Random(seed)
    orders: list[tuple[int, ...]] = []
    while len(orders) < count:
        first = source.sample(range(configurations), configurations)
        turns = source.sample(range(configurations), configurations)
        orders += [tuple(first[turn:] + first[:turn]) for turn in turns]
    return [Round(order, tuple(source.sample(range(loads), loads))) for order in orders[:count]]


def each_in_turn(
    loads: Sequence[Load], repeats: int, seed: int
) -> Generator[Load, Trial, list[list[Trial]]]:
    """Every load once per round, each round in an order of its own, so that what the
    machine does meanwhile does not look like an effect of the load. Returns the trials
    by load."""
    source = random.Random(seed)
    made: list[list[Trial]] = [[] for _ in loads]
    for _ in range(repeats):
        for index in source.sample(range(len(loads)), len(loads)):
            made[index].append((yield loads[index]))
    return made
