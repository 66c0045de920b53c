"""sched_setattr(2), which the C library does not offer. Reading is in ``rootfs``.

``struct sched_attr`` is used in its first form (48 bytes, version 0 of
include/uapi/linux/sched/types.h), which every kernel since 3.14 takes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from vsrtune.model.guest import POLICY_NUMBERS, Sched

SCHED_FLAG_RESET_ON_FORK = 0x01
# size, policy, flags, nice, priority, runtime, deadline, period
_ATTR = struct.Struct("=IIQiIQQQ")
# __NR_sched_setattr; architectures not named here use asm-generic's number.
_NUMBERS = {"x86_64": 314, "i686": 351, "armv7l": 380, "ppc64le": 355, "s390x": 345}
_GENERIC = 274


def pack(sched: Sched) -> bytes:
    """``struct sched_attr`` for ``sched``. A fair class leaves the times at 0, which
    from 6.12 on asks for the kernel's default slice."""
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
    """Give one thread these scheduling parameters. OSError as from the call."""
    attr = ctypes.create_string_buffer(pack(sched), _ATTR.size)
    number = _NUMBERS.get(platform.machine(), _GENERIC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(tid), attr, ctypes.c_uint(0)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"sched_setattr of {tid}")
