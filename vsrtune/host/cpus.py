# SPDX-License-Identifier: GPL-2.0-or-later
"""The CPUs of the host, their times, and the kernel's books of class deadline on them."""

from __future__ import annotations

import re

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.model.deadline import UNIT
from vsrtune.model.host import Cpu, DeadlineCpu
from vsrtune.model.load import CpuTimes

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
    smt = text_of(root, f"{CPU_DIR}/smt/active") != "0"
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
    text = text_of(root, path) or ""
    return CpuSet() if text == "(null)" else CpuSet.parse(text)


def parse_cpu_times(text: str) -> dict[int, CpuTimes]:
    """Times by CPU from /proc/stat (proc(5)). User time includes guest time. Raises ValueError
    and IndexError."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("cpu"):
            break
        name, *fields = line.split()
        if name != "cpu":
            # user, nice, system, idle, iowait, irq, softirq, steal
            ticks = [int(field) for field in fields[:8]]
            found[int(name[3:])] = CpuTimes(sum(ticks), ticks[3] + ticks[4], ticks[6])
    return found


SCHED = "/sys/kernel/debug/sched"
BOOKS = f"{SCHED}/debug"
_RQ = re.compile(r"^dl_rq\[(\d{1,9})\]:\s*$", re.ASCII)
_TOTAL = re.compile(r"^\s*\.dl_bw->total_bw\s*:\s*(-?\d{1,20})\s*$", re.ASCII)


def parse_books(text: str) -> dict[int, int]:
    """CPU to the bandwidth booked in its root domain, in 1/2**20 CPU."""
    books: dict[int, int] = {}
    cpu: int | None = None
    for line in text.splitlines():
        rq = _RQ.match(line)
        total = _TOTAL.match(line)
        if rq is not None:
            cpu = int(rq[1])
        elif total is not None and cpu is not None:
            books[cpu] = int(total[1])
    return books


def book_lines(text: str) -> list[str]:
    """The lines that ``parse_books`` uses."""
    return [line for line in text.splitlines() if _RQ.match(line) or _TOTAL.match(line)]


def read_books(root: HostRoot, cpus: CpuSet, *, totals: bool) -> tuple[DeadlineCpu, ...]:
    """The books of every CPU; empty where debugfs cannot be read. ``totals`` also reads the booked
    bandwidths. The kernel then prints every task of the host, so it is only for hosts where there
    may be DEADLINE threads."""
    if not root.exists(SCHED):
        return ()
    books: dict[int, int] = {}
    if totals:
        try:
            books = parse_books(root.read(BOOKS))
        except OSError:
            return ()
    return tuple(DeadlineCpu(cpu, books.get(cpu), _fair_server(root, cpu)) for cpu in cpus)


def _fair_server(root: HostRoot, cpu: int) -> int:
    """The kernel's own budget for ordinary threads on that CPU (6.12), 0 without one."""
    base = f"{SCHED}/fair_server/cpu{cpu}"
    try:
        runtime, period = (int(root.read(f"{base}/{name}")) for name in ("runtime", "period"))
    except (OSError, ValueError):
        return 0
    return runtime * UNIT // period if period > 0 else 0
