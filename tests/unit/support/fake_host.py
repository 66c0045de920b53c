"""A host in memory for tests of the shell: observed, read and written like a real one."""

from __future__ import annotations

from dataclasses import replace

import shell_samples as samples

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VanishedError, VsrtuneError
from vsrtune.model.guest import Guest, Thread
from vsrtune.model.plan import Action
from vsrtune.model.snapshot import Snapshot, SnapshotSlice
from vsrtune.model.targets import (
    CgroupDir,
    EmulatorPin,
    IrqAffinity,
    NapiThreaded,
    Pin,
    QueueCpus,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TxQueueLen,
    Value,
    VcpuPin,
)
from vsrtune.plan.safety.projection import after


class FakeHost:
    """Observer and SysOps in one. ``fail`` holds errors that a write or read of a
    target kind raises; ``writes`` counts what was written."""

    def __init__(self, *guests: Guest) -> None:
        self.snapshot: Snapshot = samples.snapshot(*guests)
        self.dirs: set[str] = set()
        self.fail: dict[str, VsrtuneError] = {}
        self.fail_observe: VsrtuneError | None = None
        self.writes = 0
        self.traces: list[float] = []

    # -- Observing

    def observe(self, trace_seconds: float = 0.0) -> Snapshot:
        self.traces.append(trace_seconds)
        if self.fail_observe is not None:
            raise self.fail_observe
        return self.snapshot

    def observe_some(self, names: frozenset[str]) -> SnapshotSlice:
        return SnapshotSlice.of(self.observe(), names)

    def observe_turns(self, names: frozenset[str] = frozenset()) -> SnapshotSlice:
        return SnapshotSlice(self.observe())

    # -- SysOps

    def online(self) -> CpuSet:
        return self.snapshot.host.online

    def read(self, target: Target) -> Value:
        match target:
            case CgroupDir():
                return target.path in self.dirs
            case TxQueueLen() | NapiThreaded():
                for guest in self.snapshot.guests:
                    for interface in guest.interfaces:
                        if interface.ifindex == target.ifindex:
                            if isinstance(target, TxQueueLen):
                                return interface.txqueuelen
                            return interface.threaded or 0
                raise VanishedError("no such device", where=str(target))
            case IrqAffinity() | QueueCpus():
                return self._below(target)
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
        self.writes += 1
        if isinstance(target, CgroupDir):
            (self.dirs.add if value else self.dirs.discard)(target.path)
        else:
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

    def _below(self, target: IrqAffinity | QueueCpus) -> CpuSet:
        for nic in self.snapshot.host.nics:
            if isinstance(target, IrqAffinity):
                for irq in nic.irqs:
                    if (irq.number, irq.name) == (target.irq, target.name):
                        return irq.affinity
            elif nic.ifindex == target.ifindex:
                for queue in nic.queues:
                    if queue.name == target.queue and queue.cpus is not None:
                        return queue.cpus
        raise VanishedError("no such interrupt or queue", where=str(target))

    def _thread(
        self, target: ThreadAffinity | ThreadSched | ThreadCgroup | VcpuPin | EmulatorPin
    ) -> Thread:
        for guest in self.snapshot.guests:
            for thread in guest.threads:
                if thread.key == target.thread:
                    return thread
        raise VanishedError("no such thread", where=str(target))
