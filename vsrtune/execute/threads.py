# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads the identity, mask, cgroup and cpuset of one thread of the host; writes mask and cpuset.

A thread that is to have all CPUs of its cpuset gets a mask of all possible CPUs. The kernel cuts
the mask to the cpuset, and since 6.2 remembers the wide one (``user_cpus_ptr``), so the thread
follows later widenings as it did before us.
"""

from __future__ import annotations

from contextlib import suppress

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VanishedError, WriteError
from vsrtune.execute.cpuset_clear import home_of
from vsrtune.execute.errno_table import Operation, told
from vsrtune.execute.syscalls import LiveCalls
from vsrtune.host.cgroupfs import MOUNT
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.procfs import Stat, parse_cgroup, parse_stat, parse_status_allowed
from vsrtune.model.cpuset_tree import upwards
from vsrtune.model.guest import ThreadKey
from vsrtune.plan.phases import OWN_CGROUP

CPUS = "/sys/devices/system/cpu"


class HostThread:
    """One thread, as host_writer uses it. Methods raise OSError unless they state otherwise."""

    def __init__(self, root: HostRoot, calls: LiveCalls, key: ThreadKey, where: str) -> None:
        self.key = key
        self.where = where
        self._root = root
        self._calls = calls
        self._base = f"/proc/{key.pid}/task/{key.tid}"

    def check(self) -> None:
        """Raise VanishedError unless the thread is the very one, and alive."""
        try:
            stat = self.stat()
        except (FileNotFoundError, ProcessLookupError):
            raise VanishedError("the thread has ended", where=self.where) from None
        if stat.start_time != self.key.start_time:
            raise VanishedError("the thread has ended, its number is reused", where=self.where)
        if stat.state in ("Z", "X"):
            raise VanishedError("the thread has ended", where=self.where)

    def stat(self) -> Stat:
        """Its state, the CPU it last ran on, and whether it is a kernel thread."""
        return parse_stat(self._root.read(f"{self._base}/stat"))

    def affinity(self) -> CpuSet:
        """The thread's mask, as the observer reads it."""
        return parse_status_allowed(self._root.read(f"{self._base}/status"))

    def mask_or_none(self) -> CpuSet | None:
        """The mask; None when the thread has ended."""
        try:
            return self.affinity()
        except (FileNotFoundError, ProcessLookupError):
            return None

    def cgroup(self) -> str:
        """Path below /sys/fs/cgroup."""
        path = parse_cgroup(self._root.read(f"{self._base}/cgroup"))
        if path is None:
            raise WriteError(
                "the cpuset controller is on cgroup v1",
                where=self.where,
                hint="boot with systemd.unified_cgroup_hierarchy=1",
            )
        return path

    def home(self) -> str:
        """``cgroup``, or the one the thread belongs to when a crash left it parked."""
        return home_of(self.cgroup())

    def cpuset_text(self) -> str | None:
        """Raw ``cpuset.cpus`` of the thread's home, None without the controller."""
        try:
            return self._root.read(f"{MOUNT}/{self.home()}/cpuset.cpus").strip()
        except (FileNotFoundError, WriteError):
            return None

    def set_cpuset_text(self, text: str) -> None:
        """Write ``cpuset.cpus`` of the thread's home. Raises WriteError."""
        with told(Operation.CPUSET, self.where, text):
            self._calls.write(f"{MOUNT}/{self.home()}/cpuset.cpus", text)

    def allowed(self, *, above: bool = False) -> CpuSet | None:
        """The CPUs of the nearest cpuset below the root that confines the thread (``above``: that
        confines its cgroup); None when there is none, or the controller is not on cgroup v2. The
        cgroup that threads leave again has no list of ours."""
        try:
            path = self.cgroup().rpartition("/")[0] if above else self.cgroup()
        except WriteError:
            return None
        for group in upwards(path.removesuffix(f"/{OWN_CGROUP}")):
            with suppress(FileNotFoundError):
                return CpuSet.parse(self._root.read(f"{MOUNT}/{group}/cpuset.cpus.effective"))
        return None

    def left(self, cpus: CpuSet, *, above: bool = False) -> CpuSet:
        """What the cpuset (``allowed``) leaves the thread of ``cpus``: all its own if it has none
        of them. The root's leaves all but those of partitions."""
        allowed = self.allowed(above=above)
        if allowed is not None:
            return cpus & allowed or allowed
        try:
            top = CpuSet.parse(self._root.read(f"{MOUNT}/cpuset.cpus.effective"))
        except FileNotFoundError:
            return cpus
        cpus -= CpuSet.parse(self._root.read(f"{CPUS}/online")) - top
        return self.affinity() if cpus.isdisjoint(top) else cpus

    def set_affinity(self, cpus: CpuSet) -> None:
        """Set the mask, by the rule in the module's docstring. Raises WriteError."""
        allowed = self.allowed()
        mask = cpus
        if allowed is not None and allowed <= cpus:
            mask = cpus | CpuSet.parse(self._root.read(f"{CPUS}/possible"))
        with told(Operation.AFFINITY, self.where, str(cpus)):
            self._calls.set_affinity(self.key.tid, mask)

    def keep_affinity(self, mask: CpuSet) -> None:
        """Give the mask back after a move, as far as the new cpuset allows."""
        allowed = self.allowed()
        if allowed is not None and allowed.isdisjoint(mask):
            return
        follows = allowed is not None and allowed <= mask
        if follows or self.affinity() != mask:
            self.set_affinity(mask)
