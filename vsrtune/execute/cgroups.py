# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads and writes cgroups of our own, CPU lists of cgroups, and cpuset partitions."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import Lasting, VanishedError, WriteError
from vsrtune.execute.cpuset_clear import make_threaded
from vsrtune.execute.errno_table import Operation, told, write_error
from vsrtune.execute.syscalls import LiveCalls
from vsrtune.execute.threads import CPUS, HostThread
from vsrtune.host.cgroupfs import MOUNT, children, directory
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.host.procfs import parse_stat
from vsrtune.model.cpuset_tree import upwards
from vsrtune.model.guest import ThreadKey
from vsrtune.model.host import release_of
from vsrtune.model.targets import (
    CgroupDir,
    CgroupTarget,
    CpusetFile,
    CpusetList,
    Noted,
    Noting,
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
_OSRELEASE = "/proc/sys/kernel/osrelease"


def settle(thread: HostThread, wanted: CpuSet) -> None:
    """Give a thread ``wanted`` after a write of its cpuset, as far as the cpuset allows.

    The kernel has mostly done that: it cuts masks to the new cpuset, and from 6.2 on widens them
    again. It does not restore a thread's own mask on 6.1, nor widen a thread that was born while
    its parent was narrow.
    """
    try:
        thread.check()
        wanted = thread.left(wanted)
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
        """The present value, without masks (``renewed``)."""
        base = f"{MOUNT}/{target.path}"
        if isinstance(target, CgroupDir):
            if self._root.exists(base):
                return True
            self._check(base.rpartition("/")[0], target)
            return False
        self._check(base, target)
        try:
            file = PARTITION_FILE if isinstance(target, Partition) else target.file
            text = self._root.read(f"{base}/{file}").strip()
        except FileNotFoundError:
            # systemd removes the controller when no guest needs it any more.
            raise VanishedError("the cgroup has no cpuset any more", where=str(target)) from None
        kind = PartitionState if isinstance(target, Partition) else CpusetList
        return kind(text)

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
        whole new list."""
        base = f"{MOUNT}/{target.path}"
        self._check(base, target)
        keep = list(self._wanted(target, value.masks, lost=True))
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
        self._settle(target, keep)

    # -- masks of threads

    def renewed(self, target: Noting, value: Noted) -> Noted:
        """As LiveSysOps.renewed."""
        return replace(value, masks=tuple(self._wanted(target, value.masks)))

    def _wanted(
        self, target: Noting, noted: Iterable[ThreadMask], lost: bool = False
    ) -> Iterator[ThreadMask]:
        """The threads whose masks a write of ``target`` loses, with the masks to give them: the
        ``noted`` ones where the present cpuset has cut them, otherwise those that are narrower than
        the cpuset. ``lost``: a kill may have lost noted masks, so that a thread with all CPUs of
        its cpuset gets its own back as well."""
        earlier = {m.thread: m.cpus for m in noted}
        for key, mask, allowed in self._masks(target):
            cpus, now = earlier.get(key), mask & allowed
            if cpus is not None and (
                now == (cpus & allowed or allowed) or (lost and now == allowed)
            ):
                yield ThreadMask(key, cpus)
            elif now != allowed:
                yield ThreadMask(key, mask)

    def _settle(self, target: Noting, keep: Iterable[ThreadMask]) -> None:
        for own in keep:
            settle(HostThread(self._root, self._calls, own.thread, str(target)), own.cpus)

    def _masks(self, target: Noting) -> Iterator[tuple[ThreadKey, CpuSet, CpuSet]]:
        """The threads whose masks a write of ``target`` may lose, with their masks and the CPUs of
        their cpusets: those below a slice whose list it is, and before 6.2 all of the host when a
        partition is made or ends (update_tasks_cpumask)."""
        if isinstance(target, Partition):
            if release_of(self._root.read(_OSRELEASE)) >= (6, 2):
                return
        elif "/" in target.path or target.file != "cpuset.cpus":
            return
        top = "" if isinstance(target, Partition) else target.path
        tids = (
            (tid, allowed)
            for path, allowed in islice(self._below(top), MOST_CGROUPS)
            # A domain with threaded children lists none of its own.
            for tid in (text_of(self._root, f"{directory(path)}/cgroup.threads") or "").split()
        )
        for tid, allowed in islice(tids, MOST_THREADS):
            try:
                stat = parse_stat(self._root.read(f"/proc/{tid}/task/{tid}/stat"))
                key = ThreadKey(stat.tid, stat.tid, stat.start_time)
                mask = HostThread(self._root, self._calls, key, str(target)).affinity()
            except OSError:
                continue
            if allowed is not None and not stat.bound:
                yield key, mask, allowed

    def _below(self, path: str) -> Iterator[tuple[str, CpuSet | None]]:
        """A cgroup and those in it, the upper ones first, with the CPUs of their cpusets."""
        waiting: deque[tuple[str, CpuSet | None]] = deque([(path, None)])
        while waiting:
            path, allowed = waiting.popleft()
            text = text_of(self._root, f"{directory(path)}/cpuset.cpus.effective")
            allowed = allowed if text is None else CpuSet.parse(text)
            yield path, allowed
            inside = (f"{path}/{name}".lstrip("/") for name in children(self._root, path))
            waiting += (
                (p, allowed) for p in inside if self._root.exists(f"{MOUNT}/{p}/cgroup.procs")
            )

    # -- partitions

    def follows(self, thread: HostThread) -> bool:
        """Whether a thread outside all partitions has every CPU that its cpuset has left."""
        allowed = thread.allowed()
        whole = allowed is not None and allowed <= thread.affinity()
        return whole and not self.partitions(thread.cgroup())

    def listed(self, path: str, cpus: CpuSet) -> CpuSet:
        """Those of ``cpus`` that the lists of a cgroup and of all above it permit."""
        for above in upwards(path):
            text = text_of(self._root, f"{MOUNT}/{above}/cpuset.cpus")  # None: no controller
            if text:
                cpus &= CpuSet.parse(text)
        return cpus

    def partitions(self, path: str) -> list[str]:
        """The cgroup and those above it that are partitions (in force or not)."""
        # None: without the controller.
        return [
            above for above in upwards(path)
            if text_of(self._root, f"{MOUNT}/{above}/{PARTITION_FILE}") not in ("member", None)
        ]  # fmt: skip

    def write_partition(self, target: Partition, state: PartitionState) -> None:
        """Make a cgroup a partition or a member again, and give threads their own masks back.
        Raises WriteError with the kernel's reason when the kernel makes a partition but calls it
        invalid."""
        base = f"{MOUNT}/{target.path}"
        self._check(base, target)
        file = f"{base}/{PARTITION_FILE}"
        keep = list(self._wanted(target, state.masks, lost=True))
        with told(Operation.PARTITION, str(target), state.wanted):
            if state.wanted == "root" and "invalid" in self._root.read(file):
                # An invalid partition stays invalid even after the cause is gone.
                self._calls.write(file, "member")
            self._calls.write(file, state.wanted)
        self._settle(target, keep)
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
