"""Software that changes the same settings."""

from __future__ import annotations

from pathlib import Path

from hosttree import HostTree

from vsrtune.neighbours import read_neighbours
from vsrtune.proc import Daemon


def test_daemons_and_what_they_do(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.file("/etc/tuned/active_profile", "realtime-virtual-host\n")
    tree.file("/sys/devices/system/cpu/nohz_full", "2-3\n")
    daemons = [Daemon("tuned", 9), Daemon("irqbalance", 8), Daemon("stalld", 7)]
    found = read_neighbours(tree.root(), daemons, -1)
    assert [(n.name, n.pid) for n in found] == [
        ("irqbalance", 8),
        ("nohz_full", None),
        ("stalld", 7),
        ("tuned", 9),
    ]
    details = {n.name: n.detail for n in found}
    assert details["tuned"].startswith("profile realtime-virtual-host; sched_rt_runtime_us is -1")
    assert "DEADLINE" in details["stalld"]
    assert "2-3" in details["nohz_full"]


def test_throttling_that_is_on_is_nobodys_fault(tmp_path: Path) -> None:
    tree = HostTree(tmp_path).file("/sys/devices/system/cpu/nohz_full", "(null)\n")
    (found,) = read_neighbours(tree.root(), [Daemon("tuned", 9)], 950000)
    assert found.detail == "no profile"


def test_none(tmp_path: Path) -> None:
    assert read_neighbours(HostTree(tmp_path).root(), [], 950000) == ()
