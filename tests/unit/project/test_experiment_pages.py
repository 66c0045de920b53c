"""The pages of docs/results, made of stored results with known answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import bench_samples as samples
import pytest

pytest.importorskip("matplotlib")

from experiments import lab, page
from experiments.data import Data
from experiments.figures import FIGURES, fig03

from vsrtune.bench.report.files import outcome_to_json
from vsrtune.bench.spec.model import Configuration, Outcome, Trial

LOADS = (16000, 32000, 64000)


def outcome(peaks: dict[str, float], *, decline: str = "") -> Outcome:
    """A comparison whose configurations saturate at ``peaks``; nine rounds, each in a mood
    of its own. ``decline`` names one that overload halves."""
    trials: list[Trial] = []
    for turn in range(9):
        mood = 1 + 0.02 * turn
        for name, peak in peaks.items():
            for load in LOADS:
                rate = min(load, peak * mood)
                if name == decline and load == LOADS[-1]:
                    rate /= 2
                trials.append(samples.trial(name, load, rate))
    configurations = tuple(Configuration(name) for name in peaks)
    environment = dict.fromkeys(peaks, samples.BLOCK)
    return replace(
        samples.outcome(),
        method="compare",
        configurations=configurations,
        trials=tuple(trials),
        environment=environment,
    )


def store(raw: Path, key: str, made: Outcome) -> None:
    """As the runner stores it."""
    fresh = raw / "fresh.json"
    raw.mkdir(parents=True, exist_ok=True)
    fresh.write_text(outcome_to_json(made))
    lab._keep(fresh, raw / f"{key}.json")


def answers(docs: Path, figure: str) -> dict[str, str]:
    (found,) = [f for f in FIGURES if f.id == figure]
    data = Data(docs / "raw").of(figure)
    return {claim.text: page._judge(claim, data).answer for claim in found.claims}


class TestFig03:
    names = tuple(str(c["name"]) for c in fig03.FIGURE.runs[0].configurations)

    def made(self, docs: Path, peaks: list[float], decline: str = "") -> dict[str, str]:
        made = outcome(dict(zip(self.names, peaks, strict=True)), decline=decline)
        store(docs / "raw", "fig03/priorities", made)
        return answers(docs, "fig03")

    def test_what_the_paper_says(self, tmp_path: Path) -> None:
        found = self.made(tmp_path, [20000, 40000, 30000, 10000], decline="vcpu above vhost")
        assert list(found.values())[:4] == ["agrees"] * 4
        assert found["Three separate cores do better than any order on one."] == "open"

    def test_the_opposite(self, tmp_path: Path) -> None:
        found = self.made(tmp_path, [20000, 10000, 30000, 40000], decline="vcpu = vhost")
        assert list(found.values())[:4] == ["differs"] * 4

    def test_no_difference(self, tmp_path: Path) -> None:
        found = self.made(tmp_path, [20000, 20000, 20000, 20000])
        assert found["vhost above vcpu forwards least."] == "open"


class TestPages:
    def test_nothing_measured_is_said(self, tmp_path: Path) -> None:
        page.write(FIGURES, tmp_path)
        text = (tmp_path / "paper.md").read_text()
        assert "Nothing has been measured yet." in text
        assert "`fig03/priorities`, which has not been measured" in text

    def test_figures_stand_beside_the_verdicts(self, tmp_path: Path) -> None:
        peaks = dict(zip(TestFig03.names, [20000.0, 40000.0, 30000.0, 10000.0], strict=True))
        store(tmp_path / "raw", "fig03/priorities", outcome(peaks))
        page.write(FIGURES, tmp_path)
        text = (tmp_path / "paper.md").read_text()
        assert "![Fig. 3: priorities of vcpu and vhost](png/fig03.png)" in text
        assert (tmp_path / "png" / "fig03.png").stat().st_size > 5000
        assert "vhost above vcpu / vcpu = vhost at 64,000 pps offered: 0.25" in text
        assert "kernel 6.12.57" in text
        assert "[priorities](raw/fig03/priorities.json)" in text

    def test_links_inside_the_page_resolve(self, tmp_path: Path) -> None:
        page.write(FIGURES, tmp_path)
        for name in ("paper.md", "peers.md"):
            lines = (tmp_path / name).read_text().splitlines()
            heads = {page._anchor(line[3:]) for line in lines if line.startswith("## ")}
            links = {line.split("](#")[1].split(")")[0] for line in lines if "](#" in line}
            assert links <= heads

    def test_stored_results_read_back_the_same(self, tmp_path: Path) -> None:
        made = outcome({"a": 20000, "b": 30000})
        store(tmp_path / "raw", "x/y", made)
        assert Data(tmp_path / "raw").outcome("x/y") == made


def test_runs_are_made_once(tmp_path: Path) -> None:
    before = [key for key, _ in lab.missing(FIGURES, tmp_path)]
    assert len(before) == len(set(before))
    store(tmp_path, "fig03/priorities", outcome({"a": 1000, "b": 2000}))
    after = [key for key, _ in lab.missing(FIGURES, tmp_path)]
    assert set(before) - set(after) == {"fig03/priorities"}


def test_scaled_runs_come_after_what_scales_them() -> None:
    made: list[str] = []
    for figure in FIGURES:
        for run in figure.runs:
            if run.scaled is not None:
                assert run.scaled[0] in made
            made.append(f"{figure.id}/{run.name}")
