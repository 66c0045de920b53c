"""Root domains as the host has them."""

from __future__ import annotations

from vsrtune.core.cpuset import CpuSet
from vsrtune.model import Host, Thread

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
    return thread.affinity if isolated_alone(host, thread.affinity) else None


def isolated_alone(host: Host, cpus: CpuSet) -> bool:
    """Whether ``cpus`` is a root domain since boot: the default one, to which all isolated
    CPUs belong, is that of a thread only when there is a single one."""
    return len(cpus) == 1 and cpus == CpuSet(c.id for c in host.cpus if c.isolated)
