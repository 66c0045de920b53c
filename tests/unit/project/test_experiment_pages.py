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
from experiments.beddata import BedRun
from experiments.data import Data
from experiments.figures import FIGURES, frr, order, peers
from experiments.plan import TREE, Claim, Verdict

from vsrtune.bench.report.files import outcome_to_json
from vsrtune.bench.spec.model import Configuration, Latency, Load, Outcome, Trial

LOADS = (16000, 32000, 64000)
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


def outcome(peaks: dict[str, float]) -> Outcome:
    """A comparison whose configurations saturate at ``peaks``; nine rounds, each in a mood
    of its own."""
    trials: list[Trial] = []
    for turn in range(9):
        mood = 1 + 0.02 * turn
        for name, peak in peaks.items():
            for load in LOADS:
                trials.append(samples.trial(name, load, min(load, peak * mood)))
    return compared(trials, dict.fromkeys(peaks, samples.BLOCK))


def store(raw: Path, key: str, made: Outcome) -> None:
    """As the runner stores it."""
    fresh = raw / "fresh.json"
    raw.mkdir(parents=True, exist_ok=True)
    fresh.write_text(outcome_to_json(made))
    lab._keep(fresh, raw / f"{key}.json", {"rules": "1234567"})


class TestJudge:
    """What the rules say of two configurations at one load, a round a pair."""

    def made(
        self, docs: Path, rates: Sequence[tuple[float, float]], *, unsent: int = 0, **head: object
    ) -> Data:
        """Nothing but these rates; in the first ``unsent`` rounds 97 % of a load is sent."""
        trials = []
        for turn, pair in enumerate(rates):
            for name, rate in zip("ab", pair, strict=True):
                one = samples.trial(name, 64000, rate)
                if turn < unsent and name == "a":
                    one = replace(one, sent=round(0.97 * one.sent))
                trials.append(one)
        store(docs, "one", compared(trials))
        path = docs / "one.json"
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
            ([(1100, 1000)] * 9, "agrees"),
            ([(1000, 1100)] * 9, "agrees"),
            ([(1102, 1000)] * 9, "differs"),
            ([(1000, 1102)] * 9, "differs"),
            # The 90 % interval of eight leaves out the outermost, that of 95 % does not.
            ([(1000, 1300), *[(1000, 1000)] * 6, (1300, 1000)], "agrees"),
            ([(1000, 1000)] * 5, "agrees"),
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
            ([(3000, 1000)] * 9, "agrees"),
            ([*[(2900, 1000)] * 2, *[(3000, 1000)] * 7], "open"),
        ],
    )
    def test_a_goal_is_reached_by_the_whole_interval(
        self, tmp_path: Path, rates: list[tuple[float, float]], answer: str
    ) -> None:
        assert self.verdict(tmp_path, rates, judge.above(3.0)).answer == answer

    @pytest.mark.parametrize(
        ("shares", "answer"),
        [
            ([0.9] * 9, "agrees"),
            ([0.8] * 2 + [0.9] * 7, "open"),
            ([0.8] * 9, "differs"),
            ([1.0] * 5, "open"),
        ],
    )
    def test_a_share_is_kept_by_the_whole_interval(self, shares: list[float], answer: str) -> None:
        assert judge.interval(shares, 0.9) == answer

    def test_spreads_are_shares_of_each_median(self, tmp_path: Path) -> None:
        pair = judge.Place("one", "a"), judge.Place("one", "b")
        wide = [(9000 + 2000 * (turn % 2), 80 + 40 * (turn % 2)) for turn in range(8)]
        ratio, narrow = judge.spreads(self.made(tmp_path, wide).of("."), *pair)
        assert (ratio.low, narrow.high) == pytest.approx((0.5, 0.5), abs=1e-5)
        still = [(rate, 100) for rate, _ in wide]
        assert judge.spreads(self.made(tmp_path, still).of("."), *pair)[0].low > 1e4

    TWICE = ((2000, 1000),) * 9

    def test_rounds_that_were_not_sent_are_left_out(self, tmp_path: Path) -> None:
        found = self.verdict(tmp_path, [(10, 1000), *self.TWICE], judge.above(), unsent=1)
        assert found.answer == "stood still"
        found = self.verdict(tmp_path, [(500, 1000), *self.TWICE], judge.above(), unsent=1)
        assert found.answer == "agrees"
        assert "2.00 (95% 2.00..2.00, 9 pairs)" in found.text

    def test_what_one_router_gets_too_much_another_lacks(self, tmp_path: Path) -> None:
        both = Load({"vr1": 32000.0, "vr2": 32000.0}, 2.0)
        for sent, answer in ((64000, "agrees"), (60000, "refused")):
            by = {"vr1": sent, "vr2": 128000 - sent}
            trials = [
                replace(samples.trial(name, 64000, rate), load=both, sent_by=by)
                for rates in self.TWICE
                for name, rate in zip("ab", rates, strict=True)
            ]
            store(tmp_path, "one", replace(outcome({"a": 1, "b": 1}), trials=tuple(trials)))
            assert self.answer(Data(tmp_path), judge.more("one", "a", "b")).answer == answer

    def test_a_round_that_was_not_ended_is_left_out(self, tmp_path: Path) -> None:
        made = outcome({"a": 2000, "b": 1000})
        store(tmp_path, "one", replace(made, trials=made.trials[:-1]))
        found = self.answer(Data(tmp_path), judge.more("one", "a", "b"))
        assert "8 pairs" in found.text

    def test_a_router_that_stood_still(self, tmp_path: Path) -> None:
        rates = [*self.TWICE[:-1], (2000, 49)]
        found = self.verdict(tmp_path, rates, judge.above())
        assert found.answer == "stood still"
        assert "b forwarded 98 frames in round 9" in found.text
        assert "🔴" in page._AGREES[found.answer]
        found = self.verdict(tmp_path, [*self.TWICE[:-1], (2000, 50)], judge.above())
        assert found.answer == "agrees"

    def test_a_machine_that_was_not_quiet(self, tmp_path: Path) -> None:
        found = self.verdict(tmp_path, self.TWICE, judge.above(), calibration=[900.0, 800.0])
        assert found.answer == "refused"
        assert "800 to 900 turns a second" in found.text
        found = self.verdict(tmp_path, self.TWICE, judge.above(), calibration=[900.0, 810.0])
        assert found.answer == "agrees"
        found = self.verdict(tmp_path, self.TWICE, judge.above(), others=0.06)
        assert found.answer == "refused"
        assert "others took 6% of its CPU time" in found.text
        found = self.verdict(tmp_path, self.TWICE, judge.above(), others=0.05)
        assert found.answer == "agrees"


class TestDelays:
    """The rule on delays; nine rounds of all loads of the peers."""

    def answer(self, docs: Path, unheard: int) -> Verdict:
        """P99 is a second untuned and 0.01 s tuned; in so many rounds 901 of 1,000 untuned probes are
        lost, in the last round the load was not sent."""
        trials = []
        for turn in range(9):
            for factor in peers.FACTORS:
                for name, p99 in ((peers.UNTUNED, 1.0), (peers.OURS, 0.01)):
                    gone = 901 if name == peers.UNTUNED and turn < unheard else 0
                    late = Latency(1000, gone, p99 / 9, p99 / 2, p99)
                    one = samples.trial(name, round(10000 * factor), 5000)
                    sent = 1000 + one.sent // (2 if turn == 8 else 1)
                    trials.append(replace(one, sent=sent, latency=late))
        store(docs, peers.RUN, compared(trials))
        return page.decided(Claim("", peers.sooner(2.0, 0.1)), Data(docs).of("."))

    def test_rounds_of_neither_kind_are_left_out_together(self, tmp_path: Path) -> None:
        """Of nine rounds one was not sent and two were not heard: six of nine, not six of eight."""
        assert self.answer(tmp_path, unheard=1).answer == "agrees"
        found = self.answer(tmp_path, unheard=2)
        assert found.text == "vsrtune and untuned: at least 100 probes came, in 6 of 9 rounds"


@pytest.mark.parametrize(
    ("load", "sent_a", "sent_b", "kept"),
    [
        ("ten", 10000, 1000, True),
        ("ten", 10000, 900, False),  # 1 % of the sum
        ("alone", 0, 900, False),
    ],
)
def test_each_stream_of_a_bed_was_sent(load: str, sent_a: int, sent_b: int, kept: bool) -> None:
    loads = {"ten": {"a": 10000.0, "b": 1000.0}, "alone": {"b": 1000.0}}
    short = {"a": sent_a, "b": sent_b}
    trials = tuple(
        {
            "configuration": "x",
            "load": one,
            "round": turn,
            "sent_pps": short if one == load else rates,
        }
        for turn in range(4)
        for one, rates in loads.items()
    )
    run = BedRun({"loads": loads}, trials)
    try:
        assert judge.bed_rounds(run, "ten", {"x": [1.0] * 4}, "alone") == [(1.0,)] * 4
        assert kept
    except judge.Refused:
        assert not kept


class TestOrder:
    """The rules on frames out of order; nine rounds of three loads, one queue."""

    def answers(
        self, docs: Path, ours: int, untuned: Sequence[int], looked: int = 1000
    ) -> list[str]:
        """Of keeping the order, and of keeping it better than untuned. So many frames of ours are out
        of order in the last round of the last load, and of untuned in each round of it."""
        trials = []
        for turn in range(9):
            for load in LOADS:
                for name in order.configurations(1):
                    late = 0
                    if load == LOADS[-1]:
                        late = untuned[turn] if name == order.UNTUNED else ours * (turn == 8)
                    one = samples.trial(name, load, 5000)
                    trials.append(replace(one, sampled=looked, reordered=late))
        store(docs, "order/queues-1", compared(trials))
        ours_claims = [c for c in order.FIGURE.claims if c.text.startswith("1 queue, vsrtune")]
        return [page.decided(c, Data(docs).of("order")).answer for c in ours_claims]

    @pytest.mark.parametrize(
        ("ours", "untuned", "looked", "kept", "better"),
        [
            (0, [5] * 9, 1000, "agrees", "agrees"),
            (0, [5] * 9, 999, "open", "agrees"),
            (1, [5] * 9, 1000, "differs", "agrees"),
            # One round of nine to the other side is the most that chance does not explain.
            (6, [5] * 9, 1000, "differs", "agrees"),
            (6, [5] * 7 + [0, 5], 1000, "differs", "open"),
            (1, [0] * 9, 1000, "differs", "open"),
            (0, [5] * 6 + [0] * 3, 1000, "agrees", "agrees"),
            (0, [5] * 5 + [0] * 4, 1000, "agrees", "open"),
        ],
    )
    def test_the_order_is_kept_by_every_frame(
        self, tmp_path: Path, ours: int, untuned: list[int], looked: int, kept: str, better: str
    ) -> None:
        assert self.answers(tmp_path, ours, untuned, looked) == [kept, better]


def test_a_session_lost_once_is_not_kept(tmp_path: Path) -> None:
    """Three loads in all configurations of the routers with FRR; at the highest, ours lose BGP."""
    good = {
        "before": True, "loaded": 10, "bgp": "1" * 12, "ospf": "1" * 12, "bfd": "1" * 12,
        "drops": {"bgp": 0, "bfd": 0}, "snmp": [10.0] * 4,
    }  # fmt: skip
    lost = good | {"bgp": "1" * 6 + "0" * 4 + "11", "drops": {"bgp": 1, "bfd": 0}}
    names = frr.CONFIGURATIONS
    trials = [samples.trial(name, load, 900) for _ in range(4) for name in names for load in LOADS]
    store(tmp_path, "frr/sessions", compared(trials))
    path = tmp_path / "frr/sessions.json"
    result = json.loads(path.read_text())
    for trial in result["trials"]:
        ours = trial["configuration"] in (peers.OURS, frr.MODULE)
        trial["control"] = lost if ours and trial["load"]["pps"]["vr1"] == LOADS[-1] else good
    path.write_text(json.dumps(result))
    data = Data(tmp_path).of("frr")
    found = {c.text: page.decided(c, data).answer for c in frr.FIGURE.claims}
    assert found["At 4 times it, vsrtune keeps BGP."] == "differs"
    assert found["At 4 times it, vsrtune keeps OSPF."] == "agrees"
    more = "At 4 times it, BGP is up for more of the time than with each other."
    assert found[more] == "differs"


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
    assert page.decided(Claim("", guarded), data).answer == ("refused" if why else "missing")


class TestFound:
    """The one page of what was found."""

    text = (RESULTS / "README.md").read_text()

    def test_it_is_what_the_stored_results_say(self) -> None:
        assert found.text(FIGURES, RESULTS) == self.text

    def test_it_is_one_page(self) -> None:
        assert len(self.text.splitlines()) <= 80

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


def test_readme_says_of_frr_what_was_measured() -> None:
    summary = frr.summary(Data(RESULTS / "raw").of(frr.FIGURE.id))
    assert "\n".join(["", *summary, ""]) in (TREE / "README.md").read_text()
