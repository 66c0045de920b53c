"""Warnings about a host as a plan would leave it."""

from __future__ import annotations

import pytest
from planning_samples import change, cpus, router, snapshot

from vsrtune.model import Role, Sched, SchedClass
from vsrtune.plan_warnings import warnings

SPINNING = (
    "vr1: 2 vcpus share CPU 1 under fifo: one that spins for another never makes room for it, "
    "and the guest can stand still; class rr takes turns"
)


@pytest.mark.parametrize(
    ("vcpus", "where", "cls", "expected"),
    [
        (2, "1", SchedClass.FIFO, True),
        (2, "1", SchedClass.RR, False),
        (2, "1", SchedClass.OTHER, False),
        (2, "1-2", SchedClass.FIFO, False),
        (1, "1", SchedClass.FIFO, False),
    ],
)
def test_vcpus_that_spin_for_one_another(
    vcpus: int, where: str, cls: SchedClass, expected: bool
) -> None:
    priority = 0 if cls is SchedClass.OTHER else 10
    guest = change(
        router(vcpus=vcpus), Role.VCPU, affinity=cpus(where), sched=Sched(cls, priority=priority)
    )
    found = warnings(snapshot(guest), {"vr1"}, cpus("0"))
    assert (SPINNING in found) is expected
