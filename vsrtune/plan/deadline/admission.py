# SPDX-License-Identifier: GPL-2.0-or-later
"""Whether root domains are possible: budgets that fit, threads and emulators in the way."""

from __future__ import annotations

from collections.abc import Sequence

from vsrtune.model.deadline import bandwidth, limit, limit_text, percent
from vsrtune.model.guest import DATA_PLANE, SchedClass
from vsrtune.model.root_domains import root_domain, within
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.deadline.model import DomainMode, Member, RootDomain, Search
from vsrtune.plan.placement.model import Chosen
from vsrtune.plan.requirements import Requirements, label


def admit(snapshot: Snapshot, domain: RootDomain, search: Search) -> None:
    """Refuse guests whose budgets do not fit, as ``__dl_overflow`` counts them. Threads that stay
    in the root domain without being planned for have theirs already."""
    host = snapshot.host
    most = limit(host, domain.cpus)
    if most is None:
        return
    members = {m.thread.key for m in domain.members}
    staying = [
        (f"{guest.ref} {label(thread)}", bandwidth(thread.sched))
        for guest in snapshot.guests
        for thread in guest.threads
        if thread.sched.cls is SchedClass.DEADLINE
        and thread.key not in members
        and root_domain(host, thread) == domain.cpus
    ]
    used = sum(want for _, want in staying)
    beside = [f"{name} ({percent(want)})" for name, want in staying]
    for member in domain.members:
        want = member.booked
        if used + want > most:
            others = f" beside {', '.join(beside)}" if beside else ""
            search.refuse(
                member,
                f"{label(member.thread)} asks {percent(want)} of CPU {domain.cpus}, of which "
                f"{percent(max(0, most - used))} remains{others}; the kernel admits "
                f"{limit_text(host, domain.cpus)}",
                "lower the budget, or use more CPUs",
            )
            continue
        used += want
        if want:
            beside.append(f"{member.name} ({percent(want)})")


def evict(
    snapshot: Snapshot, per_guest: Sequence[Requirements], domain: RootDomain, search: Search
) -> None:
    """Refuse a guest whose partition would push threads of guests without a policy off CPUs to
    which somebody bound them."""
    if domain.mode is DomainMode.ISOLATED:
        return
    inside = {m.thread.key for m in domain.members}
    managed = {w.guest.ref for w in per_guest}
    for guest in snapshot.guests:
        for thread in guest.threads:
            bound = bool(thread.affinity) and thread.affinity <= domain.cpus
            work = thread.role in DATA_PLANE
            below = domain.mode is DomainMode.LOOSE and within(thread.cgroup, domain.path)
            if not bound or not work or thread.key in inside or below or guest.ref in managed:
                continue
            first = next(m for m in domain.members if m.booked)
            search.refuse(
                first,
                f"the partition of CPUs {domain.cpus} would push {guest.ref} {label(thread)}, "
                f"which no policy names and which is bound to CPUs {thread.affinity}, off them",
                f"choose other CPUs, or give {guest.ref} a policy",
            )
            return


def keep_out(
    threads: Sequence[Member],
    domain: RootDomain,
    search: Search,
) -> None:
    """Refuse guests whose NAPI threads would get CPUs of a partition: these threads live in the
    root cgroup, which has none of them."""
    if domain.mode is DomainMode.ISOLATED:
        return
    for member in threads:
        both = search.chosen[member.thread.key].cpus & domain.cpus
        if both:
            search.refuse(
                member,
                f"{label(member.thread)} would get CPU {both} of the partition of CPUs "
                f"{domain.cpus}, which is for threads of class deadline",
                "choose other CPUs for cpus.napi, or class fifo for the threads beside it",
            )


def emulators(per_guest: Sequence[Requirements], search: Search) -> None:
    """Keep emulators and iothreads off partitions, and those that live in a loose one within it;
    otherwise refuse the guest."""
    chosen = search.chosen
    for requirements, pin in ((r, p) for r in per_guest for p in r.housekeepers):
        if pin.thread.key not in chosen:
            continue
        for domain in search.domains:
            loose = domain.mode is DomainMode.LOOSE
            inside = loose and within(pin.thread.cgroup, domain.path)
            pick = chosen[pin.thread.key].cpus
            if inside and not pick <= domain.cpus:
                if pin.cpus is None:
                    chosen[pin.thread.key] = Chosen(domain.cpus, f"confined to {domain.path}")
                    continue
                reason = (
                    f"{label(pin.thread)} lives in {domain.path}, which becomes the partition of "
                    f"CPUs {domain.cpus}: CPUs {pick - domain.cpus} are outside"
                )
                hint = f"write {pin.keys[-1]}: auto, or CPUs within the partition"
            elif not inside and domain.mode is not DomainMode.ISOLATED and pick & domain.cpus:
                reason = f"CPU {pick & domain.cpus} belongs to a partition for class deadline"
                hint = f"write {pin.keys[-1]}: auto, or CPUs outside the partition"
            else:
                continue
            search.refusals.append(requirements.refusal(pin.keys, reason, hint))
            break
