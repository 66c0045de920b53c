"""Scheduling of ksoftirqd beside realtime guest threads.

A frame that a vhost worker sends to a veth, or to another guest, is received by
the SoftIRQ of the CPU it was sent on. Once that work has been put off to
ksoftirqd, kernels before 6.5 leave all of it to that thread (``ksoftirqd_running``
in kernel/softirq.c); an ordinary ksoftirqd below realtime guest threads then
hardly runs, and routed frames are dropped at the per-CPU backlog, after all the
work on them was done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, REALTIME, SchedClass, ThreadKey
from vsrtune.model.host import SoftirqThread
from vsrtune.model.plan import Action, Skipped
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import HOST_REF, Target, ThreadSched
from vsrtune.placement import Chosen
from vsrtune.plan_build import Phases, level
from vsrtune.policy.model import SchedRule, rule_for
from vsrtune.wishes import Context, Wishes


def target(thread: SoftirqThread) -> ThreadSched:
    """The scheduling of one ksoftirqd thread."""
    return ThreadSched(HOST_REF, thread.key, f"ksoftirqd/{thread.cpu}")


def build(
    context: Context,
    all_wishes: Sequence[Wishes],
    chosen: Mapping[ThreadKey, Chosen],
    phases: Phases,
) -> frozenset[Target]:
    """Add what the policies ask of ksoftirqd threads; returns the targets asked for.

    The most urgent rule wins where guests share a CPU. An interrupt CPU's thread
    is never touched: there the SoftIRQ competes with no realtime guest thread.
    """
    rules: dict[int, tuple[SchedRule, Wishes]] = {}
    for wish in all_wishes:
        rule = wish.policy.softirq_sched
        if rule is None:
            phases.skip(wish.guest.ref, "softirq scheduling", "not asked by the policy")
            continue
        cpus = _busy(wish, chosen) - context.irq
        if not cpus:
            reason = "no realtime thread of the guest is pinned"
            phases.skip(wish.guest.ref, "softirq scheduling", reason)
        for cpu in cpus:
            known = rules.get(cpu)
            if known is None or level(rule.sched) > level(known[0].sched):
                rules[cpu] = (rule, wish)
    asked: set[Target] = set()
    threads = {t.cpu: t for t in context.host.softirq}
    for cpu, (rule, wish) in sorted(rules.items()):
        thread = threads.get(cpu)
        if thread is None:
            phases.skip(wish.guest.ref, f"ksoftirqd/{cpu} scheduling", "the thread was not found")
            continue
        asked.add(target(thread))
        _one(context, thread, rule, wish, phases)
    return frozenset(asked)


def _busy(wish: Wishes, chosen: Mapping[ThreadKey, Chosen]) -> CpuSet:
    """CPUs to which realtime threads of the guest that handle frames are pinned."""
    cpus = CpuSet()
    for pin in wish.pins:
        rule = rule_for(wish.policy, pin.thread.role)
        if rule is not None and rule.realtime and pin.thread.key in chosen:
            cpus |= chosen[pin.thread.key].cpus
    return cpus


def _one(
    context: Context, thread: SoftirqThread, rule: SchedRule, wish: Wishes, phases: Phases
) -> None:
    name = f"ksoftirqd/{thread.cpu} scheduling"
    if thread.sched == rule.sched:
        phases.skipped.append(Skipped(HOST_REF, name, f"already as asked: {rule.sched}"))
        context.settled[target(thread)] = rule.sched
        return
    drift = context.leave(target(thread))
    if drift is not None:
        phases.leave(HOST_REF, name, drift)
        return
    if thread.sched.cls is SchedClass.DEADLINE:
        reason = "someone else gave the thread class deadline; it is left alone"
        phases.skipped.append(Skipped(HOST_REF, name, reason))
        return
    reason = (
        f"scheduler.softirq ({wish.policy.at('scheduler', 'softirq')}): it runs beside "
        f"realtime threads of {wish.guest.ref}"
    )
    lower = level(rule.sched) < level(thread.sched)
    into = phases.softirq_lowered if lower else phases.softirq_raised
    into.append(Action(target(thread), thread.sched, rule.sched, reason))


def warnings(result: Snapshot, managed: AbstractSet[str]) -> list[str]:
    """CPUs whose ksoftirqd stands below realtime threads of a managed guest."""
    below: set[int] = set()
    on = {t.cpu: t.sched for t in result.host.softirq}
    for guest in result.guests:
        if guest.ref not in managed:
            continue
        for thread in guest.threads:
            busy = thread.role in DATA_PLANE and thread.sched.cls in REALTIME
            if busy and len(thread.affinity) == 1:
                softirq = on.get(thread.affinity.first())
                if softirq is not None and level(softirq) < level(thread.sched):
                    below.add(thread.affinity.first())
    return [
        f"CPU {cpu}: ksoftirqd/{cpu} stands below realtime guest threads; frames they send to "
        "other guests or to a veth can be dropped at the backlog; add scheduler: softirq with "
        "their class and priority"
        for cpu in sorted(below)
    ]
