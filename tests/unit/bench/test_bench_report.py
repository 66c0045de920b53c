"""Points, tables, plots and the HTML report of bench results."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import bench_router
import bench_samples as samples
import golden
import pytest
from bench_router import FakeRouter

from vsrtune.bench.methods import compare, methods
from vsrtune.bench.methods.methods import run
from vsrtune.bench.report import files, plots, tables
from vsrtune.bench.report.points import by_configuration, points
from vsrtune.bench.spec.model import (
    BenchAttachment,
    Configuration,
    Load,
    Method,
    Outcome,
    Traffic,
    Trial,
)
from vsrtune.views import layout


class TestPoints:
    found = points(samples.trials("untuned", 20000))

    def test_trials_of_the_same_load_are_taken_together(self) -> None:
        assert [p.offered for p in self.found] == list(samples.RATES)
        assert [len(p.trials) for p in self.found] == [3, 3, 3, 3]

    def test_median_and_extremes(self) -> None:
        last = self.found[-1]
        assert (last.pps, last.low, last.high) == (20000, 18000, 22000)

    def test_loss_and_its_place_agree(self) -> None:
        last = self.found[-1]
        assert last.loss == pytest.approx(1 - 20000 / 64000)
        assert last.drop_share("macvtap_ring") == pytest.approx(last.loss)
        assert last.drop_share("nic") == 0

    def test_costs_are_for_a_million_forwarded(self) -> None:
        last = self.found[-1]
        assert last.cpu_per_million("vhost") == pytest.approx(3.0 * 1e6 / 120000)
        assert last.switches_per_thousand() == pytest.approx(6000 * 1000 / 120000)
        assert last.migrations_per_second() == pytest.approx(5.0)

    def test_sizes_are_told_apart(self) -> None:
        made = samples.trial("untuned", 8000, 8000)
        sizes = ["imix", 1496, None, 60]
        found = points([replace(made, load=replace(made.load, size=s)) for s in sizes])
        assert [p.size for p in found] == [None, 60, 1496, "imix"]
        assert [tables.load_text(p) for p in found[:2]] == ["8,000", "8,000 of 60"]

    def test_nothing_forwarded_has_no_cost(self) -> None:
        (dead,) = points([samples.trial("untuned", 8000, 0)])
        assert dead.cpu_per_million("vhost") is None

    def test_configurations_keep_their_order(self) -> None:
        assert list(by_configuration(samples.outcome("compare"))) == ["untuned", "tuned"]


def measured(method: Method, router: FakeRouter, **more: object) -> Outcome:
    """A whole run of a method."""
    spec = bench_router.spec(method, **more)  # type: ignore[arg-type]
    summary, trials = run(methods.start(spec), router.trial)
    return replace(samples.outcome(method.kind), spec=spec, summary=summary, trials=tuple(trials))


def compared(peaks: dict[str, float], pairs: int) -> Outcome:
    spec = bench_router.spec(Method(rates=(8000, 64000), seconds=2.0))
    configurations = tuple(Configuration(name) for name in peaks)
    routers = [FakeRouter(peak, noise=0.05) for peak in peaks.values()]

    def trial(order: tuple[int, Load]) -> Trial:
        index, load = order
        return routers[index].trial(load, configurations[index].name)

    summary, trials = run(compare.compare(spec, configurations, pairs), trial)
    return replace(
        samples.outcome("compare"),
        spec=spec, configurations=configurations, summary=summary, trials=tuple(trials),
    )  # fmt: skip


FULL = {"ndr": {"high": 100000}, "pdr": {"high": 100000, "loss": 0.005}}
MADE = {
    "sweep": measured(Method(rates=(8000, 64000)), FakeRouter(20000, most=30000)),
    **{
        kind: measured(
            Method(kind=kind, seconds=4.0, trials=2, latency=True, **more),  # type: ignore[arg-type]
            FakeRouter(20000),
        )
        for kind, more in FULL.items()
    },
    "ndr-of-nothing": measured(Method(kind="ndr", low=1000, high=64000), FakeRouter(10)),
    "fairness": measured(
        Method(kind="fairness", rates=(16000,), repeats=2), FakeRouter(20000), routers=2
    ),
    "fairness-of-flows": measured(
        Method(kind="fairness", rates=(4000,)), FakeRouter(20000), traffic=Traffic(flows=4)
    ),
    "one-load": measured(Method(rates=(8000,), seconds=2.0, repeats=10), FakeRouter(20000)),
    "compare": compared({"untuned": 20000, "tuned": 40000}, 9),
    "compare-too-few": compared({"untuned": 20000, "tuned": 40000}, 3),
    "interrupted": replace(
        samples.outcome("compare"),
        unfinished="interrupted",
        trials=tuple(
            replace(t, notes=("late start",), latency=late)
            for t in samples.outcome("compare").trials[:12]
            for late in [samples.trial("", 8000, 8000, late=True).latency]
        ),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_printed(name: str) -> None:
    """Answers of the real methods, given by routers with known peaks."""
    found = tables.outcome_tables(MADE[name])
    text = "\n".join("\n".join(layout.lines(one)) + "\n" for one in found)
    golden.matches(Path(__file__).parent / "golden_bench" / f"{name}.txt", text)


@pytest.mark.parametrize("name", MADE)
def test_every_method_has_a_report(name: str) -> None:
    pytest.importorskip("matplotlib")
    assert "</html>" in files.page(MADE[name])


class _Page(HTMLParser):
    """Collects what a page would fetch, its ids, and the text that can be read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "use", "path", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            elif name in ("src", "href", "xlink:href") and not str(value).startswith("#"):
                self.fetched.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        self.words.append(data)


class TestHtml:
    pytest.importorskip("matplotlib")
    text = files.page(samples.outcome("compare"))
    page = _Page(text)

    def test_is_self_contained(self) -> None:
        assert self.page.fetched == []
        assert "<script" not in self.text
        assert re.findall(r"@import|url\((?!#)", self.text) == []

    def test_ids_are_unique(self) -> None:
        assert len(self.page.ids) == len(set(self.page.ids))

    def test_holds_the_policy(self) -> None:
        assert "cpus: {vcpu: 1}" in "".join(self.page.words)

    def test_every_plot_is_there(self) -> None:
        # Throughput, and the trials of four loads.
        assert self.text.count("<svg") == 5

    def test_markup_in_names_is_text(self) -> None:
        evil = Configuration("<script>alert(1)</script>", attachment=BenchAttachment.BRIDGE)
        made = tuple(replace(t, configuration=evil.name) for t in samples.trials("x", 20000))
        outcome = replace(samples.outcome(), configurations=(evil,), trials=made)
        assert "<script" not in files.page(outcome)

    def test_the_same_result_gives_the_same_page(self) -> None:
        assert files.page(samples.outcome("compare")) == self.text


class TestPlots:
    def test_sizes_have_lines_and_columns_of_their_own(self) -> None:
        several = [
            replace(t, load=replace(t.load, size=size))
            for t in samples.trials("untuned", 20000)
            for size in (60, 1496)
        ]
        made = plots.of_outcome(replace(samples.outcome(), trials=tuple(several)), "note")
        (lines,) = [figure for caption, figure in made if caption.startswith("Forwarded")]
        labels = [text.get_text() for text in lines.axes[0].get_legend().get_texts()]
        assert {"untuned, 60", "untuned, 1496"} <= set(labels)
        captions = [caption for caption, _ in made if caption.startswith("Every trial")]
        assert "Every trial at 8,000 pps of 60 offered; the bar is the median." in captions

    pytest.importorskip("matplotlib")

    def test_svg_is_well_formed_and_references_resolve(self) -> None:
        ((_, figure), *_) = plots.of_outcome(samples.outcome("compare"), "note")
        text = plots.svg(figure, "k")
        root = ET.fromstring(text)
        ids = {e.get("id") for e in root.iter() if e.get("id")}
        assert set(re.findall(r"(?:\"|\()#([^\")]+)", text)) <= ids

    def test_a_single_load_that_is_tried_often_is_drawn_over_time(self) -> None:
        ((caption, _), *_) = plots.of_outcome(MADE["one-load"], "")
        assert "over time" in caption
