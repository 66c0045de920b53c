"""Ratios of interleaved pairs, on series whose true ratio is known."""

from __future__ import annotations

import random

import pytest

from vsrtune.stats import paired_ratio


def test_constant_ratio() -> None:
    ratio = paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == (2.0, 2.0, 2.0, 3)
    assert ratio.shown
    assert str(ratio) == "2.00 (95% 2.00..2.00, 3 pairs)"


def test_no_difference_is_rarely_claimed() -> None:
    source = random.Random(7)
    claims = 0
    for seed in range(60):
        ours = [source.lognormvariate(0, 0.4) for _ in range(9)]
        theirs = [source.lognormvariate(0, 0.4) for _ in range(9)]
        claims += paired_ratio(ours, theirs, seed=seed).shown
    assert claims <= 9


def test_nothing_forwarded_counts_as_one_packet() -> None:
    assert paired_ratio([5.0], [0.0]).median == 5.0


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0])])
def test_needs_pairs(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="need pairs"):
        paired_ratio(ours, theirs)
