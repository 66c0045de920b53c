"""rewind.py: the host as it would be without us."""

from __future__ import annotations

from dataclasses import replace

import shell_samples as samples
from vsrtune.actions import (
    CgroupDir,
    EmulatorPin,
    Pin,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TxQueueLen,
    VcpuPin,
)
from vsrtune.cpuset import CpuSet
from vsrtune.model import Sched, SchedClass, Snapshot, ThreadKey
from vsrtune.rewind import rewind

ONE = CpuSet([1])


def tuned() -> tuple[Snapshot, Snapshot]:
    """An untuned host, and the same after tuning."""
    before = samples.snapshot()
    guest = before.guests[0]
    emulator, vcpu, worker = guest.threads
    after = replace(
        guest,
        threads=(
            replace(emulator, affinity=ONE, pin=ONE, cpuset_cpus="1", cpuset_effective=ONE),
            replace(
                vcpu,
                affinity=ONE,
                pin=ONE,
                cpuset_cpus="1",
                cpuset_effective=ONE,
                sched=Sched(SchedClass.FIFO, 5),
            ),
            replace(worker, affinity=ONE, cgroup=f"{samples.SCOPE}/vsrtune"),
        ),
        interfaces=(replace(guest.interfaces[0], txqueuelen=100),),
    )
    return before, replace(before, guests=(after,))


def test_every_kind_of_setting_is_rewound() -> None:
    before, after = tuned()
    emulator, vcpu, worker = (t.key for t in before.guests[0].threads)
    originals = {
        TxQueueLen("vr1", "macvtap100", 100): 500,
        CgroupDir("vr1", f"{samples.SCOPE}/vsrtune"): False,
        ThreadCgroup("vr1", worker, "vhost"): f"{samples.SCOPE}/emulator",
        ThreadAffinity("vr1", worker, "vhost"): samples.ALL,
        EmulatorPin("vr1", "u", emulator): Pin(samples.ALL, ""),
        VcpuPin("vr1", "u", 0, vcpu): Pin(samples.ALL, ""),
        ThreadSched("vr1", vcpu, "vcpu 0"): Sched(),
    }
    assert rewind(after, originals) == before


def test_entries_of_other_objects_change_nothing() -> None:
    _, after = tuned()
    stranger = ThreadKey(100, 101, 1)  # the same tid, started at another time
    originals = {
        ThreadAffinity("vr1", stranger, "vcpu 0"): samples.ALL,
        TxQueueLen("vr1", "macvtap100", 999): 500,
    }
    assert rewind(after, originals) == after
