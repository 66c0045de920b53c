# SPDX-License-Identifier: GPL-2.0-or-later
"""The interface through which readers access a host, and its implementation for this one."""

from __future__ import annotations

import ctypes
import errno
import os
import posixpath
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Protocol

from vsrtune.core.errors import ObserveError
from vsrtune.host import ethtool, netlink
from vsrtune.host.scheduler import sched_getattr
from vsrtune.model.guest import Sched

_SMALL, _CHUNK = 4096, 16384
# A process can let /proc/PID/cmdline show any part of its memory (PR_SET_MM_MAP in prctl(2)).
MOST_ARGUMENTS = 1 << 20
# Inodes of the namespaces that the kernel starts with (include/linux/proc_ns.h).
HOST_NAMESPACES = {"cgroup": 0xEFFFFFFB, "pid": 0xEFFFFFFC}
_CGROUPS = "/sys/fs/cgroup"
# The beginning of struct statx (include/uapi/linux/stat.h): uid, mode, ino, rdev and dev.
_STATX = struct.Struct("=20xI4xH2xQ88xIIII112x")
_STATX_BASIC_STATS, _AT_FDCWD = 0x7FF, -100
_AT_SYMLINK_NOFOLLOW, _AT_NO_AUTOMOUNT, _AT_STATX_DONT_SYNC = 0x100, 0x800, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class FileStat:
    """The results of stat(2) that readers need: who owns a file, and which file it is. ``rdev`` is
    the number of a device node."""

    uid: int
    mode: int
    dev: int
    ino: int
    rdev: int = 0


class HostRoot(Protocol):
    """The accesses that readers may make to a host. Paths are absolute, as on that host."""

    def read(self, path: str) -> str:
        """The whole text; bytes that are not UTF-8 become ``\\xNN``. Raises OSError as os.open
        does, and E2BIG for a command line of more than MOST_ARGUMENTS bytes."""

    def listdir(self, path: str, most: int | None = None) -> list[str]:
        """Sorted names. Raises OSError as os.listdir does, and E2BIG for more than ``most`` names,
        without reading further."""

    def stat(self, path: str, *, follow: bool = True) -> FileStat:
        """stat(2) of a file, or of a symbolic link itself unless ``follow``. Of a file system with
        a server, which may never answer, it tells what the kernel knows. Raises OSError as os.stat
        does."""

    def readlink(self, path: str) -> str:
        """The target of a symbolic link. Raises OSError as os.readlink does."""

    def exists(self, path: str) -> bool:
        """Whether the path is there."""

    def read_only(self, path: str) -> bool:  # noqa: ARG002
        """Whether the file is on a read-only mount here, as /proc/sys is in containers. False of a
        recorded host."""
        return False

    def processes(self) -> list[tuple[str, int]]:
        """Every process in /proc, with a number that tells it from a later one of the same pid.
        Raises OSError as os.listdir does."""

    def link_count(self, path: str) -> int:
        """The number of links of a directory: two more than its subdirectories, which for
        /proc/PID/task are threads. Raises OSError as os.stat does."""

    def sched_attr(self, tid: int) -> Sched:
        """``sched_getattr(2)`` of one thread. Raises OSError: ESRCH when the thread is gone,
        EOPNOTSUPP when its class is not one of the model's."""

    def ethtool_statistics(self, device: str) -> dict[str, int]:
        """``ethtool -S``: a driver's statistics by name, empty when it has none. Raises OSError:
        ENODEV when the device is gone."""

    def napi_thread(self, device: str) -> int | None:
        """The NAPI thread of a device, 0 when it has none; None when its driver does not tell, or
        the device is gone. Raises OSError as netlink.link does."""

    def qmp_vcpus(self, pid: int, socket: str, timeout: float) -> dict[int, int]:
        """QMP ``query-cpus-fast`` of a QEMU: vcpu number to tid. The request goes to process
        ``pid`` only. ``timeout`` limits, in seconds, the connection and the exchange each. Raises
        ObserveError."""


class LiveRoot(HostRoot):
    """This host. /proc/TID/cgroup reads as it does outside of containers, also in one that has a
    cgroup namespace of its own."""

    def read(self, path: str) -> str:
        text = _text(path, MOST_ARGUMENTS if path.endswith("/cmdline") else None)
        return _as_on_host(text) if path.endswith("/cgroup") else text

    def listdir(self, path: str, most: int | None = None) -> list[str]:
        names: Collection[str]
        if most is None:
            names = os.listdir(path)
        else:
            with os.scandir(path) as found:
                names = capped([entry.name for entry in islice(found, most + 1)], path, most)
        return sorted(names if "".join(names).isascii() else map(_escaped, names))

    def stat(self, path: str, *, follow: bool = True) -> FileStat:
        # os.stat waits for the server, and a process chooses what it runs and has open.
        flags = _AT_STATX_DONT_SYNC | _AT_NO_AUTOMOUNT | (0 if follow else _AT_SYMLINK_NOFOLLOW)
        name, found = os.fsencode(path), ctypes.create_string_buffer(_STATX.size)
        if b"\0" in name:
            raise ValueError("stat: embedded null character in path")
        if _libc.statx(_AT_FDCWD, name, flags, _STATX_BASIC_STATS, found) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        uid, mode, ino, *numbers = _STATX.unpack(found)
        rdev, dev = os.makedev(*numbers[:2]), os.makedev(*numbers[2:])
        return FileStat(uid, mode, dev, ino, rdev)

    def readlink(self, path: str) -> str:
        return _escaped(os.readlink(path))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def read_only(self, path: str) -> bool:
        try:
            return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
        except OSError:
            return False

    def processes(self) -> list[tuple[str, int]]:
        # A process keeps its inode in procfs while the kernel remembers it; a new process of the
        # same pid has another.
        with os.scandir("/proc") as found:
            return [(e.name, e.inode()) for e in found if e.name.isdecimal()]

    def link_count(self, path: str) -> int:
        return os.stat(path).st_nlink

    def sched_attr(self, tid: int) -> Sched:
        return sched_getattr(tid)

    def ethtool_statistics(self, device: str) -> dict[str, int]:
        return ethtool.statistics(device)

    def napi_thread(self, device: str) -> int | None:
        link = netlink.link(device)
        return link.napi_thread if link is not None else None

    def qmp_vcpus(self, pid: int, socket: str, timeout: float) -> dict[int, int]:
        # Imported here: asyncio and the QMP library are slow to load, and most
        # hosts never need them.
        from vsrtune.host.qmp import query_vcpus

        # The path is as QEMU sees it, which may be inside a container.
        relative = f"root{socket}" if socket.startswith("/") else f"cwd/{socket}"
        try:
            return query_vcpus(f"/proc/{pid}/{relative}", pid, timeout)
        except ObserveError as error:
            error.where = socket
            raise


def namespace_of_its_own(kind: str) -> bool:
    """Whether this process is in another namespace than the host's, ``kind`` one of
    HOST_NAMESPACES. Raises OSError without /proc."""
    return os.stat(f"/proc/self/ns/{kind}").st_ino != HOST_NAMESPACES[kind]


@cache
def cgroup_root() -> str | None:
    """The cgroup that /proc/TID/cgroup calls ``/`` in this process, by its path on the host: "" in
    the host's cgroup namespace. None when /sys/fs/cgroup is not the host's, so nothing tells."""
    if not namespace_of_its_own("cgroup"):
        return ""
    # Only the root of all cgroups has no type.
    if os.path.exists(f"{_CGROUPS}/cgroup.type"):
        return None
    own, pid = unified_cgroup(_text("/proc/self/cgroup")), str(os.getpid())
    for place, _, _ in os.walk(_CGROUPS):
        with suppress(OSError):
            if pid in _text(f"{place}/cgroup.procs").split():
                return place.removeprefix(_CGROUPS).removesuffix(own.rstrip("/"))
    return None


def unified_cgroup(text: str) -> str:
    """The cgroup of v2 in the text of /proc/TID/cgroup, "/" for none."""
    return next((line[3:] for line in text.split("\n") if line.startswith("0::")), "/")


def _as_on_host(text: str) -> str:
    root = cgroup_root()
    return seen_from(root, text) if root else text


def seen_from(root: str, text: str) -> str:
    """/proc/TID/cgroup as the host shows it, of the text that a process reads for which ``root`` is
    the root of cgroup v2: a path outside begins with ``/..`` for each level up
    (cgroup_namespaces(7))."""
    # No splitlines(): names of cgroups may hold whatever else it takes for the end of a line.
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("0::"):
            lines[number] = f"0::{posixpath.normpath(f'{root}/{line[3:]}')}"
    return "\n".join(lines)


def boot_id(root: HostRoot | None = None) -> str:
    """The kernel's id of the present boot; of this machine when ``root`` is None."""
    return (LiveRoot() if root is None else root).read("/proc/sys/kernel/random/boot_id").strip()


def text_of(root: HostRoot, path: str) -> str | None:
    """The text of a file, without the white space around it; None when it cannot be read."""
    try:
        return root.read(path).strip()
    except OSError:
        return None


def _text(path: str, most: int | None = None) -> str:
    """The text of a file. Raises OSError, E2BIG, for more than ``most`` bytes."""
    # Few system calls, because a pass reads thousands of small files. Python opens them
    # close-on-exec.
    fd = os.open(path, os.O_RDONLY)
    try:
        data = os.read(fd, _SMALL)
        if data:
            parts, size = [data], len(data)
            while more := os.read(fd, _CHUNK):
                parts.append(more)
                size += len(more)
                if most is not None and size > most:
                    raise OSError(errno.E2BIG, f"more than {most} bytes")
            data = b"".join(parts)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)
    return data.decode("utf-8", "backslashreplace")


def device_number(rdev: int) -> str:
    """The number of a device node (FileStat.rdev) as the file ``dev`` in sysfs has it."""
    return f"{os.major(rdev)}:{os.minor(rdev)}"


def capped(names: Collection[str], path: str, most: int | None) -> Collection[str]:
    """The names. Raises OSError, E2BIG, for more than ``most``."""
    if most is not None and len(names) > most:
        raise OSError(errno.E2BIG, f"more than {most} entries, none of which is read", path)
    return names


def _escaped(name: str) -> str:
    """A name from os with bytes that are not UTF-8 as ``\\xNN``."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")
