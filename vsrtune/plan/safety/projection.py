# SPDX-License-Identifier: GPL-2.0-or-later
"""The snapshot after actions: the planner's model of the host.

The planner checks plans with it before it returns them, and tests use it. It models only what
the kernel and libvirt do to the fields on which plans depend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from vsrtune.core.cpuset import CpuSet
from vsrtune.model import cpuset_tree
from vsrtune.model.cpuset_tree import CpusetGroup, at_or_below, upwards
from vsrtune.model.guest import Guest, Interface, Role, Sched, Thread, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.plan import Action
from vsrtune.model.present import changed, passed_changed, thread_target
from vsrtune.model.root_domains import within
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    CpusetFile,
    CpusetList,
    DeviceNumber,
    EmulatorPin,
    IrqAffinity,
    Partition,
    PartitionState,
    Pin,
    QueueCpus,
    RealtimeLimit,
    RrTimeslice,
    RunTime,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TimeSlice,
    Value,
    VcpuPin,
)

_Change = Callable[[Guest, Thread], Thread]


def project_actions(snapshot: Snapshot, actions: Iterable[Action]) -> Snapshot:
    """The snapshot after the actions, in their order."""
    state = Projection(snapshot)
    for action in actions:
        state.apply(action)
    return state.snapshot()


class Projection:
    """A snapshot that takes actions one after the other. The time of an action depends on the
    size of its own guest, not on the number of guests."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._before = snapshot
        self._guests = list(snapshot.guests)
        self._host: Host | None = snapshot.host
        self._softirq = {t.key: t for t in snapshot.host.softirq}
        # Changed cpusets by path; None: removed.
        self._groups: dict[str, CpusetGroup | None] = {}

    @property
    def host(self) -> Host:
        """The host as it is now."""
        if self._host is None:
            before = self._before.host
            groups = cpuset_tree.changed(before.cpusets, self._groups)
            softirq = tuple(self._softirq.values())
            self._host = replace(before, cpusets=groups, softirq=softirq)
        return self._host

    @property
    def guests(self) -> Sequence[Guest]:
        """The guests as they are now, in the snapshot's order."""
        return self._guests

    def snapshot(self) -> Snapshot:
        """The whole snapshot, frozen."""
        return replace(self._before, host=self.host, guests=tuple(self._guests))

    def find(self, key: ThreadKey) -> tuple[Guest, Thread] | None:
        """The guest and its thread as they are now."""
        home = self._homes.get(key)
        if home is None:
            return None
        guest = self._guests[home]
        return guest, next(t for t in guest.threads if t.key == key)

    def apply(self, action: Action) -> None:
        """Carry out one action."""
        match action.target, action.after:
            case (ThreadAffinity(thread=key), CpuSet() as cpus):
                if action.target.guest == HOST_REF:
                    self._below(action.target, cpus)
                self._thread(key, lambda g, t: replace(t, affinity=cpus))
            case (IrqAffinity() as irq, CpuSet() as cpus) if irq.guest != HOST_REF:
                self._passed(irq, cpus)
            case (IrqAffinity() | QueueCpus(), CpuSet() as cpus):
                self._below(action.target, cpus)
            case (RrTimeslice(), TimeSlice(ms=ms)):
                self._set_host(rr_timeslice_ms=ms)
            case (RealtimeLimit(), RunTime(us=us)):
                self._set_host(sched_rt_runtime_us=us)
            case (ThreadSched(thread=key), Sched() as sched):
                if key in self._softirq:
                    self._softirq[key] = replace(self._softirq[key], sched=sched)
                    self._host = None
                self._thread(key, lambda g, t: replace(t, sched=sched))
            case (ThreadCgroup(thread=key), str() as cgroup):
                group = self._cpuset(cgroup)
                self._thread(key, lambda g, t: _move(g, t, cgroup, group))
            case (VcpuPin(thread=key, vcpu=number), Pin() as pin):
                self._listed(key, f"vcpu{number}", pin)
                self._thread(key, lambda g, t: _pinned(g, t, pin))
            case (EmulatorPin(thread=key), Pin() as pin):
                self._listed(key, "emulator", pin)
                self._neighbours(key, lambda g, t: _with_main(g, t, pin, key.pid, key.tid))
            case (DeviceNumber() as target, int() as number):
                self._interfaces(target.ifindex, lambda i: target.changed(i, number))
            case (CgroupDir(path=path), bool() as exists):
                self._made(path) if exists else self._removed(path)
            case (CpusetFile(path=path, file=file), CpusetList(text=text)):
                self._written(path, file, text)
            case (Partition(path=path), PartitionState() as state):
                group = self._cpuset(path)
                self._group(path, lambda c: _partitioned(c, state))
                if group is not None and group.valid and state.wanted == "member":
                    self._freed(path, group.effective)
                    self._widened(path)
            case _:
                raise TypeError(f"{action.target.kind} does not take {action.after!r}")

    # -- threads and devices

    def _below(self, target: Target, cpus: CpuSet) -> None:
        """Change a setting of a lower device."""
        nics = tuple(changed(nic, target, cpus) for nic in self._before.host.nics)
        self._set_host(nics=nics)

    def _set_host(self, **values: Any) -> None:
        self._before = replace(self._before, host=replace(self._before.host, **values))
        self._host = None

    def _passed(self, irq: IrqAffinity, cpus: CpuSet) -> None:
        """Change an interrupt of a device that its guest drives itself."""
        for number in self._named.get(irq.guest, ()):
            self._guests[number] = passed_changed(self._guests[number], irq, cpus)

    @cached_property
    def _homes(self) -> dict[ThreadKey, int]:
        return {t.key: number for number, g in enumerate(self._guests) for t in g.threads}

    @cached_property
    def _named(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, guest in enumerate(self._guests):
            found.setdefault(guest.ref, []).append(number)
        return found

    @cached_property
    def _users(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, guest in enumerate(self._guests):
            for interface in guest.interfaces:
                found.setdefault(interface.ifindex, []).append(number)
        return found

    def _thread(self, key: ThreadKey, change: _Change) -> None:
        self._neighbours(key, lambda g, t: change(g, t) if t.key == key else t)

    def _neighbours(self, key: ThreadKey, change: _Change) -> None:
        """Change all threads of the guest that has this thread."""
        home = self._homes.get(key)
        if home is not None:
            self._change(home, change)

    def _change(self, number: int, change: _Change) -> None:
        guest = self._guests[number]
        threads = tuple(change(guest, t) for t in guest.threads)
        self._guests[number] = replace(guest, threads=threads)

    def _interfaces(self, ifindex: int, change: Callable[[Interface], Interface]) -> None:
        for number in self._users.get(ifindex, ()):
            guest = self._guests[number]
            changed = tuple(change(i) if i.ifindex == ifindex else i for i in guest.interfaces)
            self._guests[number] = replace(guest, interfaces=changed)

    # -- cgroups; those that the snapshot does not list are not followed

    def _cpuset(self, path: str) -> CpusetGroup | None:
        return self._groups[path] if path in self._groups else self._before.host.cpuset(path)

    def _group(self, path: str, change: Callable[[CpusetGroup], CpusetGroup]) -> None:
        group = self._cpuset(path)
        if group is not None:
            self._groups[path] = change(group)
            self._host = None

    def _made(self, path: str) -> None:
        known = self._before.host.cpusets
        if not known or self._cpuset(path) is not None:
            return
        parent = self._cpuset(path.rpartition("/")[0])
        effective = self._before.host.online if parent is None else parent.effective
        exclusive = "" if any(c.exclusive is not None for c in known) else None
        made = CpusetGroup(path, "", effective, "member", exclusive, populated=False)
        self._groups[path] = made
        self._host = None

    def _removed(self, path: str) -> None:
        if self._cpuset(path) is not None:
            self._groups[path] = None
            self._host = None

    def _written(self, path: str, file: str, text: str) -> None:
        if file != "cpuset.cpus":
            self._group(path, lambda c: replace(c, exclusive=text))
            return
        cpus = CpuSet.parse(text)
        self._group(path, lambda c: replace(c, cpus=text, effective=cpus or c.effective))
        for number, guest in enumerate(self._guests):
            if any(t.cgroup == path for t in guest.threads):
                self._change(number, lambda g, t: _listed_anew(g, t, path, text))
        if not cpus:
            self._widened(path)

    def _freed(self, path: str, cpus: CpuSet) -> None:
        """The CPUs of a partition that goes are free to all cgroups outside it again, as far as
        their lists allow. Threads that had all CPUs of their cpuset follow it."""

        def allowed(cgroup: str) -> CpuSet:
            found = cpus
            for group in map(self._cpuset, upwards(cgroup)):
                if group is not None and group.cpus:
                    found &= CpuSet.parse(group.cpus)
            return found

        def freed(_guest: Guest, thread: Thread) -> Thread:
            effective, limit = thread.cpuset_effective, thread.cpuset_limit
            if effective is None:
                return thread
            limit = limit and limit | allowed(thread.cgroup.rpartition("/")[0])
            if at_or_below(thread.cgroup, path):
                return replace(thread, cpuset_limit=limit)
            wide = effective | allowed(thread.cgroup)
            return replace(
                thread,
                affinity=wide if thread.affinity == effective else thread.affinity,
                cpuset_effective=wide,
                cpuset_limit=limit,
            )

        for number in range(len(self._guests)):
            self._change(number, freed)
        everywhere = self.host.everywhere
        for nic in self.host.nics:
            for thread in nic.napi:
                if thread.affinity == everywhere - cpus:
                    self._below(thread_target(thread), everywhere)
        for group in self.host.cpusets:
            if not group.valid and not at_or_below(group.path, path):
                wide = group.effective | allowed(group.path)
                self._groups[group.path] = replace(group, effective=wide)
        self._host = None

    def _reach(self, path: str) -> CpuSet:
        """The CPUs that the partitions, and the lists from a cgroup upwards, leave to it."""
        cpus = self.host.online
        for group in map(self._cpuset, upwards(path)):
            if group is not None and group.valid:
                return cpus & group.effective or group.effective
            if group is not None and group.cpus:
                cpus = cpus & CpuSet.parse(group.cpus) or cpus
        return cpus - CpuSet.union(g.effective for g in self.host.cpusets if g.valid) or cpus

    def _widened(self, path: str) -> None:
        """A cgroup is bound no more, and neither are those below it. Masks stay."""

        def changed(_guest: Guest, thread: Thread) -> Thread:
            effective = thread.cpuset_effective
            if effective is None or not within(thread.cgroup, path):
                return thread
            wide = self._reach(thread.cgroup)
            return replace(
                thread,
                cpuset_effective=wide,
                cpuset_limit=thread.cpuset_limit and self._reach(thread.cgroup.rpartition("/")[0]),
            )

        for number in range(len(self._guests)):
            self._change(number, changed)
        for group in self.host.cpusets:
            if at_or_below(group.path, path) and not group.valid:
                self._groups[group.path] = replace(group, effective=self._reach(group.path))
        self._host = None

    def _listed(self, key: ThreadKey, name: str, pin: Pin) -> None:
        """Write the list of libvirt's own cgroup, unless the thread has left it."""
        found = self.find(key)
        if found is None or pin.cpuset is None:
            return
        path, text = found[1].cgroup, pin.cpuset
        if path.rpartition("/")[2] == name:
            above = self._cpuset(path.rpartition("/")[0])
            wide = self._before.host.online if above is None else above.effective
            cpus = CpuSet.parse(text) & wide or wide
            self._group(
                path, lambda c: replace(c, cpus=text, effective=c.effective if c.valid else cpus)
            )


def scope_limit(guest: Guest, thread: Thread) -> CpuSet | None:
    """The CPUs that the thread's cgroup, or one beside it, gets when its own ``cpuset.cpus`` is
    unset: as observed, otherwise those of a thread in such a cgroup.

    None when neither shows them. The planner then assumes no limit, and the write of a CPU
    outside it fails (EINVAL).
    """
    if thread.cpuset_limit is not None:
        return thread.cpuset_limit
    parent = thread.cgroup.rpartition("/")[0]
    for other in guest.threads:
        if other.cgroup.rpartition("/")[0] == parent and other.cpuset_cpus == "":
            return other.cpuset_effective
    return None


def allowed_cpus(
    host: Host, applied: Mapping[Target, Value], guest: Guest, thread: Thread, *, moves: bool
) -> CpuSet:
    """The CPUs that the thread's cgroup permits after the plan.

    libvirt rewrites the cpuset of vcpus and emulator, and a worker that moves (``moves``) gets
    the scope's, so only the cgroup above limits these. The CPUs that our partitions take are no
    limit, because a plan may place everything anew.
    """
    if thread.role is Role.NAPI:
        # A kernel thread of the host, outside the guest's cgroups and every partition
        # (plan/deadline/root_domains.py).
        limit = thread.cpuset_effective
        return host.online if limit is None else host.online & limit
    pinned = thread.role in (Role.VCPU, Role.EMULATOR)
    rewritten = guest.source == "libvirt" and (pinned or moves)
    rewritten = rewritten and thread.cpuset_cpus is not None
    if guest.source == "libvirt" and any(isinstance(t, Partition) for t in applied):
        return _by_lists(host, applied, guest, thread, rewritten)
    limit = scope_limit(guest, thread) if rewritten else thread.cpuset_effective
    return host.online if limit is None else host.online & limit


def _by_lists(
    host: Host, applied: Mapping[Target, Value], guest: Guest, thread: Thread, rewritten: bool
) -> CpuSet:
    """The CPUs that cgroup lists which we did not write permit, without the CPUs that partitions
    of others hold."""
    partitions = {t.path for t in applied if isinstance(t, Partition)}
    lists = {t.path for t in applied if isinstance(t, CpusetFile) and t.file == "cpuset.cpus"}
    written = partitions | lists
    inside = thread.cgroup in partitions
    path = thread.cgroup if "/" in thread.cgroup else (guest.main or thread).cgroup
    if rewritten or inside:
        path = path.rpartition("/")[0]
    cpus = host.online
    for above in map(host.cpuset, upwards(path)):
        if above is not None and above.cpus and above.path not in written:
            cpus &= CpuSet.parse(above.cpus)
    for group in host.cpusets:
        if group.valid and group.path not in partitions and not path.startswith(group.path):
            cpus -= group.effective
    return cpus


def _effective(guest: Guest, thread: Thread, cpuset: str | None) -> CpuSet | None:
    if cpuset is None:
        return thread.cpuset_effective
    if cpuset == "":
        return scope_limit(guest, thread)
    return CpuSet.parse(cpuset)


def _pinned(guest: Guest, thread: Thread, pin: Pin) -> Thread:
    return replace(
        thread,
        affinity=pin.cpus,
        pin=pin.cpus,
        cpuset_cpus=pin.cpuset,
        cpuset_effective=_effective(guest, thread, pin.cpuset),
    )


def _with_main(guest: Guest, thread: Thread, pin: Pin, pid: int, tid: int) -> Thread:
    """A write of the emulator's cpuset changes the CPUs of every thread in its cgroup."""
    if thread.key.tid == tid and thread.key.pid == pid:
        return _pinned(guest, thread, pin)
    main = next((t for t in guest.threads if t.key.tid == tid and t.key.pid == pid), None)
    if main is None or pin.cpuset is None or thread.cgroup != main.cgroup:
        return thread
    return replace(_pinned(guest, thread, pin), pin=thread.pin)


def _move(guest: Guest, thread: Thread, cgroup: str, group: CpusetGroup | None) -> Thread:
    """A thread that moves takes the cpuset of its new cgroup, and keeps its affinity as far as
    that allows."""
    there = next((t for t in guest.threads if t.cgroup == cgroup), None)
    text, effective = "", scope_limit(guest, thread)
    if group is not None:
        text, effective = group.cpus, group.effective
    elif there is not None and there.cpuset_cpus is not None:
        text, effective = there.cpuset_cpus, there.cpuset_effective
    affinity = thread.affinity if effective is None else thread.affinity & effective or effective
    return replace(
        thread, cgroup=cgroup, affinity=affinity, cpuset_cpus=text, cpuset_effective=effective
    )


def _listed_anew(guest: Guest, thread: Thread, path: str, text: str) -> Thread:
    if thread.cgroup != path:
        return thread
    effective = _effective(guest, thread, text)
    return replace(thread, cpuset_cpus=text, cpuset_effective=effective)


def _partitioned(group: CpusetGroup, state: PartitionState) -> CpusetGroup:
    cpus = CpuSet.parse(group.exclusive or group.cpus)
    effective = cpus if state.text == "root" and cpus else group.effective
    return replace(group, partition=state.text, effective=effective)
