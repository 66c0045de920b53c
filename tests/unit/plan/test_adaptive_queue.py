"""adaptive_queue.py: the rule against a model of a router whose rate depends on its queue."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vsrtune.model.load import Crew, QueueSample, Window, window_between
from vsrtune.plan.adaptive_queue import (
    CHANGES,
    ENTER,
    MEMORY,
    MOST,
    PAUSE,
    REFILL,
    SPACING,
    TRIAL,
    QueuePhase,
    QueueRuleState,
    begin,
    judge,
    step,
)
from vsrtune.policy.model import QueueBounds

BOUNDS = QueueBounds(16, 500)
TICK = 0.5
PEAK = 20000.0

# What a queue of this length forwards in overload, as a share of the peak.
Curve = Callable[[int], float]
# Measured here, 6.12: docs/results/paper.md, Fig. 15.
MEASURED = ((5, 0.46), (35, 0.82), (50, 0.89), (110, 0.95), (500, 1.0))


def long_wins(length: int) -> float:
    """Between the measured lengths, straight over the logarithm."""
    for (short, low), (long, high) in itertools.pairwise(MEASURED):
        if length <= long:
            return low + (high - low) * log(length / short) / log(long / short)
    return 1.0


def short_wins(length: int) -> float:
    """As in the paper: 500 collapses, 35 to 50 hold, very short ones starve."""
    steps = ((30, 0.6), (80, 1.0), (150, 0.9), (300, 0.7))
    return next((rate for most, rate in steps if length <= most), 0.5)


CURVES: dict[str, Curve] = {
    "long wins": long_wins,
    "short wins": short_wins,
    "flat": lambda _: 1.0,
    "cliff": lambda length: 1.0 if length > 100 else 0.5,
}


@dataclass
class Router:
    """Forwards what is offered up to its rate, which is that of its curve; arrivals vary
    by ``noise``, and in bursts more comes than a short queue holds, at any load. With
    ``pauses`` so long that a full queue is worked off in them, it idles for what is short."""

    curve: Curve
    noise: float = 0.0
    bursts: bool = False
    pauses: bool = False
    seed: int = 1
    fixed: int | None = None
    now: float = 0.0
    state: QueueRuleState = field(default_factory=lambda: begin(BOUNDS))
    lengths: list[tuple[float, int]] = field(default_factory=list)
    forwarded: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self, seconds: float, load: float) -> None:
        """Load is a multiple of the peak."""
        for _ in range(round(seconds / TICK)):
            self.tick(load)

    def tick(self, load: float) -> None:
        length = self.fixed or self.state.length
        rate = PEAK * self.curve(length) * self.random.lognormvariate(0, self.noise)
        offered = PEAK * load * TICK
        passed = min(offered, rate * TICK)
        if self.bursts:
            passed = min(passed, offered * min(1.0, 0.7 + length / 1000))
        if self.pauses:
            passed = min(passed, rate * TICK * (0.5 + 0.46 * length / 500))
        self.forwarded += passed
        busy = min(1.0, passed / (rate * TICK))
        window = Window(
            self.now, self.now + TICK, round(offered), round(offered - passed), round(passed), busy
        )
        self.now += TICK
        if self.fixed is not None:
            return
        before = self.state
        self.state = step(before, BOUNDS, window)
        assert BOUNDS.low <= self.state.length <= BOUNDS.high
        if self.state.length != before.length:
            if self.lengths:
                back = (
                    self.state.length > before.length and self.state.phase is not QueuePhase.TRIAL
                )
                spacing = SPACING / 2 if back else SPACING
                assert self.now - self.lengths[-1][0] >= spacing - 0.01
            self.lengths.append((self.now, self.state.length))


def test_no_overload_no_change() -> None:
    router = Router(CURVES["short wins"])
    router.run(600, 0.4)
    assert router.lengths == []
    assert (router.state.length, router.state.changes) == (500, 0)


@pytest.mark.parametrize("bursts", [False, True])
def test_bursts_below_saturation_keep_it_long(bursts: bool) -> None:
    """Drops alone are no overload: a burst that does not fit needs room, not less of it."""
    router = Router(CURVES["flat"], bursts=bursts)
    router.run(600, 0.8)
    assert (router.lengths, router.state.phase) == ([], QueuePhase.LONG)


def test_overload_where_long_wins_costs_next_to_nothing() -> None:
    router = Router(CURVES["long wins"], noise=0.03)
    router.run(600, 2.0)
    fixed = 600 * PEAK * CURVES["long wins"](500)
    assert router.forwarded >= 0.99 * fixed
    assert router.state.length == 500 or router.state.phase is QueuePhase.TRIAL
    assert "forwards 0." in router.state.why or "no shorter" in router.state.why


def test_overload_where_short_wins_finds_it() -> None:
    router = Router(CURVES["short wins"], noise=0.03)
    router.run(120, 2.0)
    assert 31 <= router.state.held <= 62
    router.forwarded = 0.0
    router.run(600, 2.0)
    assert router.forwarded >= 0.97 * 600 * PEAK


def test_pauses_that_a_shorter_queue_idles_in_cost_one_window() -> None:
    """However little one pair of turns says when rates vary that much."""
    fell = []
    for seed in range(20):
        router = Router(CURVES["flat"], 0.15, pauses=True, seed=seed)
        router.run(8, 2.0)
        steps = [at for at, _ in router.lengths]
        assert [length for _, length in router.lengths] == [250, 500]
        fell.append(steps[1] - steps[0])
    assert sum(1 for seconds in fell if seconds == TICK) >= 16, fell


def test_as_much_with_less_waiting_is_taken() -> None:
    router = Router(CURVES["flat"])
    router.run(180, 2.0)
    assert router.state.length == BOUNDS.low


def test_stops_short_of_a_cliff() -> None:
    router = Router(CURVES["cliff"], noise=0.02)
    router.run(900, 2.0)
    assert router.state.held == 125


def test_long_again_as_soon_as_overload_ends() -> None:
    router = Router(CURVES["short wins"])
    router.run(60, 2.0)
    assert router.state.length < 500
    router.run(2.0, 0.4)
    assert (router.state.length, router.state.phase) == (500, QueuePhase.LONG)


def test_what_was_found_is_known_when_overload_comes_back() -> None:
    router = Router(CURVES["short wins"])
    router.run(60, 2.0)
    held = router.state.held
    assert held < 100
    router.run(20, 0.4)
    router.run(ENTER * TICK, 2.0)
    assert (router.state.length, router.state.phase) == (held, QueuePhase.SHORT)
    router.run(20, 0.4)
    router.run(MEMORY, 0.4)
    router.run((router.state.enter + 1) * TICK, 2.0)
    assert router.state.held == 500


def test_goes_back_when_the_router_changes() -> None:
    """What stayed is looked at again: the guest may be another kind of router by now."""
    router = Router(CURVES["short wins"])
    router.run(60, 2.0)
    assert router.state.held < 100
    router.curve = CURVES["long wins"]
    router.run(4 * PAUSE + 60, 2.0)
    assert router.state.held == 500


@pytest.mark.parametrize("period", [2.0, 8.0, 20.0])
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_overload_that_comes_and_goes_makes_no_storm(curve: Curve, period: float) -> None:
    router = Router(curve, noise=0.05)
    while router.now < 600:
        router.run(period / 2, 3.0)
        router.run(period / 2, 0.2)
    assert len(router.lengths) <= CHANGES + TRIAL + router.now / REFILL


def test_a_guest_that_routes_nothing_is_left_long() -> None:
    state = begin(BOUNDS)
    for second in range(100):
        state = step(state, BOUNDS, Window(second, second + 0.5, 10000, 5000, 12, 1.0))
    assert (state.length, state.changes) == (500, 0)
    assert "hardly any" in state.why


@settings(max_examples=15, deadline=None)
@given(
    curve=st.sampled_from(sorted(CURVES)),
    noise=st.sampled_from([0.0, 0.02, 0.1, 0.4]),
    bursts=st.booleans(),
    pauses=st.booleans(),
    seed=st.integers(0, 10**6),
    loads=st.lists(
        st.tuples(st.floats(0.5, 40), st.sampled_from([0.0, 0.5, 0.8, 1.0, 1.5, 4.0])),
        min_size=1,
        max_size=6,
    ),
)
def test_bounded_whatever_comes(
    curve: str,
    noise: float,
    bursts: bool,
    pauses: bool,
    seed: int,
    loads: list[tuple[float, float]],
) -> None:
    """Within the bounds, changes apart (``Router.tick``), and few of them over time: trials
    of each length wait twice as long each time."""
    router = Router(CURVES[curve], noise, bursts, pauses, seed)
    for seconds, load in loads:
        router.run(seconds, load)
    assert router.state.changes == len(router.lengths)
    assert len(router.lengths) <= CHANGES + TRIAL + router.now / REFILL
    router.run(MOST * TICK, 0.2)
    assert router.state.length == BOUNDS.high


@pytest.mark.parametrize("load", [0.5, 0.8, 1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("bursts", [False, True], ids=["steady", "bursts"])
def test_close_to_the_better_fixed_length(curve: str, load: float, bursts: bool) -> None:
    """Over ten minutes, what it takes to find out included, it forwards at least 0.97 of the
    better of 50 and 500."""
    seed = 7
    router = Router(CURVES[curve], 0.03, bursts, seed=seed)
    router.run(600, load)
    best = 0.0
    for length in (50, 500):
        fixed = Router(CURVES[curve], 0.03, bursts, seed=seed, fixed=length)
        fixed.run(600, load)
        best = max(best, fixed.forwarded)
    assert router.forwarded >= 0.97 * best


def test_between_counts_what_came_in_the_meantime() -> None:
    crews = (Crew(frozenset([1]), 1.0), Crew(frozenset([1, 2]), 1.0), Crew(frozenset([3]), 0.5))
    before = QueueSample(10.0, 100, 5, 50, ((1, 0), (2, 0), (3, 0)))
    after = QueueSample(10.5, 300, 25, 200, ((1, 200_000_000), (2, 250_000_000), (3, 200_000_000)))
    window = window_between(before, after, crews)
    assert window == Window(10.0, 10.5, 200, 20, 150, pytest.approx(0.9))
    assert window is not None and window.overloaded


def test_between_tells_nothing_of_counters_that_began_anew() -> None:
    before = QueueSample(10.0, 100, 5, 50)
    assert window_between(before, QueueSample(10.5, 3, 0, 2), ()) is None
    assert window_between(before, replace(before, received=200), ()) is None


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((), None),
        ((1.0,), None),
        ((0.8,), False),
        ((0.9, 0.91), False),
        ((1.0, 1.0, 1.0), None),
        ((1.2, 1.21), True),
        ((1.0, 1.0, 1.0, 1.0), True),
        ((0.97, 0.97, 0.97, 0.97), False),
        ((0.9, 1.1, 0.9, 1.1), None),
        ((0.9, 1.1) * 4, False),
    ],
)
def test_judge(ratios: tuple[float, ...], verdict: bool | None) -> None:
    """Shorter only when it is sure, by pairs of turns."""
    assert judge(tuple(log(r) for r in ratios)) is verdict
