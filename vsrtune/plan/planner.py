# SPDX-License-Identifier: GPL-2.0-or-later
"""Turns a snapshot and policies into a Plan, without touching the host.

``_pipeline`` runs the stages in order: each takes the value of the previous stage and returns
its own, frozen. Stages refuse guests. If a refusal changes what other guests get (interrupts
stay where they are, or the guest would have let a thread stand still), ``judge`` runs the
pipeline again without these guests.

Invariants (safety/invariants.py checks them on every plan, before it is returned):

- No vcpu, vhost or NAPI thread is put on an interrupt CPU of any guest with a policy, be it one
  that is refused, stepped down or not confirmed.
- At least one housekeeping CPU is left: everything that nobody binds may run there, so it is
  neither isolated nor in a partition, and no such thread is pinned to it.
- Widen before narrow: a vhost worker leaves the emulator's cgroup before the emulator is
  narrowed; no thread gets CPUs outside its cpuset.
- No thread becomes fifo or rr while it may run on an interrupt CPU.
- A thread becomes DEADLINE only in a root domain whose CPUs are its mask, and only if the
  kernel's limit admits its budget; the domain has no interrupt CPU.
- No realtime vcpu can keep another thread of a router from running (safety/standstill.py).
- A refused guest gets no action; no target gets two, besides a release.
- Actions come in the order of the phases (phases.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import is_deadline
from vsrtune.model.guest import Guest, ThreadKey
from vsrtune.model.load import data_plane, measured, merged, moves
from vsrtune.model.plan import Action, Drift, Heeded, Plan, Refusal, Skipped
from vsrtune.model.root_domains import slices_of
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import NO_STEPS, Steps
from vsrtune.model.targets import Target, Value
from vsrtune.plan import interrupts, kernel_threads
from vsrtune.plan.actions import build, conflicts
from vsrtune.plan.cpu_selection import choose, last
from vsrtune.plan.deadline import partitions, root_domains
from vsrtune.plan.deadline.model import RootDomains
from vsrtune.plan.drift import NO_MEMORY, Memory, drifts, enforcing
from vsrtune.plan.incremental import Whole, remember
from vsrtune.plan.interrupt_cpus import interrupt_cpus
from vsrtune.plan.phases import Draft, Phase
from vsrtune.plan.placement import keep_off
from vsrtune.plan.placement.costs import Chosen
from vsrtune.plan.requirements import (
    Context,
    Requirements,
    Seats,
    label,
    lacks_cpus,
    not_online,
    refusal,
    requirements_of,
)
from vsrtune.plan.safety import invariants, standstill
from vsrtune.plan.safety.projection import project_actions
from vsrtune.plan.warnings import pins_alone, warnings
from vsrtune.policy.matching import assign, policies_of
from vsrtune.policy.model import IRQ_KEYS, Policy, asks_of_host, irq_lists

Pairs = tuple[tuple[Guest, Policy], ...]
# A bound on the work. Few plans refuse guests, and the second round mostly is the last.
_ROUNDS = 4

DISOWNED = "no policy asks for it any more, but somebody else has changed it: left alone"


def plan(
    snapshot: Snapshot,
    policies: Sequence[Policy],
    applied: Mapping[Target, Value] | None = None,
    reassert: Collection[str] = (),
    steps: Steps = NO_STEPS,
) -> Plan:
    """The settings that the policies ask for and the host does not have, as lowered for
    stepped-down guests (``steps``). The plan releases nothing (full_plan.py).

    ``applied`` is what was last written (from the journal). It keeps placements stable and shows
    what somebody has changed since. Drift that a policy leaves alone stays (plan/drift.py), except
    for the guests of ``reassert``. Raises PlanError when the result breaks an invariant.
    """
    inputs = Inputs(snapshot, policies, applied or {}, reassert, steps=steps)
    return checked(inputs, judge(inputs)).plan


# -- the pipeline: its values


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a plan. ``releases`` come first in it; ``snapshot`` and ``applied`` are as
    they will be after them. ``disowned`` is Plan.disowned. ``unable``: guests that are refused
    from the start, and why. ``kept``: slices that stay root domains for the guests that are not
    planned for. ``seats``: the CPUs that threads had in an earlier round of the same plan.
    ``originals``: what undo restores of ``applied``."""

    snapshot: Snapshot
    policies: Sequence[Policy]
    applied: Mapping[Target, Value]
    reassert: Collection[str] = ()
    memory: Memory = NO_MEMORY
    steps: Steps = field(default_factory=lambda: NO_STEPS)
    releases: tuple[Action, ...] = ()
    disowned: tuple[Target, ...] = ()
    unable: Mapping[str, tuple[Refusal, ...]] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    seats: Seats = field(default_factory=dict)
    originals: Mapping[Target, Value] = field(default_factory=dict)

    def host_stays(self, refused: Collection[str]) -> bool:
        """Whether what vsrtune has set on the host stays as it is. Guests that are not planned
        for may need it: the refused ones, and those that libvirt is busy with. So may a guest
        with budgets that is missing: the journal has dropped the threads of those that ended, so
        that one could not be read."""
        left = [g for g in self.snapshot.guests if g.waits or g.ref in refused]
        planned = {g.ref for g in self.snapshot.guests} - {g.ref for g in left}
        return any(
            is_deadline(value) and target.guest not in planned
            for target, value in self.applied.items()
        ) or any(asks_of_host(p) for g in left for p in policies_of(g, self.policies))


@dataclass(frozen=True, slots=True)
class Report:
    """What a plan reports besides its actions."""

    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def plus(self, refusals: Iterable[Refusal] = (), notes: Iterable[str] = ()) -> Report:
        """This report with the additions of a stage."""
        return Report((*self.refusals, *refusals), (*self.notes, *notes), self.skipped)


@dataclass(frozen=True, slots=True)
class Matched:
    """Guests with their policies. ``out`` are the guests with policies for which nothing is
    planned. ``drifts``: what somebody has changed, and what the plan does about it."""

    inputs: Inputs
    pairs: Pairs
    out: tuple[Guest, ...]
    drifts: Mapping[Target, Drift]
    report: Report

    @property
    def movers(self) -> Pairs:
        """The guests whose policies move interrupts."""
        return tuple((g, p) for g, p in self.pairs if p.moves_irqs)


@dataclass(frozen=True, slots=True)
class Located:
    """``irq`` are the interrupt CPUs of all managed guests; ``heeded`` is Plan.heeded."""

    matched: Matched
    pairs: Pairs
    irq: CpuSet
    heeded: Heeded
    report: Report


@dataclass(frozen=True, slots=True)
class Required:
    """The requirements of each guest, before CPU selection. ``left``: targets that are left
    alone because somebody changed them, those of refused guests included."""

    located: Located
    context: Context
    per_guest: tuple[Requirements, ...]
    left: frozenset[Target]
    report: Report


@dataclass(frozen=True, slots=True)
class Seated:
    """CPUs and root domains. ``per_guest`` are the guests that are not refused."""

    required: Required
    per_guest: tuple[Requirements, ...]
    chosen: Mapping[ThreadKey, Chosen]
    domains: RootDomains
    report: Report


@dataclass(frozen=True, slots=True)
class Ordered:
    """The actions. ``desired``: the targets for which policies have a value."""

    placed: Seated
    plan: Plan
    desired: frozenset[Target]
    left: frozenset[Target]


@dataclass(frozen=True, slots=True)
class Judged:
    """The plan as returned. ``desired``: the targets for which policies have a value. ``whole``:
    what incremental planning needs of it. ``seats``: the CPUs of each thread. ``harmful``:
    refusals of guests that it would let stand still, or that move interrupts beside realtime
    threads; if there are any, the plan must not be used."""

    plan: Plan
    desired: frozenset[Target]
    whole: Whole | None
    movers: frozenset[str]
    seats: Seats
    harmful: tuple[Refusal, ...] = ()


# -- the pipeline: its stages


def judge(inputs: Inputs) -> Judged:
    """Plan for the guests. What refuses a guest may be where others are at first, or would be if
    it came too; the next plan would no longer refuse it. So a plan that refuses guests and moves
    others is made again with the others where it puts them, until they stay there."""
    judged = _judge_once(inputs)
    for _ in range(_ROUNDS):
        if not judged.plan.refusals or all(a.release for a in judged.plan.actions):
            break
        before, snapshot = judged, inputs.snapshot
        if moves(before.plan.actions):
            loads = {t.key: merged(t.load) for t in data_plane(snapshot)}
            snapshot = measured(snapshot, loads)
        judged = _judge_once(replace(inputs, snapshot=snapshot, seats=before.seats))
        if judged.seats == before.seats:
            break
    return judged


def _judge_once(inputs: Inputs) -> Judged:
    """Run the pipeline until no refusal affects other guests. The places of interrupts are known
    only when no guest that moves them is refused, and standstills only when everything is
    planned. After such a refusal everything is planned again without the guest, and its
    interrupts stay where they are. So does a slice that is its root domain: the others are then
    planned for beside it."""
    unable, kept = dict(inputs.unable), inputs.kept
    slices = frozenset(slices_of(inputs.snapshot.host, inputs.applied))
    holders: dict[str, tuple[Refusal, ...]] = {}
    while True:
        judged = _pipeline(replace(inputs, unable=unable, kept=kept))
        why = (*judged.plan.refusals, *judged.harmful)
        every = {r.guest for r in judged.plan.refusals}
        refused = every & judged.movers
        refused |= {r.guest for r in judged.harmful}
        if kept != slices and inputs.host_stays(every):
            kept = slices
            holders = {ref: tuple(r for r in why if r.guest == ref) for ref in every}
            continue
        if kept and not inputs.host_stays(every):
            # They are refused only where the slice might change.
            unable |= holders
            continue
        if not refused:
            break
        unable |= {ref: tuple(r for r in why if r.guest == ref) for ref in refused}
    return judged


def checked(inputs: Inputs, judged: Judged) -> Judged:
    """``judged``, made of ``inputs``. Raises PlanError when it breaks an invariant."""
    invariants.check(inputs.snapshot, judged.plan, inputs.applied)
    return judged


def _pipeline(inputs: Inputs) -> Judged:
    matched = _match(inputs)
    located = _locate(matched)
    required = _require(located)
    placed = _place(required)
    ordered = _order(placed)
    return _judge(ordered)


def _match(inputs: Inputs) -> Matched:
    """Assign the policies to the guests."""
    snapshot, unable = inputs.snapshot, inputs.unable
    assigned = assign(snapshot.guests, inputs.policies, inputs.steps)
    quarrels = interrupts.conflicts(snapshot.host, assigned.pairs)
    refused = {r.guest for r in quarrels}
    pairs = [(g, p) for g, p in assigned.pairs if g.ref not in refused]
    changed = {
        target: replace(drift, left="") if target.guest in inputs.reassert else drift
        for target, drift in drifts(snapshot, pairs, inputs.applied, inputs.memory).items()
    }
    report = Report(tuple(assigned.refusals), tuple(assigned.notes), tuple(assigned.skipped))
    report = report.plus([*quarrels, *(r for g, _ in pairs for r in unable.get(g.ref, ()))])
    kept = tuple((g, p) for g, p in pairs if g.ref not in unable)
    planned = {g.ref for g, _ in kept}
    out = tuple(
        g for g in snapshot.guests if g.ref not in planned and policies_of(g, inputs.policies)
    )
    return Matched(inputs, kept, out, changed, report)


def _locate(matched: Matched) -> Located:
    """Find the interrupt CPUs of all managed guests, guest by guest. A guest whose NICs are
    served by the last CPUs that are free of interrupts is refused."""
    left = [target for target, drift in matched.drifts.items() if drift.left]
    # The host as it will be after the interrupts move.
    host = interrupts.moved(matched.inputs.snapshot.host, matched.movers, left)
    irq = CpuSet()
    heeded: dict[str, tuple[CpuSet, frozenset[str]]] = {}
    notes: list[str] = []
    refusals: list[Refusal] = []
    refused = {r.guest for r in matched.report.refusals}
    kept: list[tuple[Guest, Policy]] = []
    for guest, policy in matched.pairs:
        needs = policy.pins or policy.realtime or policy.emulator or policy.iothread
        wrong = interrupts.not_below(host, guest, policy)
        lists = irq_lists(policy)
        for keys, cpus in lists:
            wrong += not_online(host, guest, policy, keys, cpus)
        choice = interrupt_cpus(host, guest, policy)
        notes += choice.notes
        together = (irq | choice.cpus) & host.online
        full = bool(host.online) and host.online <= together
        if full and (needs or policy.irq is not None):
            others = "" if host.online <= choice.cpus else " together with the other guests' NICs"
            reason = (
                f"the interrupts of its NICs are served on every online CPU{others}, "
                "so no CPU is left for its threads"
            )
            hint = (
                "move the interrupts to fewer CPUs (cpus: {irq: 0}, irq: {set: true}), or name "
                "cpus.irq by hand"
            )
            wrong.append(refusal(guest, policy, IRQ_KEYS, reason, hint))
        refusals += wrong
        if wrong:
            choice, lists = interrupt_cpus(host, guest), []
            together = (irq | choice.cpus) & host.online
            full = host.online <= together
        else:
            kept.append((guest, policy))
        if not full:
            irq = together
            heeded[guest.ref] = (CpuSet.union(cpus for _, cpus in lists), choice.listed)
    for guest in matched.out:
        # Its lists count, unless interrupts would have to move there; otherwise the CPUs as they
        # are. Neither counts where it would leave no CPU to those that are planned for.
        asked = [p for p in policies_of(guest, matched.inputs.policies) if not p.moves_irqs]
        one = asked[0] if len(asked) == 1 and guest.ref not in refused else None
        choice = interrupt_cpus(host, guest, one)
        together = (irq | choice.cpus) & host.online
        if not host.online <= together:
            irq = together
            lists = irq_lists(one) if one is not None else []
            heeded[guest.ref] = (CpuSet.union(cpus for _, cpus in lists), choice.listed)
            why = "is refused" if guest.ref in refused else "is not planned for"
            notes += [f"{note}; it {why}, so they stay there" for note in choice.notes]
    return Located(matched, tuple(kept), irq, heeded, matched.report.plus(refusals, notes))


def _require(located: Located) -> Required:
    """Collect the requirements of each policy, and judge all of them except CPU selection."""
    inputs, drifts = located.matched.inputs, located.matched.drifts
    host, applied = inputs.snapshot.host, inputs.applied
    context = Context(
        host, located.irq, applied, drifts, inputs.kept, inputs.seats, inputs.originals
    )
    every = [requirements_of(context, guest, policy) for guest, policy in located.pairs]
    refusals = [r for requirements in every for r in requirements.refusals]
    kept = _without(every, refusals)
    quarrels = conflicts(kept)
    kept = _without(kept, quarrels)
    pinned = CpuSet()
    full: list[Refusal] = []
    for requirements in kept:
        # The guest whose lists take the last housekeeping CPU is refused.
        by_hand = CpuSet.union(p.cpus for p in requirements.pins if p.cpus is not None)
        if by_hand and context.host.housekeeping <= pinned | by_hand:
            full.append(_no_housekeeping(context, requirements))
        else:
            pinned |= by_hand
    left = frozenset(target for requirements in every for target in requirements.left)
    report = located.report.plus([*refusals, *quarrels, *full])
    return Required(located, context, _without(kept, full), left, report)


def _place(required: Required) -> Seated:
    """Select CPUs for every thread and root domains for DEADLINE threads. Guests for which there
    is no root domain are refused. So is the last guest that pins if narrow cgroups force ``auto``
    onto the last free CPU, one whose vcpus ``auto`` would have share a CPU, and those for which
    cores do not suffice (``last``). CPUs are then selected again for the rest."""
    context, snapshot = required.context, required.located.matched.inputs.snapshot
    per_guest = required.per_guest
    refusals: list[Refusal] = []
    while True:
        chosen: Mapping[ThreadKey, Chosen]
        chosen, lacking = choose(context, snapshot, per_guest)
        why = lacking or _lacking_cpus(context, per_guest, chosen)
        if not why:
            chosen, domains = root_domains.find(context, snapshot, per_guest, chosen)
            why = [*domains.refusals] or _in_held_partitions(context, per_guest, chosen)
        if not why:
            return Seated(required, per_guest, chosen, domains, required.report.plus(refusals))
        refusals += why
        per_guest = _without(per_guest, why)


def _lacking_cpus(
    context: Context, per_guest: Sequence[Requirements], chosen: Mapping[ThreadKey, Chosen]
) -> Sequence[Refusal]:
    """The refusal of a guest for which there is no CPU of its own, or that takes the last one."""
    pinned = CpuSet.union(chosen[p.thread.key].cpus for w in per_guest for p in w.pins)
    if pinned and context.host.housekeeping <= pinned:
        return [_no_housekeeping(context, [w for w in per_guest if w.pins][-1])]
    return last(context, [r for w in per_guest if (r := lacks_cpus(w, chosen)) is not None])


def _order(placed: Seated) -> Ordered:
    """Make the actions of all guests, in the order of the phases."""
    required, per_guest = placed.required, placed.per_guest
    inputs = required.located.matched.inputs
    context, snapshot = required.context, inputs.snapshot
    draft = Draft()
    for action in inputs.releases:
        draft.add(Phase.RELEASES, action)
    for target in inputs.disowned:
        draft.skip(target.guest, str(target).removeprefix(f"{target.guest}: "), DISOWNED)
    draft.skipped += placed.report.skipped
    build(context, per_guest, placed.chosen, placed.domains, draft)
    kernel_threads.build_napi(context, per_guest, draft)
    interrupts.build(context, per_guest, draft)
    kernel_threads.build(context, per_guest, placed.chosen, draft)
    kernel_threads.build_timeslice(context, per_guest, draft)
    kernel_threads.build_limit(context, per_guest, draft)
    partitions.build(context, snapshot, placed.domains, draft)
    keep_off.build(
        context, snapshot, inputs.policies, per_guest, placed.chosen, inputs.steps, draft
    )
    made = Plan(
        draft.actions(),
        tuple(draft.skipped),
        placed.report.refusals,
        (),
        (*placed.report.notes, *partitions.notes(snapshot, placed.domains)),
        for_verify=draft.for_verify,
        heeded=required.located.heeded,
        accepted=frozenset(w.guest.ref for w in per_guest if w.policy.accept_standstill),
        disowned=inputs.disowned,
    )
    desired = frozenset(draft.desired).union(*(w.desired for w in per_guest))
    return Ordered(placed, made, desired, required.left | draft.left)


def _judge(ordered: Ordered) -> Judged:
    """Add the warnings to the plan, and find guests that could stand still under it."""
    placed, made = ordered.placed, ordered.plan
    located = placed.required.located
    matched, per_guest = located.matched, placed.per_guest
    inputs = matched.inputs
    movers = frozenset(guest.ref for guest, _ in matched.movers)
    result = project_actions(inputs.snapshot, (a for a in made.actions if not a.release))
    managed = {w.guest.ref for w in per_guest}
    still = tuple(standstill.standstills(result, managed, made.accepted))
    refused = (
        *standstill.refusals(still, per_guest),
        *interrupts.onto_realtime(
            inputs.snapshot.host,
            result,
            per_guest,
            [a for a in made.actions if inputs.applied.get(a.target) != a.after],
        ),
    )
    if refused:
        return Judged(made, ordered.desired, None, movers, {}, refused)
    told = (
        *warnings(result, managed, located.irq, still),
        *pins_alone(result, per_guest),
        *kernel_threads.warnings(result, managed),
        *interrupts.warnings(result, per_guest),
    )
    concerned = ordered.left | {a.target for a in made.actions}
    # What was left as somebody changed it may be why its guest is refused.
    refusals = {r.guest for r in made.refusals}
    drift = tuple(
        d
        for target, d in matched.drifts.items()
        if target in concerned or (d.left and target.guest in refusals)
    )
    whole = None
    if not made.refusals:
        whole = remember(
            placed.required.context,
            inputs.snapshot.guests,
            inputs.policies,
            per_guest,
            placed.chosen,
            placed.domains,
            located.heeded,
        )
    final = enforcing(replace(made, warnings=told, drift=drift), inputs.applied)
    seats = {key: pick.cpus for key, pick in placed.chosen.items()}
    return Judged(final, ordered.desired, whole, movers, seats)


def _in_held_partitions(
    context: Context, per_guest: Sequence[Requirements], chosen: Mapping[ThreadKey, Chosen]
) -> list[Refusal]:
    """Refusals of guests whose threads would get CPUs of partitions of guests that are not
    planned for: these partitions stay."""
    held = context.held("", [w.guest.ref for w in per_guest])
    out = []
    for requirements in per_guest:
        for pin in requirements.all_pins:
            pick = chosen.get(pin.thread.key)
            if pick is not None and (both := pick.cpus & held):
                reason = (
                    f"{label(pin.thread)} would get CPU {both}, which is a root domain of a guest "
                    "that keeps its settings"
                )
                hint = "choose other CPUs, or mend the policy of that guest"
                out.append(requirements.refusal(pin.keys, reason, hint))
                break
    return out


def _without(
    per_guest: Iterable[Requirements], refusals: Iterable[Refusal]
) -> tuple[Requirements, ...]:
    refused = {r.guest for r in refusals}
    return tuple(w for w in per_guest if w.guest.ref not in refused)


def _no_housekeeping(context: Context, requirements: Requirements) -> Refusal:
    pins = requirements.pins
    keys = next((p.keys for p in pins if p.cpus is not None), pins[0].keys)
    free = context.host.housekeeping
    hint = "leave one CPU to everything else"
    if closed := context.online - free:
        hint += f", which may not use CPUs {closed}: isolated, in a partition, or not in"
        hint += " AllowedCPUs= of system.slice"
    return requirements.refusal(
        keys,
        f"CPUs {free} would all carry pinned threads and no housekeeping CPU would be left",
        hint,
    )
