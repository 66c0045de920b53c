"""What was traced is remembered for this boot."""

from __future__ import annotations

from pathlib import Path

import pytest

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError
from vsrtune.model.guest import ThreadKey
from vsrtune.observe.tracing import SeenNic, SeenWorker, TraceMemory

ONE = SeenWorker(ThreadKey(5, 6, 7), "macvtap0", 9)
TWO = SeenWorker(ThreadKey(5, 8, 7), "macvtap1", 10)
NIC = SeenNic("p0", 4, CpuSet([1]))
KEYS = [ONE.key, TWO.key]


def fresh(path: Path | None, boot_id: str = "b") -> TraceMemory:
    memory = TraceMemory(path)
    memory.load(boot_id)
    return memory


def test_remembers_across_processes(tmp_path: Path) -> None:
    path = tmp_path / "run/trace-results.json"
    fresh(path).remember([ONE], [NIC], KEYS)
    later = fresh(path)
    assert later.worker(ONE.key) == ("macvtap0", 9)
    assert later.rx_cpus("p0", 4) == CpuSet([1])
    # The same tid or name, yet another thread or device.
    assert later.worker(ThreadKey(5, 6, 8)) is None
    assert later.rx_cpus("p0", 5) is None
    assert [p.name for p in path.parent.iterdir()] == ["trace-results.json"]


def test_merges_and_forgets_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "trace-results.json"
    fresh(path).remember([ONE], [NIC], KEYS)
    moved = SeenNic("p0", 4, CpuSet([2]))
    fresh(path).remember([TWO], [moved], KEYS)
    assert fresh(path).worker(ONE.key) == ("macvtap0", 9)
    assert fresh(path).rx_cpus("p0", 4) == CpuSet([2])
    fresh(path).remember([], [], [TWO.key])
    assert fresh(path).worker(ONE.key) is None
    assert fresh(path).worker(TWO.key) == ("macvtap1", 10)
    assert fresh(path).rx_cpus("p0", 4) == CpuSet([2]), "it is there, and its guest may come back"
    again = SeenNic("p0", 5, CpuSet([3]))
    fresh(path).remember([], [again], KEYS)
    assert fresh(path).results.nics == (again,)


def test_another_boot_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace-results.json"
    fresh(path, "before").remember([ONE], [NIC], KEYS)
    assert fresh(path, "after").worker(ONE.key) is None
    memory = fresh(None, "before")
    memory.remember([ONE], [], KEYS)
    memory.load("after")
    assert memory.worker(ONE.key) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"boot_id": 1}', "\udcff", '{"boot_id": "b", "version": 9}']
)
def test_a_damaged_file_counts_as_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace-results.json"
    path.write_text(text, errors="surrogateescape")
    memory = fresh(path)
    assert memory.worker(ONE.key) is None
    memory.remember([ONE], [], KEYS)
    assert fresh(path).worker(ONE.key) == ("macvtap0", 9)


def test_without_a_file_it_lasts_as_long_as_the_object() -> None:
    memory = fresh(None)
    memory.remember([ONE], [], KEYS)
    memory.load("b")
    assert memory.worker(ONE.key) == ("macvtap0", 9)


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = fresh(tmp_path / "file/trace-results.json")
    with pytest.raises(ObserveError, match="cannot store the trace results"):
        memory.remember([ONE], [], KEYS)
    assert memory.worker(ONE.key) == ("macvtap0", 9)


def test_interrupts_that_the_kernel_keeps_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "trace-results.json"
    fresh(path).remember([ONE], [NIC], KEYS)
    fresh(path).remember_fixed([(41, "p0-rx-0")])
    fresh(path).remember_fixed([(41, "p0-rx-0"), (42, "p0-tx-0")])
    later = fresh(path)
    assert later.fixed(41, "p0-rx-0")
    assert later.fixed(42, "p0-tx-0")
    assert not later.fixed(41, "nvme0q1")
    assert later.worker(ONE.key) == ("macvtap0", 9)
    assert not fresh(path, "after").fixed(41, "p0-rx-0")
