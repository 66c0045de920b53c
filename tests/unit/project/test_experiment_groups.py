"""Figures of routers made of several guests, and of two routers: known trials in, verdicts
out; and what the lab's end makes of their runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bench_samples as samples
import pytest

pytest.importorskip("matplotlib")

from experiments import inlab, page
from experiments.figures import FIGURES, fairness, fig20
from experiments.plan import Run
from experiments.sized import SIZES
from test_experiment_pages import answers, store

from vsrtune.bench.spec.model import Configuration, Load, Outcome, Trial

ROUNDS = 6
LAB = """\
left: {device: g0, namespace: gen}
right: {device: s0, namespace: sink}
routers:
  - {guest: vr1, forth: {mac: "02:00:00:00:01:00", source: 10.10.1.2}, back: {}}
  - {guest: vr2, forth: {mac: "02:00:00:00:02:00", source: 10.10.2.2}, back: {}}
"""


def compared(trials: list[Trial]) -> Outcome:
    names = list(dict.fromkeys(t.configuration for t in trials))
    return replace(
        samples.outcome(),
        method="compare",
        configurations=tuple(Configuration(name) for name in names),
        trials=tuple(trials),
        environment=dict.fromkeys(names, samples.BLOCK),
    )


class TestFig20:
    def made(
        self,
        docs: Path,
        rate: Callable[[int, str, int], float],
        idle: float = 0.1,
        sent: int | None = None,
    ) -> dict[str, str]:
        """``rate`` of so many members, bound or unbound, at a size; each round in a mood of
        its own. ``idle`` is CPU seconds of a trial of two, in which so many were ``sent``."""
        trials = []
        for turn in range(ROUNDS):
            for members in fig20.MEMBERS:
                for binding in ("unbound", "bound"):
                    for size in SIZES:
                        one = samples.trial(
                            fig20.name(members, binding), 48000,
                            rate(members, binding, size) * (1 + 0.02 * turn),
                        )  # fmt: skip
                        cpu = {**one.cpu_seconds, "idle": idle}
                        load = replace(one.load, size=size)
                        one = replace(one, load=load, cpu_seconds=cpu)
                        trials.append(one if sent is None else replace(one, sent=sent))
        store(docs / "raw", "fig20/members", compared(trials))
        return answers(docs, "fig20")

    def test_what_the_paper_says(self, tmp_path: Path) -> None:
        def rate(members: int, binding: str, size: int) -> float:
            bound = 12000 + 2000 * min(members, 3)
            return bound if binding == "bound" or members == 2 else bound * 0.8

        assert set(self.made(tmp_path, rate).values()) == {"agrees"}
        page.write(FIGURES, tmp_path)
        text = (tmp_path / "paper.md").read_text()
        assert "| 3 members, bound | 18,900 (18,000..19,800) | 18,900" in text
        # 0.8 + 1.0 s of threads and 0.5 s of SoftIRQ for 6 x 29,400 frames in the mean.
        assert "| 1 member, bound | 61.2 / 17.0 / 2 % |" in text
        assert (tmp_path / "png" / "fig20-cpu.png").stat().st_size > 5000

    def test_members_that_only_cost(self, tmp_path: Path) -> None:
        found = self.made(tmp_path, lambda members, *_: 20000 / members, idle=1.0)
        assert list(found.values())[:5] == ["differs"] * 5
        assert found["The CPUs have no time left at any point."] == "differs"

    def test_a_generator_that_falls_short_decides_nothing(self, tmp_path: Path) -> None:
        found = self.made(tmp_path, lambda members, *_: 9000.0 * members**0.01, sent=19000)
        assert found["2 members forward more than one router with bindings."] == "refused"
        page.write(FIGURES, tmp_path)
        assert " of 9,500 sent" in (tmp_path / "paper.md").read_text()

    def test_one_size_that_gains_is_not_enough(self, tmp_path: Path) -> None:
        found = self.made(
            tmp_path, lambda members, _, size: 20000 * (members if size == 60 else 1.0)
        )
        assert found["2 members forward more than one router with bindings."] == "open"
        assert found["Two members forward at least as much as one, bound, on two cores."] == (
            "agrees"
        )


class TestFig21:
    def made(self, docs: Path, rates: Mapping[tuple[str, str], float]) -> dict[str, str]:
        for stage in ("1+1", "2+2"):
            trials = [
                replace(one, load=replace(one.load, size=size))
                for turn in range(ROUNDS)
                for binding in ("unbound", "bound")
                for size in SIZES
                for one in [
                    samples.trial(binding, 48000, rates[stage, binding] * (1 + 0.02 * turn))
                ]
            ]
            store(docs / "raw", f"fig21/{stage}", compared(trials))
        TestFig20().made(docs, lambda *_: 10000)
        return answers(docs, "fig21")

    def test_what_the_papers_say(self, tmp_path: Path) -> None:
        found = self.made(
            tmp_path,
            {("1+1", "unbound"): 5000, ("1+1", "bound"): 8000,
             ("2+2", "unbound"): 3000, ("2+2", "bound"): 4000},
        )  # fmt: skip
        # 1+1 and 2+2 are made one after the other.
        assert list(found.values()) == ["agrees"] * 2 + ["refused"] * 3
        page.write(FIGURES, tmp_path)
        text = (tmp_path / "paper.md").read_text()
        assert "| 2+2, bound | 4,200 (4,000..4,400) | 4,200" in text

    def test_bindings_that_change_nothing_show_nothing(self, tmp_path: Path) -> None:
        stages = [(stage, binding) for stage in ("1+1", "2+2") for binding in ("unbound", "bound")]
        found = self.made(tmp_path, dict.fromkeys(stages, 10000))
        assert list(found.values())[:2] == ["open"] * 2


class TestFairness:
    def made(self, docs: Path, kept: Callable[[float, float], float]) -> dict[str, str]:
        """``kept`` of a flow with this share at this load, for either configuration."""
        peak = [
            samples.trial(name, load, min(load, 20000) * (1 + 0.01 * turn))
            for turn in range(ROUNDS)
            for name in ("unbound", "bound")
            for load in (16000, 32000)
        ]
        store(docs / "raw", "fairness/peak", compared(peak))
        for load in fairness.LOADS:
            for share in fairness.SHARES:
                trials = [
                    self.trial(name, load, share, lambda s, load=load: kept(load, s), turn)  # type: ignore[misc]
                    for turn in range(ROUNDS)
                    for name in ("unbound", "bound")
                ]
                store(docs / "raw", f"fairness/{fairness.name(load, share)}", compared(trials))
        return answers(docs, "fairness")

    def trial(
        self, name: str, load: float, share: float, kept: Callable[[float], float], turn: int
    ) -> Trial:
        sent = {"vr1": round(40000 * load * share), "vr2": round(40000 * load * (1 - share))}
        mood = 1 - 0.001 * turn
        got = {
            "vr1": round(sent["vr1"] * kept(share) * mood),
            "vr2": round(sent["vr2"] * kept(1 - share) * mood),
        }
        one = samples.trial(name, 1, 1)
        return replace(
            one, load=Load({k: v / 2 for k, v in sent.items()}, 2.0), sent=sum(sent.values()),
            forwarded=sum(got.values()), sent_by=sent, forwarded_by=got,
        )  # fmt: skip

    def test_the_smaller_flow_is_penalised(self, tmp_path: Path) -> None:
        found = self.made(tmp_path, lambda load, share: 1.0 if load < 1 else share)
        assert set(found.values()) == {"agrees"}
        page.write(FIGURES, tmp_path)
        text = (tmp_path / "paper.md").read_text()
        row = next(line for line in text.splitlines() if line.startswith("| 100 % | 0.3 | 0.7"))
        assert row.startswith(
            "| 100 % | 0.3 | 0.7 | 17.9 % | 47.9 % | 29.9 % (29.8..30.0) | 69.8 %"
        )

    def test_it_keeps_as_much(self, tmp_path: Path) -> None:
        found = list(self.made(tmp_path, lambda load, _: min(1.0, 0.4 / load)).values())
        assert found == ["differs"] * 6

    def test_shares_that_go_both_ways_show_nothing(self, tmp_path: Path) -> None:
        found = list(self.made(tmp_path, lambda _, s: {0.1: 0.2, 0.3: 0.9}.get(s, 0.5)).values())
        assert found[2:] == ["open"] * 4


class TestInLab:
    @pytest.fixture(autouse=True)
    def lab(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        spec = tmp_path / "bench.yaml"
        spec.write_text(LAB)
        monkeypatch.setattr(inlab, "SHARE", tmp_path)
        read = inlab.read_yaml
        monkeypatch.setattr(inlab, "read_yaml", lambda _: read(str(spec)))

    def todo(self, run: Run) -> dict[str, Any]:
        """As the lab gets it."""
        data: dict[str, Any] = json.loads(json.dumps({**asdict(run), "key": f"x/{run.name}"}))
        return data

    def test_guests_of_a_group_are_one_router(self) -> None:
        (run,) = fig20.FIGURE.runs
        (router,) = inlab.routers(self.todo(run))
        assert router == {
            "guests": ["vr1", "vr2", "vr3", "vr4"], "forth": {"source": "10.10.1.2"}
        }  # fmt: skip
        assert inlab.method(self.todo(run), 1)["sizes"] == [60, 508, 1496]

    def test_a_guest_may_be_in_a_group_with_another(self) -> None:
        own = ["quiet", "nic=B0,10.10.2.1/24,G,10.10.2.2", "nic=B1,10.20.2.1/24,S,10.20.2.2"]
        theirs = ["nic=A0,10.10.1.1/24,G,10.10.1.2", "nic=A1,10.20.1.1/24,S,10.20.1.2", "quiet"]
        assert inlab.alike(own, theirs) == [
            *theirs[:2], "nic=B0,10.10.1.1/24,G,10.10.1.2", "nic=B1,10.20.1.1/24,S,10.20.1.2"
        ]  # fmt: skip

    def test_routers_together_and_the_peak_of_the_better(self, tmp_path: Path) -> None:
        together, half = fairness.FIGURE.runs[0], fairness.FIGURE.runs[2]
        assert [r["guest"] for r in inlab.routers(self.todo(together))] == ["vr1", "vr2"]
        assert inlab.method(self.todo(together), 1)["kind"] == "sweep"
        rates: Mapping[str, int] = {"unbound": 10000, "bound": 20000}
        trials = [samples.trial(name, 32000, rate) for name, rate in rates.items()]
        store(tmp_path / "raw", "fairness/peak", compared(trials))
        assert half.name == "50-30"
        loads = inlab.method(self.todo(half), 1)["by_router"]
        assert loads == {"vr1": 3000, "vr2": 7000}
