# SPDX-License-Identifier: GPL-2.0-or-later
"""Whether the host has a value: the very one, one that was cut, a half-written one, or none.

A cpuset partition takes its CPUs from the masks of all threads outside it (``cut``), and a thread
has no CPU that its cpuset lacks. A mask that undo restores may therefore lack them (``restored``);
a mask that a plan asks for may not.
"""

from __future__ import annotations

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VanishedError, VsrtuneError
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.model.deadline import LEAVING
from vsrtune.model.guest import Sched
from vsrtune.model.journal_records import Entry, ours, same_setting
from vsrtune.model.targets import (
    CpusetList,
    PartitionState,
    Pin,
    Target,
    Value,
    pinned_cpus,
)


def is_gone(target: Target, ops: LiveSysOps) -> bool:
    """Whether a target no longer exists. False when that cannot be read."""
    try:
        return ops.read(target) is False
    except VanishedError:
        return True
    except VsrtuneError:
        return False


def lost_its_cpus(entry: Entry, now: Value, ops: LiveSysOps) -> bool:
    """Whether CPUs of a mask or pin of ours went offline or out of the thread's cpuset, and the
    kernel gave the thread what is left."""
    cpus, present = pinned_cpus(entry.written), pinned_cpus(now)
    if not cpus or present is None:
        return False
    online = ops.online()
    if cpus.isdisjoint(online) and ops.unpartitioned(online) <= present:
        return True
    bound = ops.left(entry.target, online)
    narrowed = not ops.unpartitioned(cpus) <= bound
    if isinstance(now, CpuSet) and narrowed and now & online == bound:
        return True  # 6.1 forgets the mask where its cpuset changes
    return restored(entry.target, entry.written, now, ops)


def exactly(wanted: Value, now: Value, ops: LiveSysOps) -> bool:
    """Whether a write of ``wanted`` gives ``now``: equality, except for offline CPUs, which no
    thread can have."""
    if wanted == now and type(wanted) is type(now):
        return True
    if isinstance(wanted, CpuSet) and isinstance(now, CpuSet):
        online = ops.online()
        return wanted & online == now & online
    if isinstance(wanted, Pin) and isinstance(now, Pin):
        return wanted.cpuset == now.cpuset and exactly(wanted.cpus, now.cpus, ops)
    if isinstance(wanted, CpusetList) and isinstance(now, CpusetList) and not wanted.text:
        # A list of all CPUs means the same as no list, which the kernel does not allow a cgroup
        # with threads again.
        return ops.online() <= CpuSet.parse(now.text)
    return False


def unchanged(wanted: Value, now: Value, ops: LiveSysOps) -> bool:
    """Whether the host has ``wanted`` itself, so that nothing is to be written to restore it. What
    a write of it may show as well (``exactly``) may be another value: RPS and interrupts have
    offline CPUs."""
    if isinstance(wanted, CpuSet | Pin):
        return wanted == now
    return exactly(wanted, now, ops)


def cut(wanted: Value, now: Value, ops: LiveSysOps) -> bool:
    """Whether ``now`` is what partitions leave of ``wanted``: the mask of a thread without the
    CPUs that they hold, and no CPU less. From 6.2 on the kernel keeps the mask that was asked for,
    and gives it to the thread once they are gone."""
    if isinstance(wanted, Pin) and isinstance(now, Pin):
        return wanted.cpuset == now.cpuset and cut(wanted.cpus, now.cpus, ops)
    if isinstance(wanted, CpuSet) and isinstance(now, CpuSet):
        return ops.unpartitioned(wanted) == now & ops.online()
    return False


def restored(target: Target, wanted: Value, now: Value, ops: LiveSysOps) -> bool:
    """Whether the host has what the kernel makes of ``wanted``: of the mask of a thread, the CPUs
    that partitions (``cut``) and its cpuset leave."""
    if exactly(wanted, now, ops) or cut(wanted, now, ops):
        return True
    if isinstance(wanted, Pin) and isinstance(now, Pin):
        same = wanted.cpuset == now.cpuset
        return same and restored(target, wanted.cpus, now.cpus, ops)
    if not isinstance(wanted, CpuSet) or not isinstance(now, CpuSet):
        return False
    return ops.left(target, wanted) == now & ops.online()


def still_applied(written: Value, now: Value, ops: LiveSysOps) -> bool:
    """Whether the host has what we wrote; pins compare by their CPUs."""
    if isinstance(written, Pin) and isinstance(now, Pin):
        return still_applied(written.cpus, now.cpus, ops)
    if isinstance(written, PartitionState | Sched):
        return ours(written, now)
    return exactly(written, now, ops) or cut(written, now, ops)


def between(before: Value, after: Value, now: Value, ops: LiveSysOps) -> bool:
    """Whether ``now`` can come from a write from ``before`` to ``after`` that stopped half-way:
    each part is from one of the two, or an intermediate value of libvirt's."""
    if isinstance(before, Pin) and isinstance(after, Pin) and isinstance(now, Pin):
        online = ops.online()
        masks = [before.cpus & online, after.cpus & online, online]
        masks += [CpuSet.parse(p.cpuset) for p in (before, after) if p.cpuset]
        texts = {before.cpuset, after.cpuset, str(online), *map(str, masks)}
        masks += [ops.unpartitioned(m) for m in masks]
        return now.cpuset in texts and now.cpus & online in masks + [
            a & b for a in masks for b in masks
        ]
    return now == LEAVING or same_setting(before, now) or same_setting(after, now)
