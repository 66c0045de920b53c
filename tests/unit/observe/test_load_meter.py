"""The meter on a tree of /proc/TID/schedstat files, and the file it leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hosttree import HostTree
from planning_samples import change, change_one, cpus, router, snapshot

from vsrtune.core.errors import ObserveError
from vsrtune.model.guest import Role
from vsrtune.model.load import data_plane
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe import load as load_meter
from vsrtune.observe import load as load_module
from vsrtune.observe.load import LoadMeter, Loads, ThreadLoad

SECOND = 10**9


class Lab:
    """A router whose threads are given CPU time, and a clock."""

    def __init__(self, place: Path) -> None:
        self.tree = HostTree()
        self.seen = snapshot(router())
        self.path = place / "run" / "load.json"
        self.now = 100 * SECOND
        self.ran = {t.key: 0 for t in data_plane(self.seen)}
        self.meter = self.new()
        self.pass_time(0)

    def new(self) -> LoadMeter:
        return LoadMeter(self.tree.root(), self.path, lambda: self.now)

    def pass_time(self, seconds: float, *shares: float) -> None:
        """The threads run for these shares of the time that passes."""
        self.now += int(seconds * SECOND)
        for n, key in enumerate(self.ran):
            self.ran[key] += int((shares[n] if n < len(shares) else 0) * seconds * SECOND)
            path = f"/proc/{key.pid}/task/{key.tid}/schedstat"
            self.tree.file(path, f"{self.ran[key]} 0 1\n")

    def update(self) -> list[tuple[float, ...]]:
        return [t.load for t in data_plane(self.meter.update(self.seen))]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_loads_by_thread_whenever_one_looks(lab: Lab) -> None:
    assert lab.update() == [(), (), ()]
    lab.pass_time(2, 0.9, 0.9, 0.9)
    assert lab.update() == [(), (), ()], "too early for a window"
    lab.pass_time(8, 0.4, 0.2)
    assert lab.update() == [(0.5,), (0.34,), (0.18,)]
    for _ in range(3):
        lab.pass_time(25, 1.0, 0.1)
        found = lab.update()
    assert found == [(1.0, 1.0, 1.0), (0.1, 0.1, 0.1), (0.0, 0.0, 0.0)]


def test_windows_end_anew_when_a_thread_has_moved(lab: Lab) -> None:
    lab.seen = snapshot(change(router(), Role.VHOST, affinity=cpus("1")))
    lab.update()
    for share in (0.2, 0.4):
        lab.pass_time(10, share)
        lab.update()
    lab.seen = replace(lab.seen, guests=(change_one(lab.seen.guests[0], 1021, affinity=cpus("2")),))
    lab.pass_time(10, 1.0)
    assert lab.update()[0] == (0.3,), "the window in which it moved does not count"
    lab.pass_time(10, 0.5)
    assert lab.update()[0] == (0.3, 0.5)


def test_pinning_a_thread_that_floated_is_no_move(lab: Lab) -> None:
    lab.update()
    lab.pass_time(10, 0.2)
    lab.update()
    lab.seen = snapshot(change(router(), Role.VCPU, affinity=cpus("1")))
    lab.pass_time(10, 0.4)
    assert lab.update()[0] == (0.2, 0.4)


def test_threads_that_are_gone_are_forgotten_and_unreadable_ones_left_out(lab: Lab) -> None:
    lab.update()
    lab.pass_time(10, 0.5)
    lab.update()
    both = lab.seen
    lab.seen = Snapshot(both.host, ())
    assert lab.update() == []
    lab.seen = both
    assert lab.update() == [(), (), ()]
    key = next(iter(lab.ran))
    lab.tree.file(f"/proc/{key.pid}/task/{key.tid}/schedstat", "nothing\n")
    lab.now += 10 * SECOND
    assert lab.update()[0] == ()
    assert lab.update()[1] == (0.0,)


def test_a_look_reads_so_many_threads_and_all_in_turn(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_meter, "BATCH", 2)
    for _ in range(2):
        lab.update()
    lab.pass_time(10, 0.5, 0.5, 0.5)
    assert sorted(len(load) for load in lab.update()) == [0, 1, 1]
    assert sorted(len(load) for load in lab.update()) == [1, 1, 1]


def test_the_file_is_for_others_and_for_the_next_start(lab: Lab) -> None:
    boot = lab.seen.host.boot_id
    lab.update()
    lab.meter.remember(boot)
    assert not lab.path.exists(), "nothing was measured yet"
    for share in (0.2, 0.4):
        lab.pass_time(10, share)
        lab.update()
    lab.meter.remember(boot)
    shown = load_module.with_loads(lab.seen, lab.path)
    assert [t.load for t in data_plane(shown)] == [(0.2, 0.4), (0.0, 0.0), (0.0, 0.0)]
    lab.meter = lab.new()
    assert lab.update()[0] == (0.3,), "known, but no reason to move"
    lab.path.unlink()
    lab.meter.remember(boot)
    assert not lab.path.exists(), "nothing new to write"


DAMAGED = ["", "[]", "{", '{"boot_id": 1}', '{"version": 99}', "[" * 100_000, "\0"]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_counts_as_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "load.json").write_text(text)
    assert load_module.load("boot", tmp_path / "load.json") == Loads("boot")


def test_another_boots_file_counts_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    key = data_plane(snapshot(router()))[0].key
    load_module.save(Loads("before", (ThreadLoad(key, (0.5,)),)), path)
    assert load_module.load("before", path).by_thread == {key: (0.5,)}
    assert load_module.load("now", path) == Loads("now")
    assert json.loads(path.read_text())["version"] == 2


def test_a_file_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ObserveError) as told:
        load_module.save(Loads("boot"), tmp_path / "file" / "load.json")
    assert "load.json" in told.value.where
    assert told.value.hint
