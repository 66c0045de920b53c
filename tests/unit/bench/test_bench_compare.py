"""Comparisons of made-up routers whose true ratio is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from bench_router import FakeRouter, spec

from vsrtune.bench.methods.compare import compare, verdict
from vsrtune.bench.methods.methods import run
from vsrtune.bench.methods.methods import trials as expected
from vsrtune.bench.spec.model import Configuration, Load, Method, Spec, Trial
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.stats import paired_ratio

A, B, C = Configuration("untuned"), Configuration("tuned"), Configuration("pins")
SWEEP = spec(Method("sweep", (16_000, 4000, 8000)))


def measure(
    of: Spec, routers: Sequence[FakeRouter], *, pairs: int = 9, seed: int = 1
) -> tuple[dict[str, Any], list[Trial]]:
    configurations = (A, B, C)[: len(routers)]

    def trial(order: tuple[int, Load]) -> Trial:
        index, load = order
        return routers[index].trial(load, configurations[index].name)

    return run(compare(of, configurations, pairs, seed), trial)


def verdicts(found: dict[str, Any], index: int = 1) -> list[str]:
    return [p["configurations"][index]["ratio"]["verdict"] for p in found["points"]]


def noisy(true: float, seed: int, noise: float = 0.15) -> list[FakeRouter]:
    """Two routers, overloaded at every load, with a true ratio of their peaks."""
    source = random.Random(seed)
    return [FakeRouter(peak, noise=noise, source=source) for peak in (2000, 2000 * true)]


def test_no_difference_is_claimed_where_there_is_none() -> None:
    """Over whole runs of three load points: not one claim in 95 % of them."""
    claiming = 0
    for seed in range(400):
        found, _ = measure(SWEEP, noisy(1.0, seed), seed=seed)
        claiming += set(verdicts(found)) != {"none"}
    assert claiming / 400 <= 0.05


def test_a_true_difference_is_found() -> None:
    found_in = 0
    for seed in range(100):
        found, _ = measure(SWEEP, noisy(1.5, seed), seed=seed)
        found_in += verdicts(found).count("higher")
        ratio = found["points"][0]["configurations"][1]["ratio"]
        assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert found_in >= 0.95 * 300


def test_a_loss_is_found_as_well() -> None:
    found, _ = measure(SWEEP, noisy(0.5, 1))
    assert verdicts(found) == ["lower"] * 3
    text = found["points"][2]["configurations"][1]["ratio"]["text"]
    assert text.startswith("tuned: lower pps than untuned (ratio 0.")
    assert text.endswith(", 9 pairs)")


def test_order_is_interleaved_and_shuffled_by_the_seed() -> None:
    _, trials = measure(SWEEP, noisy(1.0, 1), pairs=4, seed=5)
    names = [t.configuration for t in trials]
    assert len(names) == expected(SWEEP, 8) == 24
    for turn in range(4):
        part = trials[6 * turn : 6 * turn + 6]
        loads = [t.load.total for t in part]
        assert {t.configuration for t in part[:3]} != {t.configuration for t in part[3:]}
        assert loads[:3] == loads[3:]
        assert sorted(loads[:3]) == [4000, 8000, 16_000]
    assert names == [t.configuration for t in measure(SWEEP, noisy(1.0, 1), pairs=4, seed=5)[1]]
    seeds = {tuple(t.configuration for t in measure(SWEEP, noisy(1.0, 1), pairs=4, seed=s)[1])
             for s in range(20)}  # fmt: skip
    assert len(seeds) == 4


def test_points_hold_what_was_measured() -> None:
    found, trials = measure(SWEEP, [FakeRouter(6000), FakeRouter(12_000), FakeRouter(3000)])
    assert found["baseline"] == "untuned"
    assert [p["offered"] for p in found["points"]] == [4000, 8000, 16_000]
    last = found["points"][2]["configurations"]
    assert [row["name"] for row in last] == ["untuned", "tuned", "pins"]
    assert [row["median"] for row in last] == [6000, 12_000, 3000]
    assert [row["loss"] for row in last] == pytest.approx([0.625, 0.25, 1 - 3 / 16])
    assert last[0]["ratio"] is None
    assert (last[1]["ratio"]["median"], last[2]["ratio"]["median"]) == (2.0, 0.5)
    assert all(len(row["values"]) == 9 for row in last)
    # Where everybody forwards all, nothing differs.
    assert verdicts(found, 1) == ["none", "higher", "higher"]
    assert verdicts(found, 2) == ["lower"] * 3
    assert len(trials) == 81


def test_sizes_are_points_of_their_own() -> None:
    of = spec(Method("sweep", (16_000,), sizes=(60, 1496)))
    found, trials = measure(of, [FakeRouter(9000), FakeRouter(18_000)], pairs=9)
    assert [(p["offered"], p["size"]) for p in found["points"]] == [(16_000, 60), (16_000, 1496)]
    assert verdicts(found) == ["higher", "higher"]
    assert len(trials) == expected(of, 18) == 36


def test_a_generator_that_falls_short_is_noted() -> None:
    found, _ = measure(SWEEP, [FakeRouter(6000), FakeRouter(12_000, most=10_000)])
    rows = found["points"][2]["configurations"]
    assert [row["generator_limited"] for row in rows] == [False, True]
    assert [row["sent_pps"] for row in rows] == [16_000, 10_000]
    assert found["notes"] == [
        "at 16,000 pps offered the generator sent 10,000 in most trials of tuned"
    ]


def test_searches_are_compared_by_their_answers() -> None:
    of = spec(Method("ndr", high=100_000, precision=0.05))
    found, _ = measure(of, [FakeRouter(10_000), FakeRouter(20_000)], pairs=6)
    [point] = found["points"]
    assert point["offered"] is None
    assert point["configurations"][1]["ratio"]["median"] == pytest.approx(2.0, rel=0.06)
    assert verdicts(found) == ["higher"]
    assert expected(of, 12) is None
    assert found["notes"] == []


@pytest.mark.parametrize(
    ("peaks", "most", "names", "told"),
    [
        ((1_100_000, 1_900_000), 1e6, [A, B], "the generator, which cannot send more: at least"),
        ((90_000, 3_000_000), 1e12, [B], "the highest rate of the search, which passed: at least"),
        ((500, 90_000), 1e12, [A], "the lowest rate of the search, which failed: below"),
    ],
)
def test_searches_that_did_not_end_at_the_router_are_noted(
    peaks: tuple[int, int], most: float, names: list[Configuration], told: str
) -> None:
    of = spec(Method("ndr", low=1000, high=2_000_000, precision=0.05))
    found, _ = measure(of, [FakeRouter(peak, most=most) for peak in peaks], pairs=6)
    told = told.replace(": ", ": its rate is ") + " that"
    assert found["notes"] == [f"most searches of {one.name} ended at {told}" for one in names]


def test_too_few_pairs_say_so() -> None:
    found, _ = measure(SWEEP, noisy(3.0, 1), pairs=3)
    assert verdicts(found) == ["too few pairs"] * 3
    ratio = found["points"][0]["configurations"][1]["ratio"]
    assert (ratio["low"], ratio["high"]) == (None, None)
    assert found["notes"] == ["3 pairs give no 95 % interval; 6 are the fewest that do"]


def test_too_many_loads_for_the_pairs_say_so() -> None:
    found, _ = measure(SWEEP, noisy(3.0, 1), pairs=6)
    assert verdicts(found) == ["none"] * 3
    assert "of so many load points" in found["points"][0]["configurations"][1]["ratio"]["text"]
    assert found["notes"] == [
        "6 pairs cannot show a difference at one of 3 load points; 7 are the fewest that can"
    ]


def test_a_tiny_but_sure_difference_is_told_in_figures_that_show_it() -> None:
    ratio = paired_ratio([1.002] * 9, [1.0] * 9)
    text = verdict(ratio, True, "tuned", "untuned", "pps")["text"]
    assert text == "tuned: higher pps than untuned (ratio 1.0020, 95 % 1.0020..1.0020, 9 pairs)"


def test_equal_names_cannot_be_told_apart() -> None:
    with pytest.raises(VsrtuneError, match="several configurations are called 'untuned'"):
        compare(SWEEP, (A, A))
