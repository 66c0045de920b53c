"""The kit for real hardware, against made-up routers."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_router
import bench_samples as samples
import pytest
from bench_router import FakeRouter
from shell_samples import guest

from vsrtune.bench import paper
from vsrtune.bench.methods.methods import run
from vsrtune.bench.report import tables
from vsrtune.bench.report.files import outcome_from_json, outcome_to_json
from vsrtune.bench.spec.model import Configuration, Load, Method, Outcome, Trial, Tuning
from vsrtune.bench.spec.parser import policies
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import InputError, VsrtuneError
from vsrtune.model.guest import Role

ONLINE = CpuSet.parse("0-7")
GUEST = replace(guest(), uuid="11111111-2222-3333-4444-555555555555")
SPEC = bench_router.spec(Method(rates=(1024,), seconds=2.0))
NAMES = ("untuned", "bound", "vcpu = vhost")
CONFIGURATIONS = tuple(map(Configuration, NAMES))
PAIRS = 6


def policy(name: str, **more: Any) -> str:
    found = {one.name: one for one in paper.configurations(GUEST, ONLINE, **more)}
    return found[name].policy or ""


class TestConfigurations:
    def test_every_policy_is_one(self) -> None:
        found = paper.configurations(GUEST, ONLINE)
        assert found[0] == Configuration("untuned")
        for one in found:
            if one.tuning is Tuning.POLICY:
                (read,) = policies(one)
                assert read.guest == GUEST.uuid
                assert read.irq_set

    def test_the_first_cpu_is_for_interrupts_the_others_for_the_router(self) -> None:
        own = policy("bound", cpus="4-7")
        assert "cpus: {irq: 4, vcpu: 5, vhost: 6, emulator: auto}" in own
        assert "cpus: {irq: 0, vcpu: 1, vhost: 1, emulator: auto}" in policy("vcpu = vhost")
        assert 'pool: "1-3"' in policy("vsrtune")
        assert "vcpu: 1, vhost: 1" in policy("bound", cpus="0-1")
        pins = {one.name: one.cpus for one in paper.configurations(GUEST, ONLINE)}["libvirt pins"]
        assert pins == "1-3"

    @pytest.mark.parametrize("cpus", ["3", "6-9"])
    def test_cpus_that_there_are_not(self, cpus: str) -> None:
        with pytest.raises(InputError, match="two CPUs or more are needed"):
            paper.configurations(GUEST, ONLINE, cpus)

    def test_several_vcpus_are_never_put_on_one_cpu_in_class_fifo(self) -> None:
        (vcpu,) = GUEST.by_role(Role.VCPU)
        two = replace(
            GUEST, threads=(*GUEST.threads, replace(vcpu, key=replace(vcpu.key, tid=999)))
        )
        found = paper.configurations(two, ONLINE)
        assert {one.name for one in found} <= {
            "untuned",
            "libvirt pins",
            "vsrtune",
            "TuneD virtual-host",
        }

    def test_some_only(self) -> None:
        found = paper.configurations(GUEST, ONLINE, only=["bound"])
        assert [one.name for one in found] == ["untuned", "bound"]
        with pytest.raises(InputError, match=r"no 'bond' here.*bound"):
            paper.configurations(GUEST, ONLINE, only=["bond"])

    @pytest.mark.parametrize(
        ("told", "revert"),
        [
            ("Current active profile: balanced\n", ("tuned-adm", "profile", "balanced")),
            ("Current active profile: a b\nx: c\n", ("tuned-adm", "profile", "a", "b")),
            ("No current active profile.\n", ("tuned-adm", "off")),
            ("Cannot talk to TuneD daemon via DBus.\nCurrent active profile: balanced\n", None),
        ],
    )
    def test_tuned_is_measured_where_it_runs_and_put_back(
        self, told: str, revert: tuple[str, ...] | None,
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        program = tmp_path / "tuned-adm"
        program.write_text(f"#!{sys.executable}\nprint({told!r})\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        found = {one.name: one for one in paper.configurations(GUEST, ONLINE)}
        assert (revert is None) == ("TuneD virtual-host" not in found)
        if revert is not None:
            assert found["TuneD virtual-host"].revert == revert


class Runs:
    """Trials of a router by configuration, of which the first so many are known already."""

    def __init__(self, earlier: list[Trial], **peaks: FakeRouter) -> None:
        self.earlier = earlier
        self.routers = list(peaks.values())
        self.made: list[Trial] = []

    def trial(self, order: tuple[int, Load]) -> Trial:
        index, load = order
        if self.earlier:
            return self.earlier.pop(0)
        self.made.append(self.routers[index].trial(load, NAMES[index]))
        return self.made[-1]

    def measure(self, spec: Any = SPEC) -> tuple[dict[str, Any], list[Trial]]:
        return run(paper.method(spec, CONFIGURATIONS, PAIRS, 3, self.earlier), self.trial)


def runs(earlier: list[Trial] | None = None, **more: float) -> Runs:
    return Runs(
        [] if earlier is None else earlier,
        untuned=FakeRouter(20_000, hurt=0.2, **more),
        bound=FakeRouter(30_000, **more),
        equal=FakeRouter(40_000, **more),
    )


class TestLoads:
    def test_are_multiples_of_what_the_untuned_router_forwards_at_its_best(self) -> None:
        found, trials = runs().measure()
        offered = [step["offered"] for step in found["search"]]
        assert offered == [1024, 2048, 4096, 8192, 16384, 32768, 65536]
        loads = [point["offered"] for point in found["points"]]
        peak = max(step["pps"] for step in found["search"])
        assert loads == [int(peak * factor) // 100 * 100 for factor in paper.FACTORS]
        assert len(trials) == len(offered) + 4 * len(NAMES) * PAIRS

    def test_none_is_more_than_the_generator_sends(self) -> None:
        found, trials = runs(most=25_000).measure()
        assert found["points"][-1]["offered"] == 24_200
        assert not any(t.fell_short for t in trials[len(found["search"]) :])

    def test_none_is_above_the_limit(self) -> None:
        limited = replace(SPEC, limits=replace(SPEC.limits, pps=5000))
        found, trials = runs().measure(limited)
        assert max(t.load.total for t in trials) <= 5000
        assert [step["offered"] for step in found["search"]] == [1024, 2048, 4096]

    def test_a_router_that_forwards_nothing_is_not_compared(self) -> None:
        with pytest.raises(VsrtuneError, match="forwards nothing"):
            Runs([], untuned=FakeRouter(10)).measure()


@pytest.mark.parametrize("rounds", [0, 1.5, 3])
def test_a_run_goes_on_from_its_last_whole_round(rounds: float) -> None:
    found, trials = runs().measure()
    steps, size = len(found["search"]), 4 * len(NAMES)
    known = steps + int(rounds * size)
    again = runs(trials[:known])
    whole, _ = again.measure()
    kept = steps + int(rounds) * size
    assert [t.load for t in again.made] == [t.load for t in trials[kept:]]
    assert any("interrupted" in note for note in whole["notes"])
    assert whole["points"] == found["points"]


def outcome(**more: float) -> Outcome:
    found, trials = runs(**more).measure()
    return replace(
        samples.outcome("paper"),
        spec=SPEC, configurations=CONFIGURATIONS, trials=tuple(trials), summary=found,
    )  # fmt: skip


def rows(of: Outcome) -> dict[str, tuple[str, ...]]:
    return {row[1]: row for row in paper.beside(of).rows}


class TestReport:
    def test_stands_beside_the_paper_and_the_lab(self) -> None:
        found = rows(outcome_from_json(outcome_to_json(outcome())))
        assert found["bound / untuned"][2:] == (
            "more", "not judged", "2.98 (95% 2.98..2.98, 6 pairs)",
        )  # fmt: skip
        assert found["bound"][-1] == "30,000 pps"
        assert found["vcpu = vhost / peak"][-1] == "1.00"
        assert found["queue 5 / queue 50"][-1] == "not measured"

    def test_the_tables_begin_with_it(self) -> None:
        titles = [table.title for table in tables.outcome_tables(outcome())]
        assert titles[1].startswith("Beside the paper")
        assert titles[2].startswith("Compared with untuned at")

    def test_a_router_that_stood_still_is_no_ratio(self) -> None:
        made = outcome()
        made.summary["points"][-1]["configurations"][0]["values"][2] = 0.0
        assert rows(made)["bound / untuned"][-1] == "untuned stood still in 1 of 6 trials"

    def test_an_unfinished_run_has_tables(self) -> None:
        made = replace(outcome(), summary={}, unfinished="killed, or still running")
        assert "Forwarded" in [table.title for table in tables.outcome_tables(made)]


def test_the_lab_column_is_what_the_rules_make_of_the_raw_results() -> None:
    from experiments.data import Data
    from experiments.judge import Place, Refused, ratios

    docs = Path(__file__).resolve().parents[3] / "docs"
    data = Data(docs / "results/raw")
    page = (docs / "hardware.md").read_text()
    quoted = set(re.findall(r"\| ([\d.]+ \([\d.]+\))", page))
    for point in paper._paper()["points"]:
        run_, of, *to = point["raw"]
        peak = data.peak(run_, of)
        alone = to in ([], ["peak"])
        beside = Place(run_, of, peak.offered) if alone else Place(run_, *to)
        try:
            ratio = ratios(data, Place(run_, of), beside)[0]
            told = f"{ratio.median:.2f}" if to == ["peak"] else str(ratio)
            quoted.discard(f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})")
        except Refused:
            told = "not judged"
        assert point["lab"] == (told if to else f"{peak.pps:,.0f} pps"), point
    assert quoted == set()
