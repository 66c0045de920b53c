# SPDX-License-Identifier: GPL-2.0-or-later
"""Warnings about what a plan allows, such as priority orders that starve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, REALTIME, TIMED, Guest, Role, SchedClass, Thread, level
from vsrtune.model.host import Host
from vsrtune.model.load import WINDOWS
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.requirements import Requirements, label
from vsrtune.plan.safety.standstill import Standstill, without_idle

# Threads ask for so much of a CPU that another one is missing: a fifth more than it has.
OVERCOMMITTED = 1.2


def warnings(
    result: Snapshot, managed: AbstractSet[str], irq: CpuSet, still: Iterable[Standstill]
) -> tuple[str, ...]:
    """Warnings about ``result``, the snapshot as the plan leaves it, and its standstills;
    ``managed`` are the refs of the guests with a policy that was not refused."""
    guests = [without_idle(g) for g in result.guests if g.ref in managed]
    out: list[str] = []
    for guest in guests:
        out += _order(guest)
        out += _starved_emulator(guest)
        out += _on_interrupts(guest, irq)
    out += _standing_still(still)
    out += _between_guests(guests)
    out += _unthrottled(result.host, guests)
    out += _overcommitted(result, managed)
    return tuple(out)


def pins_alone(result: Snapshot, per_guest: Iterable[Requirements]) -> list[str]:
    """Guests whose vcpus and workers a policy pins to one CPU and leaves in the ordinary class. The
    three threads of a router, which libvirt pinned so, forwarded less than untuned ones at the
    untuned peak and at twice that (docs/results/peers.md)."""
    pinned = {w.guest.ref for w in per_guest if w.pins and not w.policy.lowered}
    out: list[str] = []
    for guest in (without_idle(g) for g in result.guests if g.ref in pinned):
        vcpus, workers = (
            CpuSet.union(
                t.affinity
                for t in guest.by_role(role)
                if len(t.affinity) == 1 and t.sched.cls is SchedClass.OTHER
            )
            for role in (Role.VCPU, Role.VHOST)
        )
        if vcpus & workers:
            out.append(
                f"{guest.ref}: vcpu and vhost share CPU {vcpus & workers} in the ordinary class: "
                "in overload a router pinned so forwarded less than an untuned one; give both "
                "class rr, as profile: router does"
            )
    return out


def _realtime(threads: Iterable[Thread]) -> list[Thread]:
    return [t for t in threads if t.sched.cls in REALTIME]


_FLOODED = "in overload the guest receives frames it never gets to route"
_SAME = "give both the same priority"
# Which threads stand above which, and what comes of it (Abeni et al., section 3.3).
_ORDERS = (
    (Role.VHOST, Role.VCPU, f"the worst order there is, {_FLOODED}; {_SAME}"),
    (
        Role.VCPU,
        Role.VHOST,
        "in overload routed frames wait in the guest; the same priority for both forwards more",
    ),
    (Role.NAPI, Role.VCPU, f"{_FLOODED}; {_SAME}"),
)


def _order(guest: Guest) -> list[str]:
    return [
        f"{guest.ref}: {higher} stands above {lower} on CPU {cpus}: {effect}"
        for higher, lower, effect in _ORDERS
        if (cpus := _covered(guest, lower, higher))
    ]


def _standing_still(still: Iterable[Standstill]) -> list[str]:
    """Standstills that a policy with ``standstill: accept`` permits, once for every vcpu."""
    found = {s.vcpu.key: s for s in still}
    return [
        f"{s.vcpu_guest}: {label(s.vcpu)} is {s.vcpu.sched} on CPU {s.cpus}, and keeps "
        f"{label(s.starved)} of {s.starved_guest} from running for as long as its guest is "
        "busy: the router can stand still; class rr with one priority takes turns"
        for s in found.values()
    ]


def _covered(guest: Guest, lower: Role, higher: Role) -> CpuSet:
    """CPUs of those ``lower`` threads that have a more urgent ``higher`` thread on every CPU."""
    out = CpuSet()
    for thread in guest.by_role(lower):
        if thread.sched.cls is SchedClass.DEADLINE:
            continue
        more = [t for t in guest.by_role(higher) if level(t.sched) > level(thread.sched)]
        if thread.affinity <= CpuSet.union(t.affinity for t in more):
            out |= thread.affinity
    return out


def _starved_emulator(guest: Guest) -> list[str]:
    main = guest.main
    busy = CpuSet.union(t.affinity for t in _realtime(guest.threads) if len(t.affinity) == 1)
    if main is None or not busy or not main.affinity <= busy:
        return []
    pod = guest.source == "kubevirt"
    hint = "isolateEmulatorThread gives it a CPU" if pod else "use cpus.emulator: auto"
    text = (
        f"{guest.ref}: the emulator runs on CPU {main.affinity} only, beside realtime "
        f"threads that may starve it; {hint}"
    )
    return [text]


def _on_interrupts(guest: Guest, irq: CpuSet) -> list[str]:
    return [
        f"{guest.ref}: {label(t)} is {t.sched} and may run on interrupt CPU "
        f"{t.affinity & irq}, where it starves packet reception"
        for t in _realtime(guest.threads)
        if t.role in DATA_PLANE and t.affinity & irq
    ]


def _bound(guests: Iterable[Guest]) -> list[tuple[int, list[tuple[str, Thread]]]]:
    """The threads of the data plane that are bound to one CPU, by CPU, with their guests."""
    on: dict[int, list[tuple[str, Thread]]] = {}
    for guest in guests:
        for thread in (t for role in DATA_PLANE for t in guest.by_role(role)):
            if len(thread.affinity) == 1:
                on.setdefault(thread.affinity.first(), []).append((guest.ref, thread))
    return sorted(on.items())


def _between_guests(guests: Sequence[Guest]) -> list[str]:
    """Guests that share a CPU at unequal priorities: the higher starves the lower."""
    out: list[str] = []
    for cpu, here in _bound(guests):
        levels: dict[str, set[int]] = {}
        for ref, thread in here:
            if thread.sched.cls is not SchedClass.DEADLINE:
                levels.setdefault(ref, set()).add(level(thread.sched))
        if len(levels) > 1 and len(set.union(*levels.values())) > 1:
            names = ", ".join(sorted(levels))
            out.append(
                f"CPU {cpu} is shared by {names} at unequal priorities: "
                "the lower one gets only what the higher leaves"
            )
    return out


def _overcommitted(result: Snapshot, managed: AbstractSet[str]) -> list[str]:
    """CPUs of which threads asked for more than there is in each of the latest windows. The text
    has no numbers, because a warning that stays the same is reported once."""
    out: list[str] = []
    for cpu, every in _bound(result.guests):
        here = [(ref, t) for ref, t in every if len(t.load) >= WINDOWS]
        loads = [sum(t.load[-n] for _, t in here) for n in range(1, WINDOWS + 1)]
        if min(loads) > OVERCOMMITTED and any(ref in managed for ref, _ in here):
            names = ", ".join(f"{ref} {label(t)}" for ref, t in here)
            out.append(
                f"CPU {cpu} is overcommitted: {names} together ask for more than it has; "
                "give the guests more CPUs, or move one to another host"
            )
    return out


def _unthrottled(host: Host, guests: Sequence[Guest]) -> list[str]:
    timed = any(t.sched.cls in TIMED for g in guests for t in g.threads)
    if host.sched_rt_runtime_us != -1 or not timed:
        return []
    text = (
        "realtime throttling is off (sched_rt_runtime_us = -1): "
        "a realtime thread that never sleeps takes its CPU for good, and the kernel admits any sum "
        "of budgets"
    )
    return [text]
