"""Whether a value on the host is the one that was written, or one on the way to it."""

from __future__ import annotations

from vsrtune.core.cpuset import CpuSet
from vsrtune.execute.host_writer import SysOps
from vsrtune.model.deadline import LEAVING
from vsrtune.model.journal_records import same_setting
from vsrtune.model.targets import CpusetList, PartitionState, Pin, TimeSlice, Value


def exactly(wanted: Value, now: Value, ops: SysOps) -> bool:
    """Whether a write of ``wanted`` gives ``now``: equality, but for CPUs that are
    offline, which no thread can have."""
    if wanted == now and type(wanted) is type(now):
        return True
    if isinstance(wanted, TimeSlice) and isinstance(now, TimeSlice):
        return wanted.reached_by(now)
    if isinstance(wanted, CpuSet) and isinstance(now, CpuSet):
        online = ops.online()
        return wanted & online == now & online
    if isinstance(wanted, Pin) and isinstance(now, Pin):
        return wanted.cpuset == now.cpuset and exactly(wanted.cpus, now.cpus, ops)
    if isinstance(wanted, CpusetList) and isinstance(now, CpusetList) and not wanted.text:
        # A list of all CPUs means the same as none, and the kernel lets no cgroup with
        # threads have none again.
        return ops.online() <= CpuSet.parse(now.text)
    return False


def still_ours(written: Value, now: Value, ops: SysOps) -> bool:
    """Whether the host has what we wrote; pins compare by their CPUs."""
    if isinstance(written, Pin) and isinstance(now, Pin):
        return exactly(written.cpus, now.cpus, ops)
    if isinstance(written, PartitionState):
        return same_setting(written, now)
    return exactly(written, now, ops)


def between(before: Value, after: Value, now: Value, ops: SysOps) -> bool:
    """Whether ``now`` can be a write from ``before`` to ``after`` that stopped half-way:
    each part is that of one of the two, or what libvirt writes on the way."""
    if isinstance(before, Pin) and isinstance(after, Pin) and isinstance(now, Pin):
        online = ops.online()
        masks = [before.cpus & online, after.cpus & online, online]
        masks += [CpuSet.parse(p.cpuset) for p in (before, after) if p.cpuset]
        texts = {before.cpuset, after.cpuset, str(online), *map(str, masks)}
        return now.cpuset in texts and now.cpus & online in masks + [
            a & b for a in masks for b in masks
        ]
    if now == LEAVING and before != LEAVING:
        return True
    return same_setting(before, now) or same_setting(after, now)
