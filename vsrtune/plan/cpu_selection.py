# SPDX-License-Identifier: GPL-2.0-or-later
"""Selects CPUs for all guests: lists as written, then ``auto``, whole cores first, then the
emulators and iothreads, which get the remaining CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Role, ThreadKey
from vsrtune.model.plan import Refusal
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import pinned_cpus
from vsrtune.plan.interrupt_cpus import inner_links, lower_nics
from vsrtune.plan.placement.costs import Chosen, Occupant, Seat
from vsrtune.plan.placement.greedy import place
from vsrtune.plan.requirements import Context, PinRequest, Requirements, label, staying
from vsrtune.policy.model import AUTO, cpus_for

_HINT = "free cores of interrupts and of lists, widen cpus.pool, or remove cores: whole"


def choose(
    context: Context, snapshot: Snapshot, per_guest: Sequence[Requirements]
) -> tuple[dict[ThreadKey, Chosen], Sequence[Refusal]]:
    """CPUs for every request: lists as written, auto by placement, then housekeepers. Where cores
    do not suffice, no CPUs, but the refusals of the guests to leave out."""
    chosen: dict[ThreadKey, Chosen] = {}
    occupants = _occupants(context, snapshot, per_guest)
    seats: list[Seat] = []
    by_hand, kept = CpuSet(), CpuSet()
    whole = _whole(context, per_guest)
    links = {w.guest.ref: inner_links(context.host, w.guest) for w in per_guest}
    for requirements in per_guest:
        ref = requirements.guest.ref
        for pin in requirements.pins:
            if pin.cpus is not None:
                role, load = pin.thread.role, pin.thread.load
                chosen[pin.thread.key] = Chosen(pin.cpus)
                by_hand |= pin.cpus
                # An ``auto`` thread that floats in its root domain reserves none of it. Otherwise
                # the threads beside it would leave, and the domain would grow after them, plan
                # by plan.
                floats = cpus_for(requirements.policy, role) is AUTO
                if floats and pin.thread.key in whole and len(pin.cpus) == 1:
                    kept |= _cores(context, pin.cpus)
                booked = requirements.booked(role)
                afloat = floats and len(pin.cpus) > 1
                occupants.append(
                    Occupant(ref, role, pin.cpus, not floats, load, booked, links[ref], afloat)
                )
    spare = _spare(context, per_guest, by_hand, occupants)
    for requirements in per_guest:
        nics = lower_nics(context.host, requirements.guest)
        nodes = frozenset(nic.node for nic in nics if nic.node >= 0)
        nodes |= {device.node for device in requirements.guest.passed if device.node >= 0}
        linked = links[requirements.guest.ref]
        seats += [
            _seat(context, requirements, pin, spare, nodes, linked)
            for pin in requirements.pins
            if pin.cpus is None
        ]
    taken = context.irq | by_hand | spare | CpuSet.union(o.cpus for o in occupants if o.tight)
    apart = [seat for seat in seats if seat.thread in whole]
    placed, lacking = _on_cores(context, per_guest, apart, occupants, taken)
    if lacking:
        return {}, lacking
    kept |= _cores(context, CpuSet.union(pick.cpus for pick in placed.values()))
    others = [seat for seat in seats if seat.thread not in whole]
    if kept:
        stuck = {seat.guest for seat in others if seat.allowed <= kept}
        why = "guests with cores: whole leave it no CPU"
        if stuck:
            found = [w.refusal(("cpus",), why, _HINT) for w in per_guest if w.guest.ref in stuck]
            return {}, last(context, found)
        others = [replace(seat, allowed=seat.allowed - kept) for seat in others]
    chosen |= placed | _placed(context, others, occupants)
    pinned = kept | CpuSet.union(pick.cpus for pick in chosen.values())
    pinned |= CpuSet.union(o.cpus for o in occupants if o.tight)
    roaming = CpuSet.union(o.cpus for o in occupants) - pinned
    for requirements in per_guest:
        for pin in requirements.housekeepers:
            pick = _housekeepers(context, pin, pinned, roaming)
            if pick is not None:
                chosen[pin.thread.key] = pick
    return chosen, []


def last(context: Context, refusals: Sequence[Refusal]) -> Sequence[Refusal]:
    """The guest to leave out first, so that the others may have CPUs enough: the last one of which
    nothing is tuned yet. Who comes takes no CPU from those that have theirs."""
    tuned = _tuned(context)
    return [r for r in refusals if r.guest not in tuned][-1:] or refusals[-1:]


def _tuned(context: Context) -> set[str]:
    return {target.guest for target in context.applied}


def _whole(context: Context, per_guest: Sequence[Requirements]) -> set[ThreadKey]:
    """The threads that get whole cores; none on a host without SMT."""
    if not any(len(c.siblings & context.online) > 1 for c in context.host.cpus):
        return set()
    asking = (pin for w in per_guest if w.policy.whole_cores for pin in w.pins)
    return {pin.thread.key for pin in asking if pin.thread.role is not Role.NAPI}


def _cores(context: Context, cpus: CpuSet) -> CpuSet:
    """These CPUs with their SMT siblings."""
    return CpuSet.union(c.siblings for c in context.host.cpus if c.id in cpus) & context.online


def _on_cores(
    context: Context,
    per_guest: Sequence[Requirements],
    seats: Sequence[Seat],
    occupants: Sequence[Occupant],
    taken: CpuSet,
) -> tuple[dict[ThreadKey, Chosen], Sequence[Refusal]]:
    """CPUs on cores of their own for these seats, whatever their loads, and refusals of the guests
    to leave out if there are too few. A core with a CPU of ``taken`` is none. Each other core has
    one candidate: a CPU that a thread had, otherwise the first."""
    if not seats:
        return {}, []
    had = {seat.previous for seat in seats}
    ones = CpuSet()
    free = CpuSet.union(seat.allowed for seat in seats) - _cores(context, taken)
    for cpu in sorted(free, key=lambda cpu: (cpu not in had, cpu)):
        if ones.isdisjoint(_cores(context, CpuSet.single(cpu))):
            ones |= CpuSet.single(cpu)
    needed = Counter(seat.guest for seat in seats)
    asking = [w for w in per_guest if w.policy.whole_cores]

    def lacks(requirements: Requirements, free: int) -> Refusal:
        count = needed[requirements.guest.ref]
        reason = f"{count} of its threads need a core each; free cores: {free}"
        return requirements.refusal(("cpus", "cores"), reason, _HINT)

    # Those that fit in number, tuned ones first. To place all of many takes minutes.
    tuned, left, over = _tuned(context), len(ones), []
    for requirements in sorted(asking, key=lambda w: w.guest.ref not in tuned):
        if needed[requirements.guest.ref] > left:
            over.append(lacks(requirements, left))
        else:
            left -= needed[requirements.guest.ref]
    if over:
        return {}, over
    apart = [replace(s, allowed=s.allowed & ones or s.allowed, load=None) for s in seats]
    placed = place(context.host, context.irq, apart, occupants)
    lacking = []
    for requirements in asking:
        own = [s for s in apart if s.guest == requirements.guest.ref]
        others = CpuSet.union(placed[s.thread].cpus for s in apart if s not in own)
        free = CpuSet.union(s.allowed for s in own) & ones - others
        if len(free & CpuSet.union(placed[s.thread].cpus for s in own)) < len(own):
            lacking.append(lacks(requirements, len(free)))
    return {key: replace(pick, why="a core of its own") for key, pick in placed.items()}, last(
        context, lacking
    )


def _placed(
    context: Context, seats: Sequence[Seat], occupants: Sequence[Occupant]
) -> dict[ThreadKey, Chosen]:
    """CPUs for every seat. Threads whose policy does not ask for placement by load come first,
    and do not follow the loads of others; then the others come beside them."""
    unmeasured = [seat for seat in seats if seat.load is None]
    without = [replace(o, load=()) for o in occupants] if unmeasured else []
    placed = place(context.host, context.irq, unmeasured, without)
    if by_load := [seat for seat in seats if seat.load is not None]:
        beside = [
            Occupant(s.guest, s.role, placed[s.thread].cpus, booked=s.booked, links=s.links)
            for s in unmeasured
        ]
        placed |= place(context.host, context.irq, by_load, [*occupants, *beside])
    return placed


def _occupants(
    context: Context, snapshot: Snapshot, per_guest: Sequence[Requirements]
) -> list[Occupant]:
    planned = {(w.guest.pid, w.guest.start_time) for w in per_guest}
    out = [o for w in per_guest for o in w.occupants]
    for guest in snapshot.guests:
        if (guest.pid, guest.start_time) not in planned:
            out += staying(context, guest, guest.threads)
    return out


def _spare(
    context: Context,
    per_guest: Sequence[Requirements],
    by_hand: CpuSet,
    occupants: Sequence[Occupant],
) -> CpuSet:
    """The CPU that ``auto`` leaves free if no interrupt CPU serves for housekeeping: not listed
    by hand, without a thread that would have to leave, least occupied, lowest."""
    if context.irq & context.host.housekeeping:
        return CpuSet()
    pins = [pin for w in per_guest for pin in w.pins if pin.cpus is None]
    had = {_previous(context, pin, pin.allowed) for pin in pins}

    def order(cpu: int) -> tuple[bool, int, int]:
        return cpu in had, sum(1 for o in occupants if cpu in o.cpus), cpu

    return CpuSet(sorted(context.host.housekeeping - by_hand, key=order)[:1])


def _previous(context: Context, pin: PinRequest, allowed: CpuSet) -> int | None:
    """The one CPU of these that a thread has."""
    written = pinned_cpus(context.applied.get(pin.target))
    for cpus in (context.seats.get(pin.thread.key), written, pin.thread.affinity):
        if cpus is not None and len(cpus) == 1 and cpus <= allowed:
            return cpus.first()
    return None


def _seat(
    context: Context,
    requirements: Requirements,
    pin: PinRequest,
    spare: CpuSet,
    nodes: frozenset[int],
    links: frozenset[str],
) -> Seat:
    allowed = pin.allowed - spare or pin.allowed
    return Seat(
        pin.thread.key,
        requirements.guest.ref,
        pin.thread.role,
        pin.number,
        allowed,
        _previous(context, pin, allowed),
        nodes,
        f"{requirements.guest.ref} {label(pin.thread)}",
        None if requirements.policy.placement is None else pin.thread.load,
        requirements.booked(pin.thread.role),
        links,
    )


def _housekeepers(
    context: Context, pin: PinRequest, pinned: CpuSet, roaming: CpuSet
) -> Chosen | None:
    """CPUs for an emulator or iothread: as written, otherwise those without pinned vcpu, vhost or
    NAPI threads, and without isolated and interrupt CPUs if others remain. If threads may roam
    on all of these (``roaming``), an interrupt CPU is the quieter place."""
    if pin.cpus is not None:
        return Chosen(pin.cpus)
    pool = pin.allowed - pinned
    if not pool:
        return None
    pool = pool - context.host.isolated or pool
    quiet = pool - roaming
    pool = (quiet - context.irq or quiet) if quiet else (pool & context.irq or pool)
    return Chosen(pool, "housekeeping CPUs")
