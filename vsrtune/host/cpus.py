"""The CPUs of the host."""

from __future__ import annotations

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.filesystem import HostRoot
from vsrtune.model.host import Cpu

CPU_DIR = "/sys/devices/system/cpu"
NODE_DIR = "/sys/devices/system/node"


def read_cpus(root: HostRoot) -> tuple[Cpu, ...]:
    """The CPUs that are present, in order. Raises OSError without sysfs.

    ``isolated`` joins isolcpus= with the isolated partitions of cgroup v2.
    """
    online = CpuSet.parse(root.read(f"{CPU_DIR}/online"))
    present = CpuSet.parse(root.read(f"{CPU_DIR}/present"))
    isolated = _optional(root, f"{CPU_DIR}/isolated") | _optional(
        root, "/sys/fs/cgroup/cpuset.cpus.isolated"
    )
    nodes = _nodes(root)
    caches = _caches(root, online)
    smt = _text(root, f"{CPU_DIR}/smt/active") != "0"
    return tuple(
        Cpu(
            id=cpu,
            online=cpu in online,
            isolated=cpu in isolated,
            siblings=_siblings(root, cpu) if smt and cpu in online else CpuSet([cpu]),
            node=nodes.get(cpu, 0),
            cache=caches.get(cpu, CpuSet()),
        )
        for cpu in present
    )


def _siblings(root: HostRoot, cpu: int) -> CpuSet:
    found = _optional(root, f"{CPU_DIR}/cpu{cpu}/topology/thread_siblings_list")
    return found | CpuSet([cpu])


def _caches(root: HostRoot, online: CpuSet) -> dict[int, CpuSet]:
    """The CPUs that share a last level cache, for each online CPU whose caches the kernel
    describes. ``index`` directories are numbered from the innermost level outwards
    (detect_cache_attributes, drivers/base/cacheinfo.c)."""
    found: dict[int, CpuSet] = {}
    for cpu in online:
        if cpu in found:
            continue
        try:
            names = root.listdir(f"{CPU_DIR}/cpu{cpu}/cache")
        except OSError:
            continue
        levels = [int(n[5:]) for n in names if n.startswith("index") and n[5:].isdecimal()]
        if levels:
            path = f"{CPU_DIR}/cpu{cpu}/cache/index{max(levels)}/shared_cpu_list"
            shared = (_optional(root, path) & online) | CpuSet([cpu])
            found.update(dict.fromkeys(shared, shared))
    return found


def _nodes(root: HostRoot) -> dict[int, int]:
    """NUMA node of each CPU; empty on kernels without NUMA."""
    try:
        names = root.listdir(NODE_DIR)
    except OSError:
        return {}
    nodes = {}
    for name in names:
        number = name.removeprefix("node")
        if name.startswith("node") and number.isdecimal():
            for cpu in _optional(root, f"{NODE_DIR}/{name}/cpulist"):
                nodes[cpu] = int(number)
    return nodes


def _optional(root: HostRoot, path: str) -> CpuSet:
    text = _text(root, path)
    return CpuSet() if text == "(null)" else CpuSet.parse(text)


def _text(root: HostRoot, path: str) -> str:
    try:
        return root.read(path).strip()
    except OSError:
        return ""
