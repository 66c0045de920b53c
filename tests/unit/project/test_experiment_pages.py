"""The pages of docs/results, made of the results that are stored, and the rules that judge these."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_samples as samples
import pytest

pytest.importorskip("matplotlib")

from experiments import found, judge, lab, page, reserve
from experiments.data import Data
from experiments.figures import FIGURES
from experiments.plan import TREE, Claim, Verdict

from vsrtune.bench.report.files import outcome_to_json
from vsrtune.bench.spec.model import Configuration, Outcome, Trial

RESULTS = TREE / "docs" / "results"


def compared(trials: Sequence[Trial], environment: Mapping[str, Any] | None = None) -> Outcome:
    """The comparison of the configurations of these trials."""
    return replace(
        samples.outcome(),
        method="compare",
        trials=tuple(trials),
        configurations=tuple(map(Configuration, dict.fromkeys(t.configuration for t in trials))),
        environment=environment or {},
    )


def store(raw: Path, key: str, made: Outcome) -> None:
    """As the runner stores it."""
    fresh = raw / "fresh.json"
    raw.mkdir(parents=True, exist_ok=True)
    fresh.write_text(outcome_to_json(made))
    lab._keep(fresh, raw / f"{key}.json", "1234567")


class TestJudge:
    """What the rules say of two configurations at one load, a round a pair."""

    def made(
        self, docs: Path, rates: Sequence[tuple[float, float]], *, unsent: int = 0, **head: object
    ) -> Data:
        """Nothing but these rates; in the first ``unsent`` rounds a load is sent in part."""
        trials = []
        for turn, pair in enumerate(rates):
            for name, rate in zip("ab", pair, strict=True):
                one = samples.trial(name, 64000, rate)
                if turn < unsent and name == "a":
                    one = replace(one, sent=round(0.97 * one.sent))
                trials.append(one)
        for run in ("one", "two"):
            store(docs, run, compared(trials))
            path = docs / f"{run}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | head))
        return Data(docs)

    def answer(self, data: Data, judge: judge.Judge) -> Verdict:
        return page.decided(Claim("", judge), data.of("."))

    def verdict(
        self, docs: Path, rates: Sequence[tuple[float, float]], rule: judge.Rule, **more: Any
    ) -> Verdict:
        pair = judge.Place("one", "a"), judge.Place("one", "b")
        return self.answer(self.made(docs, rates, **more), judge.compared(rule, [pair]))

    @pytest.mark.parametrize(
        ("rates", "answer"),
        [
            ([(1000, 1000 + turn) for turn in range(9)], "agrees"),
            ([(1000, 1060)] * 9, "agrees"),  # shown, and within the bound
            ([(1000, 1000 * (0.5 + turn / 6)) for turn in range(7)], "open"),
            ([(1000, 1200 + turn) for turn in range(9)], "differs"),
            ([(1000, 1000)] * 4, "open"),
        ],
    )
    def test_the_same_needs_an_interval_within_a_bound(
        self, tmp_path: Path, rates: list[tuple[float, float]], answer: str
    ) -> None:
        assert self.verdict(tmp_path, rates, judge.same).answer == answer

    @pytest.mark.parametrize(
        ("rates", "answer"),
        [
            ([(3000 + turn, 1000) for turn in range(9)], "agrees"),
            ([(2900 + 50 * turn, 1000) for turn in range(9)], "open"),
            ([(2900, 1000)] * 9, "differs"),
        ],
    )
    def test_a_goal_is_reached_by_the_whole_interval(
        self, tmp_path: Path, rates: list[tuple[float, float]], answer: str
    ) -> None:
        assert self.verdict(tmp_path, rates, judge.above(3.0)).answer == answer

    TWICE = ((2000, 1000),) * 9

    def test_rounds_that_were_not_sent_are_left_out(self, tmp_path: Path) -> None:
        found = self.verdict(tmp_path, [(10, 1000), *self.TWICE], judge.above(), unsent=1)
        assert found.answer == "stood still"
        found = self.verdict(tmp_path, [(500, 1000), *self.TWICE], judge.above(), unsent=1)
        assert found.answer == "agrees"
        assert "2.00 (95% 2.00..2.00, 9 pairs)" in found.text

    def test_a_load_that_was_not_sent_decides_nothing(self, tmp_path: Path) -> None:
        found = self.verdict(tmp_path, self.TWICE, judge.above(), unsent=3)
        assert found.answer == "refused"
        assert "within 2 %, in 6 of 9 rounds" in found.text

    def test_a_router_that_stood_still(self, tmp_path: Path) -> None:
        rates = [*self.TWICE[:-1], (2000, 49)]
        found = self.verdict(tmp_path, rates, judge.above())
        assert found.answer == "stood still"
        assert "b forwarded 98 frames in round 9" in found.text
        assert "🔴" in page._AGREES[found.answer]

    def test_a_machine_that_was_not_quiet(self, tmp_path: Path) -> None:
        found = self.verdict(tmp_path, self.TWICE, judge.above(), calibration=[900.0, 800.0])
        assert found.answer == "refused"
        assert "800 to 900 turns a second" in found.text
        found = self.verdict(tmp_path, self.TWICE, judge.above(), calibration=[900.0, 820.0])
        assert found.answer == "agrees"

    def test_runs_made_one_after_the_other(self, tmp_path: Path) -> None:
        pair = judge.Place("one", "a"), judge.Place("two", "b")
        data = self.made(tmp_path, self.TWICE)
        found = self.answer(data, judge.compared(judge.above(), [pair]))
        assert found.answer == "refused"
        assert "not interleaved" in found.text


def test_rules_are_committed_before_they_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    (tmp_path / "tests/experiments").mkdir(parents=True)
    rule = tmp_path / "tests/experiments/judge.py"
    rule.write_text("SAME = 1.1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "rules"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(lab, "TREE", tmp_path)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert head.stdout.startswith(lab.rules())
    rule.write_text("SAME = 2\n")
    with pytest.raises(SystemExit, match="commit the rules before measuring"):
        lab.make((), tmp_path, 1)


PAGES = {one.name: (one, own) for one, own in page.pages(FIGURES)}


@pytest.fixture(scope="module")
def pages() -> dict[str, tuple[str, set[str]]]:
    """The text and the pictures of each page, of the stored results."""
    data = Data(RESULTS / "raw")
    made = {name: page.made(*one, data) for name, one in PAGES.items()}
    return {name: (text, set(drawn)) for name, (text, drawn) in made.items()}


@pytest.mark.parametrize("name", PAGES)
class TestPages:
    def test_it_is_what_the_stored_results_say(
        self, name: str, pages: dict[str, tuple[str, set[str]]]
    ) -> None:
        said = "run `python3 -m experiments --page` in tests/ and commit what it writes"
        assert pages[name][0] == (RESULTS / f"{name}.md").read_text(), said

    def test_its_links_and_pictures_are_there(
        self, name: str, pages: dict[str, tuple[str, set[str]]]
    ) -> None:
        text, drawn = pages[name]
        heads = {page._anchor(line[3:]) for line in text.splitlines() if line.startswith("## ")}
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= heads
        assert set(re.findall(r"\]\(png/([^)]+)\.png\)", text)) == drawn
        files = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        assert [file for file in files if not (RESULTS / file).exists()] == []

    def test_nothing_measured_is_said(self, name: str, tmp_path: Path) -> None:
        text, drawn = page.made(*PAGES[name], Data(tmp_path))
        assert "Nothing has been measured yet." in text
        assert "not measured" in text
        assert drawn == {}


DEADLINE = "deadline:30000000/200000000/200000000ns reset-on-fork"


@pytest.mark.parametrize(
    ("cls", "used", "why"),
    [
        (DEADLINE, 0.15, ""),
        ("fifo:10", 0.15, "a: a vcpu thread had class fifo:10"),
        (DEADLINE, 0.24, "a: vcpu used 24 % of a CPU in a trial, with 15 % reserved"),
        (None, 0.15, "a: no vcpu thread was seen"),
    ],
)
def test_budgets_that_were_not_in_force(
    cls: str | None, used: float, why: str, tmp_path: Path
) -> None:
    threads = [{"thread": "vcpu 0", "cpus": "1", "class": cls}] if cls is not None else []
    block = {**samples.BLOCK, "guests": {"vr1": {"threads": threads}}}
    trial = replace(samples.trial("a", 64000, 9000), cpu_seconds={"vcpu": 2 * used})
    store(tmp_path, "x/run", compared([trial] * 5, {"a": block}))
    data, reserved = Data(tmp_path).of("x"), {"a": {"vcpu": 0.15}}
    assert reserve.not_in_force(data, "run", reserved) == why
    guarded = reserve.in_force("run", reserved, judge.impossible("the judge"))
    assert page.decided(Claim("", guarded), data).answer == ("refused" if why else "open")


class TestFound:
    """The one page of what was found."""

    text = (RESULTS / "README.md").read_text()

    def test_it_is_what_the_stored_results_say(self) -> None:
        assert found.text(FIGURES, RESULTS) == self.text

    def test_it_leads_to_each_page_and_each_leads_back(self) -> None:
        links = set(re.findall(r"(?<!!)\[[^]!]+\]\(([^)]+)\)", self.text))
        assert [link for link in links if not (RESULTS / link).exists()] == []
        pages = {path.name for path in RESULTS.glob("*.md")} - {"README.md"}
        assert pages - links == set()
        assert [name for name in pages if page.START not in (RESULTS / name).read_text()] == []


def test_runs_are_made_once(tmp_path: Path) -> None:
    before = [key for key, _ in lab.missing(FIGURES, tmp_path)]
    assert len(before) == len(set(before))
    store(tmp_path, "fig03/priorities", samples.outcome("compare"))
    after = [key for key, _ in lab.missing(FIGURES, tmp_path)]
    assert set(before) - set(after) == {"fig03/priorities"}


def test_scaled_runs_come_after_what_scales_them() -> None:
    made: list[str] = []
    for figure in FIGURES:
        for run in figure.runs:
            if run.scaled is not None:
                assert run.scaled[0] in made
            made.append(f"{figure.id}/{run.name}")
