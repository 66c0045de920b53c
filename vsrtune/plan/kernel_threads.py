# SPDX-License-Identifier: GPL-2.0-or-later
"""Scheduling of ksoftirqd beside realtime guest threads, threaded NAPI, and the host's values for
classes rr and fifo: the slice and the limit.

When a vhost worker sends a frame to a veth or to another guest, the SoftIRQ of the sending CPU
receives it. Once the kernel has deferred that work to ksoftirqd, kernels before 6.5 leave all of
it to that thread (``ksoftirqd_running`` in kernel/softirq.c). Below realtime guest threads an
ordinary ksoftirqd hardly runs, and the per-CPU backlog drops routed frames after all the work on
them was done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import has_fair_server, is_deadline
from vsrtune.model.guest import (
    DATA_PLANE,
    REALTIME,
    Interface,
    NicKind,
    Role,
    SchedClass,
    ThreadKey,
    level,
)
from vsrtune.model.host import SoftirqThread
from vsrtune.model.plan import Action
from vsrtune.model.present import softirq_target
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    NapiThreaded,
    RealtimeLimit,
    RrTimeslice,
    RunTime,
    TimeSlice,
)
from vsrtune.plan.actions import want_number
from vsrtune.plan.phases import Draft, Phase
from vsrtune.plan.placement.costs import Chosen
from vsrtune.plan.requirements import Context, Requirements
from vsrtune.policy.model import SchedRule, cpus_for, host_keys, rule_for, slice_of


def build(
    context: Context,
    per_guest: Sequence[Requirements],
    chosen: Mapping[ThreadKey, Chosen],
    draft: Draft,
) -> None:
    """Add the scheduling of ksoftirqd threads that policies ask for.

    Where guests share a CPU, the most urgent rule wins. The thread of an interrupt CPU is never
    changed, because the SoftIRQ there competes with no realtime guest thread.
    """
    rules: dict[int, tuple[SchedRule, Requirements]] = {}
    for requirements in per_guest:
        rule = requirements.policy.softirq_sched
        if rule is None:
            continue
        cpus = _busy(requirements, chosen) - context.irq
        if not cpus and not requirements.policy.by_profile("scheduler", "softirq"):
            reason = "no realtime thread of the guest is pinned"
            draft.skip(requirements.guest.ref, "softirq scheduling", reason)
        for cpu in cpus:
            known = rules.get(cpu)
            if known is None or level(rule.sched) > level(known[0].sched):
                rules[cpu] = (rule, requirements)
    threads = {t.cpu: t for t in context.host.softirq}
    for cpu, (rule, requirements) in sorted(rules.items()):
        thread = threads.get(cpu)
        if thread is None:
            what, why = f"ksoftirqd/{cpu} scheduling", "the thread was not found"
            draft.skip(requirements.guest.ref, what, why, vain=True)
            continue
        _one(context, thread, rule, requirements, draft)


def _busy(requirements: Requirements, chosen: Mapping[ThreadKey, Chosen]) -> CpuSet:
    """CPUs to which realtime threads of the guest that handle frames are pinned."""
    rules = {role: rule_for(requirements.policy, role) for role in DATA_PLANE}
    realtime = {role for role, rule in rules.items() if rule is not None and rule.realtime}
    keys = (pin.thread.key for pin in requirements.pins if pin.thread.role in realtime)
    return CpuSet.union(chosen[key].cpus for key in keys if key in chosen)


def _one(
    context: Context,
    thread: SoftirqThread,
    rule: SchedRule,
    requirements: Requirements,
    draft: Draft,
) -> None:
    name, target = f"ksoftirqd/{thread.cpu} scheduling", softirq_target(thread)
    drift = context.left_alone(target)
    if drift is None and thread.sched.cls is SchedClass.DEADLINE:
        draft.desired.add(target)
        draft.skip(HOST_REF, name, "someone else gave the thread class deadline; it is left alone")
        return
    reason = (
        f"scheduler.softirq ({requirements.policy.at('scheduler', 'softirq')}): it runs beside "
        f"realtime threads of {requirements.guest.ref}"
    )
    lower = level(rule.sched) < level(thread.sched)
    phase = Phase.LOWER_SOFTIRQ if lower else Phase.RAISE_SOFTIRQ
    draft.want(phase, Action.of(target, thread.sched, rule.sched, reason), drift, name)


def warnings(result: Snapshot, managed: AbstractSet[str]) -> list[str]:
    """A warning of the CPUs whose ksoftirqd is below realtime threads of a managed guest."""
    below: set[int] = set()
    on = {t.cpu: t.sched for t in result.host.softirq}
    for guest in result.guests:
        if guest.ref not in managed:
            continue
        for thread in (t for role in DATA_PLANE for t in guest.by_role(role)):
            if thread.sched.cls in REALTIME and len(thread.affinity) == 1:
                softirq = on.get(thread.affinity.first())
                if softirq is not None and level(softirq) < level(thread.sched):
                    below.add(thread.affinity.first())
    if not below:
        return []
    what = (
        f"CPUs {CpuSet(below)}: ksoftirqd stands below realtime guest threads; frames they send to "
        "other guests or to a veth can be dropped at the backlog; add scheduler: softirq with "
        "their class and priority"
    )
    return [what]


def build_napi(context: Context, per_guest: Sequence[Requirements], draft: Draft) -> None:
    """Add the ``threaded`` settings that policies ask for, and report missing threads."""
    claimed: dict[int, str] = {}
    for requirements in per_guest:
        devices = [i for i in requirements.guest.interfaces if i.kind is NicKind.NAPI_MACVTAP]
        policy = requirements.policy
        desired = {
            "cpus.napi": policy.napi,
            "scheduler.napi": policy.napi_sched,
            "napi.threaded": policy.desired(NapiThreaded),
        }
        what = ", ".join(key for key, value in desired.items() if value is not None)
        if what and not devices:
            why = "the guest has no napi_macvtap interface"
            draft.skip(requirements.guest.ref, what, why, vain=True)
        for device in devices:
            want_number(context, requirements, device, NapiThreaded, claimed, draft)
            _missing(requirements, device, claimed, draft)


def _missing(
    requirements: Requirements, device: Interface, claimed: dict[int, str], draft: Draft
) -> None:
    """Report why this device's NAPI thread cannot get the CPUs or the class of the policy."""
    ref, policy = requirements.guest.ref, requirements.policy
    if any(t.interface == device.target for t in requirements.threads(Role.NAPI)):
        return
    cpus, rule = cpus_for(policy, Role.NAPI), rule_for(policy, Role.NAPI)
    if isinstance(cpus, tuple):
        names = (device.target, device.mac.lower())
        cpus = next((c for key, c in cpus if key in names), None)
    pending = False
    owner = claimed.get(device.ifindex, ref)
    if owner != ref:
        reason = f"the device is shared, its thread goes with {owner}"
    elif policy.desired(NapiThreaded) is False:
        reason = "there is no thread with napi.threaded: false"
    elif device.threaded:
        found = "; ".join(p for p in requirements.guest.problems if p.startswith(device.target))
        reason = f"its thread was not found ({found or 'no reason was reported'})"
    elif policy.desired(NapiThreaded):
        pending = device.threaded is not None
        reason = "the thread is made by threaded NAPI, and can be tuned once it is there"
    else:
        reason = "its NAPI is not threaded; napi.threaded: true makes the thread"
    for what, value in (("CPUs", cpus), ("scheduling", rule)):
        if value is not None:
            told = f"pending: {reason}" if pending else reason
            subject = f"napi {device.target} {what}"
            draft.skip(ref, subject, told, pending=pending, vain=not pending)


_SUBJECT = "time slice of class rr"


def build_timeslice(context: Context, per_guest: Sequence[Requirements], draft: Draft) -> None:
    """Add the shortest slice that the policies ask for."""
    slices = [(*slice_of(requirements.policy), requirements.policy) for requirements in per_guest]
    shortest = min((s for s in slices if s[0]), key=lambda s: s[:2], default=None)
    if shortest is None:
        return
    milliseconds, key, policy = shortest
    target = RrTimeslice(HOST_REF)
    draft.desired.add(target)
    wanted = TimeSlice(milliseconds)
    if context.host.rr_timeslice_ms is None:
        _by_hand(draft, _SUBJECT, f"sched_rr_timeslice_ms={milliseconds}")
        return
    now = TimeSlice(context.host.rr_timeslice_ms)
    reason = f"scheduler.{key} ({policy.at('scheduler', key)}): equals take turns of {wanted}"
    action = Action.of(target, now, wanted, reason)
    draft.want(Phase.TIME_SLICE, action, context.left_alone(target), _SUBJECT)


def _by_hand(draft: Draft, subject: str, value: str) -> None:
    reason = f"it cannot be set here: sysctl kernel.{value} on the host"
    draft.skip(HOST_REF, subject, reason, vain=True)


_LIMIT = "limit of realtime threads"


def build_limit(context: Context, per_guest: Sequence[Requirements], draft: Draft) -> None:
    """Let realtime threads run for longer of each second than the kernel's 950 ms, as the policies
    ask for. A kernel without fair_server stops all of them on a CPU for the rest, 50 ms, even if
    nothing else wants it (``sched_rt_runtime_exceeded`` in kernel/sched/rt.c).

    The kernel admits budgets of class deadline by the same value, so it stays as it is beside them.
    """
    policies = [w.policy for w in per_guest]
    asking = [p for p in policies if "scheduler.rest" in host_keys(p)]
    host = context.host
    if not asking or has_fair_server(host):
        return
    if any(p.deadline for p in policies) or any(map(is_deadline, context.applied.values())):
        draft.skip(HOST_REF, _LIMIT, "budgets of class deadline are admitted by it")
        return
    policy = max(asking, key=lambda p: p.rest_us)
    rest, target = policy.rest_us, RealtimeLimit(HOST_REF)
    now = RunTime(host.sched_rt_runtime_us)
    wanted = RunTime(host.sched_rt_period_us * (1_000_000 - rest) // 1_000_000)
    if now.us == 0 or wanted.us <= 0:
        draft.desired.add(target)
        draft.skip(HOST_REF, _LIMIT, "it is 0 or cannot be read: sysctl kernel.sched_rt_runtime_us")
        return
    # Ours goes back to the original first, to which this then applies.
    if context.applied.get(target) in (None, now) and not 0 < now.us <= wanted.us:
        reason = f"left at {now}, which leaves less than scheduler.rest: somebody set it"
        draft.skip(HOST_REF, _LIMIT, reason)
        return
    draft.desired.add(target)
    if host.rr_timeslice_ms is None and now != wanted:
        # /proc/sys is read-only.
        _by_hand(draft, _LIMIT, f"sched_rt_runtime_us={wanted.us}")
        return
    left = f"they leave {rest / 1000:g}ms of each second"
    reason = f"scheduler.rest ({policy.at('scheduler', 'rest')}): {left}"
    action = Action.of(target, now, wanted, reason)
    draft.want(Phase.TIME_SLICE, action, context.left_alone(target), _LIMIT)
