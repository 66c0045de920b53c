"""What the lab is asked to measure for docs/results, and what its end makes and reads of that."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

pytest.importorskip("matplotlib")

import bench_samples as samples
from experiments import inlab, sessions
from experiments.figures import FIGURES, budgets, fairness, isolation
from experiments.lab import Others
from experiments.nslab import counters, measure, probes, traffic
from experiments.nslab.beds import Bed, Kind
from experiments.plan import TREE
from labtool import guests

from vsrtune.bench.cli import read_spec

RUNS = {f"{figure.id}/{run.name}": run for figure in FIGURES for run in figure.runs}
OF_BENCH = {key: run for key, run in RUNS.items() if run.bed is None}


def todo(key: str) -> dict[str, Any]:
    """A run as the lab gets it."""
    data: dict[str, Any] = json.loads(json.dumps({**asdict(RUNS[key]), "key": key}))
    return data


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two routers, and the results that are stored."""
    routers = [guests.Guest(i, f"vr{i}", "libvirt", 1, 1) for i in (1, 2, 3)]
    texts = {
        "/run/lab/bench.yaml": guests.bench_spec(routers),
        "/run/lab/bench-native.yaml": guests.native_bench_spec(1),
    }
    monkeypatch.setattr(inlab, "read_yaml", lambda path: YAML(typ="safe").load(texts[path]))
    monkeypatch.setattr(inlab, "SPECS", tmp_path)
    monkeypatch.setattr(inlab, "SHARE", TREE / "docs/results")


@pytest.mark.parametrize("key", OF_BENCH)
def test_the_bench_takes_the_specifications(
    key: str, lab: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OF_BENCH[key]
    # What scales it may not have been measured yet.
    monkeypatch.setattr(inlab, "peak", lambda _: 10_000.0)
    first, *others = map(Path, inlab.write_specs(todo(key)))
    spec = read_spec(first)
    assert all(read_spec(path, spec).method == spec.method for path in others)
    assert spec.method.seconds == run.seconds
    if run.by_router:
        assert spec.method.kind == "fairness"
        assert [r.name for r in spec.routers] == list(spec.method.by_router) == [*run.by_router]
    else:
        wanted = ("+".join(run.guests),) if run.guests else run.together or (run.router,)
        names = ["native" if r.native else r.name for r in spec.routers]
        assert (spec.method.kind, names) == ("sweep", [*wanted])


def test_the_module_still_takes_the_patch_of_an_experiment() -> None:
    patch = TREE / "tests/experiments/early_drop.patch"
    done = subprocess.run(
        ["git", "-C", str(TREE), "apply", "--check", str(patch)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_guest_may_be_in_a_group_with_another() -> None:
    own = ["quiet", "nic=B0,10.10.2.1/24,G,10.10.2.2", "nic=B1,10.20.2.1/24,S,10.20.2.2"]
    theirs = ["nic=A0,10.10.1.1/24,G,10.10.1.2", "nic=A1,10.20.1.1/24,S,10.20.1.2", "quiet"]
    assert inlab.alike(own, theirs) == [
        *theirs[:2], "nic=B0,10.10.1.1/24,G,10.10.1.2", "nic=B1,10.20.1.1/24,S,10.20.1.2"
    ]  # fmt: skip


def test_loads_are_shares_of_the_peak_of_the_better(lab: None) -> None:
    peak = inlab.peak(todo("fairness/50-30"))
    assert peak > 10_000
    wanted = {"vr1": 0.5 * 0.3 * peak, "vr2": 0.5 * 0.7 * peak}
    found = inlab.method(todo("fairness/50-30"), 1)["by_router"]
    assert found == {name: inlab.hundreds(rate) for name, rate in wanted.items()}
    assert fairness.name(0.5, 0.3) == "50-30"


def reserved(policy: str) -> dict[int, float]:
    """Percent of each CPU that a policy reserves; a router has two vhost workers."""
    data = YAML(typ="safe").load(policy)
    found: dict[int, float] = {}
    for role, count in (("vcpu", 1), ("vhost", 2)):
        rule = data.get("scheduler", {}).get(role, {})
        if rule.get("class") == "deadline":
            runtime, period = (float(rule[k].removesuffix("ms")) for k in ("runtime", "period"))
            cpu = data["cpus"][role]
            found[cpu] = found.get(cpu, 0.0) + 100 * count * runtime / period
    return found


@pytest.mark.parametrize("key", OF_BENCH)
def test_the_kernel_admits_the_budgets_and_trials_are_whole_periods(key: str) -> None:
    run = OF_BENCH[key]
    for configuration in run.configurations:
        policy = configuration.get("policy", "")
        for cpu, percent in reserved(policy or "{}").items():
            # CPU 0 is that of the interrupts; 6.12 admits 90 % of each.
            assert 0 < cpu < run.boot.cpus
            assert len(run.boot.guests) * percent <= 90 + 1e-9
        for period in re.findall(r"period: (\d+)ms", policy):
            assert round(1000 * run.seconds) % int(period) == 0


def test_budgets_are_those_named() -> None:
    named: Mapping[int, float]
    for figure, cpu in ((budgets.FIG04, 2), (budgets.FIG05, 1), (budgets.FIG06, 1)):
        for configuration in figure.runs[0].configurations:
            named = {cpu: float(configuration["name"].removesuffix(" %"))}
            assert reserved(configuration["policy"]) == pytest.approx(named)
    own = isolation.FIGURE.runs[0].configurations[0]["policy"]
    assert reserved(own) == pytest.approx({1: 40})


class TestSessions:
    """What the record beside the bench makes of what the peers see."""

    def control(
        self, lost: range = range(0), routes: Mapping[int, int] | None = None,
        bfd: bool = False, count: int = 20,
    ) -> Any:  # fmt: skip
        """Of a trial of two seconds from 3.0 on, after half a second of warming up from 2.0 on, at
        1,000 pps; BGP's session is lost in these of ``count`` ticks of half a second each."""
        ticks: list[dict[str, Any]] = []
        sent = 0
        for number in range(count):
            at = number / 2
            sent += 500 if at == 2.5 or 3.5 <= at <= 5.0 else 3
            drops = {"bgp": int(number in lost or number > max(lost, default=99)), "bfd": 2}
            ticks.append(
                {
                    "at": at, "sent": sent, "bgp": number not in lost, "ospf": True, "bfd": bfd,
                    "drops": drops, "routes": (routes or {}).get(number, 10),
                }
            )  # fmt: skip
        lines = [
            *ticks,
            {"at": 4.1, "snmp": 0.0123},
            {"at": 4.2, "ssh": None},
            {"at": 1.0, "snmp": 1},
        ]
        trial = samples.trial("a", 1000, 900)
        return sessions.control(sessions.in_order(lines), trial, 10, 5.2)

    def test_only_what_was_under_load_and_after_it_counts(self) -> None:
        found = self.control()
        assert found["loaded"] == 4
        assert found["bgp"] == found["ospf"] == "1" * 13
        assert (found["snmp"], found["ssh"]) == ([12.3], [None])
        assert found["drops"] == {"bgp": 0, "bfd": 0}

    def test_all_is_back_when_all_sessions_and_routes_are(self) -> None:
        for session in ("ospf", "routes"):
            assert self.control()[session][0] == "1"
        assert self.control()["before"] is False  # BFD never was up
        assert self.control()["converged"] is None

    def test_a_session_that_was_lost(self) -> None:
        found = self.control(range(9, 12), {11: 4, 12: 9})
        assert found["bgp"] == "1100011111111"
        assert found["routes"] == "1111001111111"
        assert found["drops"]["bgp"] == 1

    def test_a_session_that_falls_within_a_hold_time_is_lost_by_this_trial(self) -> None:
        """Its peer's timer ends 7 s after the load."""
        found = self.control(range(24, 26), bfd=True, count=30)
        assert found["bgp"].endswith("11001111")
        assert (found["converged"], found["rested"]) == (8.0, False)
        found = self.control(range(24, 26), bfd=True, count=46)
        assert (found["converged"], found["rested"]) == (8.0, True)

    def test_a_hold_time_begins_after_the_load(self) -> None:
        assert self.control(bfd=True, count=29)["rested"] is False
        found = self.control(bfd=True, count=30)
        assert (found["converged"], found["rested"]) == (0.0, True)


# -- namespace routers


class TestPlan:
    def test_every_round_meets_every_load_of_every_kind_once(self) -> None:
        standing = [Bed(Kind(name, "macvlan"), [], [], {}) for name in "xyz"]
        planned: list[measure.Load] = [("low", {}), ("high", {})]
        made = list(measure.schedule({"seed": 3, "pairs": 4}, standing, planned))
        each = Counter((turn, one.kind.name, load[0]) for turn, one, load in made)
        assert len(each) == 4 * 3 * 2
        assert set(each.values()) == {1}
        assert [turn for turn, _, _ in made] == sorted(turn for turn, _, _ in made)
        orders = {
            tuple((o.kind.name, n) for t, o, (n, _) in made if t == turn) for turn in range(4)
        }
        assert len(orders) > 1

    def test_an_overload_stays_within_what_the_generator_can_send(self) -> None:
        assert measure.overloads((3.0, 10.0), 100.0, 2000.0) == [300.0, 1000.0]
        assert measure.overloads((3.0, 10.0), 100.0, 700.0) == [300.0, 600.0]
        assert measure.overloads((3.0, 10.0), 100.0, 250.0) == [150.0]


class TestReading:
    def test_a_column_of_interrupts(self) -> None:
        text = (
            "           CPU0       CPU1\n"
            "  9:          0          3   IO-APIC   9-fasteoi   acpi\n"
            "LOC:         11         12   Local timer interrupts\n"
            "ERR:          7\n"
        )
        assert counters.parse_column(text, 1) == {"9": 3, "LOC": 12}

    def test_the_backlog_by_the_cpu_that_the_line_names(self) -> None:
        line = "{:08x} {:08x} {:08x} " + "00000000 " * 9 + "{:08x} 00000000 00000000"
        text = line.format(256, 16, 1, 0) + "\n" + line.format(32, 0, 0, 3) + "\n"
        assert counters.parse_softnet(text) == {0: (256, 16, 1), 3: (32, 0, 0)}

    def test_what_the_generator_sent_and_the_wire_refused(self) -> None:
        text = (
            "Current:\n     pkts-sofar: 900  errors: 100\n"
            "Result: OK: 500000(c1+d2) usec, 900 (60byte,0frags)\n"
        )
        assert traffic.parse("a", text) == traffic.Sent(1000, 0.5)

    def test_a_probe_tells_when_it_was_sent(self) -> None:
        made = probes.frame("02:76:00:00:00:00", "10.9.0.1", 5, 1234567890123456789)
        assert probes.stamp_of(made) == 1234567890123456789
        assert probes.stamp_of(b"\0" * 60) is None


def test_what_others_take_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab sleeps, and this process does not."""
    monkeypatch.setattr(Others, "EVERY", 0.1)
    made = tmp_path / "made.json"
    made.write_text(json.dumps({"started": datetime.now(UTC).isoformat()}))
    with Others(["sleep", "1"]) as others:
        while others.lab.poll() is None:
            made.touch()
    found = others.during(made)
    assert found is not None
    assert 0 < found <= 1
    made.write_text(json.dumps({"started": datetime.now(UTC).isoformat()}))
    assert others.during(made) is None
