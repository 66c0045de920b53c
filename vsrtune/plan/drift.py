# SPDX-License-Identifier: GPL-2.0-or-later
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
from vsrtune.model.plan import Action, Culprit, Drift, DriftRule, Place, Plan
from vsrtune.model.present import PresentValues
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    DeviceNumber,
    EmulatorPin,
    IrqAffinity,
    Pin,
    SchedLimit,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    Value,
    VcpuPin,
)
from vsrtune.plan.phases import on_lower_device
from vsrtune.policy.model import Policy, host_keys

Pairs = Iterable[tuple[Guest, Policy]]

# Sections of settings that neighbours are known to write while they run (Host.neighbours).
_HABITS = {
    "irqbalance": ("irq",),
    "numad": ("cpus",),
    "stalld": ("scheduler",),
    "tuned": ("cpus", "scheduler"),
}
_RELOAD = "a reload takes it back"
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
    libvirt. ``culprits``: who the kernel last saw make a change."""

    for_verify: Mapping[Target, Value] = field(default_factory=dict)
    waits: Mapping[Target, str] = field(default_factory=dict)
    patient: bool = False
    stayed: frozenset[tuple[Target, str]] = frozenset()
    culprits: Mapping[Place, Culprit] = field(default_factory=dict)

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
    present = PresentValues(snapshot)
    by_guest: dict[str, list[tuple[Target, Value]]] = {}
    for target, value in {**applied, **memory.for_verify}.items():
        by_guest.setdefault(target.guest, []).append((target, value))
    found: dict[Target, Drift] = {}
    policies: list[Policy] = []
    for guest, policy in pairs:
        policies.append(policy)
        for change in _changes(present, by_guest.get(guest.ref, ())):
            rule = policy.drift_rule(change.setting)
            found[change.target] = _judge(snapshot.host, change, rule, memory)
    of_host = _changes(present, by_guest.get(HOST_REF, ()))
    for change in sorted(of_host, key=lambda change: change.setting):
        rule = _strictest(policies, change.setting)
        found[change.target] = _judge(snapshot.host, change, rule, memory)
    return found


@dataclass(frozen=True, slots=True)
class _Change:
    """A setting that differs; ``thread`` is that of the guest."""

    target: Target
    setting: str
    desired: Value
    now: Value
    thread: Thread | None


def _changes(
    present: PresentValues, for_verify: Iterable[tuple[Target, Value]]
) -> Iterator[_Change]:
    """The settings that differ from what they should be."""
    for target, value in for_verify:
        now = present.value(target)
        desired = value.cpus if isinstance(value, Pin) else value
        if now is None or now == desired:
            continue
        thread = present.thread(target)
        if setting := _setting(target, thread):
            yield _Change(target, setting, desired, now, thread)


def _setting(target: Target, thread: Thread | None) -> str:
    """The key of policies that governs the setting; "" for one that nobody else changes."""
    if isinstance(target, DeviceNumber | SchedLimit):
        return target.key
    if on_lower_device(target):
        return "irq.set"
    if isinstance(target, ThreadSched) and target.guest == HOST_REF:
        return "scheduler.softirq"
    if thread is None or isinstance(target, ThreadCgroup):
        return ""
    section = "scheduler" if isinstance(target, ThreadSched) else "cpus"
    return f"{section}.{thread.role.value}"


def place(target: Target) -> Place:
    """Where the kernel tells changes of a target."""
    match target:
        case ThreadSched():
            return "scheduler", target.thread.tid
        case ThreadAffinity() | VcpuPin() | EmulatorPin() | ThreadCgroup():
            return "cpus", target.thread.tid
        case IrqAffinity():
            return "irq", target.irq
        case DeviceNumber():
            return target.kind, target.device
    return target.kind, ""


def _by(host: Host, change: _Change, culprit: Culprit | None) -> str:
    if change.target.guest == HOST_REF and not isinstance(change.target, IrqAffinity | ThreadSched):
        return ""
    section, thread = change.setting.partition(".")[0], change.thread
    if thread is not None and section == "cpus":
        if thread.pin is not None and thread.pin == thread.affinity:
            return "libvirt"
        effective, desired = thread.cpuset_effective, change.desired
        if effective is not None and isinstance(desired, CpuSet) and not desired <= effective:
            return "a writer of its cgroup"
    if culprit is not None:
        return culprit.unit.removesuffix(".service")
    running = [n.name for n in host.neighbours if n.pid is not None and n.detail != "no profile"]
    return next((name for name in running if section in _HABITS.get(name, ())), "")


def _strictest(policies: Iterable[Policy], setting: str) -> DriftRule | None:
    """The strictest rule of the policies that ask for a setting of the host. None when one of
    them has no rule, or when no policy asks."""
    rules = [p.drift_rule(setting) for p in policies if setting in host_keys(p)]
    if not rules or None in rules:
        return None
    return next(rule for rule in _STRICTEST if rule in rules)


def _judge(host: Host, change: _Change, rule: DriftRule | None, memory: Memory) -> Drift:
    culprit = memory.culprits.get(place(change.target))
    by, was, found = _by(host, change, culprit), _text(change.desired), _text(change.now)
    held = rule is None and by == "libvirt"
    rule = rule or (DriftRule.REPORT if held else DriftRule.ENFORCE)
    if rule is DriftRule.ENFORCE:
        left = memory.wait(change.target, found, by)
    elif rule is DriftRule.ADOPT:
        left = f"adopted as found: {found}, we had set {was}; {_RELOAD}"
    elif held:
        left = f"held by the operator on {found}, we had set {change.desired}; {_RELOAD}"
    else:
        who = culprit or by or "something"
        left = f"reported: {who} changed it to {found}, we had set {was}; {_RELOAD}"
    return Drift(change.target, change.setting, rule, was, found, by, left, culprit)


def _text(value: Value) -> str:
    return f"CPUs {value}" if isinstance(value, CpuSet) else str(value)
