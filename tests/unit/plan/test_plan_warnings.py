"""Warnings about a host as a plan would leave it."""

from __future__ import annotations

from planning_samples import change, cpus, router, snapshot

from vsrtune.model.guest import Role, Sched, SchedClass
from vsrtune.plan.safety.standstill import standstills
from vsrtune.plan.warnings import warnings


def test_a_fifo_vcpu_that_shares_its_cpu_is_warned_of() -> None:
    both = {"affinity": cpus("1"), "sched": Sched(SchedClass.FIFO, priority=10)}
    guest = change(router(vcpus=2), Role.VCPU, **both)
    left = snapshot(guest)
    found = warnings(left, {"vr1"}, cpus("0"), standstills(left, {"vr1"}))
    assert any("keeps vcpu 1 of vr1 from running" in text for text in found)
