"""Placement: each element of the ranking key decides when those before it are equal."""

from __future__ import annotations

import pytest
from planning_samples import cpus, host

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Role, ThreadKey
from vsrtune.model.host import Host
from vsrtune.plan.placement.ranked import Occupant, Seat, place


def seat(number: int, role: Role = Role.VCPU, guest: str = "a", **more: object) -> Seat:
    tid = 100 * (ord(guest[0]) - 96) + (50 if role is Role.VHOST else 0) + number
    fields: dict[str, object] = {"allowed": cpus("1-3"), **more}
    return Seat(ThreadKey(1, tid, tid), guest, role, number, **fields)  # type: ignore[arg-type]


def where(
    seats: list[Seat], occupants: list[Occupant] | None = None, on: Host | None = None
) -> list[int]:
    machine = host(4) if on is None else on
    placed = place(seats, occupants or [], {c.id: c for c in machine.cpus})
    backwards = place(seats[::-1], (occupants or [])[::-1], {c.id: c for c in machine.cpus})
    assert placed == backwards
    return [placed[s.thread].cpu for s in seats]


def bound(text: str, guest: str = "b", role: Role = Role.VHOST, reserves: bool = False) -> Occupant:
    return Occupant(guest, role, cpus(text), reserves)


def test_own_cpu_each_while_they_last() -> None:
    assert where([seat(0), seat(0, Role.VHOST), seat(1, Role.VHOST)]) == [1, 2, 3]


def test_vcpus_choose_first() -> None:
    assert where([seat(0, Role.VHOST), seat(0)]) == [2, 1]


def test_first_threads_of_all_guests_before_second_ones() -> None:
    assert where([seat(0), seat(1), seat(0, guest="b"), seat(1, guest="b")])[::2] == [1, 2]


def test_one_cpu_is_shared_by_all() -> None:
    one = {"allowed": cpus("1")}
    assert where([seat(0, **one), seat(1, **one), seat(0, Role.VHOST, **one)]) == [1, 1, 1]


def test_taken_cpus_come_last() -> None:
    assert where([seat(0), seat(1)], [bound("1")]) == [2, 3]


def test_roaming_threads_count_less_than_bound_ones() -> None:
    assert where([seat(0)], [bound("1"), bound("2-3")]) == [2]


def test_shares_with_its_own_guest_first() -> None:
    assert where([seat(0)], [bound("1", "b"), bound("2", "a"), bound("3", "b")]) == [2]


def test_vhost_shares_with_vhost_rather_than_vcpu() -> None:
    found = [bound("1", "a", Role.VCPU), bound("2", "a", Role.VHOST), bound("3", "a", Role.VCPU)]
    assert where([seat(0, Role.VHOST)], found) == [2]


def test_isolated_first() -> None:
    assert where([seat(0)], on=host(4, isolated="3")) == [3]


def test_node_of_the_nics_first() -> None:
    near = {"nodes": frozenset({1})}
    assert where([seat(0, **near)], on=host(4, nodes={2: 1, 3: 1})) == [2]


def test_empty_cores_before_busy_siblings() -> None:
    on = host(4, siblings={0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"})
    assert where([seat(0)], [bound("0")], on=on) == [2]


def test_stays_where_it_was() -> None:
    assert where([seat(0, previous=3), seat(1, previous=1)]) == [3, 1]


def test_previous_outside_what_is_allowed_is_forgotten() -> None:
    assert where([seat(0, previous=0)]) == [1]


def test_leaves_a_shared_cpu_when_one_is_free() -> None:
    found = where([seat(0, previous=2), seat(0, Role.VHOST, previous=2)])
    assert found == [2, 1], "the vcpu stays, the worker moves"


def test_leaves_a_cpu_that_was_reserved_by_hand() -> None:
    assert where([seat(0, previous=2)], [bound("2-3", "a", reserves=True)]) == [1]
    assert where([seat(0, previous=2)], [bound("2-3", "a")]) == [2]


def test_stays_shared_when_moving_helps_nobody() -> None:
    seats = [seat(0, previous=1), seat(0, Role.VHOST, previous=1)]
    assert where(seats, [bound("2"), bound("3")]) == [1, 1]


@pytest.mark.parametrize("count", range(1, 10))
def test_loads_differ_by_one_at_most(count: int) -> None:
    found = where([seat(n, previous=1) for n in range(count)])
    loads = [found.count(c) for c in (1, 2, 3)]
    assert max(loads) - min(loads) <= 1


def test_reasons() -> None:
    machine = {c.id: c for c in host(4).cpus}
    alone, shared = seat(0, allowed=CpuSet([1])), seat(0, Role.VHOST, allowed=CpuSet([2]))
    placed = place([alone, shared], [bound("2", "b")], machine)
    assert placed[alone.thread].why == "a CPU of its own"
    assert placed[shared.thread].why == "no CPU is free, shared with b"
