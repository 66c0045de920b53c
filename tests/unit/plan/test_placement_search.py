"""The search for the cheapest placement, against all bindings there are."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from balance_samples import cheapest, machine, machines, occupants, seats
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Role, ThreadKey
from vsrtune.model.load import WINDOWS
from vsrtune.plan.placement.board import Board
from vsrtune.plan.placement.costs import Costs
from vsrtune.plan.placement.ranked import Seat, place
from vsrtune.plan.placement.search import search

WITHIN = 1.05


def bounded(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def assert_close_to_best(costs: Costs) -> None:
    found = search(costs, {}, range(len(costs.seats)))
    assert sorted(found) == list(range(len(costs.seats)))
    assert all(costs.cpus[at] in costs.seats[n].allowed for n, at in found.items())
    assert costs.total(found) <= WITHIN * cheapest(costs) + 1e-6


@bounded(150)
@given(st.data())
def test_few_threads_within_five_percent_of_the_best_of_all_bindings(data: st.DataObject) -> None:
    on = data.draw(machines())
    some = data.draw(seats(on, most=6 if len(on.cpus) == 4 else 8))
    irq = CpuSet(data.draw(st.sets(st.integers(0, 5), max_size=2)))
    assert_close_to_best(Costs(on, irq, some, data.draw(occupants(on))))


@bounded(6)
@given(st.data())
def test_eight_threads_on_four_cpus(data: st.DataObject) -> None:
    on = machine(4, data.draw(st.sampled_from((1, 2))), data.draw(st.integers(1, 2)))
    some = data.draw(seats(on, least=8))
    assert_close_to_best(Costs(on, CpuSet(), some, data.draw(occupants(on))))


@bounded(40)
@given(st.data())
def test_the_board_adds_up_to_the_total(data: st.DataObject) -> None:
    on = data.draw(machines(6))
    costs = Costs(on, CpuSet([0]), data.draw(seats(on)), data.draw(occupants(on)))
    board, sum_of_prices = Board(costs, {}), 0.0
    for n, seat in enumerate(costs.seats):
        at = costs.position[data.draw(st.sampled_from(sorted(seat.allowed)))]
        sum_of_prices += board.price(n, at)
        board.put(n, at)
    assert sum_of_prices == pytest.approx(costs.total(board.placed))
    gone = data.draw(st.sampled_from(range(len(costs.seats))))
    rest = {n: at for n, at in board.placed.items() if n != gone}
    at = board.take(gone)
    assert board.price(gone, at) == pytest.approx(sum_of_prices - costs.total(rest))


@bounded(40)
@given(st.data())
def test_few_moves_keep_to_their_number_and_pay_their_fee(data: st.DataObject) -> None:
    on = data.draw(machines())
    costs = Costs(on, CpuSet(), data.draw(seats(on, most=5)), [])
    start = {
        n: costs.position[data.draw(st.sampled_from(sorted(s.allowed)))]
        for n, s in enumerate(costs.seats)
    }
    changes, fee = data.draw(st.integers(0, 3)), 0.05
    found = search(costs, {}, sorted(start), before=start, fee=fee, changes=changes)
    moved = sum(found[n] != start[n] for n in start)
    assert moved <= changes
    assert costs.total(found) + fee * moved <= costs.total(start) + 1e-6


def many(threads: int, on: CpuSet) -> list[Seat]:
    return [
        Seat(
            ThreadKey(n, n, n), f"vr{n // 3}", (Role.VCPU, Role.VHOST, Role.VHOST)[n % 3], n % 3, on,
            load=(0.1 + n * 37 % 60 / 100,) * WINDOWS,
        )
        for n in range(threads)
    ]  # fmt: skip


def test_many_threads_are_spread_by_their_load() -> None:
    """48 threads on 16 CPUs: none is asked for much more than the mean, and it costs less
    than the same number of threads everywhere."""
    on = machine(16)
    costs = Costs(on, CpuSet(), many(48, CpuSet(range(16))), [])
    found = search(costs, {}, range(48))
    loads = [0.0] * 16
    for n, at in found.items():
        loads[at] += costs.asking[n].demand
    assert max(loads) < 1.3 * sum(loads) / 16
    by_number = place(costs.seats, [], {c.id: c for c in on.cpus})
    even = {n: costs.position[by_number[s.thread].cpu] for n, s in enumerate(costs.seats)}
    assert costs.total(found) < costs.total(even)


def test_time_is_bounded_with_very_many() -> None:
    """A search that grew with the square of the threads would take minutes here."""
    on = machine(32, 2, 2)
    costs = Costs(on, CpuSet([0, 1]), many(600, CpuSet(range(2, 32))), [])
    begin = time.process_time()
    found = search(costs, {}, range(600))
    assert len(found) == 600
    assert time.process_time() - begin < 60


# -- the multistage router of five threads (Abeni et al., section 5 and Fig. 21): a balancer with a
# vcpu and two workers, a router with a vcpu and one


def five(loads: Sequence[float], cpus: CpuSet) -> list[Seat]:
    roles = [
        ("lb", Role.VCPU),
        ("lb", Role.VHOST),
        ("lb", Role.VHOST),
        ("br", Role.VCPU),
        ("br", Role.VHOST),
    ]
    return [
        Seat(
            ThreadKey(1, n, n), guest, role, n, cpus,
            load=(load,) * WINDOWS, links=frozenset({"edge-in"}),
        )
        for n, ((guest, role), load) in enumerate(zip(roles, loads, strict=True))
    ]  # fmt: skip


@bounded(60)
@given(
    st.lists(st.integers(0, 100).map(lambda n: n / 100), min_size=5, max_size=5), st.integers(2, 4)
)
def test_the_papers_five_threads(loads: list[float], count: int) -> None:
    seats = five(loads, CpuSet(range(1, count + 1)))
    assert_close_to_best(Costs(machine(count + 1), CpuSet([0]), seats, []))


def test_the_papers_five_threads_at_the_rate_where_it_matters() -> None:
    """Two CPUs, all threads alike: its case A, vcpus on one and workers on the other, forwarded
    most; case B, the balancer's workers beside the router's vcpu, less."""
    costs = Costs(machine(3), CpuSet([0]), five([0.4] * 5, CpuSet([1, 2])), [])
    found = search(costs, {}, range(5))
    assert found[0] == found[3] != found[1] == found[2] == found[4]
    case_a, case_b = {0: 0, 3: 0, 1: 1, 2: 1, 4: 1}, {1: 0, 2: 0, 3: 0, 0: 1, 4: 1}
    assert costs.total(case_a) < costs.total(case_b)


def test_workers_that_overload_a_cpu_do_not_stay_together() -> None:
    """In overload case A lost: three workers on one CPU, and time left on the other."""
    costs = Costs(machine(3), CpuSet([0]), five([0.5, 0.8, 0.8, 0.3, 0.8], CpuSet([1, 2])), [])
    found = search(costs, {}, range(5))
    assert len({found[n] for n in (1, 2, 4)}) == 2
