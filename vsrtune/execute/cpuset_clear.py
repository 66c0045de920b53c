# SPDX-License-Identifier: GPL-2.0-or-later
"""Empties ``cpuset.cpus`` of a cgroup with threads again, as it was before a pin.

The kernel refuses that while the cgroup is populated (``validate_change``: ENOSPC), so ``clear``
parks the threads meanwhile in a new threaded sibling, ``vsrtune-NAME`` beside ``NAME``. The
sibling's name tells where they belong: the next write of the same pin brings home the threads
that a crash left parked.
"""

from __future__ import annotations

import errno

from vsrtune.core.errors import Lasting, WriteError
from vsrtune.execute.errno_table import Operation, told, write_error
from vsrtune.execute.syscalls import LiveCalls
from vsrtune.host.cgroupfs import MOUNT
from vsrtune.host.filesystem import HostRoot

_PREFIX = "vsrtune-"
# New threads may be born in the cgroup while others leave it.
_ROUNDS = 50


def parking_of(path: str) -> str:
    """The cgroup in which the threads of ``path`` are parked."""
    above, _, name = path.rpartition("/")
    return f"{above}/{_PREFIX}{name}"


def home_of(path: str) -> str:
    """The cgroup to which threads in ``path`` belong: another one only if they are parked."""
    above, _, name = path.rpartition("/")
    return f"{above}/{name.removeprefix(_PREFIX)}" if name.startswith(_PREFIX) else path


def clear(root: HostRoot, calls: LiveCalls, path: str, where: str) -> None:
    """Unset ``cpuset.cpus`` of ``path``. Idempotent, from any step of an earlier try.
    Raises WriteError."""
    if _emptied(calls, path, where):
        return
    make_threaded(root, calls, parking_of(path), where)
    emptied = False
    for _ in range(_ROUNDS):
        _move_all(root, calls, path, parking_of(path), where)
        emptied = _emptied(calls, path, where)
        if emptied:
            break
    unpark(root, calls, path, where)
    if not emptied:
        raise WriteError(
            f"cpuset.cpus of {path} could not be unset: new threads kept coming",
            where=where,
            hint="the daemon tries again at its next pass",
            lasting=Lasting.TRANSIENT,
        )


def unpark(root: HostRoot, calls: LiveCalls, path: str, where: str) -> None:
    """Bring the parked threads of ``path`` home, and remove their cgroup. Raises WriteError."""
    parking = parking_of(path)
    if not root.exists(f"{MOUNT}/{parking}"):
        return
    for _ in range(_ROUNDS):
        if root.read(f"{MOUNT}/{parking}/cgroup.type").strip() == "threaded":
            _move_all(root, calls, parking, path, where)
        try:
            calls.rmdir(f"{MOUNT}/{parking}")
        except OSError as error:
            if error.errno == errno.EBUSY:
                continue
            if error.errno != errno.ENOENT:
                raise write_error(Operation.RMDIR, error, where) from error
        return
    raise WriteError(
        f"{parking} could not be removed: new threads kept coming",
        where=where,
        hint="the daemon tries again at its next pass",
        lasting=Lasting.TRANSIENT,
    )


def make_threaded(root: HostRoot, calls: LiveCalls, path: str, where: str) -> None:
    """Make a threaded cgroup, or finish a half-made one. Raises WriteError."""
    parent, _, _ = path.rpartition("/")
    kind = root.read(f"{MOUNT}/{parent}/cgroup.type").strip()
    if kind not in ("threaded", "domain threaded"):
        raise WriteError(
            f"the parent cgroup is of type '{kind}', which cannot hold single threads",
            where=where,
            hint="only guests whose cgroups libvirt made threaded can be served",
        )
    if not root.exists(f"{MOUNT}/{path}"):
        with told(Operation.MKDIR, where):
            calls.mkdir(f"{MOUNT}/{path}")
    if root.read(f"{MOUNT}/{path}/cgroup.type").strip() != "threaded":
        with told(Operation.TYPE, where, "threaded"):
            calls.write(f"{MOUNT}/{path}/cgroup.type", "threaded")


def _emptied(calls: LiveCalls, path: str, where: str) -> bool:
    """Unset ``cpuset.cpus``; False when there are threads inside."""
    try:
        calls.write(f"{MOUNT}/{path}/cpuset.cpus", "")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return False
        raise write_error(Operation.CPUSET, error, where) from error
    return True


def _move_all(root: HostRoot, calls: LiveCalls, source: str, target: str, where: str) -> None:
    for tid in root.read(f"{MOUNT}/{source}/cgroup.threads").split():
        try:
            calls.write(f"{MOUNT}/{target}/cgroup.threads", tid)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise write_error(Operation.THREADS, error, where, target) from error
