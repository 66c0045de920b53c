"""Which CPUs a thread's cgroups let it have, seen through partitions of our own."""

from __future__ import annotations

from collections.abc import Mapping

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Role, Thread
from vsrtune.model.host import Host
from vsrtune.model.targets import CpusetFile, Partition, Target, Value
from vsrtune.projection import scope_limit


def allowed(
    host: Host, ours: Mapping[Target, Value], guest: Guest, thread: Thread, *, moves: bool
) -> CpuSet:
    """CPUs that the thread's cgroup lets it have once the plan has run.

    libvirt rewrites the cpuset of vcpus and emulator, and a worker that moves
    (``moves``) gets the scope's, so for these only the cgroup above is a limit. What
    partitions of ours take away is no limit: a plan may place everything anew.
    """
    if thread.role is Role.NAPI:
        # A kernel thread of the host's own, outside the guest's cgroups; partitions are
        # not for it (domains.py).
        limit = thread.cpuset_effective
        return host.online if limit is None else host.online & limit
    rewritten = guest.source == "libvirt" and (thread.role is not Role.VHOST or moves)
    rewritten = rewritten and thread.cpuset_cpus is not None
    if guest.source == "libvirt" and any(isinstance(t, Partition) for t in ours):
        return _by_lists(host, ours, guest, thread, rewritten)
    limit = scope_limit(guest, thread) if rewritten else thread.cpuset_effective
    return host.online if limit is None else host.online & limit


def _by_lists(
    host: Host, ours: Mapping[Target, Value], guest: Guest, thread: Thread, rewritten: bool
) -> CpuSet:
    """What the lists of the cgroups leave that we have not written, but for CPUs that
    partitions of others hold."""
    partitions = {t.path for t in ours if isinstance(t, Partition)}
    lists = {t.path for t in ours if isinstance(t, CpusetFile) and t.file == "cpuset.cpus"}
    written = partitions | lists
    main = next(iter(guest.by_role(Role.EMULATOR)), thread)
    inside = thread.cgroup in partitions
    path = thread.cgroup if "/" in thread.cgroup else main.cgroup
    if rewritten or inside:
        path = path.rpartition("/")[0]
    cpus = host.online
    above = path
    while above:
        group = host.cpuset(above)
        if group is not None and group.cpus and above not in written:
            cpus &= CpuSet.parse(group.cpus)
        above = above.rpartition("/")[0]
    for group in host.cpusets:
        if group.valid and group.path not in partitions and not path.startswith(group.path):
            cpus -= group.effective
    return cpus
