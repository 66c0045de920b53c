"""Which cpusets of a host are read."""

from __future__ import annotations

from hosttree import HostTree

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.cgroupfs import CpusetReader, read_tree
from vsrtune.model.cpuset_tree import CpusetGroup

SCOPE = "machine.slice/vr1.scope/libvirt"


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
    for path in ("machine.slice", "machine.slice/vr1.scope", SCOPE, f"{SCOPE}/vcpu0"):
        group(tree, path)
    group(tree, f"{SCOPE}/vsrtune.cpus2", "2", "root invalid (Parent is not a partition root)")
    group(tree, "system.slice")
    group(tree, "system.slice/sshd.service")
    group(tree, "pods", "1")
    group(tree, "pods/a", "1", "root")
    tree.file("/sys/fs/cgroup/user.slice/cgroup.procs", "")
    found = {g.path: g for g in _read(tree, [f"{SCOPE}/vcpu0"])}
    assert list(found) == [
        "machine.slice", "machine.slice/vr1.scope", SCOPE, f"{SCOPE}/vcpu0",
        f"{SCOPE}/vsrtune.cpus2", "pods", "pods/a", "system.slice",
    ]  # fmt: skip
    assert found["pods/a"].valid
    own = found[f"{SCOPE}/vsrtune.cpus2"]
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
