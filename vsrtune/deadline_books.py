"""What the kernel has booked for SCHED_DEADLINE, from /sys/kernel/debug/sched/debug.

debugfs is for root and may be absent; then nothing is known and the kernel judges alone.
Each runqueue shows the books of its root domain (``print_dl_rq`` in kernel/sched/debug.c).
"""

from __future__ import annotations

import re

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import UNIT
from vsrtune.model.host import DeadlineCpu
from vsrtune.rootfs import HostRoot

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
    """The books of every CPU; empty where debugfs cannot be read. ``totals`` also reads what
    is booked, for which the kernel writes down every task of the host: only where there
    are DEADLINE threads to look for."""
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
