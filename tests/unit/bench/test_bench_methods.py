"""The methods, driven against routers whose answers are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench_router import FakeRouter, spec

from vsrtune.bench.methods import methods
from vsrtune.bench.methods.methods import run
from vsrtune.bench.spec.model import Load, Method, Spec, Traffic, Trial
from vsrtune.core.errors import VsrtuneError


def measure(of: Spec, router: FakeRouter, seed: int = 1) -> tuple[dict[str, Any], list[Trial]]:
    return run(methods.start(of, seed), router.trial)


class TestSweep:
    of = spec(Method("sweep", (8000, 1000, 4000), repeats=3), routers=2)

    def test_every_load_in_every_round_in_its_own_order(self) -> None:
        router = FakeRouter(3000)
        _, trials = measure(self.of, router)
        assert len(trials) == methods.trials(self.of, self.of.method.repeats) == 9
        orders = [tuple(load.total for load in router.loads[i : i + 3]) for i in (0, 3, 6)]
        assert all(sorted(order) == [1000, 4000, 8000] for order in orders)
        assert len(set(orders)) > 1
        again = FakeRouter(3000)
        measure(self.of, again)
        assert again.loads == router.loads

    def test_routers_share_evenly(self) -> None:
        router = FakeRouter(3000)
        measure(self.of, router)
        assert all(load.pps["vr1"] == load.pps["vr2"] for load in router.loads)

    def test_the_peak_is_found(self) -> None:
        found, trials = measure(self.of, FakeRouter(3000, hurt=0.25))
        last = [t for t in trials if t.load.total == 8000]
        assert [t.loss for t in last] == pytest.approx([1 - 1750 / 8000] * 3)
        assert found["peak"] == {"offered": 4000, "pps": 2750}
        assert found["at_highest"] == pytest.approx(1750 / 2750)

    one = spec(Method("sweep", (4000,), seconds=2, repeats=10))

    def test_a_single_load_that_is_tried_often_shows_drift(self) -> None:
        peaks = iter(range(4000, 3000, -100))
        found, _ = run(methods.start(self.one), lambda load: FakeRouter(next(peaks)).trial(load))
        # 100 pps in each 2 seconds, of a median of 3550.
        assert found["drift_per_hour"] == pytest.approx(-50 * 3600 / 3550)
        assert found["r_squared"] == pytest.approx(1.0)
        assert measure(self.one, FakeRouter(9000))[0]["drift_per_hour"] == 0.0
        assert "drift_per_hour" not in measure(self.of, FakeRouter(9000))[0]


class TestSizes:
    of = spec(Method("sweep", (1000, 4000), repeats=2, sizes=(60, 1496)))

    def test_each_rate_is_tried_with_each_size(self) -> None:
        router = FakeRouter(3000)
        measure(self.of, router)
        assert methods.trials(self.of, self.of.method.repeats) == len(router.loads) == 8
        for first in (0, 4):
            turn = {(load.total, load.size) for load in router.loads[first : first + 4]}
            assert turn == {(1000, 60), (1000, 1496), (4000, 60), (4000, 1496)}

    def test_overload_of_one_size_says_nothing_of_another(self) -> None:
        assert measure(self.of, FakeRouter(3000))[0]["at_highest"] is None


class TestSearch:
    of = spec(Method("ndr", high=200_000, precision=0.02, trials=2, latency=True))

    @pytest.mark.parametrize("hurt", [0.0, 0.3, 1.0])
    def test_ndr(self, hurt: float) -> None:
        found, _ = measure(self.of, FakeRouter(23_456, hurt=hurt))
        assert 23_456 / 1.02 <= found["lower"] <= 23_456 < found["upper"]
        assert found["upper"] <= found["lower"] * 1.02
        assert found["limited_by"] == "router"

    def test_pdr_allows_its_loss(self) -> None:
        pdr = replace(self.of, method=replace(self.of.method, kind="pdr", loss=0.1))
        found, _ = measure(pdr, FakeRouter(20_000))
        assert 20_000 / 0.9 / 1.02 <= found["lower"] <= 20_000 / 0.9 * 1.001

    def test_the_worst_of_the_trials_decides(self) -> None:
        calls: list[float] = []

        def unsteady(load: Load) -> Trial:
            """Every other full trial above 10,000 pps loses a frame."""
            calls.append(load.total)
            trial = FakeRouter(1e9).trial(load)
            bad = load.total > 10_000 and calls.count(load.total) % 2 == 0
            return replace(trial, forwarded=trial.forwarded - bad)

        found, _ = run(methods.start(self.of), unsteady)
        assert 10_000 / 1.02 <= found["lower"] <= 10_000

    def test_latency_at_shares_of_the_answer(self) -> None:
        found, trials = measure(self.of, FakeRouter(23_456))
        rates = [trial.load.total / found["lower"] for trial in trials[-3:]]
        assert rates == pytest.approx([0.1, 0.5, 0.9])
        assert all(t.load.latency for t in trials[-3:])
        assert not any(t.load.latency for t in trials[:-3])

    def test_the_ends_of_the_search(self) -> None:
        found, _ = measure(self.of, FakeRouter(1e9))
        assert (found["lower"], found["upper"], found["limited_by"]) == (200_000, None, "high")
        low = replace(self.of, method=replace(self.of.method, low=5000))
        found, trials = measure(low, FakeRouter(100))
        assert (found["lower"], found["upper"], found["limited_by"]) == (None, 5000, "low")
        assert min(t.load.total for t in trials) == 5000

    def test_a_generator_that_cannot_send_more(self) -> None:
        found, _ = measure(self.of, FakeRouter(1e9, most=50_000))
        assert found["limited_by"] == "generator"
        # A generator may miss its rate by 3 % before it counts as the limit.
        assert 50_000 <= found["lower"] <= 50_000 / 0.97

    def test_a_router_that_forwards_nothing(self) -> None:
        found, trials = measure(self.of, FakeRouter(0.0))
        assert found["lower"] is None
        assert len(trials) < 30

    def test_nobody_knows_how_long_it_takes(self) -> None:
        assert methods.trials(self.of, self.of.method.repeats) is None


class TestFairness:
    def test_between_routers(self) -> None:
        of = spec(Method("fairness", (1000, 5000), by_router={"vr2": 3000}), routers=2)

        def starve(load: Load) -> Trial:
            sent = {name: round(pps * load.seconds) for name, pps in load.pps.items()}
            got = {"vr1": sent["vr1"], "vr2": sent["vr2"] // 2}
            return Trial("x", load, load.seconds, sum(sent.values()), sum(got.values()), {},
                         sent_by=sent, forwarded_by=got)  # fmt: skip

        found, trials = run(methods.start(of), starve)
        assert sorted(t.load.pps["vr1"] for t in trials) == [1000, 5000]
        assert all(t.load.pps["vr2"] == 3000 for t in trials)
        assert found["unit"] == "router"
        first = found["points"][0]
        assert first["rate"] == 1000
        assert [s["share"] for s in first["shares"]] == [1.0, 0.5]
        assert [s["pps"] for s in first["shares"]] == [1000, 1500]
        assert first["jain"]["median"] == pytest.approx(0.9)

    def test_between_flows(self) -> None:
        of = spec(Method("fairness", (1000,)), traffic=Traffic(flows=3))

        def one_only(load: Load) -> Trial:
            sent = round(load.total * load.seconds)
            return Trial("x", load, load.seconds, sent, sent // 3, {}, sent_by={"vr1": sent},
                         forwarded_by={"vr1": sent // 3},
                         forwarded_by_flow={"vr1/0": sent // 3})  # fmt: skip

        found, trials = run(methods.start(of), one_only)
        assert trials[0].load.pps == {"vr1": 3000}
        [point] = found["points"]
        assert [s["name"] for s in point["shares"]] == ["vr1/0", "vr1/1", "vr1/2"]
        assert [s["share"] for s in point["shares"]] == [1.0, 0.0, 0.0]
        assert point["jain"]["median"] == pytest.approx(1 / 3)


class TestRunner:
    of = spec(Method("sweep", (1000, 2000), repeats=2))

    def test_a_failing_trial_closes_the_method(self) -> None:
        method = methods.start(self.of)

        def fail(_: Load) -> Trial:
            raise VsrtuneError("the device is gone")

        with pytest.raises(VsrtuneError, match="gone"):
            run(method, fail)
        with pytest.raises(StopIteration):
            next(method)
