"""Results about namespace routers: what the lab's end reads and plans, and what the page
makes of stored trials with known answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from experiments import lab, page
from experiments.__main__ import _named
from experiments.data import Data
from experiments.figures import FIGURES
from experiments.nslab import counters, measure, probes, traffic
from experiments.nslab.beds import Bed, Kind
from experiments.plan import Run

NAPI = [figure for figure in FIGURES if figure.id.startswith("napi-")]
ENVIRONMENT = {"os": "Debian 13", "kernel": "6.12.1", "cpus": 2, "netdev_max_backlog": 1000}


def runs() -> list[tuple[str, Run]]:
    return [(f"{figure.id}/{run.name}", run) for figure in NAPI for run in figure.runs]


def trial(turn: int, name: str, load: str, sent: dict[str, float], share: float) -> dict[str, Any]:
    """One second in which every stream loses all but ``share``."""
    mood = 1 + 0.01 * turn
    through = {stream: rate * share * mood for stream, rate in sent.items()}
    return {
        "round": turn, "configuration": name, "load": load, "seconds": 1.0, "sent": sent,
        "sent_pps": sent, "forwarded": through, "forwarded_pps": through,
        "counted": {"nic_ring_full": 10}, "cpu": {"net_rx": 100, "interrupts": 50},
        "latency_us": {"p50": 20 / share, "p90": 30.0, "p99": 40.0},
    }  # fmt: skip


def loads(run: Run) -> dict[str, dict[str, float]]:
    assert run.bed is not None
    factors = run.bed.get("factors", ())
    if run.bed["method"] == "latency":
        return {"probes": {}}
    if run.bed["method"] == "sweep":
        return {f"{f:g}": {"in0": 1000.0 * f} for f in factors}
    first = {"alone": {"b": 1000.0}}
    if run.bed["method"] == "flood":
        return first | {f"flood {f:g}": {"b": 1000.0, "flood": 1000.0 * f} for f in factors}
    first["both"] = {"a": 1000.0, "b": 1000.0}
    return first | {f"{f:g} times": {"a": 1000.0 * f, "b": 1000.0} for f in factors}


def store(raw: Path, shares: dict[str, float]) -> None:
    """Every run; ``shares`` says by kind what it forwards in overload."""
    for key, run in runs():
        planned = loads(run)
        trials = [
            trial(
                turn, c["name"], load, rates or {"a": 1000.0},
                1.0 if load in ("alone", "both") else shares[c["name"]],
            )
            for turn in range(run.pairs)
            for load, rates in planned.items()
            for c in run.configurations
        ]  # fmt: skip
        head = {"configurations": run.configurations, "bed": run.bed}
        data = {"run": head, "environment": ENVIRONMENT, "loads": planned, "facts": {}}
        fresh = raw / "fresh.json"
        raw.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({**data, "trials": trials}))
        lab._keep(fresh, raw / f"{key}.json", "1234567")


def answers(docs: Path, figure: str) -> list[str]:
    (found,) = [f for f in NAPI if f.id == figure]
    data = Data(docs / "raw").of(figure)
    return [page.decided(claim, data).answer for claim in found.claims]


ISOLATES = {
    "plain IP forwarding": 1.0, "macvlan": 0.2, "napi_macvlan": 1.0, "napi_macvlan, threaded": 0.97
}  # fmt: skip


class TestPage:
    def test_ours_isolates_and_macvlan_does_not(self, tmp_path: Path) -> None:
        store(tmp_path / "raw", ISOLATES)
        assert answers(tmp_path, "napi-isolation") == ["agrees"] * 9
        assert answers(tmp_path, "napi-flood") == ["agrees"] * 3
        assert answers(tmp_path, "napi-latency") == ["agrees"] * 2

    def test_a_victim_that_keeps_less_is_said(self, tmp_path: Path) -> None:
        store(tmp_path / "raw", ISOLATES | {"napi_macvlan": 0.9, "napi_macvlan, threaded": 0.1})
        assert answers(tmp_path, "napi-flood") == ["differs", "differs", "agrees"]

    def test_a_tie_is_no_difference(self, tmp_path: Path) -> None:
        store(tmp_path / "raw", dict.fromkeys(ISOLATES, 0.5))
        assert answers(tmp_path, "napi-cases") == ["open"] * 3
        assert answers(tmp_path, "napi-isolation")[2] == "open"

    def test_it_stands_on_the_page(self, tmp_path: Path) -> None:
        store(tmp_path / "raw", ISOLATES)
        page.write(FIGURES, tmp_path)
        text = (tmp_path / "napi-macvlan.md").read_text()
        assert "kernel 6.12.1, 2 CPUs, net.core.netdev_max_backlog 1000" in text
        assert "| 10 times | macvlan | 10,000 | - | 1,000 |" in text
        assert "has not been measured" not in text
        for plot in ("napi-case3", "napi-routers", "napi-interfaces", "napi-isolation-two"):
            assert (tmp_path / "png" / f"{plot}.png").stat().st_size > 5000

    def test_nothing_measured_is_said(self, tmp_path: Path) -> None:
        page.write(FIGURES, tmp_path)
        text = (tmp_path / "napi-macvlan.md").read_text()
        assert "`napi-cases/nics1`, which has not been measured" in text


def test_a_family_of_figures_by_its_first_word() -> None:
    names = [figure.id for figure in FIGURES]
    assert _named("napi", names) == [figure.id for figure in NAPI]
    assert _named("peers,fig03", names) == ["peers", "fig03"]
    assert _named("nothing", names) == ["nothing"]


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

    def test_runs_are_short_enough_for_a_sitting(self) -> None:
        assert all(run.expected_seconds < 240 for _, run in runs())


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

    def test_addresses_carry_over(self) -> None:
        assert traffic.last_address("10.9.0.1", 1) == "10.9.0.1"
        assert traffic.last_address("10.9.0.1", 256) == "10.9.1.0"

    def test_a_probe_tells_when_it_was_sent(self) -> None:
        made = probes.frame("02:76:00:00:00:00", "10.9.0.1", 5, 1234567890123456789)
        assert probes.stamp_of(made) == 1234567890123456789
        assert probes.stamp_of(b"\0" * 60) is None
