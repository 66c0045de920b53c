"""Root domains for DEADLINE threads: which CPUs, made how, and who is refused.

The kernel lets a thread become DEADLINE only when its mask covers the whole root domain
it runs in (``__sched_setscheduler``), so a thread with CPUs of its own needs a root
domain of exactly these: a cpuset partition. In this order the host is asked for

1. tight: a remote partition below the guest's own cgroup, which takes CPUs from nobody
   but through its own list (``cpuset.cpus.exclusive``, kernel 6.7);
2. kernel threads: vhost workers that are kernel threads move to a partition at the top;
3. loose: the whole slice of the guests (``machine.slice``) as one partition, in which
   threads float;
4. isolated: the one CPU isolated at boot, which is a root domain already.

Where none fits the guest is refused. A set of CPUs is one root domain or none: sets that
overlap without being equal are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from vsrtune.cpuset import CpuSet
from vsrtune.deadline import bandwidth, limit, limit_text, percent
from vsrtune.model import Host, Role, Snapshot, Thread, ThreadKey, WorkerKind
from vsrtune.placement import Chosen
from vsrtune.wishes import Context, PinWish, Wishes, label, rule_for

# Our partitions are the cgroups of this name with their CPUs behind it.
PARTITION_CGROUP = "vsrtune.cpus"


def is_partition(path: str) -> bool:
    """Whether a cgroup is one that we make for a root domain."""
    return path.rpartition("/")[2].startswith(PARTITION_CGROUP)


def root_domain(host: Host, thread: Thread) -> CpuSet | None:
    """The CPUs of the partition, or of the isolated CPU, that a thread is in; None for
    the root domain of all the rest."""
    path = thread.cgroup
    while path:
        group = host.cpuset(path)
        if group is not None and group.valid:
            return group.effective
        path = path.rpartition("/")[0]
    return thread.affinity if _isolated(host, thread.affinity) else None


class Mode(Enum):
    """How a root domain is made."""

    TIGHT = "tight"
    KTHREADS = "kernel threads"
    LOOSE = "loose"
    ISOLATED = "isolated"


@dataclass(frozen=True, slots=True)
class Member:
    """A thread that runs in a root domain, DEADLINE or beside such threads."""

    wish: Wishes
    pin: PinWish

    @property
    def thread(self) -> Thread:
        """The thread itself."""
        return self.pin.thread

    @property
    def booked(self) -> int:
        """Its bandwidth; 0 when it is not to be DEADLINE."""
        rule = rule_for(self.wish.policy, self.thread.role)
        return bandwidth(rule.sched) if rule is not None and rule.deadline else 0

    @property
    def name(self) -> str:
        """The guest and the thread."""
        return f"{self.wish.guest.ref} {label(self.thread)}"


@dataclass(slots=True)
class Domain:
    """One root domain. ``path`` is the cgroup of the partition, "" when isolated."""

    mode: Mode
    cpus: CpuSet
    path: str
    members: list[Member]
    why: str

    @property
    def guests(self) -> list[str]:
        """The guests with threads in it."""
        return list(dict.fromkeys(m.wish.guest.ref for m in self.members))

    def holds(self, host: Host, cgroup: str) -> bool:
        """Whether a thread in ``cgroup`` is in this root domain as the host is now."""
        if self.mode is Mode.ISOLATED:
            return True
        group = host.cpuset(self.path)
        if group is None or not group.valid:
            return False
        below = self.mode is Mode.LOOSE and cgroup.startswith(f"{self.path}/")
        return below or cgroup == self.path

    @property
    def slice(self) -> str:
        """The topmost cgroup of its threads."""
        return self.members[0].thread.cgroup.partition("/")[0]


@dataclass(slots=True)
class Found:
    """What a look for root domains gave; refusals stand in the wishes."""

    domains: list[Domain] = field(default_factory=list)
    refused: list[Wishes] = field(default_factory=list)

    def of(self, key: ThreadKey) -> Domain | None:
        """The root domain of a thread."""
        for domain in self.domains:
            if any(m.thread.key == key for m in domain.members):
                return domain
        return None

    def refuse(self, member: Member, reason: str, hint: str) -> None:
        """Refuse the guest of a member, once."""
        if not any(w is member.wish for w in self.refused):
            keys = ("scheduler", member.thread.role.value) if member.booked else member.pin.keys
            member.wish.refuse(keys, reason, hint)
            self.refused.append(member.wish)


def find(
    context: Context,
    snapshot: Snapshot,
    asked: Sequence[Wishes],
    chosen: dict[ThreadKey, Chosen],
) -> Found:
    """The root domains that the wishes need. In loose ones ``chosen`` is widened to all
    of their CPUs. When something is refused, choose again without the refused guests."""
    found = Found()
    members = [Member(wish, pin) for wish in asked for pin in wish.pins]
    sets = _sets(members, chosen, found)
    if found.refused or not sets:
        return found
    if not context.host.cpusets and any(not _isolated(context.host, cpus) for cpus in sets):
        for group in sets.values():
            _no_cpusets(group, found)
        return found
    loose: dict[str, list[Domain]] = {}
    for cpus, group in sets.items():
        domain = _domain(context.host, cpus, group, found)
        if domain is None:
            continue
        found.domains.append(domain)
        if domain.mode is Mode.LOOSE:
            loose.setdefault(domain.slice, []).append(domain)
    for slice_ in loose:
        _merge(context, snapshot, slice_, asked, chosen, found)
    for domain in found.domains:
        _admit(context.host, domain, found)
        _evict(snapshot, asked, domain, found)
    _emulators(asked, chosen, found)
    for domain in found.domains:
        if domain.mode in (Mode.TIGHT, Mode.KTHREADS):
            for member in domain.members:
                member.wish.moves.pop(member.thread, None)
    return found


def _sets(
    members: Sequence[Member], chosen: Mapping[ThreadKey, Chosen], found: Found
) -> dict[CpuSet, list[Member]]:
    """The CPU sets of DEADLINE threads, each with every thread that has it."""
    sets: dict[CpuSet, list[Member]] = {}
    for member in members:
        if member.booked:
            sets.setdefault(chosen[member.thread.key].cpus, [])
    for member in members:
        cpus = chosen[member.thread.key].cpus
        if cpus in sets:
            sets[cpus].append(member)
            continue
        both = next((s for s in sets if s & cpus), None)
        if both is not None:
            _overlap(member, cpus, both, found)
    kept = list(sets)
    for number, cpus in enumerate(kept):
        other = next((o for o in kept[:number] if o & cpus), None)
        if other is not None:
            for member in sets[cpus]:
                _overlap(member, cpus, other, found)
    return sets


def _overlap(member: Member, cpus: CpuSet, other: CpuSet, found: Found) -> None:
    found.refuse(
        member,
        f"{label(member.thread)} would get CPUs {cpus}, of which {cpus & other} belong to the "
        f"root domain of CPUs {other}: a thread is in one root domain with all its CPUs",
        f"give it CPUs {other}, or CPUs outside them",
    )


def _no_cpusets(group: Sequence[Member], found: Found) -> None:
    for member in group:
        if member.booked:
            found.refuse(
                member,
                f"{label(member.thread)} needs a root domain of its own for class deadline, and "
                "this host has no cpuset controller of cgroup v2 to make one",
                "boot with systemd.unified_cgroup_hierarchy=1, or use class fifo",
            )


def _isolated(host: Host, cpus: CpuSet) -> bool:
    """Whether ``cpus`` is a root domain since boot: the default one, to which all isolated
    CPUs belong, is that of a thread only when there is a single one."""
    return len(cpus) == 1 and cpus == CpuSet(c.id for c in host.cpus if c.isolated)


def _domain(host: Host, cpus: CpuSet, group: list[Member], found: Found) -> Domain | None:
    first = next(m for m in group if m.booked)
    isolated = CpuSet(c.id for c in host.cpus if c.isolated)
    if _isolated(host, cpus):
        return Domain(Mode.ISOLATED, cpus, "", group, "the only CPU isolated at boot")
    if cpus & isolated:
        found.refuse(
            first,
            f"CPU {cpus & isolated} is isolated at boot; all isolated CPUs ({isolated}) are one "
            "root domain, which no partition can take them from",
            "choose CPUs that are not isolated: a partition keeps other tasks off as well",
        )
        return None
    if any(m.thread.cpuset_cpus is None for m in group):
        _no_cpusets(group, found)
        return None
    parents = {m.thread.cgroup.rpartition("/")[0] for m in group}
    guests = {m.wish.guest.ref for m in group}
    slices = {m.thread.cgroup.partition("/")[0] for m in group}
    top = host.cpuset(next(iter(slices)))
    single = len(guests) == 1
    threaded = single and all(_libvirt(m) for m in group)
    if threaded and _at_home(group) and top is not None and top.exclusive is not None:
        path = f"{next(iter(parents))}/{_tight_name(cpus, group)}"
        return Domain(Mode.TIGHT, cpus, path, group, "a partition of its own, below the guest")
    if single and all(m.thread.worker is WorkerKind.KTHREAD for m in group):
        path = f"{PARTITION_CGROUP}{cpus}.{first.wish.guest.pid}"
        why = "its vhost workers are kernel threads, which may leave the guest's cgroup"
        return Domain(Mode.KTHREADS, cpus, path, group, why)
    stranger = next((m for m in group if not _libvirt(m)), None)
    if stranger is not None:
        found.refuse(
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
    return Domain(Mode.LOOSE, cpus, first.thread.cgroup.partition("/")[0], group, why)


def _tight_name(cpus: CpuSet, group: Sequence[Member]) -> str:
    """libvirt's own cgroup of the first vcpu where there is one: a rewrite of its
    ``cpuset.cpus`` by vcpupin then leaves the partition in force."""
    vcpus = [m.thread.index for m in group if m.thread.role is Role.VCPU]
    known = sorted(i for i in vcpus if i is not None)
    return f"vcpu{known[0]}" if known else f"{PARTITION_CGROUP}{cpus}"


def _libvirt(member: Member) -> bool:
    return member.wish.guest.source == "libvirt" and member.thread.cgroup.count("/") >= 2


def _at_home(group: Sequence[Member]) -> bool:
    """Whether all threads are below one threaded cgroup of their guest."""
    return len({m.thread.cgroup.rpartition("/")[0] for m in group}) == 1


def _merge(
    context: Context,
    snapshot: Snapshot,
    slice_: str,
    asked: Sequence[Wishes],
    chosen: dict[ThreadKey, Chosen],
    found: Found,
) -> None:
    """One loose domain for everything of ours in a slice: a partition cannot hold
    another guest's remote one, and threads of guests cannot leave the slice."""
    inside = [
        Member(wish, pin)
        for wish in asked
        for pin in wish.pins
        if pin.thread.cgroup.startswith(f"{slice_}/")
    ]
    away = {m.thread.key for d in found.domains if d.mode is Mode.KTHREADS for m in d.members}
    inside = [m for m in inside if m.thread.key not in away]
    old = [d for d in found.domains if d.mode in (Mode.LOOSE, Mode.TIGHT) and d.slice == slice_]
    cpus = CpuSet(c for m in inside for c in chosen[m.thread.key].cpus)
    merged = Domain(Mode.LOOSE, cpus, slice_, inside, next(d.why for d in old))
    found.domains = [d for d in found.domains if d not in old] + [merged]
    for member in inside:
        if member.booked and chosen[member.thread.key].cpus != cpus:
            chosen[member.thread.key] = Chosen(cpus, f"floats in the partition {slice_}")
    managed = {w.guest.ref for w in asked}
    for guest in snapshot.guests:
        if guest.ref in managed:
            continue
        for thread in guest.threads:
            bound = thread.affinity & context.online
            below = thread.cgroup.startswith(f"{slice_}/")
            if below and thread.role in (Role.VCPU, Role.VHOST) and not bound & cpus:
                first = next(m for m in inside if m.booked)
                found.refuse(
                    first,
                    f"{merged.why}; the whole of {slice_} would become the partition of CPUs "
                    f"{cpus}, and {guest.ref} {label(thread)}, which no policy names, is bound "
                    f"to CPUs {bound} outside it",
                    f"give {guest.ref} a policy, use kernel 6.7 or later, or class fifo",
                )
                return


def _admit(host: Host, domain: Domain, found: Found) -> None:
    """Refuse guests whose budgets do not fit, as ``__dl_overflow`` counts."""
    most = limit(host, domain.cpus)
    if most is None:
        return
    used = 0
    beside: list[str] = []
    for member in domain.members:
        want = member.booked
        if used + want > most:
            others = f" beside {', '.join(beside)}" if beside else ""
            found.refuse(
                member,
                f"{label(member.thread)} asks {percent(want)} of CPU {domain.cpus}, of which "
                f"{percent(max(0, most - used))} remains{others}; the kernel admits "
                f"{limit_text(host, domain.cpus)}",
                "lower the runtime or lengthen the period, or use more CPUs",
            )
            continue
        used += want
        if want:
            beside.append(f"{member.name} ({percent(want)})")


def _evict(snapshot: Snapshot, asked: Sequence[Wishes], domain: Domain, found: Found) -> None:
    """A partition would push threads that somebody bound to its CPUs off them."""
    if domain.mode is Mode.ISOLATED:
        return
    inside = {m.thread.key for m in domain.members}
    managed = {w.guest.ref for w in asked}
    for guest in snapshot.guests:
        for thread in guest.threads:
            bound = bool(thread.affinity) and thread.affinity <= domain.cpus
            work = thread.role in (Role.VCPU, Role.VHOST)
            below = domain.mode is Mode.LOOSE and thread.cgroup.startswith(f"{domain.path}/")
            if not bound or not work or thread.key in inside or below or guest.ref in managed:
                continue
            first = next(m for m in domain.members if m.booked)
            found.refuse(
                first,
                f"the partition of CPUs {domain.cpus} would push {guest.ref} {label(thread)}, "
                f"which no policy names and which is bound to CPUs {thread.affinity}, off them",
                f"choose other CPUs, or give {guest.ref} a policy",
            )
            return


def _emulators(asked: Sequence[Wishes], chosen: dict[ThreadKey, Chosen], found: Found) -> None:
    """Emulators stay off partitions; only in a loose one they have to live inside it."""
    for wish in asked:
        pin = wish.emulator
        if pin is None or pin.thread.key not in chosen:
            continue
        for domain in found.domains:
            loose = domain.mode is Mode.LOOSE
            inside = loose and pin.thread.cgroup.startswith(f"{domain.path}/")
            pick = chosen[pin.thread.key].cpus
            if inside and not pick <= domain.cpus:
                if pin.cpus is None:
                    chosen[pin.thread.key] = Chosen(domain.cpus, f"confined to {domain.path}")
                    continue
                wish.refuse(
                    pin.keys,
                    f"the emulator lives in {domain.path}, which becomes the partition of CPUs "
                    f"{domain.cpus}: CPUs {pick - domain.cpus} are outside",
                    "write emulator: auto, or CPUs within the partition",
                )
            elif not inside and domain.mode is not Mode.ISOLATED and pick & domain.cpus:
                wish.refuse(
                    pin.keys,
                    f"CPU {pick & domain.cpus} belongs to a partition for class deadline",
                    "write emulator: auto, or CPUs outside the partition",
                )
            if wish.refusals:
                if not any(w is wish for w in found.refused):
                    found.refused.append(wish)
                break
