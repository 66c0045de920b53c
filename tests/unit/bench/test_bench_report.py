"""Points, tables, plots and the HTML report of bench results."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import bench_samples as samples
import pytest

from vsrtune.bench.report import files, plots, tables
from vsrtune.bench.report.points import by_configuration, points
from vsrtune.bench.spec.model import BenchAttachment, Configuration
from vsrtune.views.tables import Table


def table(found: list[Table], title: str) -> Table:
    return next(t for t in found if t.title.startswith(title))


def rows(found: list[Table], title: str) -> list[dict[str, str]]:
    one = table(found, title)
    return [dict(zip(one.columns, row, strict=True)) for row in one.rows]


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
        assert last.cpu_share("vcpu") == pytest.approx(0.4)

    def test_threads_of_napi_have_a_role_of_their_own(self) -> None:
        made = samples.trial("untuned", 8000, 8000)
        found = points([replace(made, cpu_seconds={"vcpu": 0.5, "napi": 0.8})])
        (row,) = rows([tables.cost_table(found)], "Cost")
        assert (row["vcpu"], row["napi"]) == ("31.2", "50")

    def test_sizes_are_told_apart(self) -> None:
        made = samples.trial("untuned", 8000, 8000)
        sizes = ["imix", 1496, None, 60]
        found = points([replace(made, load=replace(made.load, size=s)) for s in sizes])
        assert [p.size for p in found] == [None, 60, 1496, "imix"]
        assert [tables.load_text(p) for p in found[:2]] == ["8,000", "8,000 of 60"]

    def test_nothing_forwarded_has_no_cost(self) -> None:
        (dead,) = points([samples.trial("untuned", 8000, 0)])
        assert dead.cpu_per_million("vhost") is None
        assert dead.spread == 0

    def test_configurations_keep_their_order(self) -> None:
        assert list(by_configuration(samples.outcome("compare"))) == ["untuned", "tuned"]


class TestTables:
    found = tables.outcome_tables(samples.outcome("compare"))

    def test_one_machine_is_said_first(self) -> None:
        assert table(self.found, "overload").rows[0] == ("measured", "one machine, veth and pktgen")

    def test_forwarded_has_a_row_for_each_configuration_and_load(self) -> None:
        found = rows(self.found, "Forwarded")
        assert len(found) == 8
        last = found[-1]
        assert last["configuration"] == "tuned"
        assert last["offered pps"] == "64,000"
        assert last["forwarded pps"] == "40,000"
        assert last["lowest..highest"] == "36,000..44,000"

    def test_only_places_that_lost_something_have_a_column(self) -> None:
        columns = table(self.found, "Forwarded").columns
        assert "tap ring %" in columns
        assert "nic %" not in columns

    def test_idle_time_is_no_cost(self) -> None:
        columns = table(self.found, "Cost").columns
        assert "vhost" in columns
        assert "idle" not in columns

    def test_what_configurations_share_is_apart_from_what_differs(self) -> None:
        shared = dict(table(self.found, "Environment").rows)
        assert shared["kernel"] == "6.12.57"
        assert shared["guests.vr1.threads.vcpu 0"] == "CPUs 0-1, other"
        assert shared["guests.vr1.interfaces.0.vhost"] == "yes"
        differs = table(self.found, "Environment that differs")
        assert [row[0] for row in differs.rows] == ["policy.sha256", "policy.file"]

    def test_latency_in_microseconds(self) -> None:
        outcome = replace(
            samples.outcome(), trials=(samples.trial("untuned", 8000, 8000, late=True),)
        )
        (row,) = rows(tables.outcome_tables(outcome), "One-way latency")
        assert (row["P50"], row["P99"], row["lost"]) == ("200", "900", "1")

    def test_equal_notes_are_said_once(self) -> None:
        noted = [replace(t, notes=("late start",)) for t in samples.trials("untuned", 20000)]
        outcome = replace(samples.outcome(), trials=tuple(noted))
        assert table(tables.outcome_tables(outcome), "Notes").rows == [
            ("untuned", "late start", "12")
        ]

    def test_a_run_that_ended_early_says_so_first(self) -> None:
        head = tables.header(replace(samples.outcome(), unfinished="interrupted"))
        assert head.rows[0] == ("unfinished", "interrupted")
        assert head.tone == "warn"

    def test_thresholds_and_lengths_are_printed(self) -> None:
        method = replace(samples.SPEC.method, kind="pdr", loss=0.005, trials=3, precision=0.02)
        outcome = replace(samples.outcome("pdr"), spec=replace(samples.SPEC, method=method))
        text = tables.method_text(outcome)
        assert "0.5 %" in text
        assert "trials of 2 s" in text
        assert "worst of 3" in text


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

    def test_says_that_it_was_one_machine(self) -> None:
        assert "one machine, veth and pktgen" in "".join(self.page.words)

    def test_holds_the_policy(self) -> None:
        assert "cpus: {vcpu: 1}" in "".join(self.page.words)

    def test_every_plot_is_there(self) -> None:
        # Throughput, the trials of four loads, cost.
        assert self.text.count("<svg") == 6

    def test_markup_in_names_is_text(self) -> None:
        evil = Configuration("<script>alert(1)</script>", attachment=BenchAttachment.BRIDGE)
        made = tuple(replace(t, configuration=evil.name) for t in samples.trials("x", 20000))
        outcome = replace(samples.outcome(), configurations=(evil,), trials=made)
        assert "<script" not in files.page(outcome)

    def test_the_same_result_gives_the_same_page(self) -> None:
        assert files.page(samples.outcome("compare")) == self.text

    def test_written_whole(self, tmp_path: Path) -> None:
        target = tmp_path / "r.html"
        files.write_page(samples.outcome(), target)
        assert target.read_text().endswith("</html>\n")
        assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


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

    def test_soak_is_drawn_over_time(self) -> None:
        ((caption, _), *_) = plots.of_outcome(samples.outcome("soak"), "")
        assert "over time" in caption
