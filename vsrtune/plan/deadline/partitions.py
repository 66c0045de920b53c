# SPDX-License-Identifier: GPL-2.0-or-later
"""Turns root domains into actions: cgroups, CPU lists, partitions, and moves into them.

The order of the phases (plan/phases.py) guarantees for a plan and its undo: no move and no
partition changes a thread's mask, and no thread moves or loses its partition while it is
DEADLINE.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.cpuset_tree import CpusetGroup, upwards
from vsrtune.model.deadline import limit, percent
from vsrtune.model.host import Host
from vsrtune.model.plan import Action
from vsrtune.model.root_domains import is_partition
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    CpusetFile,
    CpusetList,
    Partition,
    PartitionState,
    Pin,
    ThreadCgroup,
    VcpuPin,
)
from vsrtune.plan.deadline.model import DomainMode, RootDomain, RootDomains
from vsrtune.plan.phases import Draft, Phase
from vsrtune.plan.requirements import EMULATOR_CGROUP, Context, label

_LIBVIRTS = ("emulator", "iothread", "vcpu")

CPUS, EXCLUSIVE = "cpuset.cpus", "cpuset.cpus.exclusive"
MEMBER, ROOT = PartitionState("member"), PartitionState("root")


def build(context: Context, snapshot: Snapshot, found: RootDomains, draft: Draft) -> None:
    """Add the actions that the root domains need."""
    maker = _Maker(context, snapshot.host, found, draft)
    for domain in found.domains:
        match domain.mode:
            case DomainMode.TIGHT | DomainMode.KTHREADS:
                maker.threads_cgroup(domain)
            case DomainMode.LOOSE:
                maker.slice(domain)
            case DomainMode.ISOLATED:
                pass
    maker.slices_above()


def notes(snapshot: Snapshot, found: RootDomains) -> list[str]:
    """A note for each root domain: how it is made and why, and what it takes from whom."""
    out: list[str] = []
    for domain in found.domains:
        names = ", ".join(m.name for m in domain.members)
        text = (
            f"CPUs {domain.cpus} become a root domain, {domain.mode.value} ({domain.why}): {names}"
        )
        used = sum(m.booked for m in domain.members)
        most = limit(snapshot.host, domain.cpus)
        text += f"; {percent(used)} booked"
        if most is not None:
            text += f", {percent(most - used)} free"
        if domain.mode is not DomainMode.ISOLATED:
            text += f"; {_taken(snapshot, domain)}"
        out.append(text)
    return out


def _taken(snapshot: Snapshot, domain: RootDomain) -> str:
    inside = {m.thread.key for m in domain.members}
    losers = [
        g.ref
        for g in snapshot.guests
        if any(t.key not in inside and t.affinity & domain.cpus for t in g.threads)
    ]
    rest = snapshot.host.online - domain.cpus
    if domain.mode is DomainMode.LOOSE:
        return (
            f"everything in {domain.path}, the emulators of its guests included, runs on "
            f"these CPUs only, and all else on CPUs {rest} only"
        )
    but = f", other threads of {', '.join(losers)} among it" if losers else ""
    return f"taken from everything else on this host{but}, which has CPUs {rest} then"


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the actions of all root domains of one plan. ``shielded`` are the cgroups of which
    the others inside are shielded already."""

    context: Context
    host: Host
    found: RootDomains
    draft: Draft
    shielded: set[str] = field(default_factory=set)

    # -- one target each

    def _text(self, path: str, file: str) -> str:
        group = self.host.cpuset(path)
        if group is None:
            return ""
        return group.cpus if file == CPUS else group.exclusive or ""

    def _set(self, ref: str, path: str, file: str, text: str, phase: Phase, why: str) -> None:
        target = CpusetFile(ref, path, file)
        self.draft.desired.add(target)
        now = self._text(path, file)
        if now != text:
            self.draft.add(phase, Action.of(target, CpusetList(now), CpusetList(text), why))

    def _partition(self, ref: str, domain: RootDomain) -> None:
        target = Partition(ref, domain.path)
        self.draft.desired.add(target)
        group = self.host.cpuset(domain.path)
        now = PartitionState(group.partition) if group is not None else MEMBER
        if now == ROOT:
            self.draft.skip(ref, f"partition {domain.path}", "already set: root")
            return
        why = f"a root domain of CPUs {domain.cpus} for class deadline: {domain.why}"
        if now.wanted == "root":
            why = f"something else made it useless ({now}); written again"
        self.draft.add(Phase.PARTITIONS, Action.of(target, now, ROOT, why))

    # -- tight, and kernel threads

    def threads_cgroup(self, domain: RootDomain) -> None:
        """Make the partition's cgroup and move the domain's threads there. The cgroup is
        libvirt's of a vcpu, or our own."""
        ref, path = domain.guests[0], domain.path
        # Cgroups that earlier plans made for workers may hold them until they move.
        self.draft.desired |= {
            t
            for t in self.context.applied
            if isinstance(t, CgroupDir) and t.guest == ref and not is_partition(t.path)
        }
        if is_partition(path):
            self._own_cgroup(ref, domain)
        for member in domain.members:
            thread = member.thread
            move = ThreadCgroup(ref, thread.key, label(thread))
            if thread.cgroup == path and move not in self.context.applied:
                continue
            self.draft.desired.add(move)
            if thread.cgroup == path:
                self.draft.skip(ref, f"{label(thread)} cgroup", "already in its partition")
                continue
            why = f"into the root domain of CPUs {domain.cpus}"
            self.draft.add(Phase.PARTITION_MOVES, Action.of(move, thread.cgroup, path, why))
        if domain.mode is DomainMode.TIGHT:
            own = Phase.PARTITION_LISTS
            self._set(ref, path, EXCLUSIVE, str(domain.cpus), own, "for the partition")
            self._shield(ref, domain.path.rpartition("/")[0])
        self._partition(ref, domain)

    def _own_cgroup(self, ref: str, domain: RootDomain) -> None:
        target = CgroupDir(ref, domain.path)
        self.draft.desired.add(target)
        if self.host.cpuset(domain.path) is None and self.context.applied.get(target) is not True:
            why = f"room for the threads of the root domain of CPUs {domain.cpus}"
            self.draft.add(Phase.PARTITION_CGROUPS, Action.of(target, False, True, why))
        why = f"the CPUs of the root domain ({domain.mode.value})"
        self._set(ref, domain.path, CPUS, str(domain.cpus), Phase.PARTITION_CGROUPS, why)

    def _shield(self, ref: str, parent: str) -> None:
        """Keep the lists of libvirt's other cgroups from breaking the partitions.

        A partition is invalid if a cgroup beside it has one of its CPUs in its list
        (``cpus_excl_conflict``). A later write by libvirt must not cause that, because the
        kernel loses count of the bandwidth of DEADLINE threads in a partition that becomes
        invalid. If a cgroup has a ``cpuset.cpus.exclusive`` of other CPUs, the kernel judges it
        by these instead of its list. Each cgroup needs a CPU of its own for that. The emulator's
        comes first; where CPUs run out, the partitions' CPUs are taken from the list.
        """
        if parent in self.shielded:
            return
        self.shielded.add(parent)
        own = {d.path for d in self.found.domains}
        taken = CpuSet.union(d.cpus for d in self.found.domains)
        spare = [c for c in self.host.online if c not in taken]
        lists = {g.path: self._after_pins(ref, g.path, g.cpus) for g in self.host.cpusets}
        beside = [
            g
            for g in self.host.cpusets
            if g.path.rpartition("/")[0] == parent and g.path not in own
        ]
        for group in sorted(beside, key=_written_by_libvirt):
            if not group.path.rpartition("/")[2].startswith(_LIBVIRTS):
                continue
            known = CpuSet.parse(group.exclusive or "")
            if not known <= CpuSet(spare) or not known:
                # No cgroup may be bound to exactly the CPU that is exclusive to another.
                bound = {lists[g.path] for g in beside if g is not group}
                fits = [c for c in spare if str(c) not in bound]
                best = [c for c in fits if lists[group.path] == str(c)]
                known = CpuSet((best or fits)[:1])
            if known:
                spare = [c for c in spare if c not in known]
                why = "so that its list of CPUs cannot make the partition beside it invalid"
                self._set(ref, group.path, EXCLUSIVE, str(known), Phase.LISTS_BESIDE, why)
            else:
                self._make_room(ref, group, taken)

    def _make_room(self, ref: str, group: CpusetGroup, taken: CpuSet) -> None:
        target = CpusetFile(ref, group.path, CPUS)
        now = self._after_pins(ref, group.path, group.cpus)
        if target in self.context.applied or CpuSet.parse(now) & taken:
            self.draft.desired.add(target)
        if CpuSet.parse(now) & taken:
            rest = CpusetList(str(CpuSet.parse(now) - taken))
            why = f"CPUs {taken} are to be exclusive"
            self.draft.add(Phase.LISTS_BESIDE, Action.of(target, CpusetList(now), rest, why))

    def _after_pins(self, ref: str, path: str, text: str) -> str:
        """The ``cpuset.cpus`` of a libvirt cgroup after the plan's pins; ``text`` is the present
        one."""
        for action in self.draft.of(Phase.PIN_VCPUS, Phase.PIN_EMULATORS):
            target, pin = action.target, action.after
            if target.guest != ref or not isinstance(pin, Pin) or pin.cpuset is None:
                continue
            name = f"vcpu{target.vcpu}" if isinstance(target, VcpuPin) else EMULATOR_CGROUP
            if path.rpartition("/")[2] == name:
                return pin.cpuset
        return text

    # -- loose

    def slice(self, domain: RootDomain) -> None:
        """Make the whole slice a partition."""
        if domain.path not in self.context.kept:
            group = self.host.cpuset(domain.path)
            file = CPUS if group is None or group.exclusive is None else EXCLUSIVE
            why = f"the CPUs of the root domain: {domain.why}"
            self._set(HOST_REF, domain.path, file, str(domain.cpus), Phase.PARTITION_LISTS, why)
        self._partition(HOST_REF, domain)

    # -- lists above the partitions

    def slices_above(self) -> None:
        """Write ``cpuset.cpus.exclusive`` on every cgroup above tight partitions, and narrow the
        lists of slices that stand in the way of partitions beside them (before 6.7)."""
        needed: dict[str, CpuSet] = {}
        owner: dict[str, str] = {}
        for domain in self.found.domains:
            if domain.mode is not DomainMode.TIGHT:
                continue
            for above in upwards(domain.path.rpartition("/")[0]):
                needed[above] = needed.get(above, CpuSet()) | domain.cpus
                owner[above] = domain.guests[0]
        why = "CPUs that partitions below may take"
        for path, cpus in sorted(needed.items()):
            ref = owner[path] if "/" in path else HOST_REF
            wanted = cpus | self._strangers(path)
            now = CpuSet.parse(self._text(path, EXCLUSIVE))
            foreign = CpusetFile(ref, path, EXCLUSIVE) not in self.context.applied
            if foreign and wanted <= now:
                continue
            self._set(ref, path, EXCLUSIVE, str(wanted), Phase.LISTS_ABOVE, why)
        loose = {d.path for d in self.found.domains if d.mode is DomainMode.LOOSE}
        top = CpuSet.union(d.cpus for d in self.found.domains if d.mode is DomainMode.KTHREADS)
        for group in self.host.cpusets:
            lists = CpuSet.parse(group.cpus)
            narrowed = CpusetFile(HOST_REF, group.path, CPUS)
            loosely = Partition(HOST_REF, group.path) in self.context.applied
            if narrowed in self.context.applied and not loosely:
                # While it is in the way of one partition, the CPUs of another come back.
                original = self.context.originals.get(narrowed)
                if isinstance(original, CpusetList):
                    lists = CpuSet.parse(original.text)
            if "/" in group.path or group.path in loose or not lists & top or group.valid:
                continue
            if group.path in {d.path for d in self.found.domains}:
                continue
            why = f"CPUs {lists & top} become a partition beside it"
            self._set(HOST_REF, group.path, CPUS, str(lists - top), Phase.PARTITION_LISTS, why)

    def _strangers(self, path: str) -> CpuSet:
        """The exclusive CPUs of cgroups directly below ``path`` that are not of these domains."""
        own = {d.path for d in self.found.domains}
        # Those of guests that are not planned for keep what they have.
        guests = {HOST_REF, *(ref for d in self.found.domains for ref in d.guests)}
        lists = (t for t in self.context.applied if isinstance(t, CpusetFile))
        mine = {t.path for t in lists if t.guest in guests}
        cpus = CpuSet()
        for group in self.host.cpusets:
            beneath = group.path.rpartition("/")[0] == path
            above_own = any(p.startswith(f"{group.path}/") for p in own)
            if beneath and group.path not in own | mine and not above_own and group.exclusive:
                cpus |= CpuSet.parse(group.exclusive)
        return cpus


def _written_by_libvirt(group: CpusetGroup) -> tuple[int, str]:
    """Sort key of the cgroups to shield: the emulator's first."""
    name = group.path.rpartition("/")[2]
    return (0 if name == EMULATOR_CGROUP else 1, group.path)
