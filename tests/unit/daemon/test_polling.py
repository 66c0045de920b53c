"""events/polling.py on trees of files: what has changed is told once, and nothing else."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import shell_samples as samples

from vsrtune.core.cpuset import CpuSet
from vsrtune.daemon.events.polling import Patrol, PolicyWatch
from vsrtune.model.host import Irq, Nic
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


def test_nothing_is_read_without_guests(tmp_path: Path) -> None:
    told: list[str] = []
    empty = replace(snapshot(), guests=())
    patrol = Patrol(
        Tree(tmp_path),
        lambda: empty,
        lambda reason, guest=None: told.append(reason),  # type: ignore[arg-type]
    )
    patrol.round()
    assert told == []


class Policies:
    """A directory of policies, and what a watch of it has told."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.told: list[str] = []
        self.watch = PolicyWatch([place], self.told.append)

    def news(self) -> str:
        """What two looks tell."""
        self.told.clear()
        self.watch.look()
        self.watch.look()
        return "; ".join(self.told)


@pytest.fixture
def policies(tmp_path: Path) -> Policies:
    (tmp_path / "etc").mkdir()
    return Policies(tmp_path / "etc")


def test_a_policy_that_is_written_replaced_changed_and_removed(policies: Policies) -> None:
    file, other = policies.place / "a b.\u00fc.yaml", policies.place / ".new"
    changed = f"{file} changed"
    file.write_text("guest: x\n")
    assert policies.news() == changed
    assert policies.news() == ""
    other.write_text("guest: x\n")
    assert policies.news() == "", "a hidden file is no policy"
    other.rename(file)
    assert policies.news() == changed, "renamed over it, as editors do"
    file.chmod(0o600)
    assert policies.news() == changed, "it could not be read before, or cannot any more"
    file.unlink()
    assert policies.news() == changed


def test_a_policy_behind_a_link(policies: Policies, tmp_path: Path) -> None:
    link = policies.place / "a.yaml"
    link.symlink_to(tmp_path / "real")
    assert policies.news() == "", "nothing is there to read"
    (tmp_path / "real").write_text("guest: x\n")
    assert policies.news() == f"{link} changed"
    (tmp_path / "real").write_text("guest: longer\n")
    assert policies.news() == f"{link} changed"


def test_policies_that_are_still_written_are_waited_for(policies: Policies) -> None:
    for number in range(3):
        (policies.place / f"{number}.yaml").write_text("guest: x\n")
        policies.watch.look()
    assert policies.told == []
    policies.watch.look()
    assert policies.told == [", ".join(f"{policies.place}/{n}.yaml" for n in range(3)) + " changed"]


def test_a_directory_of_policies_that_goes_and_comes(policies: Policies, tmp_path: Path) -> None:
    file = policies.place / "a.yaml"
    file.write_text("guest: x\n")
    policies.news()
    policies.place.rename(tmp_path / "aside")
    assert policies.news() == f"{file} changed"
    (tmp_path / "aside").rename(policies.place)
    assert policies.news() == f"{file} changed"
    later = Policies(tmp_path / "later" / "policies")
    assert later.news() == ""
    later.place.mkdir(parents=True)
    (later.place / "a.yaml").write_text("guest: x\n")
    assert later.news() == f"{later.place}/a.yaml changed"


def test_a_running_watch_tells(policies: Policies) -> None:
    watch = PolicyWatch([policies.place], policies.told.append, every=0.01)
    watch.start()
    (policies.place / "a.yaml").write_text("guest: x\n")
    end = time.monotonic() + 20
    while not policies.told:
        assert time.monotonic() < end
        time.sleep(0.01)
    watch.stop()
    watch.join(10)
    assert not watch.is_alive()
