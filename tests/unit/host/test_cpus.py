"""CPUs of the host."""

from __future__ import annotations

import pytest
from hosttree import HostTree

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.cpus import CPU_DIR, NODE_DIR, read_cpus
from vsrtune.model.host import Cpu


def test_smt_nodes_isolation_and_an_offline_cpu() -> None:
    tree = HostTree().host("0-3")
    tree.file(f"{CPU_DIR}/online", "0-2\n")
    tree.file(f"{CPU_DIR}/smt/active", "1\n")
    tree.file(f"{CPU_DIR}/isolated", "2\n")
    tree.file("/sys/fs/cgroup/cpuset.cpus.isolated", "1\n")
    for cpu, siblings in ((0, "0,2"), (1, "1"), (2, "0,2")):
        tree.file(f"{CPU_DIR}/cpu{cpu}/topology/thread_siblings_list", f"{siblings}\n")
    tree.file(f"{NODE_DIR}/node0/cpulist", "0-1\n").file(f"{NODE_DIR}/node1/cpulist", "2-3\n")
    tree.file(f"{NODE_DIR}/possible", "0-1\n")
    assert read_cpus(tree.root()) == (
        Cpu(0, True, False, CpuSet([0, 2]), 0),
        Cpu(1, True, True, CpuSet([1]), 0),
        Cpu(2, True, True, CpuSet([0, 2]), 1),
        Cpu(3, False, False, CpuSet([3]), 1),
    )


def test_a_plain_machine() -> None:
    tree = HostTree().host("0")
    tree.file(f"{CPU_DIR}/isolated", "\n")
    assert read_cpus(tree.root()) == (Cpu(0, True, False, CpuSet([0]), 0),)


def test_last_level_caches() -> None:
    """The outermost level counts, offline CPUs do not, and a CPU that tells nothing has none."""
    tree = HostTree().host("0-4")
    tree.file(f"{CPU_DIR}/online", "0-3\n")
    for cpu, shared in ((0, "0-1,4"), (2, "2")):
        tree.file(f"{CPU_DIR}/cpu{cpu}/cache/index0/shared_cpu_list", f"{cpu}\n")
        tree.file(f"{CPU_DIR}/cpu{cpu}/cache/index3/shared_cpu_list", f"{shared}\n")
        tree.file(f"{CPU_DIR}/cpu{cpu}/cache/uevent", "\n")
    found = [cpu.cache for cpu in read_cpus(tree.root())]
    assert found == [CpuSet([0, 1]), CpuSet([0, 1]), CpuSet([2]), CpuSet(), CpuSet()]


def test_without_sysfs() -> None:
    with pytest.raises(FileNotFoundError):
        read_cpus(HostTree().root())
