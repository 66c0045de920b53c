# SPDX-License-Identifier: GPL-2.0-or-later
"""Turns chosen CPUs and scheduling rules into ordered actions and skips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import cast

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, Interface, Role, SchedClass, Thread, ThreadKey
from vsrtune.model.plan import Action, Refusal
from vsrtune.model.present import irq_target
from vsrtune.model.targets import (
    DEVICE_SETTINGS,
    CgroupDir,
    DeviceNumber,
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
from vsrtune.plan.phases import Draft, Phase, lowers
from vsrtune.plan.placement.costs import Chosen
from vsrtune.plan.requirements import Context, PinRequest, Requirements, foreign_deadline, label
from vsrtune.policy.model import SchedRule, cpus_for, rule_for, sched_keys
from vsrtune.policy.yaml_reader import dotted, shown


def build(
    context: Context,
    per_guest: Sequence[Requirements],
    chosen: Mapping[ThreadKey, Chosen],
    found: RootDomains,
    draft: Draft,
) -> None:
    """Add worker moves, pins, scheduling and ring lengths of these guests to ``draft``.
    deadline/partitions.py adds the root domains."""
    claimed: dict[int, str] = {}
    for requirements in per_guest:
        draft.skipped += requirements.skipped
        _moves(context, requirements, found, draft)
        for pin in requirements.pins:
            phase = Phase.PIN_VCPUS if pin.thread.role is Role.VCPU else Phase.PIN_WORKERS
            _pin(requirements, pin, chosen, phase, draft)
        for pin in requirements.housekeepers:
            _pin(requirements, pin, chosen, Phase.PIN_EMULATORS, draft)
        for role in DATA_PLANE:
            _scheduling(context, requirements, role, chosen, found, draft)
        _interrupts(context, requirements, chosen, draft)
        _queues(context, requirements, claimed, draft)


def _moves(context: Context, requirements: Requirements, found: RootDomains, draft: Draft) -> None:
    ref = requirements.guest.ref
    moves = {t: path for t, path in requirements.moves.items() if t.key not in found.straight}
    for path in dict.fromkeys(moves.values()):
        target = CgroupDir(ref, path)
        draft.desired.add(target)
        known = context.applied.get(target) is True
        if not known and all(t.cgroup != path for t in requirements.guest.threads):
            reason = "room for the vhost workers, out of reach of emulatorpin"
            draft.add(Phase.WORKER_CGROUPS, Action.of(target, False, True, reason))
    for thread, path in moves.items():
        name = label(thread)
        move = ThreadCgroup(ref, thread.key, name)
        draft.desired.add(move)
        if thread.cgroup == path:
            draft.skip(ref, f"{name} cgroup", "already out of the emulator cgroup")
            continue
        reason = "so that the emulator's CPUs do not bind this worker"
        draft.add(Phase.WORKER_MOVES, Action.of(move, thread.cgroup, path, reason))


def pin_values(thread: Thread, target: Target, cpus: CpuSet) -> tuple[Value, Value]:
    """The values of ``target`` before and after the thread gets ``cpus``."""
    if isinstance(target, VcpuPin | EmulatorPin):
        cpuset = None if thread.cpuset_cpus is None else str(cpus)
        return Pin(thread.affinity, thread.cpuset_cpus), Pin(cpus, cpuset)
    return thread.affinity, cpus


def _pin(
    requirements: Requirements,
    pin: PinRequest,
    chosen: Mapping[ThreadKey, Chosen],
    phase: Phase,
    draft: Draft,
) -> None:
    subject = f"{label(pin.thread)} CPUs"
    pick = chosen.get(pin.thread.key)
    if pick is None:
        why = "its cgroup allows no housekeeping CPU"
        draft.skip(requirements.guest.ref, subject, why, vain=True)
        return
    if pin.thread.affinity == pick.cpus:
        why = f" ({pick.why})" if requirements.policy.placement is not None and pick.why else ""
        draft.skip(requirements.guest.ref, subject, f"already set: CPUs {pick.cpus}{why}")
        draft.for_verify[pin.target] = pick.cpus
        return
    auto = f" auto, {pick.why}" if pick.why else f" {pick.cpus}"
    reason = f"{dotted(pin.keys)}:{auto} ({requirements.policy.at(*pin.keys)})"
    before, after = pin_values(pin.thread, pin.target, pick.cpus)
    draft.add(phase, Action(pin.target, before, after, reason))


def _scheduling(
    context: Context,
    requirements: Requirements,
    role: Role,
    chosen: Mapping[ThreadKey, Chosen],
    found: RootDomains,
    draft: Draft,
) -> None:
    ref = requirements.guest.ref
    rule = rule_for(requirements.policy, role)
    if rule is None:
        return
    down = ", stepped down" if requirements.policy.lowered else ""
    keys = sched_keys(requirements.policy, role)
    reason = f"{dotted(keys)}{down} ({requirements.policy.at(*keys)})"
    already = f"already set: {rule.sched}"
    for thread in requirements.threads(role):
        name = label(thread)
        target = ThreadSched(ref, thread.key, name)
        draft.desired.add(target)
        if thread.sched == rule.sched:
            draft.for_verify[target] = rule.sched
            draft.skip(ref, f"{name} scheduling", already)
            continue
        if (drift := context.left_alone(target)) is not None:
            draft.leave(ref, f"{name} scheduling", drift)
            continue
        why_not = _why_not(context, requirements, thread, rule, chosen)
        if why_not is None and rule.deadline:
            why_not = _no_budget(found, thread)
        waits = _waits(context, found, thread) if why_not is None and rule.deadline else None
        if why_not is None and any(m.thread == thread for d in found.later for m in d.members):
            waits = "pending: its guest's workers leave the emulator's cgroup first; retried"
        if why_not is not None or waits is not None:
            later = why_not is None
            why = why_not or waits or ""
            draft.skip(ref, f"{name} scheduling", why, pending=later, vain=not later)
            continue
        action = Action.of(target, thread.sched, rule.sched, reason)
        if lowers(thread.sched, rule.sched):
            phase = Phase.LOWER_VCPUS if role is Role.VCPU else Phase.LOWER_WORKERS
            if requirements.policy.lowered and role is Role.VCPU:
                phase = Phase.STEP_DOWN
        else:
            phase = Phase.RAISE_VCPUS if role is Role.VCPU else Phase.RAISE_WORKERS
        draft.add(phase, action)


def _interrupts(
    context: Context,
    requirements: Requirements,
    chosen: Mapping[ThreadKey, Chosen],
    draft: Draft,
) -> None:
    """The interrupts of devices that the guest drives itself go where its vcpus go, for they wake
    these: vector n to vcpu n, and round again, as drivers spread their queues over the CPUs that
    they see. Elsewhere they would interrupt another router, or the work of the host's NICs."""
    guest, policy = requirements.guest, requirements.policy
    vcpus = guest.by_role(Role.VCPU)
    for device in guest.passed:
        name = f"{device.address} interrupts"
        if cpus_for(policy, Role.VCPU) is None:
            draft.skip(guest.ref, name, "the policy gives no CPUs to the vcpus that they wake")
        elif guest.source == "kubevirt":
            draft.skip(guest.ref, name, "its devices are its pod's")
        elif not device.irqs:
            draft.skip(guest.ref, name, "the guest has not enabled any")
        elif vcpus:
            for vector, irq in enumerate(device.irqs):
                vcpu = vcpus[vector % len(vcpus)]
                pick = chosen.get(vcpu.key)
                cpus = vcpu.affinity if pick is None else pick.cpus
                reason = f"cpus.vcpu: with {label(vcpu)} ({policy.at('cpus', 'vcpu')})"
                target = irq_target(irq, guest.ref)
                action = Action.of(target, irq.affinity, cpus, reason)
                subject = f"irq {irq.number} ({irq.name})"
                draft.want(Phase.INTERRUPTS, action, context.left_alone(target), subject)


def _no_budget(found: RootDomains, thread: Thread) -> str | None:
    later = any(m.thread == thread for d in found.later for m in d.members)
    if later or found.of(thread.key) is not None:
        return None
    return "no CPUs are given to it, and class deadline needs a root domain of them"


def _waits(context: Context, found: RootDomains, thread: Thread) -> str | None:
    """The reason to wait before a thread becomes DEADLINE, None when there is none. The kernel
    counts a sleeping thread in the root domain in which it last ran, and refuses DEADLINE
    (EPERM) until the thread wakes in the new one."""
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
    """The reason to leave a thread's scheduling alone, None when there is none."""
    if foreign_deadline(context, requirements.guest, thread):
        return "someone else gave the thread class deadline; it is left alone"
    pick = chosen.get(thread.key)
    cpus = pick.cpus if pick is not None else thread.affinity
    if rule.realtime and (both := cpus & context.irq):
        return f"it may run on interrupt CPU {both}, where it would starve packet reception"
    return None


def _queues(
    context: Context, requirements: Requirements, claimed: dict[int, str], draft: Draft
) -> None:
    ref = requirements.guest.ref
    if requirements.policy.desired(TxQueueLen) is None:
        return
    if not any(i.kind.rings for i in requirements.guest.interfaces):
        draft.skip(ref, "macvtap queue", "the guest has no macvtap interface", vain=True)
    for interface in requirements.guest.interfaces:
        if not interface.kind.rings:
            draft.skip(
                ref,
                f"{interface.target} queue",
                "no macvtap: in front of a tap's ring stands a qdisc that txqueuelen changes too",
                vain=True,
            )
            continue
        want_number(context, requirements, interface, TxQueueLen, claimed, draft, "queue")


def conflicts(per_guest: Sequence[Requirements]) -> list[Refusal]:
    """Refusals of guests that ask for another value of a shared device than an earlier guest:
    two guests may share one macvtap."""
    first: dict[tuple[type[DeviceNumber], int], Requirements] = {}
    out: list[Refusal] = []
    for requirements in per_guest:
        for interface, row in product(requirements.guest.interfaces, DEVICE_SETTINGS):
            value = requirements.policy.desired(row)
            if value is None or interface.kind not in row.kinds:
                continue
            other = first.setdefault((row, interface.ifindex), requirements)
            theirs, keys = other.policy.desired(row), tuple(row.key.split("."))
            if theirs != value:
                reason = (
                    f"{interface.target} is shared with {other.guest.ref}, for which "
                    f"{other.policy.at(*keys)} asks {shown(theirs)}"
                )
                out.append(requirements.refusal(keys, reason, "ask the same for both guests"))
    return out


def want_number(
    context: Context,
    requirements: Requirements,
    interface: Interface,
    setting: type[DeviceNumber],
    claimed: dict[int, str],
    draft: Draft,
    name: str = "",
) -> None:
    """Plan the setting of an interface's device as the policy asks for it. ``claimed`` maps the
    ifindex of a device to the first guest that asks, with which the setting goes."""
    ref, policy = requirements.guest.ref, requirements.policy
    subject = f"{interface.target} {name or setting.name}"
    desired, now = policy.desired(setting), setting.observed(interface)
    if desired is None:
        return
    owner = claimed.setdefault(interface.ifindex, ref)
    target = cast(Target, setting(ref, interface.target, interface.ifindex))
    draft.desired.add(target)
    if now is None:
        draft.skip(ref, subject, "the device has no such attribute", vain=True)
    elif owner != ref:
        what = f"its {name}" if name else "the setting"
        draft.skip(ref, subject, f"the device is shared, {what} goes with {owner}")
    else:
        # Every number but 0 is the true of a policy.
        value = now if isinstance(desired, bool) and bool(now) == desired else int(desired)
        reason = f"{setting.key} ({policy.at(*setting.key.split('.'))})"
        action = Action(target, now, value, reason)
        draft.want(Phase.DEVICES, action, context.left_alone(target), subject)
