"""Drift: which settings somebody changed, who did, and what the plan does about it.

The planner determines the drift before it plans. It plans nothing for a setting that is left
alone, so every rule about placement still holds for the rest. An ordinary action puts a setting
back.

Only evidence names the other party: libvirt's own record of the pin, the list of the cgroup, or
a running program that is known to write such settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Thread
from vsrtune.model.host import Host
from vsrtune.model.nic_settings import nic_settings
from vsrtune.model.plan import Action, Drift, DriftRule, Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    EmulatorPin,
    IrqAffinity,
    NapiThreaded,
    Pin,
    RrTimeslice,
    Target,
    ThreadAffinity,
    ThreadSched,
    TimeSlice,
    TxQueueLen,
    Value,
    VcpuPin,
)
from vsrtune.policy.drift_rules import DriftRules, rule_of
from vsrtune.policy.model import Policy, slice_of

Pairs = Iterable[tuple[Guest, Policy]]

# Sections of settings that neighbours are known to write while they run (Host.neighbours).
_HABITS = {
    "irqbalance": ("irq",),
    "numad": ("cpus",),
    "stalld": ("scheduler",),
    "tuned": ("cpus", "scheduler"),
}
_IRQ = "irq.set"
_SLICE = "scheduler.slice"
# If policies have several rules for a setting of the host, the first of these applies.
_STRICTEST = (DriftRule.ENFORCE, DriftRule.REPORT, DriftRule.ADOPT)


@dataclass(frozen=True, slots=True)
class Memory:
    """What earlier passes know beyond the journal. ``for_verify``: values that were found as
    desired and were never written. ``waits``: why a setting is not put back yet.

    ``patient``: a pin that moved without libvirt's knowledge is put back only once it is among
    ``stayed``, the pins that have stayed where they were moved to (Drift.found) for long enough.
    libvirt moves the thread first and notes the pin afterwards, so a plan made in between would
    mistake an operator's request (virsh vcpupin) for a thread that something moved beneath
    libvirt."""

    for_verify: Mapping[Target, Value] = field(default_factory=dict)
    waits: Mapping[Target, str] = field(default_factory=dict)
    patient: bool = False
    stayed: frozenset[tuple[Target, str]] = frozenset()

    def wait(self, target: Target, found: str, by: str) -> str:
        """Why ``target`` is not put back yet; "" when nothing is to be waited for."""
        moved = isinstance(target, VcpuPin | EmulatorPin) and by != "libvirt"
        if self.patient and moved and (target, found) not in self.stayed:
            return UNSURE
        return self.waits.get(target, "")


NO_MEMORY = Memory()

UNSURE = "checked again in a moment: libvirt moves a thread before it notes the pin"


def put_back(plan: Plan) -> dict[Target, Drift]:
    """The drift that the plan puts back because the policy enforces the setting."""
    planned = {action.target for action in plan.actions if not action.release}
    enforced = (d for d in plan.drift if d.rule is DriftRule.ENFORCE)
    return {d.target: d for d in enforced if d.target in planned}


def enforcing(plan: Plan, applied: Mapping[Target, Value]) -> Plan:
    """``plan``, with its actions that put a setting back marked as ``enforced``. ``applied`` are
    the values in the journal. A boost by stalld lasts a moment: undo must not restore it.

    An action is not marked if the journal does not know its target and the policy asks for
    another value than the one first found; undo then restores the value that it replaces.
    """
    drifted = put_back(plan)

    def marked(action: Action) -> Action:
        drift = drifted.get(action.target)
        if drift is None or action.release:
            return action
        found_so = action.target in applied or drift.desired == _text(action.after)
        return replace(action, enforced=found_so)

    return replace(plan, actions=tuple(map(marked, plan.actions)))


def drifts(
    snapshot: Snapshot, pairs: Pairs, applied: Mapping[Target, Value], memory: Memory = NO_MEMORY
) -> dict[Target, Drift]:
    """Every setting that differs from ``applied`` (the journal) or from ``memory``, with the
    drift rule of its policy. Includes settings whose policy asks for the value found; the
    planner leaves those out."""
    for_verify = {**applied, **memory.for_verify}
    by_guest: dict[str, list[tuple[Target, Value]]] = {}
    for target, value in for_verify.items():
        by_guest.setdefault(target.guest, []).append((target, value))
    found: dict[Target, Drift] = {}
    policies: list[Policy] = []
    for guest, policy in pairs:
        policies.append(policy)
        for target, desired, now, thread in _changed(guest, by_guest.get(guest.ref, ())):
            setting = _setting(target, thread)
            rule = rule_of(policy.drift, setting)
            by = _by(snapshot.host, setting, desired, thread)
            found[target] = _judge(target, setting, rule, desired, now, by, memory)
    rule = _strictest((p.drift for p in policies if p.moves_irqs is not None), _IRQ)
    settings = nic_settings(snapshot.host)
    for target, desired in by_guest.get(HOST_REF, ()):
        now_cpus = settings.get(target)
        if now_cpus is not None and now_cpus != desired:
            interrupt = isinstance(target, IrqAffinity)
            by = _by(snapshot.host, _IRQ, desired, None) if interrupt else ""
            found[target] = _judge(target, _IRQ, rule, desired, now_cpus, by, memory)
    rule = _strictest((p.drift for p in policies if slice_of(p)), _SLICE)
    slice_target = RrTimeslice(HOST_REF)
    desired_slice, now_ms = for_verify.get(slice_target), snapshot.host.rr_timeslice_ms
    if isinstance(desired_slice, TimeSlice) and now_ms is not None:
        now_slice = TimeSlice(now_ms)
        if not desired_slice.reached_by(now_slice):
            found[slice_target] = _judge(
                slice_target, _SLICE, rule, desired_slice, now_slice, "", memory
            )
    softirq = (p.drift for p in policies if p.softirq_sched is not None)
    rule = _strictest(softirq, "scheduler.softirq")
    threads = {t.key: t.sched for t in snapshot.host.softirq}
    for target, desired in by_guest.get(HOST_REF, ()):
        if isinstance(target, ThreadSched):
            now_sched = threads.get(target.thread)
            if now_sched is not None and now_sched != desired:
                setting = "scheduler.softirq"
                by = _by(snapshot.host, setting, desired, None)
                found[target] = _judge(target, setting, rule, desired, now_sched, by, memory)
    return found


def _changed(
    guest: Guest, for_verify: Iterable[tuple[Target, Value]]
) -> Iterator[tuple[Target, Value, Value, Thread | None]]:
    """Target, desired value, found value and thread of every setting that differs."""
    threads = {t.key: t for t in guest.threads}
    interfaces = {i.ifindex: i for i in guest.interfaces}
    for target, desired in for_verify:
        match target:
            case VcpuPin() | EmulatorPin() | ThreadAffinity():
                thread = threads.get(target.thread)
                cpus = desired.cpus if isinstance(desired, Pin) else desired
                if thread is not None and thread.affinity != cpus:
                    yield target, cpus, thread.affinity, thread
            case ThreadSched():
                thread = threads.get(target.thread)
                if thread is not None and thread.sched != desired:
                    yield target, desired, thread.sched, thread
            case TxQueueLen():
                interface = interfaces.get(target.ifindex)
                if interface is not None and interface.txqueuelen != desired:
                    yield target, desired, interface.txqueuelen, None
            case NapiThreaded():
                interface = interfaces.get(target.ifindex)
                now = None if interface is None else interface.threaded
                if now is not None and now != desired:
                    yield target, desired, now, None


def _setting(target: Target, thread: Thread | None) -> str:
    role = "" if thread is None else thread.role.value
    match target:
        case ThreadSched():
            return f"scheduler.{role}"
        case TxQueueLen():
            return "queue.macvtap"
        case NapiThreaded():
            return "napi.threaded"
    return f"cpus.{role}"


def _by(host: Host, setting: str, desired: Value, thread: Thread | None) -> str:
    section = setting.partition(".")[0]
    if thread is not None and section == "cpus":
        if thread.pin is not None and thread.pin == thread.affinity:
            return "libvirt"
        effective = thread.cpuset_effective
        if effective is not None and isinstance(desired, CpuSet) and not desired <= effective:
            return "a writer of its cgroup"
    running = [n.name for n in host.neighbours if n.pid is not None and n.detail != "no profile"]
    return next((name for name in running if section in _HABITS.get(name, ())), "")


def _strictest(asking: Iterable[DriftRules], setting: str) -> DriftRule | None:
    """The strictest rule of the policies that ask for a setting of the host. None when one of
    them has no rule, or when no policy asks."""
    rules = [rule_of(rules, setting) for rules in asking]
    if not rules or None in rules:
        return None
    return next(rule for rule in _STRICTEST if rule in rules)


def _judge(
    target: Target,
    setting: str,
    rule: DriftRule | None,
    desired: Value,
    now: Value,
    by: str,
    memory: Memory,
) -> Drift:
    if rule is None:
        held = by == "libvirt"
        rule = DriftRule.REPORT if held else DriftRule.ENFORCE
    else:
        held = False
    left = ""
    if rule is DriftRule.ADOPT:
        left = (
            f"adopted as found: {_text(now)}, we had set {_text(desired)}; a reload takes it back"
        )
    elif rule is DriftRule.REPORT and held:
        left = f"held by the operator on CPUs {now}, we had set {desired}; a reload takes it back"
    elif rule is DriftRule.REPORT:
        who = by or "something"
        left = f"reported: {who} changed it to {_text(now)}, we had set {_text(desired)}"
        left += "; a reload takes it back"
    else:
        left = memory.wait(target, _text(now), by)
    return Drift(target, setting, rule, _text(desired), _text(now), by, left)


def _text(value: Value) -> str:
    return f"CPUs {value}" if isinstance(value, CpuSet) else str(value)
