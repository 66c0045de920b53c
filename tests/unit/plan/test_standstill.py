"""Which threads a realtime vcpu can keep from running for good."""

from __future__ import annotations

import pytest
from planning_samples import change, cpus, host, nic, router, snapshot

from vsrtune.model.guest import Guest, Role, Sched, SchedClass
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.planner import plan
from vsrtune.plan.safety.standstill import standstills
from vsrtune.policy.parser import parse

FIFO = Sched(SchedClass.FIFO, 10, reset_on_fork=True)
RR = Sched(SchedClass.RR, 10, reset_on_fork=True)
LOWER = Sched(SchedClass.RR, 9, reset_on_fork=True)
OTHER = Sched()
BUDGET = Sched(SchedClass.DEADLINE, runtime_ns=5, deadline_ns=10, period_ns=10)


def placed(guest: Guest, role: Role, where: str, sched: Sched) -> Guest:
    return change(guest, role, affinity=cpus(where), sched=sched)


def starved(result: Snapshot, *managed: str) -> list[tuple[str, str, Role]]:
    found = standstills(result, set(managed))
    return [(s.guest, s.starved_guest, s.starved.role) for s in found]


@pytest.mark.parametrize(
    ("vcpu", "vhost", "expected"),
    [
        (FIFO, FIFO, True),
        (FIFO, RR, True),
        (FIFO, OTHER, True),
        (RR, RR, False),
        (RR, FIFO, False),
        (RR, LOWER, True),
        (LOWER, RR, False),
        (RR, OTHER, True),
        (OTHER, OTHER, False),
        (OTHER, FIFO, False),
        (BUDGET, OTHER, False),
        (FIFO, BUDGET, False),
    ],
)
def test_a_busy_vcpu_and_its_worker(vcpu: Sched, vhost: Sched, expected: bool) -> None:
    guest = placed(placed(router(), Role.VCPU, "1", vcpu), Role.VHOST, "1", vhost)
    roles = {role for _, _, role in starved(snapshot(guest), "vr1")}
    assert roles == ({Role.VHOST} if expected else set())


@pytest.mark.parametrize(
    ("where", "sched", "expected"),
    [("1", FIFO, True), ("1", RR, False), ("1-2", FIFO, False), ("1", OTHER, False)],
)
def test_vcpus_that_spin_for_each_other(where: str, sched: Sched, expected: bool) -> None:
    guest = placed(placed(router(vcpus=2), Role.VCPU, where, sched), Role.VHOST, "3", RR)
    assert bool(starved(snapshot(guest), "vr1")) is expected


@pytest.mark.parametrize(
    ("vcpus", "asked", "refused"),
    [(1, "auto", False), (2, "auto", True), (4, "auto", True), (4, "1", False)],
)
def test_auto_has_no_two_vcpus_of_a_guest_share_a_cpu(
    vcpus: int, asked: str, refused: bool
) -> None:
    seen = snapshot(router(online="0-1", vcpus=vcpus), on=host(2, [nic("p0", "0")]))
    policy = parse(f"guest: vr1\ncpus: {{irq: 0, vcpu: {asked}}}\nprofile: none\n", "p.yaml")
    told = plan(seen, [policy]).refusals
    assert [f"its {vcpus} vcpus would share CPUs 1" in r.reason for r in told] == [True] * refused


@pytest.mark.parametrize(("vcpus", "refused"), [(1, False), (2, True)])
def test_the_cpu_that_auto_leaves_free_is_none_of_a_guests_own(vcpus: int, refused: bool) -> None:
    """Where no interrupts are served auto leaves one CPU to everything else."""
    guest = router(online="0-1", vcpus=vcpus, interfaces=())
    told = plan(
        snapshot(guest, on=host(2, [])),
        [parse("guest: vr1\ncpus: {vcpu: auto}\nprofile: none\n", "p")],
    )
    assert ["vcpus would share CPUs" in r.reason for r in told.refusals] == [True] * refused


def test_a_thread_that_may_run_elsewhere_is_not_starved() -> None:
    guest = placed(placed(router(), Role.VCPU, "1", FIFO), Role.VHOST, "1-2", FIFO)
    assert starved(snapshot(guest), "vr1") == []


def test_as_many_spinning_vcpus_as_cpus_starve_a_worker() -> None:
    guest = placed(placed(router(vcpus=2), Role.VCPU, "1-2", FIFO), Role.VHOST, "1-2", FIFO)
    assert {role for _, _, role in starved(snapshot(guest), "vr1")} == {Role.VHOST}


def test_the_later_of_two_guests_is_refused() -> None:
    first = placed(placed(router(), Role.VCPU, "1", FIFO), Role.VHOST, "2", RR)
    second = placed(placed(router("vr2", 2), Role.VCPU, "3", RR), Role.VHOST, "1", RR)
    both = snapshot(first, second)
    assert {guest for guest, _, _ in starved(both, "vr1", "vr2")} == {"vr2"}
    assert {guest for guest, _, _ in starved(both, "vr1")} == {"vr1"}
    assert starved(both) == []
