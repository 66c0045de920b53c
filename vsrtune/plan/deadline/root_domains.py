# SPDX-License-Identifier: GPL-2.0-or-later
"""Root domains for DEADLINE threads: their CPUs, how they are made, and which guests are refused.

The kernel lets a thread become DEADLINE only if its mask covers the whole root domain it runs
in (``__sched_setscheduler``). A thread with CPUs of its own therefore needs a root domain of
exactly these: a cpuset partition. The first mode that fits is used:

1. isolated: the one CPU isolated at boot, which is a root domain already;
2. tight: a remote partition below the guest's own cgroup, which takes CPUs only through its
   own list (``cpuset.cpus.exclusive``, kernel 6.7);
3. kernel threads: vhost workers that are kernel threads move to a partition at the top;
4. loose: the whole slice of the guests (``machine.slice``) as one partition, in which
   threads float.

If none fits, the guest is refused. A CPU belongs to one root domain only. Sets that overlap
without being equal float together in the loose mode if no better mode is possible; otherwise
their guests are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import bandwidth, limit, limit_text, percent
from vsrtune.model.guest import DATA_PLANE, Role, SchedClass, Thread, ThreadKey, WorkerKind
from vsrtune.model.host import Host
from vsrtune.model.root_domains import (
    PARTITION_CGROUP,
    is_partition,
    isolated_alone,
    root_domain,
    within,
)
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.deadline.model import DomainMode, Member, RootDomain, RootDomains, Search
from vsrtune.plan.placement.costs import Chosen
from vsrtune.plan.requirements import Context, Requirements, label


def find(
    context: Context,
    snapshot: Snapshot,
    per_guest: Sequence[Requirements],
    chosen: Mapping[ThreadKey, Chosen],
) -> tuple[Mapping[ThreadKey, Chosen], RootDomains]:
    """The CPUs of each thread, and the root domains that the requirements need. A thread in a
    loose root domain gets all its CPUs. If guests are refused, call again without them, with
    CPUs selected anew."""
    search = Search(dict(chosen))
    if any(w.booked(role) for w in per_guest for role in (Role.VCPU, Role.VHOST)):
        _search(context, snapshot, per_guest, search)
    if search.refusals:
        return search.chosen, RootDomains(refusals=tuple(search.refusals))
    return search.chosen, _straight(search.domains)


def _search(
    context: Context,
    snapshot: Snapshot,
    per_guest: Sequence[Requirements],
    search: Search,
) -> None:
    pins = [Member(requirements, pin) for requirements in per_guest for pin in requirements.pins]
    members = [m for m in pins if m.thread.role is not Role.NAPI]
    sets = _sets(context, members, search)
    if search.refusals or not sets:
        return
    if not context.host.cpusets and any(not isolated_alone(context.host, cpus) for cpus in sets):
        for group in sets.values():
            _no_cpusets([m for m in group if m.booked], search)
        return
    loose: dict[str, list[RootDomain]] = {}
    for cpus, group in sets.items():
        domain = _domain(context.host, cpus, tuple(group), search)
        if domain is not None and context.kept:
            domain = _in_kept(context, domain, search)
        if domain is None:
            continue
        search.domains.append(domain)
        if domain.mode is DomainMode.LOOSE:
            loose.setdefault(domain.slice, []).append(domain)
    for slice_ in loose:
        _merge(context, snapshot, slice_, per_guest, search)
    for domain in search.domains:
        admit(snapshot, domain, search)
        evict(context, snapshot, domain, search)
        keep_out([m for m in pins if m.thread.role is Role.NAPI], domain, search)
    bare(context.host, search)
    emulators(per_guest, search)


def _straight(domains: Sequence[RootDomain]) -> RootDomains:
    """Split the root domains into those of this plan and later ones. Workers go straight into
    their partition unless the list of libvirt's emulator cgroup, in which they are born, lacks
    some of their CPUs. Such workers first move to the cgroup beside it, and the next plan makes
    the root domain."""
    partitions = (DomainMode.TIGHT, DomainMode.KTHREADS)
    later = [
        d for d in domains if d.mode in partitions and any(_confined(m, d.cpus) for m in d.members)
    ]
    now = [d for d in domains if d not in later]
    straight = {m.thread.key for d in now if d.mode in partitions for m in d.members}
    return RootDomains(tuple(now), tuple(later), frozenset(straight))


def _confined(member: Member, cpus: CpuSet) -> bool:
    thread = member.thread
    limit = thread.cpuset_effective
    leaving = member.requirements.moves.get(thread) not in (None, thread.cgroup)
    return leaving and thread.affinity != cpus and limit is not None and not cpus <= limit


def _sets(
    context: Context,
    members: Sequence[Member],
    search: Search,
) -> dict[CpuSet, list[Member]]:
    """The CPU sets of DEADLINE threads, each with every thread that has CPUs of it. Overlapping
    sets become one. Unless the threads of a set float, guests whose threads have other CPUs than
    the set's first DEADLINE thread are refused."""
    sets: dict[CpuSet, list[Member]] = {}
    for member in sorted(members, key=lambda m: m.booked == 0):
        cpus = search.chosen[member.thread.key].cpus
        touched = [s for s in sets if s & cpus]
        if not member.booked and not touched:
            continue
        group = [m for s in touched for m in sets.pop(s)]
        whole = CpuSet.union((*touched, cpus))
        sets[whole] = [*group, member]
    for cpus, group in sets.items():
        group.sort(key=members.index)
        odd = [m for m in group if search.chosen[m.thread.key].cpus != cpus]
        if odd and not _floats(context, group):
            first = next(m for m in group if m.booked)
            other = search.chosen[first.thread.key].cpus
            for member in group:
                mine = search.chosen[member.thread.key].cpus
                if mine != other:
                    search.refuse(
                        member,
                        f"{label(member.thread)} would get CPUs {mine}, and others CPUs {other} "
                        "for a root domain: a thread is in one root domain with all its CPUs",
                        f"give it CPUs {other}, or CPUs outside them",
                    )
    return sets


def _floats(context: Context, group: Sequence[Member]) -> bool:
    """Whether the loose mode is the best that a group of threads can have."""
    slices = {m.slice for m in group}
    if not all(_libvirt(m) for m in group) or len(slices) > 1:
        return False
    top = context.host.cpuset(next(iter(slices)))
    shared = len({m.requirements.guest.ref for m in group}) > 1
    return shared or top is None or top.exclusive is None


def _no_cpusets(group: Sequence[Member], search: Search) -> None:
    for member in group:
        search.refuse(
            member,
            f"{label(member.thread)} needs a root domain of its own for class deadline, and "
            "this host has no cpuset controller of cgroup v2 to make one",
            "boot with systemd.unified_cgroup_hierarchy=1, or use class fifo",
        )


def _domain(
    host: Host, cpus: CpuSet, group: tuple[Member, ...], search: Search
) -> RootDomain | None:
    first = next(m for m in group if m.booked)
    if isolated_alone(host, cpus):
        return RootDomain(DomainMode.ISOLATED, cpus, "", group, "the only CPU isolated at boot")
    if cpus & host.isolated:
        search.refuse(
            first,
            f"CPU {cpus & host.isolated} is isolated at boot; all isolated CPUs "
            f"({host.isolated}) are one root domain, which no partition can take them from",
            "choose CPUs that are not isolated: a partition keeps other tasks off as well",
        )
        return None
    without = [m for m in group if m.thread.cpuset_cpus is None]
    if without:
        _no_cpusets(without, search)
        return None
    parents = {m.thread.cgroup.rpartition("/")[0] for m in group}
    guests = {m.requirements.guest.ref for m in group}
    slices = {m.slice for m in group}
    top = host.cpuset(next(iter(slices)))
    single = len(guests) == 1
    threaded = single and all(_libvirt(m) for m in group)
    if threaded and len(parents) == 1 and top is not None and top.exclusive is not None:
        path = f"{next(iter(parents))}/{_tight_name(cpus, group)}"
        return RootDomain(
            DomainMode.TIGHT, cpus, path, group, "a partition of its own, below the guest"
        )
    if single and all(m.thread.worker is WorkerKind.KTHREAD for m in group):
        path = f"{PARTITION_CGROUP}{cpus}.{first.requirements.guest.pid}"
        why = "its vhost workers are kernel threads, which may leave the guest's cgroup"
        return RootDomain(DomainMode.KTHREADS, cpus, path, group, why)
    stranger = next((m for m in group if not _libvirt(m)), None)
    if stranger is not None:
        search.refuse(
            stranger,
            f"{label(stranger.thread)} is in cgroup {stranger.thread.cgroup or '/'} together "
            "with all of its QEMU, and only guests whose cgroups libvirt made threaded can have "
            "threads in a partition",
            "run the guest under libvirt, isolate exactly one CPU at boot and name it, or use "
            "class fifo",
        )
        return None
    why = (
        f"{' and '.join(sorted(guests))} share the CPUs"
        if not single
        else f"kernel {host.kernel} has no cpuset.cpus.exclusive (6.7), so libvirt's cgroups "
        "cannot hold a partition"
    )
    return RootDomain(DomainMode.LOOSE, cpus, first.slice, group, why)


def _in_kept(context: Context, domain: RootDomain, search: Search) -> RootDomain | None:
    """The root domain beside slices that stay root domains: threads in one of these can have no
    other."""
    path = domain.slice
    below = [m for m in domain.members if within(m.thread.cgroup, path)]
    if path not in context.kept or not below or domain.mode is DomainMode.LOOSE:
        return domain
    if domain.mode is DomainMode.TIGHT:
        why = f"{path} is one already, of a guest that keeps its settings"
        return RootDomain(DomainMode.LOOSE, domain.cpus, path, domain.members, why)
    search.refuse(
        next(m for m in domain.members if m.booked),
        f"{path} stays a root domain for a guest that keeps its settings, so its threads can have "
        "none of their own",
        "mend the policy of that guest",
    )
    return None


def _tight_name(cpus: CpuSet, group: Sequence[Member]) -> str:
    """The name of the partition's cgroup: libvirt's own of the first vcpu if there is one, so
    that the partition stays in force when vcpupin rewrites ``cpuset.cpus``."""
    vcpus = [m.thread.index for m in group if m.thread.role is Role.VCPU]
    known = sorted(i for i in vcpus if i is not None)
    return f"vcpu{known[0]}" if known else f"{PARTITION_CGROUP}{cpus}"


def _libvirt(member: Member) -> bool:
    path = member.thread.cgroup
    return member.requirements.guest.source == "libvirt" and (
        path.count("/") >= 2 or is_partition(path)
    )


def _merge(
    context: Context,
    snapshot: Snapshot,
    slice_: str,
    per_guest: Sequence[Requirements],
    search: Search,
) -> None:
    """Merge everything of ours in a slice into one loose domain: a partition cannot hold another
    guest's remote partition, and threads of guests cannot leave the slice."""
    inside = [
        Member(requirements, pin)
        for requirements in per_guest
        for pin in requirements.pins
        if Member(requirements, pin).slice == slice_
    ]
    for domain in search.domains:
        for member in domain.members if domain.mode is DomainMode.ISOLATED else ():
            if member.slice == slice_:
                search.refuse(
                    member,
                    f"{slice_} has to become a partition, which cannot have the isolated CPU "
                    f"{domain.cpus} that {label(member.thread)} is to run on",
                    "give the guests' threads CPUs that are not isolated",
                )
    apart = (DomainMode.KTHREADS, DomainMode.ISOLATED)
    away = {m.thread.key for d in search.domains if d.mode in apart for m in d.members}
    inside = [m for m in inside if m.thread.key not in away]
    kept = context.host.cpuset(slice_) if slice_ in context.kept else None
    if kept is not None:
        # The other threads of these guests live at the top.
        inside = [m for m in inside if within(m.thread.cgroup, slice_)]
    old = [
        d
        for d in search.domains
        if d.mode in (DomainMode.LOOSE, DomainMode.TIGHT) and d.slice == slice_
    ]
    cpus = CpuSet.union(search.chosen[m.thread.key].cpus for m in inside)
    cpus = cpus if kept is None else kept.effective
    merged = RootDomain(DomainMode.LOOSE, cpus, slice_, tuple(inside), next(d.why for d in old))
    search.domains = [d for d in search.domains if d not in old] + [merged]
    for member in inside:
        if member.booked and not cpus <= member.pin.allowed | context.irq:
            search.refuse(
                member,
                f"{label(member.thread)} would float in the partition {slice_} of CPUs {cpus}, and "
                f"its cgroup allows CPUs {member.pin.allowed} only",
                "widen the cgroup above the guest, or give its neighbours other CPUs",
            )
        elif member.booked and search.chosen[member.thread.key].cpus != cpus:
            search.chosen[member.thread.key] = Chosen(cpus, f"floats in the partition {slice_}")
    for guest in snapshot.guests:
        for thread in guest.threads:
            bound = _bound(context, thread, search)
            if bound and within(thread.cgroup, slice_) and not bound & cpus:
                first = next(m for m in inside if m.booked)
                search.refuse(
                    first,
                    f"{merged.why}; the whole of {slice_} would become the partition of CPUs "
                    f"{cpus}, and {guest.ref} {label(thread)}, which no policy moves, is bound "
                    f"to CPUs {bound} outside it",
                    "have a policy move it, use kernel 6.7 or later, or class fifo",
                )
                return


def _bound(context: Context, thread: Thread, search: Search) -> CpuSet:
    """The CPUs to which somebody bound a thread that no policy moves, empty when nobody did. Of
    emulators and iothreads these are libvirt's lists in force: libvirt cannot set a pin outside of
    the cpuset, and the guest would not start again. No policy rewrites the list of iothreadpin."""
    listed = thread.role is Role.IOTHREAD and "/iothread" in thread.cgroup
    if context.afloat(thread) or (thread.key in search.chosen and not listed):
        return CpuSet()
    if thread.role in DATA_PLANE:
        return thread.affinity & context.online
    listed |= thread.role is Role.EMULATOR
    cpus = CpuSet.parse((listed and thread.cpuset_cpus) or "")
    return cpus & context.online if thread.affinity <= cpus else CpuSet()


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


def evict(context: Context, snapshot: Snapshot, domain: RootDomain, search: Search) -> None:
    """Refuse a guest whose partition would push threads to which no policy gives CPUs off those to
    which somebody bound them, alone or together with others. Those of a slice that is a root domain
    are bound by it alone."""
    for guest in snapshot.guests:
        for thread in guest.threads:
            bound = _bound(context, thread, search)
            if not bound & domain.cpus or not _takes(domain, thread):
                continue
            if not bound <= CpuSet.union(d.cpus for d in search.domains if _takes(d, thread)):
                continue
            first = next(m for m in domain.members if m.booked)
            search.refuse(
                first,
                f"the partition of CPUs {domain.cpus} would push {guest.ref} {label(thread)}, "
                f"which no policy moves and which is bound to CPUs {bound}, off them",
                "choose other CPUs, or move it away first, by a policy or by hand",
            )
            return


def _takes(domain: RootDomain, thread: Thread) -> bool:
    """Whether a thread outside of the domain has none of its CPUs."""
    below = domain.mode is DomainMode.LOOSE and within(thread.cgroup, domain.path)
    return domain.mode is not DomainMode.ISOLATED and not below


def bare(host: Host, search: Search) -> None:
    """Refuse a guest whose partition at the top would take all CPUs from the list of a slice beside
    it: without these the slice may use all that are left."""
    domains = [d for d in search.domains if d.mode is DomainMode.KTHREADS]
    top = CpuSet.union(d.cpus for d in domains)
    ours = {d.path for d in search.domains}
    for group in host.cpusets:
        lists = CpuSet.parse(group.cpus)
        beside = "/" not in group.path and not group.valid and not is_partition(group.path)
        if not beside or group.path in ours or not lists or not lists <= top:
            continue
        domain = next(d for d in reversed(domains) if d.cpus & lists)
        search.refuse(
            next(m for m in domain.members if m.booked),
            f"the partition of CPUs {domain.cpus} would leave no CPU to {group.path}, which is "
            f"bound to CPUs {lists} (AllowedCPUs)",
            "choose other CPUs, or give that slice more",
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
                    both = domain.cpus & pin.allowed or domain.cpus
                    chosen[pin.thread.key] = Chosen(both, f"confined to {domain.path}")
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
