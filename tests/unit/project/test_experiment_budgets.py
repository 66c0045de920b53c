"""The figures about reserved CPU time, made of stored results with known answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_samples as samples
import pytest
from ruamel.yaml import YAML

pytest.importorskip("matplotlib")

from experiments import inlab, page
from experiments.data import Data
from experiments.figures import FIGURES, budgets, fig16, isolation
from experiments.plan import Figure, Run
from labtool import guests
from test_experiment_pages import answers, store

from vsrtune.bench.spec.model import Configuration, Load, Outcome, Trial
from vsrtune.bench.spec.parser import load_text

OURS = (budgets.FIG04, budgets.FIG05, budgets.FIG06, fig16.FIGURE, isolation.FIGURE)
WIGGLE = (1.0, 0.97, 1.02, 0.99, 1.03)


def block(*routers: str, vcpu: str = "fifo:10", vhost: str = "fifo:10") -> dict[str, Any]:
    """An environment block with the classes of the routers' threads."""
    threads = [
        {"thread": "emulator", "cpus": "0", "class": "other"},
        {"thread": "vhost macvtap0/0", "cpus": "1", "class": vhost},
        {"thread": "vhost macvtap1/0", "cpus": "1", "class": vhost},
        {"thread": "vcpu 0", "cpus": "1", "class": vcpu},
    ]
    names = routers or ("vr1",)
    guest = {**samples.BLOCK["guests"]["vr1"], "threads": threads}
    return {**samples.BLOCK, "guests": dict.fromkeys(names, guest)}


DEADLINE = "deadline:30000000/200000000/200000000ns reset-on-fork"


def trial(name: str, load: int, rate: float, **cpu: float) -> Trial:
    """Two seconds, in which the threads used these shares of a CPU."""
    made = samples.trial(name, load, rate)
    return replace(made, cpu_seconds={role: 2 * share for role, share in cpu.items()})


def compared(trials: Sequence[Trial], environment: Mapping[str, Any]) -> Outcome:
    return replace(
        samples.outcome(),
        method="compare",
        configurations=tuple(Configuration(name) for name in environment),
        trials=tuple(trials),
        environment=environment,
    )


# -- figures 4 to 6


class TestBudgets:
    """A router that forwards 400 pps for each percent, up to a peak."""

    def stored(
        self,
        docs: Path,
        figure: Figure,
        peak: float,
        *,
        cls: str = DEADLINE,
        used: float = 1.0,
        bend: float = 1.0,
    ) -> None:
        role = "vhost" if figure.id == "fig04" else "vcpu"
        trials: list[Trial] = []
        for turn in WIGGLE:
            for percent in budgets.BUDGETS:
                rate = min(peak, 400 * 100 * (percent / 100) ** bend) * turn
                name = f"{percent} %"
                share = {role: used * percent / 100}
                trials.append(trial(name, 64000, rate, **share))
        environment = {f"{p} %": block(**{role: cls}) for p in budgets.BUDGETS}
        store(docs / "raw", f"{figure.id}/budgets", compared(trials, environment))

    def verdict(self, docs: Path, figure: Figure, claim: int = 0) -> Any:
        data = Data(docs / "raw").of(figure.id)
        return page.decided(figure.claims[claim], data)

    @pytest.mark.parametrize("figure", OURS[:3], ids=lambda f: f.id)
    def test_a_line(self, tmp_path: Path, figure: Figure) -> None:
        self.stored(tmp_path, figure, 99999)
        found = self.verdict(tmp_path, figure)
        assert found.answer == "agrees"
        assert "35 to 90 %: R² 1.000 of the medians" in found.text
        assert "400 pps for each percent" in found.text

    def test_a_plateau_is_no_line_of_the_whole_range(self, tmp_path: Path) -> None:
        self.stored(tmp_path, budgets.FIG05, 20000)
        assert self.verdict(tmp_path, budgets.FIG05).answer == "differs"

    def test_a_line_that_starts_above_nothing(self, tmp_path: Path) -> None:
        self.stored(tmp_path, budgets.FIG05, 99999, bend=0.6)
        found = self.verdict(tmp_path, budgets.FIG05)
        assert float(re.findall(r"R² (\d\.\d+)", found.text)[0]) > 0.95
        assert found.answer == "differs"

    def test_no_line(self, tmp_path: Path) -> None:
        self.stored(tmp_path, budgets.FIG05, 99999, bend=3)
        assert self.verdict(tmp_path, budgets.FIG05).answer == "differs"

    def test_a_thread_that_kept_its_class(self, tmp_path: Path) -> None:
        self.stored(tmp_path, budgets.FIG04, 26000, cls="fifo:10")
        found = self.verdict(tmp_path, budgets.FIG04)
        assert found.answer == "refused"
        assert "not in force: 15 %: a vhost thread had class fifo:10" in found.text

    def test_a_thread_that_used_more_than_its_budget(self, tmp_path: Path) -> None:
        self.stored(tmp_path, budgets.FIG05, 26000, used=1.6)
        found = self.verdict(tmp_path, budgets.FIG05)
        assert found.answer == "refused"
        assert "vcpu used 24 % of a CPU in a trial, with 15 % reserved" in found.text

    def test_runs_of_different_labs_are_not_compared(self, tmp_path: Path) -> None:
        for figure in OURS[:3]:
            self.stored(tmp_path, figure, 30000)
        for figure in (budgets.FIG05, budgets.FIG06):
            found = self.verdict(tmp_path, figure, 1)
            assert found.answer == "refused"
            assert "made one after the other" in found.text

    def test_page(self, tmp_path: Path) -> None:
        self.stored(tmp_path, budgets.FIG05, 26000)
        page.write(FIGURES, tmp_path)
        text = (tmp_path / "paper.md").read_text()
        assert "| 35 % | 14,000 (13,580..14,420) | 5 |" in text
        assert "| 75 % | 26,000 (25,220..26,780) | 5 |" in text
        assert (tmp_path / "png" / "fig05.png").stat().st_size > 5000


# -- figures 16 and 17


SHARES = {"no budget": 0.6, "170 ms": 0.6, "90 ms": 0.45}


class TestQueues:
    def answers(self, docs: Path, rates: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
        trials = [
            trial(f"{which}, queue {n}", 64000, rate * turn, vcpu=SHARES[which])
            for turn in (*WIGGLE, 0.98, 1.01)
            for which, by_length in rates.items()
            for n, rate in by_length.items()
        ]
        environment = {
            f"{which}, queue {n}": block(vcpu="fifo:10" if which == "no budget" else DEADLINE)
            for which, by_length in rates.items()
            for n in by_length
        }
        store(docs / "raw", "fig16/queue", compared(trials, environment))
        return answers(docs, "fig16")

    def test_what_the_paper_says(self, tmp_path: Path) -> None:
        none = {500: 10000, 110: 20000, 50: 30000, 35: 30000, 5: 9000}
        hardly = none | {500: 15000}
        bound = {n: rate / 2 for n, rate in none.items()}
        found = self.answers(tmp_path, {"no budget": none, "170 ms": hardly, "90 ms": bound})
        assert set(found.values()) == {"agrees"}

    def test_the_opposite(self, tmp_path: Path) -> None:
        none = {500: 30000, 110: 20000, 50: 10000, 35: 10000, 5: 20000}
        hardly = {n: 0.5 * rate for n, rate in none.items()}
        found = self.answers(tmp_path, {"no budget": none, "170 ms": hardly, "90 ms": none})
        assert set(found.values()) == {"differs"}

    def test_no_difference(self, tmp_path: Path) -> None:
        same = dict.fromkeys((500, 110, 50, 35, 5), 20000.0)
        found = self.answers(tmp_path, dict.fromkeys(SHARES, same))
        like = {text for text in found if "what it does without" in text}
        assert {found.pop(text) for text in like} == {"agrees"}
        assert set(found.values()) == {"open"}


# -- isolation


class TestIsolation:
    """A budget carries 5,000 pps alone."""

    def stored(
        self,
        docs: Path,
        kept: Sequence[float],
        bare: Sequence[float],
        *,
        reaches: float = 1.0,
        vcpu: float = 0.45,
        cls: str = DEADLINE,
    ) -> None:
        threads = block("vr1", "vr2", vcpu=cls, vhost=DEADLINE)
        for run, load in (("alone", 8000), ("control", 4000)):
            made = [
                replace(
                    trial("budgets", load, min(load, 5000), vcpu=0.2, vhost=0.1),
                    load=Load({"vr2": float(load)}, 2.0),
                    sent_by={"vr2": 2 * load},
                    forwarded_by={"vr2": 2 * min(load, 5000)},
                )
                for _ in WIGGLE
            ]
            outcome = compared(made, {"budgets": threads})
            store(docs / "raw", f"isolation/{run}", replace(outcome, method="sweep"))
        for run, times in (("tenfold", 10), ("fourfold", 4)):
            self._loaded(docs, run, times, {"budgets": kept, "no budgets": bare}, reaches, vcpu,
                         {"budgets": threads, "no budgets": block("vr1", "vr2")})  # fmt: skip

    def _loaded(
        self, docs: Path, run: str, times: int, by_name: Mapping[str, Sequence[float]],
        reaches: float, vcpu: float, environment: Mapping[str, Any],
    ) -> None:  # fmt: skip
        asked = {"vr1": 5000.0 * times, "vr2": 4000.0}
        sent = {name: round(2 * pps * reaches) for name, pps in asked.items()}
        trials = []
        for name, shares in by_name.items():
            for share in shares:
                made = trial(name, 1, 0, vcpu=vcpu, vhost=0.3)
                got = {"vr1": 9000, "vr2": round(share * sent["vr2"])}
                trials.append(
                    replace(
                        made, load=Load(asked, 2.0), sent=sum(sent.values()),
                        forwarded=sum(got.values()), sent_by=sent, forwarded_by=got,
                        drops={"macvtap_ring": sum(sent.values()) - sum(got.values())},
                    )
                )  # fmt: skip
        store(docs / "raw", f"isolation/{run}", compared(trials, environment))

    GOOD = (0.9, *[0.99] * 8)  # the interval of nine leaves out the worst
    BAD = (0.3, *[0.5] * 8)

    def test_kept_and_lost(self, tmp_path: Path) -> None:
        self.stored(tmp_path, self.GOOD, self.BAD)
        assert list(answers(tmp_path, "isolation").values()) == ["agrees"] * 4

    def test_the_opposite(self, tmp_path: Path) -> None:
        self.stored(tmp_path, self.BAD, self.GOOD)
        assert list(answers(tmp_path, "isolation").values()) == ["differs"] * 4

    def test_an_interval_on_both_sides(self, tmp_path: Path) -> None:
        both = (*[0.9] * 3, *[0.99] * 6)
        self.stored(tmp_path, both, both)
        assert set(answers(tmp_path, "isolation").values()) == {"open"}

    def test_a_generator_that_falls_short(self, tmp_path: Path) -> None:
        self.stored(tmp_path, self.GOOD, self.BAD, reaches=0.8)
        assert set(answers(tmp_path, "isolation").values()) == {"refused"}

    def test_budgets_that_were_not_in_force(self, tmp_path: Path) -> None:
        self.stored(tmp_path, self.GOOD, self.BAD, vcpu=0.7)
        assert next(iter(answers(tmp_path, "isolation").values())) == "refused"
        self.stored(tmp_path, self.GOOD, self.BAD, cls="other")
        assert next(iter(answers(tmp_path, "isolation").values())) == "refused"

    def test_page(self, tmp_path: Path) -> None:
        self.stored(tmp_path, self.GOOD, self.BAD)
        page.write(FIGURES, tmp_path)
        text = (tmp_path / "paper.md").read_text()
        assert "A budget carries 5,000 pps alone" in text
        assert "| tenfold | budgets | vr2 | 4,000 | 3,960 | 99.0 % (90.0..99.0) |" in text
        assert "| control | budgets | vr2 | 4,000 | 4,000 | 100.0 % (100.0..100.0) |" in text
        assert (tmp_path / "png" / "isolation.png").stat().st_size > 5000


# -- what is asked of the lab


def _reserved(policy: str) -> dict[int, float]:
    """Percent of each CPU that a policy reserves; a router has two vhost workers."""
    data = YAML(typ="safe").load(policy)
    found: dict[int, float] = {}
    for role, count in (("vcpu", 1), ("vhost", 2)):
        rule = data["scheduler"][role]
        if rule["class"] == "deadline":
            runtime, period = (float(rule[k].removesuffix("ms")) for k in ("runtime", "period"))
            cpu = data["cpus"][role]
            found[cpu] = found.get(cpu, 0.0) + 100 * count * runtime / period
    return found


class TestRuns:
    @pytest.mark.parametrize("figure", OURS, ids=lambda f: f.id)
    def test_the_kernel_admits_it(self, figure: Figure) -> None:
        for run in figure.runs:
            routers = len(run.boot.guests)
            for configuration in run.configurations:
                for cpu, percent in _reserved(configuration["policy"]).items():
                    # CPU 0 is that of the interrupts; 6.12 admits 90 % of each.
                    assert 0 < cpu < run.boot.cpus
                    assert routers * percent <= 90 + 1e-9

    def test_budgets_are_those_named(self) -> None:
        for figure, cpu in ((budgets.FIG04, 2), (budgets.FIG05, 1), (budgets.FIG06, 1)):
            for configuration in figure.runs[0].configurations:
                named = float(configuration["name"].removesuffix(" %"))
                assert _reserved(configuration["policy"]) == pytest.approx({cpu: named})
        inside = [b for b in budgets.BUDGETS if 35 <= b <= 95]
        assert len(inside) >= 7
        assert _reserved(isolation.FIGURE.runs[0].configurations[0]["policy"]) == pytest.approx(
            {1: 40}
        )

    @pytest.mark.parametrize("figure", OURS, ids=lambda f: f.id)
    def test_trials_are_whole_periods(self, figure: Figure) -> None:
        for run in figure.runs:
            for configuration in run.configurations:
                for period in re.findall(r"period: (\d+)ms", configuration["policy"]):
                    assert round(1000 * run.seconds) % int(period) == 0

    @pytest.mark.parametrize("figure", OURS, ids=lambda f: f.id)
    def test_the_bench_takes_the_specifications(
        self, figure: Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lab = [guests.Guest(i, f"vr{i}", "libvirt", 1, 1) for i in (1, 2)]
        described = YAML(typ="safe").load(guests.bench_spec(lab))
        monkeypatch.setattr(inlab, "read_yaml", lambda path: described)
        monkeypatch.setattr(inlab, "SPECS", tmp_path / "specs")
        monkeypatch.setattr(inlab, "SHARE", tmp_path)
        TestIsolation().stored(tmp_path, TestIsolation.GOOD, TestIsolation.BAD)
        for run in figure.runs:
            self._check(figure, run)

    def _check(self, figure: Figure, run: Run) -> None:
        key = f"{figure.id}/{run.name}"
        made = {"key": key, **{f: getattr(run, f) for f in run.__dataclass_fields__}}
        first, *others = inlab.write_specs(made)
        spec = load_text(Path(first).read_text(), first)
        for path in others:
            assert load_text(Path(path).read_text(), path, spec).method == spec.method
        assert spec.method.seconds == run.seconds
        if not run.by_router:
            assert spec.method.kind == "sweep"
            assert [r.name for r in spec.routers] == [run.router]
            return
        assert spec.method.kind == "fairness"
        # Of the 5,000 pps that a budget carries alone in the stored result.
        assert spec.method.by_router == {
            name: round(5000 * factor) for name, factor in run.by_router.items()
        }
        assert [r.name for r in spec.routers] == ["vr1", "vr2"]
