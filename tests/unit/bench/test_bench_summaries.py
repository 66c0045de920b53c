"""The answers of the real methods, as tables; routers with known peaks give them."""

from __future__ import annotations

from dataclasses import replace

import bench_router
import bench_samples as samples
import pytest

from vsrtune.bench.methods import compare, methods
from vsrtune.bench.methods.schedule import run
from vsrtune.bench.report import files, tables
from vsrtune.bench.spec.model import Configuration, Load, Method, Outcome, Traffic, Trial
from vsrtune.views.tables import Table


def measured(method: Method, router: bench_router.FakeRouter, **more: object) -> Outcome:
    """A whole run of a method."""
    spec = bench_router.spec(method, **more)  # type: ignore[arg-type]
    summary, trials = run(methods.start(spec), router.trial)
    return replace(samples.outcome(method.kind), spec=spec, summary=summary, trials=tuple(trials))


def compared(peaks: dict[str, float], pairs: int = 9) -> Outcome:
    spec = bench_router.spec(Method(rates=(8000, 64000), seconds=2.0))
    configurations = tuple(Configuration(name) for name in peaks)
    routers = [bench_router.FakeRouter(peak, noise=0.05) for peak in peaks.values()]

    def trial(order: tuple[int, Load]) -> Trial:
        index, load = order
        return routers[index].trial(load, configurations[index].name)

    summary, trials = run(compare.compare(spec, configurations, pairs), trial)
    return replace(
        samples.outcome("compare"),
        spec=spec, configurations=configurations, summary=summary, trials=tuple(trials),
    )  # fmt: skip


def words(table: Table) -> dict[str, str]:
    return {row[0]: row[1] for row in table.rows}


def test_sweep_names_the_peak_and_what_overload_leaves_of_it() -> None:
    outcome = measured(Method(rates=(8000, 64000)), bench_router.FakeRouter(20000))
    (table,) = tables.summary_tables(outcome)
    assert words(table)["peak"] == "20,000 pps at 64,000 pps offered"
    assert words(table)["at the highest load"] == "100.00 % of the peak"


def test_sweep_says_where_the_generator_fell_short() -> None:
    router = bench_router.FakeRouter(20000, most=30000)
    (table,) = tables.summary_tables(measured(Method(rates=(8000, 64000)), router))
    assert words(table)["generator fell short"] == "at 64,000 pps offered"


@pytest.mark.parametrize(("kind", "loss"), [("ndr", 0.0), ("pdr", 0.005)])
def test_throughput_prints_threshold_and_trial_length(kind: str, loss: float) -> None:
    method = Method(kind=kind, high=100000, loss=loss, seconds=4.0, trials=2, latency=True)
    head, steps, latency = tables.summary_tables(measured(method, bench_router.FakeRouter(20000)))
    found = words(head)
    rate = float(found[kind.upper()].removesuffix(" pps").replace(",", ""))
    assert 19000 <= rate <= 20200
    assert found["loss allowed"] == f"{100 * loss:g} %"
    assert found["trial"] == "4 s, the worst of 2 deciding"
    assert found["limited by"] == "the router"
    assert {row[-1] for row in steps.rows} == {"passed", "failed"}
    assert [row[0] for row in latency.rows] == [f"{n} % of {kind.upper()}" for n in (10, 50, 90)]


def test_a_router_that_always_loses_has_no_rate() -> None:
    method = Method(kind="ndr", low=1000, high=64000)
    head = tables.summary_tables(measured(method, bench_router.FakeRouter(10)))[0]
    assert words(head)["NDR"] == "none of the rates"


def test_fairness_has_a_row_for_each_router() -> None:
    method = Method(kind="fairness", rates=(16000,), repeats=2)
    outcome = measured(method, bench_router.FakeRouter(20000), routers=2)
    index, shares = tables.summary_tables(outcome)
    assert index.rows[0][3].startswith("1.000")
    assert [row[1] for row in shares.rows] == ["vr1", "vr2"]


def test_fairness_of_flows_is_of_flows() -> None:
    method = Method(kind="fairness", rates=(4000,))
    outcome = measured(method, bench_router.FakeRouter(20000), traffic=Traffic(flows=4))
    assert "flows" in tables.summary_tables(outcome)[0].title


def test_soak() -> None:
    method = Method(kind="soak", rates=(8000,), seconds=2.0, duration=20.0)
    (table,) = tables.summary_tables(measured(method, bench_router.FakeRouter(20000)))
    assert words(table)["lost"] == "0 of 160,000 frames"
    assert "drift" in words(table)


class TestCompare:
    def test_a_difference_and_none(self) -> None:
        outcome = compared({"untuned": 20000, "tuned": 40000})
        low, high, *_ = tables.summary_tables(outcome)
        assert "8,000" in low.title
        assert "no difference shown" in low.rows[1][-1]
        assert high.rows[0][-1] == "baseline"
        assert high.rows[1][-1].startswith("higher pps than untuned")
        assert "9 pairs" in high.title

    def test_too_few_pairs_are_said(self) -> None:
        found = tables.summary_tables(compared({"a": 20000, "b": 40000}, pairs=3))
        assert "too few" in found[0].rows[1][-1]
        assert found[-1].tone == "warn"

    def test_the_answer_comes_before_the_trials(self) -> None:
        titles = [t.title for t in tables.outcome_tables(compared({"a": 20000, "b": 40000}))]
        assert titles[1].startswith("Compared with a")
        assert titles.index("Forwarded") > 2


@pytest.mark.parametrize("kind", ["ndr", "fairness", "soak"])
def test_every_method_has_a_report(kind: str) -> None:
    pytest.importorskip("matplotlib")
    method = {
        "ndr": Method(kind="ndr", high=100000),
        "fairness": Method(kind="fairness", rates=(16000, 32000)),
        "soak": Method(kind="soak", rates=(8000,), seconds=2.0, duration=20.0),
    }[kind]
    outcome = measured(method, bench_router.FakeRouter(20000), routers=2)
    assert "</html>" in files.page(outcome)
