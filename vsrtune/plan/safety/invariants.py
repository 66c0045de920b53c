# SPDX-License-Identifier: GPL-2.0-or-later
"""The planner's invariants, checked on every plan before anyone sees it.

The check runs the plan on a model of the host, action by action. A plan that breaks an invariant
is a mistake in the planner: it is neither shown nor executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.deadline import limit, total
from vsrtune.model.guest import (
    DATA_PLANE,
    REALTIME,
    Guest,
    Role,
    Sched,
    SchedClass,
    Thread,
    level,
)
from vsrtune.model.host import Host
from vsrtune.model.plan import Action, Heeded, Plan
from vsrtune.model.root_domains import root_domain
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    EmulatorPin,
    Partition,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadlessTarget,
    ThreadSched,
    Value,
    VcpuPin,
    pinned_cpus,
)
from vsrtune.plan.interrupt_cpus import confined, queue_irqs
from vsrtune.plan.phases import on_lower_device
from vsrtune.plan.requirements import label
from vsrtune.plan.safety.projection import Projection, scope_limit
from vsrtune.plan.safety.standstill import standstills


class PlanError(VsrtuneError):
    """A plan breaks an invariant: a mistake in vsrtune, not of the operator. ``guest`` is the one
    about whose settings it is, "" when no single one is to blame."""

    guest = ""


def check(
    snapshot: Snapshot,
    plan: Plan,
    applied: Mapping[Target, Value],
) -> None:
    """Raise PlanError when ``plan`` breaks an invariant of the planner.

    The check uses the snapshot and the plan alone, not what the planner derived from them.
    ``applied`` is the journal, which knows cgroups in which no thread is. Releases restore what
    was there before vsrtune; ``snapshot`` and ``applied`` are as they leave them.
    """
    plan = replace(plan, actions=tuple(a for a in plan.actions if not a.release))
    pinned = _pinned(snapshot, plan)
    state = Projection(snapshot)
    for action in plan.actions:
        # These come first: the rest is judged by where interrupts are served after them.
        if on_lower_device(action.target):
            _lower_step(state, action)
            state.apply(action)
    irq = interrupts(state.host, snapshot.guests, plan.heeded)
    _threads_off_interrupts(snapshot, irq, pinned)
    _housekeeping(snapshot, pinned)
    if not plan.actions:
        return
    refused = {r.guest for r in plan.refusals}
    found: set[Target] = set()
    dirs = _Dirs(snapshot, applied)
    state = Projection(snapshot)
    for action in plan.actions:
        if action.target in found:
            raise _broken(action.target, "the plan has a second action for this target")
        found.add(action.target)
        if action.target.guest in refused:
            raise _broken(action.target, "the guest is refused and yet gets an action")
        if action.before == action.after:
            raise _broken(action.target, "the action changes nothing")
        if isinstance(action.target, CgroupDir):
            dirs.made.add(action.target.path)
        _step(state, action, irq, dirs)
        state.apply(action)
    _realtime_off_interrupts(state, plan, irq)
    scheduled = {a.target.guest for a in plan.actions if isinstance(a.target, ThreadSched)}
    for case in standstills(state.snapshot(), scheduled - plan.accepted):
        what = f"{label(case.vcpu)} of {case.vcpu_guest} would keep {label(case.starved)} of "
        raise _broken(None, f"{what}{case.starved_guest} from CPU {case.cpus}", case.guest)


class _Dirs:
    """The cgroups that exist while a plan is carried out; ``made`` are those it makes."""

    def __init__(self, snapshot: Snapshot, applied: Mapping[Target, Value]) -> None:
        self._snapshot = snapshot
        self._ours = applied
        self.made: set[str] = set()

    def __contains__(self, path: object) -> bool:
        if path in self.made or path in self._used:
            return True
        return self._snapshot.host.cpuset(str(path)) is not None

    @cached_property
    def _used(self) -> frozenset[str]:
        known = {t.path for t, v in self._ours.items() if isinstance(t, CgroupDir) and v is True}
        return frozenset(known.union(t.cgroup for g in self._snapshot.guests for t in g.threads))


def interrupts(host: Host, guests: Iterable[Guest], heeded: Heeded) -> CpuSet:
    """The CPUs that serve frames for the heeded guests (Plan.heeded), as ``host`` shows them.

    The check accepts CPUs that a policy lists for a device. It demands nothing for another one if
    neither interrupts nor RPS nor a measurement tell where it is served.
    """
    cpus = {c for listed, _ in heeded.values() for c in listed}
    for guest in guests:
        if guest.ref in heeded:
            for interface in guest.interfaces:
                served = _served(host, interface.lower)
                cpus.update(*(served[name] for name in served.keys() - heeded[guest.ref][1]))
    return CpuSet(cpus) & host.online


def _served(host: Host, chain: Sequence[str]) -> dict[str, set[int]]:
    """For each device below an interface, the CPUs to which it delivers interrupts, RPS sends its
    frames, and its NAPI threads are confined; if there are none at all, those where the lowest was
    observed to receive."""
    cpus = {
        nic.name: {*nic.rps_cpus, *confined(host, nic)}.union(
            *(irq.effective for irq in queue_irqs(nic))
        )
        for nic in filter(None, map(host.nic, chain))
    }
    lowest = host.nic(chain[-1]) if chain else None
    if lowest is not None and not any(cpus.values()):
        cpus[lowest.name] = set(lowest.rx_cpus or ())
    return cpus


def _pinned(snapshot: Snapshot, plan: Plan) -> dict[Target, CpuSet]:
    """The CPUs that threads of the data plane get from the plan, or have as desired already."""
    handling = {t.key for g in snapshot.guests for role in DATA_PLANE for t in g.by_role(role)}
    values = [*plan.for_verify.items(), *((a.target, a.after) for a in plan.actions)]
    found: dict[Target, CpuSet] = {}
    for target, value in values:
        if isinstance(target, ThreadAffinity | VcpuPin) and target.guest != HOST_REF:
            cpus = pinned_cpus(value)
            if cpus is not None and target.thread in handling:
                found[target] = cpus
    return found


def _broken(target: Target | None, what: str, guest: str = "") -> PlanError:
    error = PlanError(
        f"internal error, the plan is not used: {what}",
        where=str(target) if target is not None else "",
        hint="please report it with the output of `vsrtune record`",
    )
    error.guest = guest if target is None else target.guest
    return error


def _threads_off_interrupts(
    snapshot: Snapshot, irq: CpuSet, pinned: Mapping[Target, CpuSet]
) -> None:
    for target, cpus in pinned.items():
        if not cpus or not cpus <= snapshot.host.online:
            raise _broken(target, f"it would get CPUs {cpus or 'none'}")
        if not cpus.isdisjoint(irq):
            raise _broken(target, f"it would run on interrupt CPU {cpus & irq}")


def _housekeeping(snapshot: Snapshot, pinned: Mapping[Target, CpuSet]) -> None:
    taken = CpuSet.union(pinned.values())
    if pinned and snapshot.host.housekeeping <= taken:
        raise _broken(None, f"no housekeeping CPU is left, CPUs {taken} are all pinned to")


def _lower_step(state: Projection, action: Action) -> None:
    cpus = action.after
    if not isinstance(cpus, CpuSet) or not cpus or not cpus <= state.host.online:
        raise _broken(action.target, f"a lower device would be served on CPUs {cpus or 'none'}")


def _step(state: Projection, action: Action, irq: CpuSet, dirs: _Dirs) -> None:
    target = action.target
    if isinstance(target, Partition):
        _partition_step(state, target, irq)
    if isinstance(target, ThreadlessTarget) or on_lower_device(target):
        return
    if target.guest == HOST_REF:
        _softirq_step(state, action, irq)
        return
    found = state.find(target.thread)
    if found is None:
        raise _broken(action.target, "the thread is not in the snapshot")
    guest, thread = found
    if isinstance(target, ThreadCgroup):
        if action.before != thread.cgroup or action.after not in dirs:
            raise _broken(action.target, f"no cgroup {action.after} to move to at that point")
    elif isinstance(target, ThreadSched):
        _sched_step(state, action, thread, irq)
    else:
        _pin_step(action, guest, thread, irq)


def _softirq_step(state: Projection, action: Action, irq: CpuSet) -> None:
    found = [
        t
        for t in state.host.softirq
        if isinstance(action.target, ThreadSched) and t.key == action.target.thread
    ]
    if not found or found[0].sched != action.before or found[0].cpu in irq:
        raise _broken(action.target, "no such ksoftirqd thread to change at that point")


def _partition_step(state: Projection, target: Partition, irq: CpuSet) -> None:
    group = state.host.cpuset(target.path)
    cpus = CpuSet.parse((group.exclusive or group.cpus) if group is not None else "")
    if not cpus or cpus & irq or state.host.housekeeping <= cpus:
        raise _broken(target, f"it would get CPUs {cpus or 'none'}")


def _sched_step(state: Projection, action: Action, thread: Thread, irq: CpuSet) -> None:
    wanted = action.after
    if not isinstance(wanted, Sched) or action.before != thread.sched:
        raise _broken(action.target, f"the thread is {thread.sched} at that point")
    if wanted.cls is SchedClass.DEADLINE:
        _deadline_step(state, action, thread, wanted, irq)
    elif thread.sched.cls is SchedClass.DEADLINE:
        raise _broken(action.target, "the thread leaves class deadline within its root domain")
    if wanted.cls in REALTIME:
        if not wanted.reset_on_fork:
            raise _broken(action.target, "realtime without reset-on-fork")
        # A thread may be lowered there before it is moved away.
        if thread.affinity & irq and not level(wanted) < level(thread.sched):
            raise _broken(action.target, f"realtime on interrupt CPU {thread.affinity & irq}")


def _deadline_step(
    state: Projection, action: Action, thread: Thread, wanted: Sched, irq: CpuSet
) -> None:
    if not wanted.reset_on_fork:
        raise _broken(action.target, "deadline without reset-on-fork")
    cpus = root_domain(state.host, thread)
    if cpus is None or thread.affinity != cpus or cpus & irq:
        raise _broken(action.target, f"CPUs {thread.affinity} are no root domain at that point")
    most = limit(state.host, cpus)
    beside = [
        t.sched
        for g in state.guests
        for t in g.threads
        if t.key != thread.key
        and t.sched.cls is SchedClass.DEADLINE
        and root_domain(state.host, t) == cpus
    ]
    if most is not None and total([*beside, wanted]) > most:
        raise _broken(action.target, f"CPUs {cpus} have too little bandwidth left at that point")


def _realtime_off_interrupts(state: Projection, plan: Plan, irq: CpuSet) -> None:
    """No thread that the plan makes realtime is on an interrupt CPU in the end."""
    for action in plan.actions:
        found = state.find(action.target.thread) if isinstance(action.target, ThreadSched) else None
        if found is not None and found[1].sched.cls in REALTIME and found[1].affinity & irq:
            raise _broken(action.target, f"realtime on interrupt CPU {found[1].affinity & irq}")


def _pin_step(action: Action, guest: Guest, thread: Thread, irq: CpuSet) -> None:
    before, cpus = pinned_cpus(action.before), pinned_cpus(action.after)
    if before != thread.affinity or not cpus:
        raise _broken(action.target, f"the thread has CPUs {thread.affinity} at that point")
    if thread.role in DATA_PLANE and cpus & irq:
        raise _broken(action.target, f"interrupt CPU {cpus & irq}")
    # libvirt rewrites the cpuset of what it pins, as far as the cgroup above allows.
    direct = isinstance(action.target, ThreadAffinity) or thread.cpuset_cpus is None
    limit = thread.cpuset_effective if direct else scope_limit(guest, thread)
    if limit is not None and not cpus <= limit:
        raise _broken(action.target, f"its cgroup allows {limit} only at that point")
    if isinstance(action.target, EmulatorPin) and thread.cpuset_cpus is not None:
        beside = [t for t in guest.by_role(Role.VHOST) if t.cgroup == thread.cgroup]
        if beside and not before <= cpus:
            raise _broken(action.target, "it would narrow vhost workers that share the cgroup")
