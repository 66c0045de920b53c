"""Software that changes the same settings."""

from __future__ import annotations

import pytest
from hosttree import HostTree

from vsrtune.observe.host import irqbalance_bans, read_neighbours


def test_daemons_and_what_they_do() -> None:
    tree = HostTree()
    tree.file("/etc/tuned/active_profile", "realtime-virtual-host\n")
    tree.file("/sys/devices/system/cpu/nohz_full", "2-3\n")
    daemons = [
        ("tuned", 9),
        ("irqbalance", 8),
        ("stalld", 7),
    ]
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


def test_throttling_that_is_on_is_nobodys_fault() -> None:
    tree = HostTree().file("/sys/devices/system/cpu/nohz_full", "(null)\n")
    (found,) = read_neighbours(tree.root(), [("tuned", 9)], 950000)
    assert found.detail == "no profile"


def test_none() -> None:
    assert read_neighbours(HostTree().root(), [], 950000) == ()


@pytest.mark.parametrize(
    ("line", "bans"),
    [
        ("irqbalance --foreground", ((), "")),
        ("irqbalance --foreground --banirq=41 --banirq=40", ((40, 41), "")),
        ("irqbalance -i 41 -i40 -t 5", ((40, 41), "")),
        ("irqbalance --banirq 41 --policyscript=/etc/x", ((41,), "/etc/x")),
        ("irqbalance -l /etc/x", ((), "/etc/x")),
        ("irqbalance --banirq", ((), "")),
        ("irqbalance --banirq=-1 --banirq=\u0664 --help", ((), "")),
        ("", ((), "")),
    ],
)
def test_what_irqbalance_leaves_alone(line: str, bans: tuple[tuple[int, ...], str]) -> None:
    assert irqbalance_bans(line.split()) == bans


def test_bans_are_read_from_its_command_line() -> None:
    tree = HostTree().file("/proc/8/cmdline", "/usr/sbin/irqbalance\0--banirq=41\0")
    (found,) = read_neighbours(tree.root(), [("irqbalance", 8)], 950000)
    assert found.banned_irqs == (41,)
    assert found.detail.endswith("but not of interrupts 41")
