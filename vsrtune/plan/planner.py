"""Snapshot and policies to a Plan, without touching the host.

Invariants (checked by plan_checks on every plan, before it is returned):

- No vcpu, vhost or NAPI thread is put on an interrupt CPU of any managed guest, nor of a
  refused one whose policy would have moved its interrupts away.
- At least one housekeeping CPU is left: online, no pinned one of these threads.
- Widen before narrow: a vhost worker leaves the emulator's cgroup before the
  emulator is narrowed; no thread is asked for CPUs outside its cpuset.
- No thread becomes fifo or rr while it may run on an interrupt CPU.
- A thread becomes DEADLINE only in a root domain whose CPUs are its mask, and only when
  the kernel's limit admits its budget; the domain has no interrupt CPU.
- No realtime vcpu can keep another thread of a router from running (plan/safety/standstill.py).
- A refused guest gets no action; no target gets two.

Actions come in this order, and in reverse they undo the plan: interrupts, RPS, XPS and
NAPI threads of lower devices, our cgroups, moves into them, scheduling that is lowered
(vhost, vcpu; of a guest that is stepped down vcpu, vhost), CPUs (vhost, vcpu, emulator),
root domains (moves, CPU lists, partitions), scheduling that is raised (ksoftirqd, vcpu,
vhost), queue lengths, threaded NAPI. So on the
way, there and back, no thread is realtime on a CPU where it is not so at either end, no
worker stands above its vcpu that does not at either end (stepped down: its vcpus starve it),
and no thread is DEADLINE while its root domain is made or taken away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Sched, SchedClass, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.plan import Plan, Refusal, Skipped
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import NO_STEPS, StepLevel, Steps
from vsrtune.model.targets import (
    HOST_REF,
    CgroupTarget,
    Partition,
    Target,
    ThreadCgroup,
    ThreadSched,
    Value,
)
from vsrtune.plan import interrupts, kernel_threads
from vsrtune.plan import warnings as plan_warnings
from vsrtune.plan.actions import Phases, build
from vsrtune.plan.cpu_selection import choose
from vsrtune.plan.deadline import partitions, root_domains
from vsrtune.plan.deadline.model import RootDomains
from vsrtune.plan.drift import NO_MEMORY, Memory, Overruled, drifts, enforcing, overrules
from vsrtune.plan.incremental import Whole, remember
from vsrtune.plan.interrupt_cpus import interrupt_cpus
from vsrtune.plan.placement.ranked import Chosen
from vsrtune.plan.projection import project
from vsrtune.plan.requirements import (
    Context,
    Requirements,
    check_online,
    requirements_of,
    without_quarrels,
)
from vsrtune.plan.safety import invariants, standstill
from vsrtune.policy.matching import assign, policies_of
from vsrtune.policy.model import Policy, asks_of_host


def plan(
    snapshot: Snapshot,
    policies: Sequence[Policy],
    applied: Mapping[Target, Value] | None = None,
    reassert: Overruled = False,
    memory: Memory = NO_MEMORY,
    steps: Steps = NO_STEPS,
) -> Plan:
    """What to change so that the host is as the policies ask, but for what guests are
    stepped down by (``steps``).

    ``applied`` is what was last written (from the journal): it keeps placements
    stable and tells what somebody has changed since, of which ``memory`` knows more.
    What a policy wants left alone then is left alone (plan/drift.py), unless ``reassert``: of all
    guests, or of these.
    Raises PlanError when the result breaks an invariant.
    """
    return _make(snapshot, policies, applied, reassert, memory, steps).plan


def plan_whole(
    snapshot: Snapshot,
    policies: Sequence[Policy],
    applied: Mapping[Target, Value],
    reassert: Overruled,
    memory: Memory,
    steps: Steps = NO_STEPS,
) -> tuple[Plan, Whole | None]:
    """As ``plan``, with what lets guests be planned alone afterwards (plan_alone)."""
    made = _make(snapshot, policies, applied, reassert, memory, steps)
    return made.plan, made.whole


def released(
    snapshot: Snapshot,
    policies: Sequence[Policy],
    applied: Mapping[Target, Value],
    steps: Steps = NO_STEPS,
) -> frozenset[Target]:
    """Targets of ``applied`` that no policy asks for any more, on guests that run.

    The caller undoes these after a reload. Targets of refused guests are not
    among them: a mistake in a policy must not untune its guest. Nor are those of guests
    with which libvirt is busy: it would not take the pins back. What such a guest needs of
    the host stays as well.
    """
    # What has to go first may stand in the way of what is planned: not to be checked yet.
    made = _make(snapshot, policies, applied, False, NO_MEMORY, steps, checked=False)
    running = {g.ref for g in snapshot.guests}
    refused = {r.guest for r in made.plan.refusals}
    refused |= {g.ref for g in snapshot.guests if g.waits}
    # Entries of dead threads are dropped before: a guest that is missing and has budgets
    # could not be read.
    budgets = any(_is_deadline(v) and t.guest not in running - refused for t, v in applied.items())
    spared = (g for g in snapshot.guests if g.ref in refused)
    if not budgets and not any(asks_of_host(p) for g in spared for p in policies_of(g, policies)):
        running.add(HOST_REF)
    vanished = {t for t in applied if t.guest in running - refused and t not in made.desired}
    vanished |= {
        t
        for t in applied
        if t.guest not in running and t.guest != HOST_REF and _left_behind(snapshot, t)
    }
    changing = {t.guest for t in vanished if isinstance(t, Partition)}
    # What is in a partition that goes leaves it; where to then is planned from there.
    vanished |= {t for t in applied if t.guest in changing and isinstance(t, ThreadCgroup)}
    changing |= _broken(snapshot, applied)
    if HOST_REF in changing:
        changing = running - refused
    # A thread leaves class deadline before its root domain is taken away or built anew.
    vanished |= {t for t, v in applied.items() if t.guest in changing and _is_deadline(v)}
    return frozenset(vanished)


def pressing(
    released: frozenset[Target], snapshot: Snapshot, steps: Steps = NO_STEPS
) -> frozenset[Target]:
    """Those of ``released`` that cannot wait for a reload: what is the host's own or was
    left by a guest that is gone, root domains that have to be made anew, and all of a guest
    that is stepped down to nothing."""
    running = {g.ref for g in snapshot.guests}
    anew = {t.guest for t in released if isinstance(t, Partition | ThreadSched)}
    anew |= {ref for ref, step in steps.items() if step.level is StepLevel.UNDONE}
    return frozenset(t for t in released if t.guest not in running or t.guest in anew)


def _broken(snapshot: Snapshot, applied: Mapping[Target, Value]) -> set[str]:
    """Guests (or the host) of partitions of ours that something made invalid. What the
    kernel has booked is not to be relied on then, until the root domain is built anew."""
    paths = {c.path for c in snapshot.host.cpusets if not c.valid}
    return {t.guest for t in applied if isinstance(t, Partition) and t.path in paths}


def _is_deadline(written: Value) -> bool:
    return isinstance(written, Sched) and written.cls is SchedClass.DEADLINE


def _left_behind(snapshot: Snapshot, target: Target) -> bool:
    """A partition at the top outlives its guest; one that nobody is in any more has to
    give its CPUs back. (The reader of a guest that still runs may have failed.)"""
    if not isinstance(target, CgroupTarget) or "/" in target.path:
        return False
    group = snapshot.host.cpuset(target.path)
    return group is not None and not group.populated


@dataclass(slots=True)
class _Made:
    plan: Plan
    per_guest: set[Target]
    whole: Whole | None
    movers: frozenset[str]
    # Guests whose plans would let threads stand still: all is planned again without them.
    still: Sequence[Refusal] = ()


@dataclass(slots=True)
class _State:
    """Guests that are still to be planned for, and what is said on the way."""

    pairs: list[tuple[Guest, Policy]]
    refusals: list[Refusal]
    notes: list[str]
    skipped: list[Skipped]
    irq: CpuSet = field(default_factory=CpuSet)
    heeded: dict[str, CpuSet | None] = field(default_factory=dict)


def _make(
    snapshot: Snapshot,
    policies: Sequence[Policy],
    applied: Mapping[Target, Value] | None,
    reassert: Overruled,
    memory: Memory,
    steps: Steps,
    *,
    checked: bool = True,
) -> _Made:
    """The plan. Where interrupts will be is known only once nobody who moves them is
    refused, and that nobody could stand still only once all is planned: whoever is refused
    for that has everything planned again without it, from where its interrupts are now."""
    unable: dict[str, tuple[Refusal, ...]] = {}
    while True:
        made = _attempt(snapshot, policies, applied or {}, reassert, memory, steps, unable)
        refused = {r.guest for r in made.plan.refusals} & made.movers
        refused |= {r.guest for r in made.still}
        if not refused:
            break
        for ref in refused:
            why = [*made.plan.refusals, *made.still]
            unable[ref] = tuple(r for r in why if r.guest == ref)
    if checked:
        invariants.check(snapshot, made.plan, applied or {})
    return made


def _attempt(
    snapshot: Snapshot,
    policies: Sequence[Policy],
    applied: Mapping[Target, Value],
    reassert: Overruled,
    memory: Memory,
    steps: Steps,
    unable: Mapping[str, tuple[Refusal, ...]],
) -> _Made:
    """A plan in which the guests in ``unable`` are refused, for these reasons."""
    assigned = assign(snapshot.guests, policies, steps)
    state = _State(assigned.pairs, assigned.refusals, assigned.notes, assigned.skipped)
    state.pairs = interrupts.without_quarrels(snapshot.host, state.pairs, state.refusals)
    changed = drifts(snapshot, state.pairs, applied, memory)
    changed = {
        target: replace(drift, left="") if overrules(reassert, target.guest) else drift
        for target, drift in changed.items()
    }
    out = [guest for guest, _ in state.pairs if guest.ref in unable]
    state.pairs = [(g, p) for g, p in state.pairs if g.ref not in unable]
    state.refusals += [r for guest in out for r in unable[guest.ref]]
    movers = [(g, p) for g, p in state.pairs if p.moves_irqs is not None]
    left = [target for target, drift in changed.items() if drift.left]
    then = interrupts.moved(snapshot.host, movers, left)
    _heed_refused(then, out, state)
    _choose_interrupts(then, state)
    context = Context(snapshot.host, state.irq, applied, changed)
    per_guest = _wishes(context, state)
    per_guest = without_quarrels(per_guest, state.refusals)
    per_guest = _with_housekeeping(context, per_guest, state)
    per_guest, chosen, found = _with_domains(context, snapshot, per_guest, state)
    phases = Phases(skipped=state.skipped)
    build(context, per_guest, chosen, found, phases)
    kernel_threads.build_napi(context, per_guest, phases)
    host_asked = interrupts.build(context, per_guest, phases)
    host_asked |= kernel_threads.build(context, per_guest, chosen, phases)
    host_asked |= kernel_threads.build_timeslice(context, per_guest, phases)
    host_asked |= partitions.build(context, snapshot, found, phases)
    state.notes += partitions.notes(snapshot, found)
    made = Plan(
        phases.actions(),
        tuple(phases.skipped),
        tuple(state.refusals),
        (),
        tuple(state.notes),
        for_verify=context.for_verify,
        heeded=state.heeded,
        accepted=frozenset(w.guest.ref for w in per_guest if w.policy.accept_standstill),
    )
    result = project(snapshot, made)
    managed = {w.guest.ref for w in per_guest}
    movers_refs = frozenset(g.ref for g, _ in movers)
    still_now = standstill.refusals(result, per_guest)
    if still_now:
        return _Made(made, set(), None, movers_refs, still_now)
    told = plan_warnings.warnings(result, managed, state.irq)
    told += tuple(kernel_threads.warnings(result, managed))
    told += tuple(interrupts.warnings(result, per_guest))
    concerned = context.left | {a.target for a in made.actions}
    drift = tuple(d for target, d in changed.items() if target in concerned)
    final = enforcing(replace(made, warnings=told, drift=drift), applied)
    whole = (
        None
        if state.refusals
        else remember(context, policies, per_guest, chosen, found, state.heeded)
    )
    every = set(host_asked).union(*(w.desired for w in per_guest))
    return _Made(final, every, whole, movers_refs)


def _heed_refused(host: Host, refused: Sequence[Guest], state: _State) -> None:
    """Keep off the CPUs that serve the NICs of guests whose policies would have moved the
    interrupts, unless these are all that there are."""
    for guest in refused:
        choice = interrupt_cpus(host, guest)
        together = (state.irq | choice.cpus) & host.online
        if not host.online <= together:
            state.irq = together
            state.heeded[guest.ref] = None
            state.notes += [f"{note}; it is refused, so they stay there" for note in choice.notes]


def _choose_interrupts(host: Host, state: _State) -> None:
    """The interrupt CPUs of all managed guests, guest by guest; one whose NICs are
    served by the last CPUs that are free of interrupts is refused. ``host`` is as it will
    be once interrupts are moved."""
    kept: list[tuple[Guest, Policy]] = []
    for guest, policy in state.pairs:
        needs = policy.pins or policy.realtime or policy.emulator is not None
        out = Requirements(guest, policy)
        if isinstance(policy.irq, CpuSet):
            cpus = policy.irq
            check_online(host, out, policy.irq_keys, cpus)
            state.notes.append(
                f"{guest.ref}: interrupt CPUs {cpus} from {policy.at(*policy.irq_keys)}"
            )
        else:
            choice = interrupt_cpus(host, guest)
            cpus = choice.cpus
            state.notes += choice.notes
        together = (state.irq | cpus) & host.online
        full = bool(host.online) and host.online <= together
        if full and (needs or policy.irq is not None):
            others = "" if host.online <= cpus else " together with the other guests' NICs"
            out.refuse(
                policy.irq_keys,
                f"the interrupts of its NICs are served on every online CPU{others}, "
                "so no CPU is left for its threads",
                "move the interrupts to fewer CPUs (irq: {cpus: 0, set: true}), or name cpus.irq "
                "by hand",
            )
        state.refusals += out.refusals
        if not out.refusals:
            kept.append((guest, policy))
            if not full:
                state.irq = together
                state.heeded[guest.ref] = policy.irq if isinstance(policy.irq, CpuSet) else None
    state.pairs = kept


def _wishes(context: Context, state: _State) -> list[Requirements]:
    kept: list[Requirements] = []
    for guest, policy in state.pairs:
        requirements = requirements_of(context, guest, policy)
        state.refusals += requirements.refusals
        if not requirements.refusals:
            kept.append(requirements)
    return kept


def _with_housekeeping(
    context: Context, per_guest: list[Requirements], state: _State
) -> list[Requirements]:
    """Refuse the guest whose lists take the last CPU without pinned threads."""
    taken = CpuSet()
    kept: list[Requirements] = []
    for requirements in per_guest:
        by_hand = CpuSet(c for p in requirements.pins if p.cpus is not None for c in p.cpus)
        if by_hand and context.online <= taken | by_hand:
            _refuse_all_pinned(context, requirements, state)
        else:
            taken |= by_hand
            kept.append(requirements)
    return kept


def _with_domains(
    context: Context, snapshot: Snapshot, per_guest: list[Requirements], state: _State
) -> tuple[list[Requirements], dict[ThreadKey, Chosen], RootDomains]:
    """CPUs, and the root domains of DEADLINE threads; guests for whom there is none are
    refused, and the rest is chosen again."""
    while True:
        per_guest, chosen = _choose_or_refuse(context, snapshot, per_guest, state)
        found = root_domains.find(context, snapshot, per_guest, chosen)
        if not found.refused:
            return per_guest, chosen, found
        for requirements in found.refused:
            state.refusals += requirements.refusals
        per_guest = [w for w in per_guest if not w.refusals]


def _choose_or_refuse(
    context: Context, snapshot: Snapshot, per_guest: list[Requirements], state: _State
) -> tuple[list[Requirements], dict[ThreadKey, Chosen]]:
    """CPUs for every request. Narrow cgroups can force auto onto the last free CPU too;
    then the last guest that pins is refused and the rest is chosen again."""
    while True:
        chosen = choose(context, snapshot, per_guest)
        pinned = CpuSet(c for w in per_guest for p in w.pins for c in chosen[p.thread.key].cpus)
        if not pinned or not context.online <= pinned:
            return per_guest, chosen
        last = [w for w in per_guest if w.pins][-1]
        _refuse_all_pinned(context, last, state)
        per_guest = [w for w in per_guest if w is not last]


def _refuse_all_pinned(context: Context, requirements: Requirements, state: _State) -> None:
    keys = next(
        (p.keys for p in requirements.pins if p.cpus is not None), requirements.pins[0].keys
    )
    requirements.refuse(
        keys,
        f"CPUs {context.online} would all carry pinned threads and no housekeeping "
        "CPU would be left",
        "leave one CPU to everything else",
    )
    state.refusals += requirements.refusals
