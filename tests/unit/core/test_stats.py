"""Statistics on series whose true answers are known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsrtune.core.stats import (
    holm,
    jain,
    linear_fit,
    median_interval,
    paired_ratio,
    pairs_needed,
    signed_rank_test,
    spread,
)


def normal(source: random.Random) -> float:
    return source.lognormvariate(0.0, 0.2)


def skewed(source: random.Random) -> float:
    """Often full speed, at times a collapse: what a router near overload does."""
    return 1.0 if source.random() < 0.7 else source.uniform(0.05, 0.9)


def heavy(source: random.Random) -> float:
    """Log-Cauchy, cut where floats end."""
    return math.exp(max(-50.0, min(50.0, 0.1 * math.tan(math.pi * (source.random() - 0.5)))))


def claims(draw: Callable[[random.Random], float], pairs: int, true: float, runs: int) -> float:
    """The share of synthetic runs that report a difference. Each pair shares a mood."""
    source = random.Random(pairs)
    found = 0
    for _ in range(runs):
        moods = [source.lognormvariate(0.0, 0.5) for _ in range(pairs)]
        ours = [8000 * mood * true * draw(source) for mood in moods]
        theirs = [8000 * mood * draw(source) for mood in moods]
        found += paired_ratio(ours, theirs).shown
    return found / runs


@pytest.mark.parametrize("draw", [normal, skewed, heavy])
@pytest.mark.parametrize("pairs", [6, 7, 9, 10, 15, 21])
def test_a_true_ratio_of_1_is_left_alone(
    draw: Callable[[random.Random], float], pairs: int
) -> None:
    # 5 % of 1000 runs, and twice the error of such a count.
    assert claims(draw, pairs, 1.0, 1000) <= 0.05 + 0.014


@pytest.mark.parametrize(("true", "least"), [(1.5, 0.99), (0.67, 0.99), (1.2, 0.5)])
def test_a_true_difference_is_found(true: float, least: float) -> None:
    assert claims(lambda s: s.lognormvariate(0.0, 0.1), 9, true, 400) >= least


@pytest.mark.parametrize("pairs", [6, 9, 12, 20])
def test_the_interval_holds_the_true_ratio(pairs: int) -> None:
    source = random.Random(3)
    held = 0
    for _ in range(1000):
        ratio = paired_ratio([1.3 * normal(source) for _ in range(pairs)], [1.0] * pairs)
        held += ratio.low <= 1.3 <= ratio.high
    assert held / 1000 >= 0.95 - 0.014


def test_the_interval_of_nine_is_second_to_eighth() -> None:
    assert median_interval([9.0, 1, 2, 3, 4, 5, 6, 7, 8]) == (2, 8)
    assert median_interval([1.0, 2, 3, 4, 5, 6]) == (1, 6)


def test_too_few_pairs_show_nothing() -> None:
    ratio = paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == (2.0, 0.0, math.inf, 3)
    assert not ratio.bounded and not ratio.shown
    assert str(ratio) == "2.00 (3 pairs are too few for an interval)"


def test_a_constant_ratio() -> None:
    ratio = paired_ratio([2.0] * 9, [1.0] * 9)
    assert (ratio.low, ratio.high, ratio.p) == (2.0, 2.0, 2 / 512)
    assert ratio.shown
    assert str(ratio) == "2.00 (95% 2.00..2.00, 9 pairs)"


def test_nothing_forwarded_counts_as_one_packet() -> None:
    assert paired_ratio([5.0], [0.0]).median == 5.0
    assert paired_ratio([0.0], [5.0]).median == 0.0
    assert paired_ratio([3.0], [0.5]).median == 6.0
    assert paired_ratio([0.0] * 9, [0.0] * 9).median == 1.0
    assert not paired_ratio([0.0] * 9, [0.0] * 9).shown


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0])])
def test_needs_pairs(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="need pairs"):
        paired_ratio(ours, theirs)


def test_signed_rank_test_by_hand() -> None:
    assert signed_rank_test([2.0] * 9) == 2 / 512
    assert signed_rank_test([0.5] * 9) == 2 / 512
    # The smallest of nine against the others: 2 of 512 are so far out on either side.
    assert signed_rank_test([2, 3, 4, 5, 6, 7, 8, 9, 1 / 1.5]) == 4 / 512
    # The greatest against the others: rank 9 can be made from smaller ones in many ways.
    assert signed_rank_test([2, 3, 4, 5, 6, 7, 8, 9, 0.0]) == 2 * 33 / 512
    assert signed_rank_test([2.0, 0.5]) == 1.0
    assert signed_rank_test([1.0] * 9) == 1.0
    assert signed_rank_test([2.0] * 8 + [1.0]) == 2 / 256


@given(st.lists(st.sampled_from([0.0, 0.5, 0.8, 1.0, 1.25, 2.0, 3.0]), max_size=9))
def test_signed_rank_test_counts_all_signs(ratios: list[float]) -> None:
    """Against the definition: every choice of signs is equally likely."""
    sizes = [abs(math.log(r)) if r else math.inf for r in ratios if r != 1.0]
    ranks = [sum(b < a for b in sizes) + (sum(b == a for b in sizes) + 1) / 2 for a in sizes]
    middle = sum(ranks) / 2
    signs = [r > 1.0 for r in ratios if r != 1.0]
    far = abs(sum(k for k, up in zip(ranks, signs, strict=True) if up) - middle)
    count = sum(
        abs(sum(k for k, up in zip(ranks, choice, strict=True) if up) - middle) >= far - 1e-9
        for choice in itertools.product([False, True], repeat=len(ranks))
    )
    expected = count / 2 ** len(ranks)
    assert signed_rank_test(ratios) == pytest.approx(min(1.0, expected))


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == [True, False, False]
    assert holm([0.01, 0.02, 0.03]) == [True, True, True]
    assert holm([0.02, 0.02, 0.02]) == [False, False, False]
    assert holm([]) == []


def test_nine_pairs_suffice_for_twelve_tests() -> None:
    assert [pairs_needed(n) for n in (0, 1, 2, 3, 12, 13, 51)] == [6, 6, 7, 7, 9, 10, 11]
    assert holm([2 / 512] * 12) == [True] * 12
    assert pairs_needed(1, level=0.0) == 1


def test_spread() -> None:
    assert spread([3, 1, 2, 10]) == {"median": 2.5, "low": 1.0, "high": 10.0, "count": 4}
    with pytest.raises(ValueError):
        spread([])


@pytest.mark.parametrize(
    ("shares", "index"),
    [([1, 1, 1], 1.0), ([1, 0], 0.5), ([0, 0], 1.0), ([1, 0, 0, 0], 0.25), ([2, 1], 0.9)],
)
def test_jain(shares: list[float], index: float) -> None:
    assert jain(shares) == pytest.approx(index)


def test_linear_fit() -> None:
    line = linear_fit([1, 2, 3, 4], [3, 5, 7, 9])
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((2.0, 1.0, 1.0))
    # By hand: slope 0.5, intercept 1/3, residual 1/6 of a total 2/3.
    bent = linear_fit([0, 1, 2], [0, 1, 1])
    assert (bent.slope, bent.r_squared) == pytest.approx((0.5, 0.75))
    assert linear_fit([1, 2], [4, 4]).r_squared == 1.0
    assert linear_fit([0, 1, 2], [2, 1, 1]).r_squared == pytest.approx(0.75)


@pytest.mark.parametrize(("xs", "ys"), [([2, 2], [1, 3]), ([1], [1]), ([1, 2], [1]), ([], [])])
def test_what_is_no_line(xs: list[float], ys: list[float]) -> None:
    with pytest.raises(ValueError):
        linear_fit(xs, ys)
