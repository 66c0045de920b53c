# SPDX-License-Identifier: GPL-2.0-or-later
"""Plans some guests alone, if they and the other guests cannot affect each other.

A whole plan remembers the inputs of each guest. A guest with the same inputs again (the same
lists of CPUs, the same threads where CPUs are selected for it, the same devices) changes nothing
for the others and gets what it had: interrupt, housekeeping and selected CPUs stay. So does a
guest without a policy whose threads are bound to the same CPUs. After any other change all guests
are planned again.

Guests that are gone leave room, which others get with the next whole plan. Their settings are
not wrong meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.journal_records import Entry, applied
from vsrtune.model.plan import Heeded, Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import NO_STEPS, Steps
from vsrtune.model.targets import HOST_REF
from vsrtune.plan import kernel_threads
from vsrtune.plan.actions import build
from vsrtune.plan.brought_pins import brought
from vsrtune.plan.deadline.model import RootDomains
from vsrtune.plan.drift import Memory, drifts, enforcing
from vsrtune.plan.interrupt_cpus import interrupt_cpus
from vsrtune.plan.phases import Draft
from vsrtune.plan.placement.costs import Chosen
from vsrtune.plan.requirements import Context, Requirements, requirements_of, staying
from vsrtune.plan.safety import invariants
from vsrtune.plan.safety.starvation import unguarded, unwatched
from vsrtune.policy.matching import assign
from vsrtune.policy.model import Policy, host_keys


@dataclass(frozen=True, slots=True)
class Whole:
    """A plan for all guests that refused none and needed no root domain. ``shapes`` are the
    inputs of each guest, ``beside`` what the others occupy, ``devices`` the guest of each ifindex,
    ``by_hand`` the interrupt CPUs that policies name."""

    host: Host
    policies: tuple[Policy, ...]
    irq: CpuSet
    heeded: Heeded
    by_hand: CpuSet
    chosen: Mapping[ThreadKey, Chosen]
    shapes: Mapping[str, Hashable]
    beside: Mapping[str, Hashable]
    devices: Mapping[int, str]


def remember(
    context: Context,
    guests: Sequence[Guest],
    policies: Sequence[Policy],
    per_guest: Sequence[Requirements],
    chosen: Mapping[ThreadKey, Chosen],
    found: RootDomains,
    heeded: Heeded,
) -> Whole | None:
    """The memory of a whole plan for planning guests alone. None when guests share root domains
    or devices, or keep others off their CPUs: they have to wait for the next whole plan."""
    if found.domains or found.later or context.lists or any(w.policy.keep_off for w in per_guest):
        return None
    shapes: dict[str, Hashable] = {}
    devices: dict[int, str] = {}
    for requirements in per_guest:
        ref = requirements.guest.ref
        shapes[ref] = _shape(context.host, requirements)
        owners = (devices.setdefault(i.ifindex, ref) for i in requirements.guest.interfaces)
        if any(owner != ref for owner in owners):
            return None
    by_hand = CpuSet.union(cpus for cpus, _ in heeded.values())
    beside = {g.ref: _occupied(context, g) for g in guests if g.ref not in shapes}
    return Whole(
        context.host, tuple(policies), context.irq, heeded, by_hand, chosen, shapes, beside, devices
    )


def plan_alone(
    whole: Whole,
    snapshot: Snapshot,
    policies: Sequence[Policy],
    entries: Sequence[Entry],
    memory: Memory,
    steps: Steps = NO_STEPS,
) -> Plan | None:
    """The plan for the guests of ``snapshot``, which has no others (SnapshotSlice.alone).
    ``entries`` of the journal and ``memory`` need to cover these only. None when all guests have to
    be planned, as for releases, or to refuse one about which the planner is wrong."""
    host, written = snapshot.host, applied(entries)
    if whole.policies != tuple(policies):
        return None
    if host.cpus is not whole.host.cpus or host.nics is not whole.host.nics:
        return None
    guests = snapshot.guests
    assigned = assign(guests, policies, steps)
    if assigned.refusals or len({g.ref for g in guests}) != len(guests):
        return None
    if brought(entries):
        return None
    context = Context(host, whole.irq, written, drifts(snapshot, assigned.pairs, written, memory))
    managed = whole.shapes.keys() | {g.ref for g, _ in assigned.pairs}
    others = (g for g in guests if g.ref not in managed)
    if any(_occupied(context, g) != whole.beside.get(g.ref, ()) for g in others):
        return None
    per_guest = [requirements_of(context, guest, policy) for guest, policy in assigned.pairs]
    chosen: dict[ThreadKey, Chosen] = {}
    for requirements in per_guest:
        if not _as_before(whole, host, requirements):
            return None
        for pin in requirements.all_pins:
            pick = whole.chosen.get(pin.thread.key) if pin.cpus is None else Chosen(pin.cpus)
            if pick is not None:
                chosen[pin.thread.key] = pick
    draft = Draft(skipped=list(assigned.skipped))
    build(context, per_guest, chosen, RootDomains(), draft)
    kernel_threads.build_napi(context, per_guest, draft)
    desired = draft.desired.union(*(r.desired for r in per_guest))
    complete = {g.ref for g in guests if not g.waits}
    if any(t.guest in complete and t not in desired for t in written):
        return None
    if unguarded(snapshot, written, unwatched(guests, policies, steps)):
        return None
    # CPUs that the others' policies name by hand count; where the others are served is unchanged.
    heeded = {g.ref: whole.heeded[g.ref] for g in guests if g.ref in whole.heeded}
    made = Plan(
        draft.actions(),
        tuple(draft.skipped),
        for_verify=draft.for_verify,
        heeded={HOST_REF: (whole.by_hand, frozenset()), **heeded},
        accepted=frozenset(w.guest.ref for w in per_guest if w.policy.accept_standstill),
    )
    try:
        invariants.check(snapshot, made, written)
    except invariants.PlanError:
        return None
    concerned = draft.left.union({a.target for a in made.actions}, *(r.left for r in per_guest))
    drift = tuple(d for target, d in context.drifts.items() if target in concerned)
    return enforcing(replace(made, drift=drift), written)


def _as_before(whole: Whole, host: Host, requirements: Requirements) -> bool:
    ref = requirements.guest.ref
    if requirements.refusals or whole.shapes.get(ref) != _shape(host, requirements):
        return False
    return all(whole.devices.get(i.ifindex, ref) == ref for i in requirements.guest.interfaces)


def _occupied(context: Context, guest: Guest) -> Hashable:
    """Everything of a guest that is not planned for on which the plans of others depend. Its loads
    count in the next whole plan."""
    return tuple(replace(o, load=()) for o in staying(context, guest, guest.threads))


def _shape(host: Host, requirements: Requirements) -> Hashable:
    """Everything of a guest on which the plans of others and the CPUs selected for it depend."""
    served = interrupt_cpus(host, requirements.guest, requirements.policy)
    return (
        requirements.policy.path,
        _moved(requirements),
        served.cpus,
        served.listed,
        tuple(requirements.occupants),
        tuple(
            # Selected CPUs belong to this very thread.
            (p.thread.role, p.number, p.cpus, p.allowed, p.thread.key if p.cpus is None else None)
            for p in requirements.all_pins
        ),
    )


def _moved(requirements: Requirements) -> frozenset[str]:
    """The lower devices that are changed for the guest; only a whole plan changes them."""
    if all(key.startswith("scheduler.") for key in host_keys(requirements.policy)):
        return frozenset()
    return frozenset(name for i in requirements.guest.interfaces for name in i.lower)
