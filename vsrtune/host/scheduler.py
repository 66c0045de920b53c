"""sched_setattr(2), which the C library does not offer, and the kernel's books of class deadline.
sched_getattr(2) is in ``filesystem``.

``struct sched_attr`` is used in its first form (48 bytes, version 0 of
include/uapi/linux/sched/types.h), which every kernel since 3.14 accepts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.filesystem import HostRoot
from vsrtune.model.deadline import UNIT
from vsrtune.model.guest import POLICY_NUMBERS, Sched
from vsrtune.model.host import DeadlineCpu

SCHED_FLAG_RESET_ON_FORK = 0x01
# size, policy, flags, nice, priority, runtime, deadline, period
_ATTR = struct.Struct("=IIQiIQQQ")
# __NR_sched_setattr; architectures not named here use asm-generic's number.
_NUMBERS = {"x86_64": 314, "i686": 351, "armv7l": 380, "ppc64le": 355, "s390x": 345}
_GENERIC = 274


def pack(sched: Sched) -> bytes:
    """``struct sched_attr`` for ``sched``. A fair class leaves the times at 0, which from 6.12 on
    requests the kernel's default slice."""
    return _ATTR.pack(
        _ATTR.size,
        POLICY_NUMBERS[sched.cls],
        SCHED_FLAG_RESET_ON_FORK if sched.reset_on_fork else 0,
        sched.nice,
        sched.priority,
        sched.runtime_ns,
        sched.deadline_ns,
        sched.period_ns,
    )


def sched_setattr(tid: int, sched: Sched) -> None:
    """Give one thread these scheduling parameters. Raises OSError as the call does."""
    attr = ctypes.create_string_buffer(pack(sched), _ATTR.size)
    number = _NUMBERS.get(platform.machine(), _GENERIC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(tid), attr, ctypes.c_uint(0)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"sched_setattr of {tid}")


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
