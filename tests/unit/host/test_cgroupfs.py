"""cpusets and libvirt's cgroup names."""

from __future__ import annotations

import pytest
from hosttree import HostTree

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.cgroupfs import CpusetReader, libvirt_role

SCOPE = "machine.slice/machine-qemu\\x2d1\\x2dvr1.scope"


@pytest.mark.parametrize(
    ("path", "role"),
    [
        (f"{SCOPE}/libvirt/vcpu0", ("vcpu", 0)),
        (f"{SCOPE}/libvirt/vcpu12", ("vcpu", 12)),
        (f"{SCOPE}/libvirt/vcpu1/partition", ("vcpu", 1)),
        (f"{SCOPE}/libvirt/iothread2", ("iothread", 2)),
        (f"{SCOPE}/libvirt/emulator", ("emulator", None)),
        ("machine/qemu-1-vr1.libvirt-qemu/libvirt/vcpu3", ("vcpu", 3)),
        ("machine/qemu-1-vr1.libvirt-qemu/vcpu3", ("vcpu", 3)),
        ("machine/qemu-1-vr1.libvirt-qemu/emulator", ("emulator", None)),
        ("machine/qemu-1-vr1.libvirt-qemu/vsrtune", None),
        (f"{SCOPE}/libvirt/vsrtune", None),
        (f"{SCOPE}/vcpu0", None),
        (f"{SCOPE}/libvirt/vcpux", None),
        ("", None),
        (None, None),
    ],
)
def test_role(path: str | None, role: tuple[str, int | None] | None) -> None:
    assert libvirt_role(path) == role


def test_cpuset_of_a_cgroup() -> None:
    tree = HostTree()
    base = "/sys/fs/cgroup"
    tree.file(f"{base}/cpuset.cpus.effective", "0-7\n")
    tree.file(f"{base}/{SCOPE}/cpuset.cpus", "\n")
    tree.file(f"{base}/{SCOPE}/cpuset.cpus.effective", "0-3\n")
    tree.file(f"{base}/{SCOPE}/libvirt/vcpu0/cpuset.cpus", "0-2,1\n")
    tree.file(f"{base}/{SCOPE}/libvirt/vcpu0/cpuset.cpus.effective", "0-2\n")
    reader = CpusetReader(tree.root())
    assert reader.read(f"{SCOPE}/libvirt/vcpu0").cpus == "0-2,1"
    assert reader.read(f"{SCOPE}/libvirt/vcpu0").effective == CpuSet([0, 1, 2])
    assert reader.read(SCOPE).cpus == ""
    # No controller of its own: what confines it is the nearest one above.
    assert reader.read("system.slice/pq1.service").cpus is None
    assert reader.read("system.slice/pq1.service").effective == CpuSet(range(8))
    assert reader.read(f"{SCOPE}/other").effective == CpuSet([0, 1, 2, 3])
    assert reader.read("").effective == CpuSet(range(8))
    assert reader.read(f"{SCOPE}/libvirt/vcpu0").limit == CpuSet([0, 1, 2, 3])
    assert reader.read("machine.slice").limit == CpuSet(range(8))
    assert reader.read("").limit is None


def test_no_cpuset_controller() -> None:
    reader = CpusetReader(HostTree().root())
    assert reader.read("a/b") == (None, None, None)
