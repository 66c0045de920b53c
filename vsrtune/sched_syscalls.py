"""sched_setattr(2) and sched_getattr(2), which the C library does not offer.

``struct sched_attr`` is used in its first form (48 bytes, version 0 of
include/uapi/linux/sched/types.h), which every kernel since 3.14 takes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from functools import cache

from vsrtune.model import POLICY_NUMBERS, Sched, SchedClass

SCHED_FLAG_RESET_ON_FORK = 0x01
# size, policy, flags, nice, priority, runtime, deadline, period
_ATTR = struct.Struct("=IIQiIQQQ")
# (sched_setattr, sched_getattr); the second row is asm-generic, used by newer machines.
_NUMBERS = {"x86_64": (314, 315), "i686": (351, 352), "s390x": (345, 346), "ppc64le": (355, 356)}
_GENERIC = (274, 275)
_CLASSES = {number: cls for cls, number in POLICY_NUMBERS.items()}


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *args: object) -> None:
    if _libc().syscall(ctypes.c_long(number), *args) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _numbers() -> tuple[int, int]:
    return _NUMBERS.get(platform.machine(), _GENERIC)


def pack(sched: Sched) -> bytes:
    """``struct sched_attr`` for ``sched``."""
    flags = SCHED_FLAG_RESET_ON_FORK if sched.reset_on_fork else 0
    return _ATTR.pack(
        _ATTR.size,
        POLICY_NUMBERS[sched.cls],
        flags,
        sched.nice,
        sched.priority,
        sched.runtime_ns,
        sched.deadline_ns,
        sched.period_ns,
    )


def unpack(data: bytes) -> Sched:
    """The Sched that ``struct sched_attr`` describes.

    The times are kept for DEADLINE only: from 6.12 on the kernel reports a fair
    thread's slice in ``sched_runtime``, and writing that back would turn the
    default slice into a fixed one. ValueError for a class without a name here
    (SCHED_EXT).
    """
    _, policy, flags, nice, priority, runtime, deadline, period = _ATTR.unpack_from(data)
    cls = _CLASSES.get(policy)
    if cls is None:
        raise ValueError(f"scheduling policy number {policy} is unknown")
    timed = cls is SchedClass.DEADLINE
    return Sched(
        cls=cls,
        priority=priority,
        nice=nice,
        reset_on_fork=bool(flags & SCHED_FLAG_RESET_ON_FORK),
        runtime_ns=runtime if timed else 0,
        deadline_ns=deadline if timed else 0,
        period_ns=period if timed else 0,
    )


def sched_getattr(tid: int) -> Sched:
    """Scheduling parameters of one thread. OSError as from the call."""
    buffer = ctypes.create_string_buffer(_ATTR.size)
    _syscall(
        _numbers()[1],
        ctypes.c_int(tid),
        buffer,
        ctypes.c_uint(_ATTR.size),
        ctypes.c_uint(0),
    )
    return unpack(buffer.raw)


def sched_setattr(tid: int, sched: Sched) -> None:
    """Give one thread these scheduling parameters. OSError as from the call."""
    buffer = ctypes.create_string_buffer(pack(sched), _ATTR.size)
    _syscall(_numbers()[0], ctypes.c_int(tid), buffer, ctypes.c_uint(0))
