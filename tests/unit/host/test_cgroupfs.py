"""cpusets and libvirt's cgroup names."""

from __future__ import annotations

import pytest
from hosttree import HostTree

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.cgroupfs import CpusetReader, libvirt_role, read_tree
from vsrtune.host.filesystem import FileStat
from vsrtune.model.cpuset_tree import CpusetGroup

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


LIBVIRT = "machine.slice/vr1.scope/libvirt"


def group(tree: HostTree, path: str, exclusive: str | None = "", partition: str = "member") -> None:
    base = f"/sys/fs/cgroup/{path}"
    tree.file(f"{base}/cgroup.procs", "").file(f"{base}/cgroup.events", "populated 1\nfrozen 0\n")
    tree.file(f"{base}/cpuset.cpus", "\n").file(f"{base}/cpuset.cpus.effective", "0-2\n")
    tree.file(f"{base}/cpuset.cpus.partition", f"{partition}\n")
    if exclusive is not None:
        tree.file(f"{base}/cpuset.cpus.exclusive", f"{exclusive}\n")


def _read(tree: HostTree, used: list[str]) -> tuple[CpusetGroup, ...]:
    root = tree.root()
    return read_tree(root, CpusetReader(root), used)


def test_what_is_above_beside_or_exclusive() -> None:
    tree = HostTree()
    for path in ("machine.slice", "machine.slice/vr1.scope", LIBVIRT, f"{LIBVIRT}/vcpu0"):
        group(tree, path)
    group(tree, f"{LIBVIRT}/vsrtune.cpus2", "2", "root invalid (Parent is not a partition root)")
    group(tree, "system.slice")
    group(tree, "system.slice/sshd.service")
    group(tree, "pods", "1")
    group(tree, "pods/a", "1", "root")
    tree.file("/sys/fs/cgroup/user.slice/cgroup.procs", "")
    found = {g.path: g for g in _read(tree, [f"{LIBVIRT}/vcpu0"])}
    assert list(found) == [
        "machine.slice", "machine.slice/vr1.scope", LIBVIRT, f"{LIBVIRT}/vcpu0",
        f"{LIBVIRT}/vsrtune.cpus2", "pods", "pods/a", "system.slice",
    ]  # fmt: skip
    assert found["pods/a"].valid
    own = found[f"{LIBVIRT}/vsrtune.cpus2"]
    assert (own.valid, own.exclusive, own.effective) == (False, "2", CpuSet([0, 1, 2]))


def test_a_kernel_without_exclusive_lists() -> None:
    tree = HostTree()
    group(tree, "machine.slice", None)
    (found,) = _read(tree, ["machine.slice/x"])
    assert found.exclusive is None


def test_a_host_without_cpusets() -> None:
    tree = HostTree()
    tree.file("/sys/fs/cgroup/machine.slice/cgroup.procs", "")
    assert _read(tree, ["machine.slice/x"]) == ()


def test_what_a_user_makes_beside_a_guest_is_not_read() -> None:
    """He may make as many as he likes; what root made there may be ours."""
    home, user = "user.slice/user@7.service", FileStat(7, 0o040755, 0, 0)
    tree = HostTree()
    for path in ("user.slice", "user.slice/other", home):
        group(tree, path)
    tree.stats[f"/sys/fs/cgroup/{home}"] = user
    for name in ("vr", "vsrtune.cpus2", *(f"x{n}" for n in range(5))):
        group(tree, f"{home}/{name}", "2" if name == "x1" else "")
        group(tree, f"{home}/{name}/inside")
        if not name.startswith("vsrtune"):
            tree.stats[f"/sys/fs/cgroup/{home}/{name}"] = user
    assert [g.path for g in _read(tree, [f"{home}/vr"])] == [
        "user.slice", "user.slice/other", home, f"{home}/vr", f"{home}/vsrtune.cpus2",
    ]  # fmt: skip
