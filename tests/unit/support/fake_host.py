"""A host in memory for tests of the shell: observed, read and written like a real one."""

from __future__ import annotations

from dataclasses import replace

import shell_samples as samples

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VanishedError, VsrtuneError
from vsrtune.model.guest import Guest, Interface, Thread
from vsrtune.model.nic_settings import nic_settings
from vsrtune.model.plan import Action
from vsrtune.model.snapshot import Snapshot, SnapshotSlice
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    CpusetFile,
    CpusetList,
    EmulatorPin,
    IrqAffinity,
    NapiThreaded,
    Partition,
    PartitionState,
    Pin,
    QueueCpus,
    RrTimeslice,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TimeSlice,
    TxQueueLen,
    Value,
    VcpuPin,
)
from vsrtune.plan.safety.projection import after


class FakeHost:
    """Observer and SysOps in one. ``fail`` holds errors that a write or read of a
    target kind raises; ``written`` lists what was written."""

    def __init__(self, *guests: Guest) -> None:
        self.snapshot: Snapshot = samples.snapshot(*guests)
        self.dirs: set[str] = set()
        self.fail: dict[str, VsrtuneError] = {}
        self.fail_observe: VsrtuneError | None = None
        self.written: list[tuple[Target, Value]] = []
        self.traces: list[float] = []

    @property
    def writes(self) -> int:
        """How much was written."""
        return len(self.written)

    # -- Observing

    def observe(self, trace_seconds: float = 0.0) -> Snapshot:
        self.traces.append(trace_seconds)
        if self.fail_observe is not None:
            raise self.fail_observe
        return self.snapshot

    def observe_some(self, names: frozenset[str]) -> SnapshotSlice:
        return SnapshotSlice.of(self.observe(), names)

    def observe_unannounced(self, names: frozenset[str] = frozenset()) -> SnapshotSlice:
        return SnapshotSlice(self.observe())

    # -- SysOps

    def online(self) -> CpuSet:
        return self.snapshot.host.online

    def read(self, target: Target) -> Value:
        match target:
            case CgroupDir():
                return target.path in self.dirs
            case CpusetFile() | Partition():
                return self._cpuset(target)
            case RrTimeslice():
                return TimeSlice(self.snapshot.host.rr_timeslice_ms or 0)
            case TxQueueLen():
                return self._interface(target).txqueuelen
            case NapiThreaded():
                return self._interface(target).threaded or 0
            case IrqAffinity() | QueueCpus():
                return self._below(target)
            case ThreadAffinity() if target.guest == HOST_REF:
                return self._below(target)
            case ThreadSched() if target.guest == HOST_REF:
                return next(t.sched for t in self.snapshot.host.softirq if t.key == target.thread)
        thread = self._thread(target)
        match target:
            case ThreadAffinity():
                return thread.affinity
            case ThreadSched():
                return thread.sched
            case ThreadCgroup():
                return thread.cgroup
            case VcpuPin() | EmulatorPin():
                return Pin(thread.affinity, thread.cpuset_cpus)

    def write(self, target: Target, value: Value) -> None:
        self.read(target)
        if target.kind in self.fail:
            raise self.fail[target.kind]
        self.written.append((target, value))
        if isinstance(target, CgroupDir):
            (self.dirs.add if value else self.dirs.discard)(target.path)
        self.snapshot = after(self.snapshot, Action(target, value, value, ""))

    # -- what others do to the host

    def start(self, guest: Guest) -> None:
        self.snapshot = replace(self.snapshot, guests=(*self.snapshot.guests, guest))

    def destroy(self, name: str) -> None:
        guests = tuple(g for g in self.snapshot.guests if g.name != name)
        self.snapshot = replace(self.snapshot, guests=guests)

    def change(self, role: str, **fields: object) -> None:
        """Set fields of every thread of a role, behind our back."""
        self.snapshot = replace(
            self.snapshot,
            guests=tuple(
                replace(
                    g,
                    threads=tuple(
                        replace(t, **fields) if t.role.value == role else t  # type: ignore[arg-type]
                        for t in g.threads
                    ),
                )
                for g in self.snapshot.guests
            ),
        )

    def set_queue(self, length: int) -> None:
        """Set the queue length of every interface, behind our back."""
        self.snapshot = replace(
            self.snapshot,
            guests=tuple(
                replace(g, interfaces=tuple(replace(i, txqueuelen=length) for i in g.interfaces))
                for g in self.snapshot.guests
            ),
        )

    def _below(self, target: IrqAffinity | QueueCpus | ThreadAffinity) -> CpuSet:
        found = nic_settings(self.snapshot.host).get(target)
        if found is None:
            raise VanishedError("no such interrupt, queue or thread", where=str(target))
        return found

    def _cpuset(self, target: CpusetFile | Partition) -> Value:
        group = self.snapshot.host.cpuset(target.path)
        if group is None:
            raise VanishedError("no such cgroup", where=str(target))
        if isinstance(target, Partition):
            return PartitionState(group.partition)
        return CpusetList((group.cpus if target.file == "cpuset.cpus" else group.exclusive) or "")

    def _interface(self, target: TxQueueLen | NapiThreaded) -> Interface:
        for guest in self.snapshot.guests:
            for interface in guest.interfaces:
                if interface.ifindex == target.ifindex:
                    return interface
        raise VanishedError("no such device", where=str(target))

    def _thread(
        self, target: ThreadAffinity | ThreadSched | ThreadCgroup | VcpuPin | EmulatorPin
    ) -> Thread:
        for guest in self.snapshot.guests:
            for thread in guest.threads:
                if thread.key == target.thread:
                    return thread
        raise VanishedError("no such thread", where=str(target))
