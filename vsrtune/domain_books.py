"""Root domains of a host as observed, and the DEADLINE bandwidth booked in them."""

from __future__ import annotations

from dataclasses import dataclass

from vsrtune.core.cpuset import CpuSet
from vsrtune.deadline import bandwidth, limit, served_by_kernel
from vsrtune.model import Host, Role, SchedClass, Snapshot, Thread
from vsrtune.root_domains import root_domain


@dataclass(frozen=True, slots=True)
class DomainBooks:
    """One root domain; bandwidths in 1/2**20 CPU. ``booked`` is that of DEADLINE threads,
    ``kernel`` the kernel's own for ordinary threads, ``admitted`` the most that the kernel
    takes for DEADLINE threads, None when it does not limit them. ``made_by`` is the
    partition's cgroup, or says that there is none."""

    cpus: CpuSet
    made_by: str
    booked: int
    kernel: int
    admitted: int | None


def books(snapshot: Snapshot) -> list[DomainBooks]:
    """Every root domain, that of all CPUs without a partition last."""
    host = snapshot.host
    found = [
        _domain(snapshot, group.effective, group.path) for group in host.cpusets if group.valid
    ]
    rest = host.online - CpuSet(c for d in found for c in d.cpus)
    if rest:
        found.append(_domain(snapshot, rest, "no partition"))
    return found


def _domain(snapshot: Snapshot, cpus: CpuSet, made_by: str) -> DomainBooks:
    host = snapshot.host
    kernel = served_by_kernel(host, cpus)
    ours = sum(bandwidth(t.sched) for t in _deadline_threads(snapshot, cpus))
    told = next((c.booked for c in host.deadline if c.cpu in cpus), None)
    known = ours if told is None else told
    # The kernel's own share is in its books only since it last rebuilt this root domain,
    # and not always then (6.12), so what is beyond the guests' threads may be that share.
    others = known - ours
    booked = ours if others <= kernel else known - kernel
    return DomainBooks(cpus, made_by, booked, kernel, limit(host, cpus))


def _deadline_threads(snapshot: Snapshot, cpus: CpuSet) -> list[Thread]:
    return [
        t
        for g in snapshot.guests
        for t in g.threads
        if t.sched.cls is SchedClass.DEADLINE and t.affinity & cpus
    ]


def waits_for_domain(host: Host, thread: Thread) -> bool:
    """Whether a vcpu or vhost thread was given a root domain in which it has not run
    yet: until then the kernel refuses it class deadline."""
    if thread.role not in (Role.VCPU, Role.VHOST) or thread.sched.cls is SchedClass.DEADLINE:
        return False
    cpus = root_domain(host, thread)
    return cpus is not None and thread.affinity == cpus and thread.last_cpu not in cpus
