"""Turns chosen CPUs and scheduling rules into ordered actions and skips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, REALTIME, Role, Sched, SchedClass, Thread, ThreadKey
from vsrtune.model.plan import Action, Drift, DriftRule, Skipped
from vsrtune.model.targets import (
    CgroupDir,
    EmulatorPin,
    Pin,
    Target,
    ThreadCgroup,
    ThreadSched,
    TxQueueLen,
    Value,
    VcpuPin,
)
from vsrtune.plan.deadline.model import RootDomains
from vsrtune.plan.placement.ranked import Chosen
from vsrtune.plan.requirements import Context, PinRequest, Requirements, foreign_deadline, label
from vsrtune.policy.model import QueueBounds, SchedRule, rule_for
from vsrtune.policy.yaml_reader import dotted


@dataclass(slots=True)
class Phases:
    """Actions by phase. Their order (see planner) is the order of the fields."""

    interrupts: list[Action] = field(default_factory=list)
    domain_dirs: list[Action] = field(default_factory=list)
    dirs: list[Action] = field(default_factory=list)
    moves: list[Action] = field(default_factory=list)
    stepped_down: list[Action] = field(default_factory=list)
    vhost_lowered: list[Action] = field(default_factory=list)
    vcpu_lowered: list[Action] = field(default_factory=list)
    vhost_pins: list[Action] = field(default_factory=list)
    vcpu_pins: list[Action] = field(default_factory=list)
    domain_moves: list[Action] = field(default_factory=list)
    emulator_pins: list[Action] = field(default_factory=list)
    exclusives: list[Action] = field(default_factory=list)
    partitions: list[Action] = field(default_factory=list)
    timeslice: list[Action] = field(default_factory=list)
    softirq_lowered: list[Action] = field(default_factory=list)
    softirq_raised: list[Action] = field(default_factory=list)
    vcpu_raised: list[Action] = field(default_factory=list)
    vhost_raised: list[Action] = field(default_factory=list)
    queues: list[Action] = field(default_factory=list)
    threaded: list[Action] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def actions(self) -> tuple[Action, ...]:
        """All actions in order. A vhost worker is lowered before and raised after
        the vcpus, so that it never stands above them in between, and NAPI threads with
        the workers; ksoftirqd is lowered after and raised before both. Of a guest that is
        stepped down the vcpus go first: they keep the workers from running."""
        return (
            *self.interrupts,
            *self.domain_dirs,
            *self.dirs,
            *self.moves,
            *self.stepped_down,
            *self.vhost_lowered,
            *self.vcpu_lowered,
            *self.softirq_lowered,
            *self.vhost_pins,
            *self.vcpu_pins,
            *self.domain_moves,
            *self.emulator_pins,
            *self.exclusives,
            *self.partitions,
            *self.timeslice,
            *self.softirq_raised,
            *self.vcpu_raised,
            *self.vhost_raised,
            *self.queues,
            *self.threaded,
        )

    def skip(self, guest: str, subject: str, reason: str, *, pending: bool = False) -> None:
        """Record a setting that is left as it is."""
        self.skipped.append(Skipped(guest, subject, reason, pending=pending))

    def leave(self, guest: str, subject: str, drift: Drift) -> None:
        """Record a setting that somebody has changed and that is not put back."""
        held = drift.rule is DriftRule.REPORT
        self.skipped.append(Skipped(guest, subject, drift.left, held))


def build(
    context: Context,
    per_guest: Sequence[Requirements],
    chosen: Mapping[ThreadKey, Chosen],
    found: RootDomains,
    phases: Phases,
) -> None:
    """Fill ``phases`` with everything asked of the guests that are not refused, but for
    the root domains themselves (domain_build)."""
    claimed: dict[int, str] = {}
    for requirements in per_guest:
        phases.skipped += requirements.skipped
        _moves(context, requirements, phases)
        for pin in requirements.pins:
            into = phases.vcpu_pins if pin.thread.role is Role.VCPU else phases.vhost_pins
            _pin(context, requirements, pin, chosen, into, phases)
        if requirements.emulator is not None:
            _pin(context, requirements, requirements.emulator, chosen, phases.emulator_pins, phases)
        for role in DATA_PLANE:
            _scheduling(context, requirements, role, chosen, found, phases)
        _queues(context, requirements, claimed, phases)


def level(sched: Sched) -> int:
    """How urgent a thread is: its realtime priority, 0 for the ordinary classes."""
    return sched.priority if sched.cls in REALTIME else 0


def _moves(context: Context, requirements: Requirements, phases: Phases) -> None:
    ref = requirements.guest.ref
    existing = {t.cgroup for t in requirements.guest.threads}
    for path in dict.fromkeys(requirements.moves.values()):
        target = CgroupDir(ref, path)
        requirements.desired.add(target)
        if path not in existing and context.applied.get(target) is not True:
            reason = "room for the vhost workers, out of reach of emulatorpin"
            phases.dirs.append(Action(target, False, True, reason))
    for thread, path in requirements.moves.items():
        move = ThreadCgroup(ref, thread.key, label(thread))
        requirements.desired.add(move)
        if thread.cgroup == path:
            phases.skip(ref, f"{label(thread)} cgroup", "already out of the emulator cgroup")
            continue
        reason = "so that the emulator's CPUs do not bind this worker"
        phases.moves.append(Action(move, thread.cgroup, path, reason))


def pin_values(thread: Thread, target: Target, cpus: CpuSet) -> tuple[Value, Value]:
    """Before and after of giving ``cpus`` to a thread."""
    if isinstance(target, VcpuPin | EmulatorPin):
        cpuset = None if thread.cpuset_cpus is None else str(cpus)
        return Pin(thread.affinity, thread.cpuset_cpus), Pin(cpus, cpuset)
    return thread.affinity, cpus


def _pin(
    context: Context,
    requirements: Requirements,
    pin: PinRequest,
    chosen: Mapping[ThreadKey, Chosen],
    into: list[Action],
    phases: Phases,
) -> None:
    subject = f"{label(pin.thread)} CPUs"
    pick = chosen.get(pin.thread.key)
    if pick is None:
        phases.skip(requirements.guest.ref, subject, "its cgroup allows no housekeeping CPU")
        return
    if pin.thread.affinity == pick.cpus:
        why = f" ({pick.why})" if requirements.policy.placement is not None and pick.why else ""
        phases.skip(requirements.guest.ref, subject, f"already as asked: CPUs {pick.cpus}{why}")
        context.for_verify[pin.target] = pick.cpus
        return
    auto = f" auto, {pick.why}" if pick.why else f" {pick.cpus}"
    reason = f"{dotted(pin.keys)}:{auto} ({requirements.policy.at(*pin.keys)})"
    before, after = pin_values(pin.thread, pin.target, pick.cpus)
    into.append(Action(pin.target, before, after, reason))


def _scheduling(
    context: Context,
    requirements: Requirements,
    role: Role,
    chosen: Mapping[ThreadKey, Chosen],
    found: RootDomains,
    phases: Phases,
) -> None:
    ref = requirements.guest.ref
    rule = rule_for(requirements.policy, role)
    threads = requirements.threads(role)
    if rule is None:
        for thread in threads:
            phases.skip(ref, f"{label(thread)} scheduling", "not asked by the policy")
        return
    down = ", stepped down" if requirements.policy.lowered else ""
    reason = f"scheduler.{role.value}{down} ({requirements.policy.at('scheduler', role.value)})"
    for thread in threads:
        name = label(thread)
        target = ThreadSched(ref, thread.key, name)
        requirements.desired.add(target)
        if thread.sched == rule.sched:
            context.for_verify[target] = rule.sched
        elif (drift := context.leave(target)) is not None:
            phases.leave(ref, f"{name} scheduling", drift)
            continue
        why_not = _why_not(context, requirements, thread, rule, chosen)
        if why_not is None and rule.deadline:
            why_not = _no_budget(found, thread)
        waits = _waits(context, found, thread) if why_not is None and rule.deadline else None
        if why_not is None and any(m.thread == thread for d in found.later for m in d.members):
            waits = "pending: its guest's workers leave the emulator's cgroup first; retried"
        if why_not is not None or waits is not None:
            phases.skip(ref, f"{name} scheduling", why_not or waits or "", pending=why_not is None)
            continue
        action = Action(target, thread.sched, rule.sched, reason)
        if level(rule.sched) < level(thread.sched) and not rule.deadline:
            into = phases.vcpu_lowered if role is Role.VCPU else phases.vhost_lowered
            if requirements.policy.lowered and role is Role.VCPU:
                into = phases.stepped_down
        else:
            into = phases.vcpu_raised if role is Role.VCPU else phases.vhost_raised
        into.append(action)


def _no_budget(found: RootDomains, thread: Thread) -> str | None:
    later = any(m.thread == thread for d in found.later for m in d.members)
    if later or found.of(thread.key) is not None:
        return None
    return "no CPUs are given to it, and class deadline needs a root domain of them"


def _waits(context: Context, found: RootDomains, thread: Thread) -> str | None:
    """A thread that sleeps is still counted in the root domain in which it last ran;
    the kernel refuses DEADLINE (EPERM) until it wakes in the new one."""
    domain = found.of(thread.key)
    if domain is None or thread.sched.cls is SchedClass.DEADLINE:
        return None
    there = domain.holds(context.host, thread.cgroup)
    if not there or thread.affinity != domain.cpus or thread.last_cpu in domain.cpus:
        return None
    return (
        f"pending: it has not run since it was given CPUs {domain.cpus} (last on CPU "
        f"{thread.last_cpu}), and the kernel takes class deadline only then; retried"
    )


def _why_not(
    context: Context,
    requirements: Requirements,
    thread: Thread,
    rule: SchedRule,
    chosen: Mapping[ThreadKey, Chosen],
) -> str | None:
    """The reason why a thread's scheduling is left alone, None when it is not."""
    if thread.sched == rule.sched:
        return f"already as asked: {rule.sched}"
    if foreign_deadline(context, requirements.guest, thread):
        return "someone else gave the thread class deadline; it is left alone"
    pick = chosen.get(thread.key)
    cpus = pick.cpus if pick is not None else thread.affinity
    if rule.realtime and (both := cpus & context.irq):
        return f"it may run on interrupt CPU {both}, where it would starve packet reception"
    return None


def _queues(
    context: Context, requirements: Requirements, claimed: dict[int, str], phases: Phases
) -> None:
    ref = requirements.guest.ref
    desired = requirements.policy.macvtap_queue
    if desired is None:
        phases.skip(ref, "macvtap queue", "not asked by the policy")
        return
    if not any(i.kind.rings for i in requirements.guest.interfaces):
        phases.skip(ref, "macvtap queue", "the guest has no macvtap interface")
    for interface in requirements.guest.interfaces:
        subject = f"{interface.target} queue"
        target = TxQueueLen(ref, interface.target, interface.ifindex)
        if not interface.kind.rings:
            phases.skip(
                ref,
                subject,
                "no macvtap: in front of a tap's ring stands a qdisc that txqueuelen changes too",
            )
            continue
        requirements.desired.add(target)
        other = claimed.setdefault(interface.ifindex, ref)
        if other != ref:
            phases.skip(ref, subject, f"the device is shared, its queue goes with {other}")
            continue
        length = (
            desired if isinstance(desired, int) else _present(desired, context.applied.get(target))
        )
        said = str(length) if isinstance(desired, int) else f"{length} ({desired})"
        if interface.txqueuelen == length:
            phases.skip(ref, subject, f"already as asked: {said}")
            context.for_verify[target] = length
        elif (drift := context.leave(target)) is not None:
            phases.leave(ref, subject, drift)
        else:
            what = "queue.macvtap" if isinstance(desired, int) else f"queue.macvtap: {desired}"
            reason = f"{what} ({requirements.policy.at('queue', 'macvtap')})"
            phases.queues.append(Action(target, interface.txqueuelen, length, reason))


def _present(desired: QueueBounds, applied: Value | None) -> int:
    """Where an adaptive queue stands: what its keeper wrote last, else long."""
    if isinstance(applied, int) and desired.low <= applied <= desired.high:
        return applied
    return desired.high
