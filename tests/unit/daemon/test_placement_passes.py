"""Loads in the daemon: placement: auto through whole passes, measured, moved, counted, remembered,
put back; and the samples that the status page shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shell_samples as samples
from advanced_root import proc_stat
from fake_host import FakeHost
from hosttree import HostTree
from shell_samples import policies

from vsrtune.core.cpuset import CpuSet
from vsrtune.daemon.http import exposition
from vsrtune.daemon.load_tracker import INTERVALS, SPACING, WHOLE, LoadKeeper, RecentKeeper
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.execute.journal import Journal
from vsrtune.model.daemon_state import DaemonState, GuestState, Recent
from vsrtune.model.guest import Guest, NicKind
from vsrtune.model.load import WINDOWS, CpuShares, FrameRates, data_plane
from vsrtune.observe import load as load_module
from vsrtune.observe.load import LoadMeter
from vsrtune.policy.model import Policy
from vsrtune.views import page_data

SECOND = 10**9
LISTED = 'guest: "*"\ncpus:\n  irq: 0\n  vcpu: 1\n  vhost: 1\nprofile: none\n'
PLACED = 'guest: "*"\nplacement: auto\ncpus:\n  irq: 0\nprofile: none\n'


class Machine:
    """A host with one router, its threads' CPU time, and the daemon's passes over it."""

    def __init__(self, place: Path, journal: Journal) -> None:
        self.tree = HostTree()
        self.host = FakeHost()
        self.path = place / "run" / "load.json"
        self.now = 100 * SECOND
        self.ran = {t.key: 0 for t in data_plane(self.host.snapshot)}
        self.passes = Reconciler(
            self.host, self.host, journal, policies(LISTED),
            meter=LoadMeter(self.tree.root(), self.path, lambda: self.now),
        )  # fmt: skip
        self.before = self.host.snapshot
        self.work(0, 0)

    def work(self, seconds: int, *shares: float) -> None:
        """Time passes in which the threads run for these shares of it."""
        self.now += seconds * SECOND
        for (key, ran), share in zip(self.ran.items(), (*shares, 0, 0), strict=False):
            self.ran[key] = ran + int(share * seconds * SECOND)
            self.tree.file(f"/proc/{key.pid}/task/{key.tid}/schedstat", f"{self.ran[key]} 0 1\n")

    def cpus(self) -> list[CpuSet]:
        return [t.affinity for t in data_plane(self.host.snapshot)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Journal.open(tmp_path / "journal.jsonl", samples.BOOT) as journal:
        yield Machine(tmp_path, journal)


def test_threads_part_when_they_are_busy_and_then_stay(machine: Machine) -> None:
    passes = machine.passes
    passes.run()
    passes.reload(policies(PLACED))
    passes.run()
    assert machine.cpus() == [CpuSet([1]), CpuSet([1])], "they keep what they had"
    for _ in range(WINDOWS):
        assert passes.state.totals.moves == 0
        machine.work(10, 0.9, 0.8)
        passes.run()
    assert len(set(machine.cpus())) == 2
    totals = passes.state.totals
    assert totals.moves == 1
    for _ in range(2 * WINDOWS):
        machine.work(10, 0.9, 0.8)
        assert not passes.run()
    assert passes.state.totals.writes == totals.writes
    told = exposition(passes.state).splitlines()
    assert "vsrtune_placement_moves_total 1.0" in told
    loads = [line for line in told if line.startswith("vsrtune_thread_load_ratio{")]
    assert sorted(line.rpartition(" ")[2] for line in loads) == ["0.8", "0.9"]
    kept = load_module.load(samples.BOOT, machine.path)
    assert sorted(t.load[-1] for t in kept.threads) == [0.8, 0.9]
    assert passes.stop()
    assert machine.host.snapshot == machine.before


def test_without_the_key_nothing_is_measured(machine: Machine) -> None:
    for _ in range(3):
        machine.work(10, 0.9, 0.8)
        machine.passes.run()
    assert not machine.path.exists()
    assert "vsrtune_thread_load_ratio{" not in exposition(machine.passes.state)


def test_a_load_that_cannot_be_remembered_stops_nothing(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.path.parent.write_text("in the way")
    machine.passes.policies = policies(PLACED)
    for _ in range(4):
        machine.work(10, 0.9, 0.8)
        machine.passes.run()
    assert machine.passes.state.totals.pass_errors == 0
    assert len([r for r in caplog.records if "measured loads" in r.message]) == 1


@pytest.mark.parametrize("few", [0, 16])
def test_all_are_planned_for_when_loads_are_new_but_seldom_with_many_guests(
    machine: Machine, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass plans for some guests alone; where threads go by load, all concern all."""
    monkeypatch.setattr("vsrtune.daemon.load_tracker.FEW", few)
    meter = LoadMeter(machine.tree.root(), machine.path, lambda: machine.now)
    keeper, placed = LoadKeeper(meter), policies(PLACED)

    def due(now: float, rules: tuple[Policy, ...] = placed) -> bool:
        keeper.measured(machine.host.snapshot, rules, now)
        return keeper.due

    assert not due(1000.0), "nothing is measured yet"
    machine.work(10, 0.9)
    assert not due(1010.0, policies(LISTED)), "no policy places by load"
    assert due(1010.0)
    machine.work(10, 0.5)
    assert due(1020.0) is bool(few), "all were planned for a moment ago"
    machine.work(10, 0.7)
    assert due(1010.0 + WHOLE)


class Sampled:
    """A daemon that samples guests, with a clock and /proc of its own. A guest's macvtap has
    received, dropped and sent ``frames``."""

    def __init__(self, *guests: Guest) -> None:
        self.guests = guests or (samples.guest(),)
        self.now = 50.0
        self.frames: dict[str, tuple[int, int, int]] = {}
        self.ticks: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}
        self.reads: list[str] = []
        self.fails = False
        root: Any = self
        self.keeper = RecentKeeper(root, lambda: self.now)

    def read(self, path: str) -> str:
        self.reads.append(path)
        if self.fails:
            raise OSError("no such thing")
        if path == "/proc/stat":
            return proc_stat(self.ticks)
        rows = {
            i.target: self.frames.get(i.target, (0, 0, 0))
            for g in self.guests
            for i in g.interfaces
        }
        lines = [
            f"{n}: 0 {rx} 0 {lost} 0 0 0 0 0 {tx} 0 0 0 0 0 0" for n, (rx, lost, tx) in rows.items()
        ]
        return "\n".join(["h", "h", *lines, ""])

    def after(self, seconds: float, **frames: tuple[int, int, int]) -> Recent:
        self.now += seconds
        self.frames |= frames
        told = tuple(GuestState(g.ref, g.source, tuned=True) for g in self.guests)
        state = DaemonState(snapshot=samples.snapshot(*self.guests), guests=told)
        return self.keeper.update(state).recent


class TestRecent:
    def test_rates_are_of_the_time_between_two_samples(self) -> None:
        sampled = Sampled()
        assert sampled.after(0, macvtap100=(50, 5, 40)) == Recent()
        sampled.ticks = {0: (60, 20, 40)}
        recent = sampled.after(10, macvtap100=(1050, 105, 840))
        assert recent.seconds == (10,)
        assert recent.rates == {"vr1": (FrameRates(80, 10),)}
        assert recent.cpus == {0: CpuShares(0.6, 0.2)}
        # A device that is made anew begins at 0.
        recent = sampled.after(20, macvtap100=(7, 0, 7))
        assert recent.seconds == (10, 20)
        assert recent.rates == {"vr1": (FrameRates(80, 10), None)}
        assert recent.cpus == {}

    def test_a_sample_is_two_files_and_not_more_often_than_it_is_worth(self) -> None:
        sampled = Sampled(*(samples.guest(f"vr{n}", 100 + n) for n in range(100)))
        sampled.after(0)
        for _ in range(11):
            recent = sampled.after(SPACING / 10)
        assert sorted(set(sampled.reads)) == ["/proc/net/dev", "/proc/stat"]
        assert len(sampled.reads) == 4
        assert len(recent.seconds) == 1

    def test_however_long_and_however_many_guests_no_more_is_kept(self) -> None:
        sampled = Sampled(*(samples.guest(f"vr{n:03}", 100 + n) for n in range(500)))
        for _ in range(2 * INTERVALS):
            recent = sampled.after(10)
        assert len(recent.seconds) == INTERVALS
        assert len(recent.rates) == page_data.GUESTS
        assert {len(rates) for rates in recent.rates.values()} == {INTERVALS}

    def test_a_guest_that_comes_has_no_rates_of_before(self) -> None:
        sampled = Sampled()
        sampled.after(0)
        sampled.after(10)
        sampled.guests = (*sampled.guests, samples.guest("vr2", 200))
        assert sampled.after(10).rates["vr2"] == (None, None)
        assert sampled.after(10, macvtap200=(9, 0, 9)).rates["vr2"] == (
            None,
            None,
            FrameRates(0.9, 0),
        )
        sampled.guests = sampled.guests[:1]
        assert list(sampled.after(10).rates) == ["vr1"]

    def test_files_that_cannot_be_read_leave_no_rates(self) -> None:
        sampled = Sampled()
        sampled.after(0)
        sampled.fails = True
        assert sampled.after(10).rates == {}
        sampled.fails = False
        sampled.after(10)
        assert sampled.after(10).rates["vr1"][-1] == FrameRates(0, 0)

    def test_devices_that_tell_nothing_of_the_guest_alone(self) -> None:
        first = samples.guest()
        unknown = replace(first, interfaces=(replace(first.interfaces[0], kind=NicKind.OTHER),))
        shared = replace(samples.guest("vr2", 200), interfaces=first.interfaces)
        for guests in ((unknown,), (first, shared)):
            sampled = Sampled(*guests)
            sampled.after(0)
            assert sampled.after(10).rates == {}
