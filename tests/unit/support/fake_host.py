"""A host in memory for tests of the shell: observed, read and written like a real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import shell_samples as samples
from planning_samples import change

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VanishedError, VsrtuneError
from vsrtune.model.guest import Guest, Role
from vsrtune.model.plan import Action, Place
from vsrtune.model.present import PresentValues
from vsrtune.model.snapshot import Snapshot, SnapshotSlice
from vsrtune.model.targets import (
    CgroupDir,
    EmulatorPin,
    Noted,
    Noting,
    Pin,
    Target,
    ThreadSched,
    Value,
    VcpuPin,
)
from vsrtune.plan.safety.projection import project_actions


class FakeHost:
    """Observer and SysOps in one. ``fail`` holds errors that a write or read of a
    target kind raises; ``written`` lists what was written."""

    def __init__(self, *guests: Guest) -> None:
        self.snapshot: Snapshot = samples.snapshot(*guests)
        self.dirs: set[str] = set()
        self.fail: dict[str, VsrtuneError] = {}
        self.fail_observe: Exception | None = None
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

    def observe_some(
        self, names: frozenset[str], places: frozenset[Place] = frozenset()
    ) -> SnapshotSlice:
        return SnapshotSlice.of(self.observe(), names)

    def observe_unannounced(self, names: frozenset[str] = frozenset()) -> SnapshotSlice:
        return SnapshotSlice(self.observe())

    # -- SysOps

    def online(self) -> CpuSet:
        return self.snapshot.host.online

    def unpartitioned(self, cpus: CpuSet) -> CpuSet:
        return cpus

    def left(self, target: Target, cpus: CpuSet) -> CpuSet:
        return cpus

    def whole(self, target: Target, value: Value) -> Value:
        return value

    def renewed(self, target: Noting, value: Noted) -> Noted:
        return value

    def read(self, target: Target) -> Value:
        if isinstance(target, CgroupDir):
            return target.path in self.dirs
        present = PresentValues(self.snapshot)
        now, thread = present.value(target), present.thread(target)
        if isinstance(target, VcpuPin | EmulatorPin) and thread is not None:
            return Pin(thread.affinity, thread.cpuset_cpus)
        if now is None and not present.shows(target):
            raise VanishedError("no such thing", where=str(target))
        return 0 if now is None else now

    def heir(self, target: ThreadSched) -> ThreadSched | None:
        return None

    def write(self, target: Target, value: Value) -> None:
        self.read(target)
        if target.kind in self.fail:
            raise self.fail[target.kind]
        self.written.append((target, value))
        if isinstance(target, CgroupDir):
            (self.dirs.add if value else self.dirs.discard)(target.path)
        self.snapshot = project_actions(self.snapshot, [Action(target, value, value, "")])

    # -- what others do to the host

    def start(self, guest: Guest) -> None:
        self.snapshot = replace(self.snapshot, guests=(*self.snapshot.guests, guest))

    def destroy(self, name: str) -> None:
        guests = tuple(g for g in self.snapshot.guests if g.name != name)
        self.snapshot = replace(self.snapshot, guests=guests)

    def change(self, role: str, **fields: Any) -> None:
        """Set fields of every thread of a role, behind our back."""
        self.each(lambda g: change(g, Role(role), **fields))

    def set_queue(self, length: int) -> None:
        """Set the queue length of every interface, behind our back."""
        self.each(
            lambda g: replace(
                g, interfaces=tuple(replace(i, txqueuelen=length) for i in g.interfaces)
            )
        )

    def each(self, changed: Callable[[Guest], Guest]) -> None:
        """Change every guest so."""
        self.snapshot = replace(self.snapshot, guests=tuple(map(changed, self.snapshot.guests)))
