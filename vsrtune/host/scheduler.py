# SPDX-License-Identifier: GPL-2.0-or-later
"""sched_setattr(2) and sched_getattr(2), which the C library does not offer.

``struct sched_attr`` is used in its first form (48 bytes, version 0 of
include/uapi/linux/sched/types.h), which every kernel since 3.14 accepts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Any

from vsrtune.model.guest import POLICY_NUMBERS, Sched, SchedClass

SCHED_FLAG_RESET_ON_FORK = 0x01
# size, policy, flags, nice, priority, runtime, deadline, period
_ATTR = struct.Struct("=IIQiIQQQ")
# __NR_sched_setattr, which __NR_sched_getattr follows; architectures not named here use
# asm-generic's number.
_NUMBERS = {"x86_64": 314, "i686": 351, "armv7l": 380, "ppc64le": 355, "s390x": 345}
_SETATTR = _NUMBERS.get(platform.machine(), 274)
_GETATTR = _SETATTR + 1
_CLASSES = {number: cls for cls, number in POLICY_NUMBERS.items()}
_libc = ctypes.CDLL(None, use_errno=True)


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
    _call(_SETATTR, "sched_setattr", tid, attr, ctypes.c_uint(0))


def sched_getattr(tid: int) -> Sched:
    """Scheduling class and parameters of a thread of this host.

    The times are kept for DEADLINE only: from 6.12 on the kernel reports a fair
    thread's slice in the runtime field, which is no parameter of its class.
    Raises OSError: ESRCH when the thread is gone, EOPNOTSUPP for a class that the
    model does not know.
    """
    attr = ctypes.create_string_buffer(_ATTR.size)
    _call(_GETATTR, "sched_getattr", tid, attr, ctypes.c_uint(_ATTR.size), ctypes.c_uint(0))
    _, policy, flags, nice, priority, *times = _ATTR.unpack(attr)
    cls = _CLASSES.get(policy)
    if cls is None:
        raise OSError(errno.EOPNOTSUPP, f"unknown policy {policy}", f"thread {tid}")
    runtime, deadline, period = times if cls is SchedClass.DEADLINE else (0, 0, 0)
    return Sched(
        cls=cls,
        priority=priority,
        nice=nice,
        reset_on_fork=bool(flags & SCHED_FLAG_RESET_ON_FORK),
        runtime_ns=runtime,
        deadline_ns=deadline,
        period_ns=period,
    )


def _call(number: int, name: str, tid: int, *arguments: Any) -> None:
    if _libc.syscall(ctypes.c_long(number), ctypes.c_int(tid), *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"{name} of {tid}")
