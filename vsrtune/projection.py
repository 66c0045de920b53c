"""What a snapshot looks like after actions: the planner's model of the host.

Used to check plans before they leave the planner, and by tests; it knows only
what the kernel and libvirt do to the fields that plans depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from vsrtune.actions import (
    Action,
    CgroupDir,
    CpusetFile,
    CpusetList,
    EmulatorPin,
    NapiThreaded,
    Partition,
    PartitionState,
    Pin,
    Plan,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TxQueueLen,
    VcpuPin,
)
from vsrtune.cpuset import CpuSet
from vsrtune.model import CpusetGroup, Guest, Interface, Sched, Snapshot, Thread, ThreadKey


def project(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """The snapshot after every action of the plan."""
    return project_actions(snapshot, plan.actions)


def project_actions(snapshot: Snapshot, actions: Iterable[Action]) -> Snapshot:
    """The snapshot after the actions, in their order."""
    for action in actions:
        snapshot = after(snapshot, action)
    return snapshot


def undo_actions(plan: Plan) -> tuple[Action, ...]:
    """The actions that take the whole plan back."""
    return tuple(action.inverse() for action in reversed(plan.actions))


def after(snapshot: Snapshot, action: Action) -> Snapshot:
    """The snapshot after one action."""
    match action.target, action.after:
        case (ThreadAffinity(thread=key), CpuSet() as cpus):
            return _threads(snapshot, lambda g, t: replace(t, affinity=cpus) if t.key == key else t)
        case (ThreadSched(thread=key), Sched() as sched):
            changed = _softirq(snapshot, key, sched)
            return _threads(changed, lambda g, t: replace(t, sched=sched) if t.key == key else t)
        case (ThreadCgroup(thread=key), str() as cgroup):
            group = snapshot.host.cpuset(cgroup)
            return _threads(
                snapshot, lambda g, t: _move(g, t, cgroup, group) if t.key == key else t
            )
        case (VcpuPin(thread=key, vcpu=number), Pin() as pin):
            changed = _listed(snapshot, key, f"vcpu{number}", pin)
            return _threads(changed, lambda g, t: _pinned(g, t, pin) if t.key == key else t)
        case (EmulatorPin(thread=key), Pin() as pin):
            changed = _listed(snapshot, key, "emulator", pin)
            return _threads(changed, lambda g, t: _with_main(g, t, pin, key.pid, key.tid))
        case (TxQueueLen(ifindex=ifindex), int() as length):
            return _interfaces(
                snapshot, lambda i: replace(i, txqueuelen=length) if i.ifindex == ifindex else i
            )
        case (NapiThreaded(ifindex=ifindex), int() as threaded):
            return _interfaces(
                snapshot, lambda i: replace(i, threaded=threaded) if i.ifindex == ifindex else i
            )
        case (CgroupDir(path=path), bool() as exists):
            return _made(snapshot, path) if exists else _removed(snapshot, path)
        case (CpusetFile(path=path, file=file), CpusetList(text=text)):
            return _written(snapshot, path, file, text)
        case (Partition(path=path), PartitionState() as state):
            return _groups(snapshot, path, lambda c: _partitioned(c, state))
    raise TypeError(f"{action.target.kind} does not take {action.after!r}")


def scope_limit(guest: Guest, thread: Thread) -> CpuSet | None:
    """The CPUs that the thread's cgroup, or one beside it, gets when its own
    ``cpuset.cpus`` is unset: as observed, else as seen on a thread in such a cgroup.

    None when neither shows it; then no limit is assumed, and a CPU outside it
    fails on writing (EINVAL).
    """
    if thread.cpuset_limit is not None:
        return thread.cpuset_limit
    parent = thread.cgroup.rpartition("/")[0]
    for other in guest.threads:
        if other.cgroup.rpartition("/")[0] == parent and other.cpuset_cpus == "":
            return other.cpuset_effective
    return None


def _softirq(snapshot: Snapshot, key: ThreadKey, sched: Sched) -> Snapshot:
    threads = tuple(replace(t, sched=sched) if t.key == key else t for t in snapshot.host.softirq)
    return replace(snapshot, host=replace(snapshot.host, softirq=threads))


def _threads(snapshot: Snapshot, change: Callable[[Guest, Thread], Thread]) -> Snapshot:
    guests = tuple(
        replace(g, threads=tuple(change(g, t) for t in g.threads)) for g in snapshot.guests
    )
    return replace(snapshot, guests=guests)


def _interfaces(snapshot: Snapshot, change: Callable[[Interface], Interface]) -> Snapshot:
    guests = tuple(
        replace(g, interfaces=tuple(change(i) for i in g.interfaces)) for g in snapshot.guests
    )
    return replace(snapshot, guests=guests)


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
    """Writing the emulator's cpuset moves every thread in its cgroup."""
    if thread.key.tid == tid and thread.key.pid == pid:
        return _pinned(guest, thread, pin)
    main = next((t for t in guest.threads if t.key.tid == tid and t.key.pid == pid), None)
    if main is None or pin.cpuset is None or thread.cgroup != main.cgroup:
        return thread
    return replace(_pinned(guest, thread, pin), pin=thread.pin)


def _move(guest: Guest, thread: Thread, cgroup: str, group: CpusetGroup | None) -> Thread:
    """A thread takes the cpuset of the cgroup it is moved to; its affinity is kept."""
    there = next((t for t in guest.threads if t.cgroup == cgroup), None)
    text, effective = "", scope_limit(guest, thread)
    if group is not None:
        text, effective = group.cpus, group.effective
    elif there is not None and there.cpuset_cpus is not None:
        text, effective = there.cpuset_cpus, there.cpuset_effective
    return replace(thread, cgroup=cgroup, cpuset_cpus=text, cpuset_effective=effective)


# -- cgroups; those that the snapshot does not list are not followed


def _groups(
    snapshot: Snapshot, path: str, change: Callable[[CpusetGroup], CpusetGroup]
) -> Snapshot:
    cpusets = tuple(change(c) if c.path == path else c for c in snapshot.host.cpusets)
    return replace(snapshot, host=replace(snapshot.host, cpusets=cpusets))


def _made(snapshot: Snapshot, path: str) -> Snapshot:
    host = snapshot.host
    if not host.cpusets or host.cpuset(path) is not None:
        return snapshot
    parent = host.cpuset(path.rpartition("/")[0])
    effective = host.online if parent is None else parent.effective
    exclusive = "" if any(c.exclusive is not None for c in host.cpusets) else None
    made = CpusetGroup(path, "", effective, "member", exclusive, populated=False)
    cpusets = tuple(sorted((*host.cpusets, made), key=lambda c: c.path))
    return replace(snapshot, host=replace(host, cpusets=cpusets))


def _removed(snapshot: Snapshot, path: str) -> Snapshot:
    cpusets = tuple(c for c in snapshot.host.cpusets if c.path != path)
    return replace(snapshot, host=replace(snapshot.host, cpusets=cpusets))


def _written(snapshot: Snapshot, path: str, file: str, text: str) -> Snapshot:
    if file != "cpuset.cpus":
        return _groups(snapshot, path, lambda c: replace(c, exclusive=text))
    cpus = CpuSet.parse(text)
    changed = _groups(
        snapshot, path, lambda c: replace(c, cpus=text, effective=cpus or c.effective)
    )
    return _threads(
        changed,
        lambda g, t: (
            replace(t, cpuset_cpus=text, cpuset_effective=_effective(g, t, text))
            if t.cgroup == path
            else t
        ),
    )


def _partitioned(group: CpusetGroup, state: PartitionState) -> CpusetGroup:
    cpus = CpuSet.parse(group.exclusive or group.cpus)
    effective = cpus if state.text == "root" and cpus else group.effective
    return replace(group, partition=state.text, effective=effective)


def _listed(snapshot: Snapshot, key: ThreadKey, name: str, pin: Pin) -> Snapshot:
    """libvirt writes the list of its own cgroup, where the thread may be no more."""
    for guest in snapshot.guests:
        for thread in guest.threads:
            at_home = thread.cgroup.rpartition("/")[2] == name
            if thread.key == key and at_home and pin.cpuset is not None:
                return _groups(snapshot, thread.cgroup, partial(replace, cpus=pin.cpuset))
    return snapshot
