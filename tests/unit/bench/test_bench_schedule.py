"""The order of a comparison: shuffled, balanced, the same for the same seed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsrtune.bench.methods.methods import trial_rounds


@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 20), st.integers(0, 10**6))
def test_every_round_measures_everything_once(c: int, loads: int, count: int, seed: int) -> None:
    found = trial_rounds(range(c), loads, count, seed)
    assert len(found) == count
    assert all(sorted(turn.configurations) == list(range(c)) for turn in found)
    assert all(sorted(turn.loads) == list(range(loads)) for turn in found)
    assert found == trial_rounds(range(c), loads, count, seed)


@pytest.mark.parametrize("configurations", [2, 3, 5])
def test_each_is_first_equally_often(configurations: int) -> None:
    found = trial_rounds(range(configurations), 1, configurations * 3, 4)
    for place in range(configurations):
        firsts = [turn.configurations[place] for turn in found]
        assert all(firsts.count(one) == 3 for one in range(configurations))


def test_seeds_differ_and_the_order_is_not_alternating() -> None:
    orders = {
        tuple(t.configurations for t in trial_rounds(range(2), 1, 10, seed)) for seed in range(20)
    }
    assert len(orders) > 10
    assert any(a == b for order in orders for a, b in pairwise(order))


def test_a_group_stays_together_and_is_at_each_place_as_often() -> None:
    found = trial_rounds((0, 0, 1, 1, 2, 2), 1, 12, 4)
    places = [[turn.configurations[i] // 2 for i in (0, 2, 4)] for turn in found]
    for turn, groups in zip(found, places, strict=True):
        assert [i // 2 for i in turn.configurations] == [g for g in groups for _ in (0, 1)]
    assert all([p[place] for p in places].count(g) == 4 for place in range(3) for g in range(3))
    # Within a group neither is always the first.
    assert {turn.configurations.index(0) % 2 for turn in found} == {0, 1}
