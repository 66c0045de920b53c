# SPDX-License-Identifier: GPL-2.0-or-later
"""The root domains of an observed host."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.cpuset_tree import upwards
from vsrtune.model.deadline import bandwidth, limit, served_by_kernel
from vsrtune.model.guest import Role, SchedClass, Thread
from vsrtune.model.host import Host
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import HOST_REF, Partition, Target

# vsrtune's partitions are the cgroups of this name followed by their CPUs.
PARTITION_CGROUP = "vsrtune.cpus"


def is_partition(path: str) -> bool:
    """Whether a cgroup is one that vsrtune makes for a root domain."""
    return path.rpartition("/")[2].startswith(PARTITION_CGROUP)


def slices_of(host: Host, targets: Iterable[Target]) -> dict[str, CpuSet]:
    """The slices that are root domains by these targets, and their CPUs."""
    found = (
        host.cpuset(t.path) for t in targets if isinstance(t, Partition) and t.guest == HOST_REF
    )
    return {group.path: group.effective for group in found if group is not None and group.valid}


def within(cgroup: str, path: str) -> bool:
    """Whether a cgroup is inside the one of that path, such as that of a guest's thread in a
    slice."""
    return cgroup.startswith(f"{path}/")


def left_beside(host: Host, slices: Collection[str], cgroup: str) -> CpuSet:
    """The CPUs that slices which are root domains leave to a thread of a cgroup: their own to
    those in them, the others to the rest."""
    cpus = host.online
    for path in slices:
        group = host.cpuset(path)
        if group is not None:
            inside = within(cgroup, path)
            cpus = cpus & group.effective if inside else cpus - group.effective
    return cpus


def root_domain(host: Host, thread: Thread) -> CpuSet | None:
    """The CPUs of the partition, or of the isolated CPU, that a thread is in; None for the root
    domain of all other CPUs."""
    for path in upwards(thread.cgroup):
        group = host.cpuset(path)
        if group is not None and group.valid:
            return group.effective
    return thread.affinity if isolated_alone(host, thread.affinity) else None


def isolated_alone(host: Host, cpus: CpuSet) -> bool:
    """Whether ``cpus`` is a root domain since boot. The default root domain, to which all isolated
    CPUs belong, is a thread's own only when a single CPU is isolated."""
    return len(cpus) == 1 and cpus == host.isolated


@dataclass(frozen=True, slots=True)
class DomainBooks:
    """One root domain; bandwidths in 1/2**20 CPU. ``booked`` is that of DEADLINE threads,
    ``kernel`` the kernel's own for ordinary threads, ``admitted`` the most that the kernel admits
    for DEADLINE threads, None when it does not limit them. ``made_by`` is the partition's cgroup,
    or says that there is none."""

    cpus: CpuSet
    made_by: str
    booked: int
    kernel: int
    admitted: int | None


def books(snapshot: Snapshot) -> list[DomainBooks]:
    """All root domains; that of the CPUs without a partition comes last."""
    host = snapshot.host
    found = [
        _domain(snapshot, group.effective, group.path) for group in host.cpusets if group.valid
    ]
    rest = host.online - CpuSet.union(d.cpus for d in found)
    if rest:
        found.append(_domain(snapshot, rest, "no partition"))
    return found


def _domain(snapshot: Snapshot, cpus: CpuSet, made_by: str) -> DomainBooks:
    host = snapshot.host
    kernel = served_by_kernel(host, cpus)
    own = sum(bandwidth(t.sched) for t in _deadline_threads(snapshot, cpus))
    told = next((c.booked for c in host.deadline if c.cpu in cpus), None)
    known = own if told is None else told
    # The books contain the kernel's own share only after the kernel rebuilt this root domain, and
    # not always then (6.12). So a remainder beyond the guests' threads may be that share.
    others = known - own
    booked = own if others <= kernel else known - kernel
    return DomainBooks(cpus, made_by, booked, kernel, limit(host, cpus))


def _deadline_threads(snapshot: Snapshot, cpus: CpuSet) -> list[Thread]:
    return [
        t
        for g in snapshot.guests
        for t in g.threads
        if t.sched.cls is SchedClass.DEADLINE and t.affinity & cpus
    ]


def waits_for_domain(host: Host, thread: Thread) -> bool:
    """Whether a vcpu or vhost thread has not run yet in the root domain that it was given. Until
    then the kernel refuses it class deadline."""
    if thread.role not in (Role.VCPU, Role.VHOST) or thread.sched.cls is SchedClass.DEADLINE:
        return False
    cpus = root_domain(host, thread)
    return cpus is not None and thread.affinity == cpus and thread.last_cpu not in cpus
