"""The patrol of events/kernel.py on a tree of files: what has changed is told once, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import shell_samples as samples

from vsrtune.core.cpuset import CpuSet
from vsrtune.daemon.events.kernel import SELDOM, Patrol
from vsrtune.model.guest import Irq
from vsrtune.model.host import Nic
from vsrtune.model.snapshot import Snapshot


class Tree:
    """/proc and /sys below a directory."""

    def __init__(self, top: Path) -> None:
        self._top = top

    def write(self, path: str, text: str) -> None:
        file = self._top / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def remove(self, path: str) -> None:
        (self._top / path.lstrip("/")).unlink()

    def read(self, path: str) -> str:
        return (self._top / path.lstrip("/")).read_text()


def snapshot() -> Snapshot:
    plain = samples.snapshot()
    lower = plain.guests[0].interfaces[0].lower[0]
    irq = Irq(40, "rx-0", CpuSet([0]), CpuSet([0]))
    nic = Nic(lower, 2, "e1000e", 0, 1000, False, CpuSet(), (irq,))
    return replace(plain, host=replace(plain.host, nics=(nic,)))


def test_each_change_is_told_once(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    told: list[str] = []
    seen = snapshot()
    lower = seen.host.nics[0].name
    affinity, threaded = "/proc/irq/40/smp_affinity_list", f"/sys/class/net/{lower}/threaded"
    tree.write(affinity, "0\n")
    tree.write(threaded, "0\n")
    patrol = Patrol(tree, lambda: seen, lambda reason, guest=None: told.append(reason))  # type: ignore[arg-type]
    patrol.round()
    patrol.round()
    assert told == [], "what is met first was read by the pass that made it known"
    tree.write(affinity, "2\n")
    patrol.round()
    patrol.round()
    assert told == [f"{affinity} changed"]
    tree.write(threaded, "1\n")
    tree.remove(affinity)
    patrol.round()
    assert told[1:] == [f"{threaded}, {affinity} changed"]
    patrol.round()
    assert len(told) == 2


def test_what_the_kernel_tells_is_read_seldom_and_the_rest_as_ever(tmp_path: Path) -> None:
    tree, told = Tree(tmp_path), []
    seen = snapshot()
    affinity, online = "/proc/irq/40/smp_affinity_list", "/sys/devices/system/cpu/online"
    tree.write(affinity, "0\n")
    tree.write(online, "0-3\n")
    patrol = Patrol(
        tree, lambda: seen, lambda reason, guest=None: told.append(reason), told=lambda: True
    )  # type: ignore[arg-type]
    patrol.round()
    tree.write(affinity, "2\n")
    tree.write(online, "0-2\n")
    patrol.round()
    assert told == [f"{online} changed"]
    for _ in range(SELDOM):
        patrol.round()
    assert told == [f"{online} changed", f"{affinity} changed"]
