# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads and writes cgroups of our own, CPU lists of cgroups, and cpuset partitions."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import Lasting, VanishedError, WriteError
from vsrtune.execute.cpuset_clear import make_threaded
from vsrtune.execute.errno_table import Operation, told, write_error
from vsrtune.execute.syscalls import LiveCalls
from vsrtune.execute.threads import CPUS, HostThread
from vsrtune.host.cgroupfs import MOUNT, children
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.host.procfs import parse_stat
from vsrtune.model.cpuset_tree import upwards
from vsrtune.model.guest import ThreadKey
from vsrtune.model.targets import (
    CgroupDir,
    CgroupTarget,
    CpusetFile,
    CpusetList,
    Partition,
    PartitionState,
    ThreadMask,
    Value,
)

PARTITION_FILE = "cpuset.cpus.partition"
# A thread that has just ended keeps its cgroup busy for a moment.
_RMDIR_TRIES = 10
_RMDIR_PAUSE = 0.02
# Users make as many cgroups and threads below a slice as they like. Masks of threads beyond these,
# in the lowest cgroups, are not kept.
MOST_CGROUPS = MOST_THREADS = 1 << 16


def settle(thread: HostThread, wanted: CpuSet) -> None:
    """Give a thread ``wanted`` after a write of its cpuset, as far as the cpuset allows.

    The kernel has mostly done that: it cuts masks to the new cpuset, and from 6.2 on widens them
    again. It does not restore a thread's own mask on 6.1, nor widen a thread that was born while
    its parent was narrow.
    """
    try:
        thread.check()
        allowed = thread.allowed()
        if allowed is not None:
            wanted = wanted & allowed or allowed
        if thread.affinity() != wanted:
            thread.set_affinity(wanted)
    except VanishedError:
        return
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.ENOENT):
            raise


class Cgroups:
    """CgroupDir, CpusetFile and Partition on a host. Raises VanishedError when the cgroup above
    is gone, WriteError, or the OSError of the file."""

    def __init__(self, root: HostRoot, calls: LiveCalls) -> None:
        self._root = root
        self._calls = calls

    def read(self, target: CgroupTarget) -> Value:
        """The present value."""
        base = f"{MOUNT}/{target.path}"
        if isinstance(target, CgroupDir):
            if self._root.exists(base):
                return True
            self._check(base.rpartition("/")[0], target)
            return False
        self._check(base, target)
        try:
            if isinstance(target, Partition):
                return PartitionState(self._root.read(f"{base}/{PARTITION_FILE}").strip())
            text = self._root.read(f"{base}/{target.file}").strip()
        except FileNotFoundError:
            # systemd removes the controller when no guest needs it any more.
            raise VanishedError("the cgroup has no cpuset any more", where=str(target)) from None
        return CpusetList(text, self._own_masks(target))

    def _check(self, base: str, target: CgroupTarget) -> None:
        if not self._root.exists(base):
            raise VanishedError("the guest's cgroup is gone", where=str(target))

    # -- directories

    def write_dir(self, target: CgroupDir, exists: bool) -> None:
        """Make or remove a cgroup of our own."""
        if not exists:
            self._remove(target)
            return
        base = f"{MOUNT}/{target.path}"
        self._check(base.rpartition("/")[0], target)
        if "/" in target.path:
            make_threaded(self._root, self._calls, target.path, str(target))
        elif not self._root.exists(base):
            with told(Operation.MKDIR, str(target)):
                self._calls.mkdir(base)

    def _remove(self, target: CgroupDir) -> None:
        path = f"{MOUNT}/{target.path}"
        for attempt in range(1, _RMDIR_TRIES + 1):
            try:
                self._calls.rmdir(path)
                return
            except FileNotFoundError:
                return  # gone together with the guest
            except OSError as error:
                if error.errno == errno.EBUSY and attempt < _RMDIR_TRIES:
                    time.sleep(_RMDIR_PAUSE)
                    continue
                inside = " ".join(self._root.read(f"{path}/cgroup.threads").split())
                where = f"{target} (threads inside: {inside or 'none'})"
                raise write_error(Operation.RMDIR, error, where) from error

    # -- lists

    def write_list(self, target: CpusetFile, value: CpusetList) -> None:
        """Write a CPU list, and give threads below their own masks back: 6.1 widens these to the
        whole new list. A mask of ``value`` is given back unless the thread got another one since:
        the present list may have cut it, and a kill may have lost it."""
        base = f"{MOUNT}/{target.path}"
        self._check(base, target)
        earlier = {m.thread: m.cpus for m in value.masks}
        keep: dict[ThreadKey, CpuSet] = {}
        for key, mask, allowed in self._masks(target):
            cpus = earlier.get(key)
            if cpus is not None and mask in (allowed, cpus & allowed):
                keep[key] = cpus
            elif mask != allowed:
                keep[key] = mask
        operation = Operation.CPUSET if target.file == "cpuset.cpus" else Operation.EXCLUSIVE
        try:
            self._calls.write(f"{base}/{target.file}", value.text)
        except OSError as error:
            if error.errno != errno.ENOSPC or value.text:
                raise write_error(operation, error, str(target), value.text) from error
            # With threads below, a list cannot be emptied again (validate_change), but a list
            # of all CPUs means the same.
            possible = self._root.read(f"{CPUS}/possible").strip()
            self._calls.write(f"{base}/{target.file}", possible)
        for key, cpus in keep.items():
            settle(HostThread(self._root, self._calls, key, str(target)), cpus)

    def _own_masks(self, target: CpusetFile) -> tuple[ThreadMask, ...]:
        """Threads below a slice whose masks are narrower than their cpusets."""
        found = self._masks(target)
        return tuple(ThreadMask(key, mask) for key, mask, allowed in found if mask != allowed)

    def _masks(self, target: CpusetFile) -> Iterator[tuple[ThreadKey, CpuSet, CpuSet]]:
        """The threads below a slice, with their masks and the CPUs of their cpusets."""
        if "/" in target.path or target.file != "cpuset.cpus":
            return
        tids = (
            (tid, allowed)
            for path, allowed in islice(self._below(target.path), MOST_CGROUPS)
            # A domain with threaded children lists none of its own.
            for tid in (text_of(self._root, f"{MOUNT}/{path}/cgroup.threads") or "").split()
        )
        for tid, allowed in islice(tids, MOST_THREADS):
            try:
                stat = parse_stat(self._root.read(f"/proc/{tid}/task/{tid}/stat"))
                key = ThreadKey(stat.tid, stat.tid, stat.start_time)
                mask = HostThread(self._root, self._calls, key, str(target)).affinity()
            except OSError:
                continue
            if allowed is not None:
                yield key, mask, allowed

    def _below(self, path: str) -> Iterator[tuple[str, CpuSet | None]]:
        """A slice and the cgroups in it, the upper ones first, with the CPUs of their cpusets."""
        waiting: deque[tuple[str, CpuSet | None]] = deque([(path, None)])
        while waiting:
            path, allowed = waiting.popleft()
            text = text_of(self._root, f"{MOUNT}/{path}/cpuset.cpus.effective")
            allowed = allowed if text is None else CpuSet.parse(text)
            yield path, allowed
            inside = (f"{path}/{name}" for name in children(self._root, path))
            waiting += (
                (p, allowed) for p in inside if self._root.exists(f"{MOUNT}/{p}/cgroup.procs")
            )

    # -- partitions

    def follows(self, thread: HostThread) -> bool:
        """Whether a thread outside all partitions has every CPU that its cpuset has left."""
        allowed = thread.allowed()
        whole = allowed is not None and allowed <= thread.affinity()
        return whole and not self.partitioned(thread.cgroup())

    def listed(self, path: str, cpus: CpuSet) -> CpuSet:
        """Those of ``cpus`` that the lists of a cgroup and of all above it permit."""
        for above in upwards(path):
            text = text_of(self._root, f"{MOUNT}/{above}/cpuset.cpus")  # None: no controller
            if text:
                cpus &= CpuSet.parse(text)
        return cpus

    def partitioned(self, path: str) -> bool:
        """Whether the cgroup, or one above it, is a partition (in force or not)."""
        files = (f"{MOUNT}/{above}/{PARTITION_FILE}" for above in upwards(path))
        # None: without the controller.
        return any(text_of(self._root, file) not in ("member", None) for file in files)

    def write_partition(self, target: Partition, state: PartitionState) -> None:
        """Make a cgroup a partition or a member again. Raises WriteError with the kernel's reason
        when the kernel makes a partition but calls it invalid."""
        base = f"{MOUNT}/{target.path}"
        self._check(base, target)
        file = f"{base}/{PARTITION_FILE}"
        with told(Operation.PARTITION, str(target), state.wanted):
            if state.wanted == "root" and "invalid" in self._root.read(file):
                # An invalid partition stays invalid even after the cause is gone.
                self._calls.write(file, "member")
            self._calls.write(file, state.wanted)
        now = self._root.read(file).strip()
        if state.text == "root" and now != "root":
            hint = (
                "look at cpuset.cpus and cpuset.cpus.exclusive of the cgroups beside and above it"
            )
            if "not permitted" in now:  # remote_partition_enable
                hint = "run as root with CAP_SYS_ADMIN"
            raise WriteError(
                f"the kernel made no partition of it: {now}",
                where=str(target),
                hint=hint,
                lasting=Lasting.TRANSIENT,
            )
