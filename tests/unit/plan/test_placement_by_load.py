"""Placement by load: it keeps to what is allowed, is stable, and says why."""

from __future__ import annotations

from dataclasses import replace

from balance_samples import cheapest, machine, machines, occupants, seats, settled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_samples import cpus

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import UNIT, limit
from vsrtune.model.guest import Role, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.load import WINDOWS, merged
from vsrtune.plan.placement.by_load import FEE, MOVES, balance
from vsrtune.plan.placement.costs import Costs
from vsrtune.plan.placement.ranked import Occupant, Placed, Seat

NONE = CpuSet()
BOUNDED = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def seat(tid: int, guest: str, load: float | None, role: Role = Role.VCPU, **more: object) -> Seat:
    windows = () if load is None else (load,) * WINDOWS
    fields: dict[str, object] = {"allowed": cpus("1-3"), "label": f"{guest} {tid}", "load": windows}
    return Seat(ThreadKey(1, tid, tid), guest, role, tid, **{**fields, **more})  # type: ignore[arg-type]


def where(found: dict[ThreadKey, Placed]) -> dict[int, int]:
    return {key.tid: placed.cpu for key, placed in found.items()}


def places(found: dict[ThreadKey, Placed]) -> dict[ThreadKey, int]:
    return {key: placed.cpu for key, placed in found.items()}


def again(on: Host, some: list[Seat], beside: list[Occupant]) -> list[dict[ThreadKey, int]]:
    """Placements, one after the other, until nothing moves; windows end anew after moves and
    fill again with the same load."""
    found = [places(balance(on, NONE, some, beside))]
    for _ in range(40):
        some = settled(some, found[-1])
        found.append(places(balance(on, NONE, some, beside)))
        if found[-1] == found[-2]:
            return found
    raise AssertionError("it does not come to rest")


# -- what must hold for all


@BOUNDED
@given(st.data())
def test_allowed_cpus_only_and_the_order_does_not_matter(data: st.DataObject) -> None:
    on = data.draw(machines(5))
    some, beside = data.draw(seats(on, most=6)), data.draw(occupants(on))
    found = balance(on, NONE, some, beside)
    assert set(found) == {s.thread for s in some}
    assert all(found[s.thread].cpu in s.allowed for s in some)
    assert all(p.why for p in found.values())
    assert balance(on, NONE, some[::-1], beside[::-1]) == found


@BOUNDED
@given(st.data())
def test_at_first_within_five_percent_of_the_best(data: st.DataObject) -> None:
    on = data.draw(machines())
    some, beside = data.draw(seats(on, most=6)), data.draw(occupants(on))
    ordered = sorted(some, key=lambda s: s.order)
    costs = Costs(on, NONE, ordered, beside)
    found = balance(on, NONE, some, beside)
    cost = costs.total({n: costs.position[found[s.thread].cpu] for n, s in enumerate(ordered)})
    assert cost <= 1.05 * cheapest(costs) + 1e-6


@BOUNDED
@given(st.data())
def test_the_same_load_moves_nobody(data: st.DataObject) -> None:
    on = data.draw(machines())
    some, beside = data.draw(seats(on, most=6, budgets=False)), data.draw(occupants(on))
    found = places(balance(on, NONE, some, beside))
    for _ in range(2):
        assert places(balance(on, NONE, settled(some, found), beside)) == found


@BOUNDED
@given(st.data())
def test_a_little_noise_moves_nobody(data: st.DataObject) -> None:
    """A fiftieth more or less of every load, in every window, from where the threads are best
    placed."""
    on = data.draw(machines())
    some = data.draw(seats(on, most=6, budgets=False))
    found = places(balance(on, NONE, some, []))
    noise = st.floats(0.98, 1.02)
    shaken = [
        replace(s, load=tuple(min(one * data.draw(noise), 1.0) for one in s.load))
        for s in settled(some, found)
    ]
    assert places(balance(on, NONE, shaken, [])) == found


@BOUNDED
@given(st.data())
def test_few_moves_at_a_time_and_an_end_of_them(data: st.DataObject) -> None:
    """From any placement: at most MOVES at a time, each time it costs less by a fee for each,
    and after some times nobody moves any more."""
    on = data.draw(machines())
    some = [s for s in data.draw(seats(on, most=6, budgets=False)) if len(s.load) >= WINDOWS]
    start = [replace(s, previous=data.draw(st.sampled_from(sorted(s.allowed)))) for s in some]
    history = [{s.thread: s.previous or 0 for s in start}, *again(on, start, [])]
    ordered = sorted(some, key=lambda s: s.order)
    if not ordered:
        return
    costs = Costs(on, NONE, ordered, [])
    totals = [
        costs.total({n: costs.position[p[s.thread]] for n, s in enumerate(ordered)})
        for p in history
    ]
    for old, new, before, after in zip(history, history[1:], totals, totals[1:], strict=False):
        moved = sum(old[key] != new[key] for key in old)
        assert moved <= MOVES
        assert after <= before - FEE * moved + 1e-6


@BOUNDED
@given(st.data())
def test_budgets_that_fit_are_admitted(data: st.DataObject) -> None:
    """One thread of each of several guests, each with a budget of 60 %: as many CPUs as threads,
    so that each gets its own, whatever it had before."""
    count = data.draw(st.integers(2, 4))
    on = machine(count)
    every = CpuSet(range(count))
    some = [
        seat(
            n, f"g{n}", 0.1, allowed=every, booked=int(0.6 * UNIT),
            previous=data.draw(st.sampled_from((None, 0, 1))),
        )
        for n in range(count)
    ]  # fmt: skip
    found = balance(on, NONE, some, [])
    assert sorted(p.cpu for p in found.values()) == list(range(count))
    assert all((limit(on, CpuSet([c])) or 0) >= 0.6 * UNIT for c in every)


# -- single situations


def test_a_busy_thread_gets_a_cpu_and_idle_ones_share() -> None:
    some = [seat(1, "a", 0.9), seat(2, "a", 0.8), *(seat(n, "b", 0.01) for n in range(3, 7))]
    found = where(balance(machine(4), NONE, some, []))
    assert found[1] != found[2]
    assert {found[n] for n in range(3, 7)} == {1, 2, 3} - {found[1], found[2]}


def test_idle_ones_leave_a_thread_that_gets_busy_when_it_stays_so() -> None:
    on = machine(4)
    some = [seat(n, "ab"[n % 2], 0.0, previous=1 + n % 3) for n in range(6)]
    quiet = where(balance(on, NONE, some, []))
    assert quiet == {n: 1 + n % 3 for n in range(6)}
    shorter = replace(some[0], load=(0.0, 0.9, 0.9))
    assert where(balance(on, NONE, [shorter, *some[1:]], [])) == quiet, "busy in two windows only"
    busy = [replace(some[0], load=(0.9,) * WINDOWS), *some[1:]]
    found = balance(on, NONE, busy, [])
    assert [tid for tid, cpu in where(found).items() if cpu == 1] == [0]
    moved = next(p for key, p in found.items() if key.tid == 3)
    assert moved.why.startswith("moved from CPU 1, which saves 0.0")


def test_not_measured_for_long_enough_is_no_reason_to_move() -> None:
    some = [replace(seat(n, "a", None, previous=1), load=merged((0.9, 0.9))) for n in range(3)]
    assert set(where(balance(machine(4), NONE, some, [])).values()) == {1}


def test_who_may_not_stay_leaves_at_once() -> None:
    some = [seat(1, "a", None, previous=0), seat(2, "b", None, previous=2)]
    assert where(balance(machine(4), NONE, some, [])) == {1: 1, 2: 2}


def test_near_the_nic_unless_it_is_crowded_there() -> None:
    on = machine(4, nodes=2)
    near = {"allowed": cpus("0-3"), "nodes": frozenset({1})}
    assert where(balance(on, NONE, [seat(1, "a", 0.5, **near)], [])) == {1: 2}
    full = [Occupant("x", Role.VCPU, cpus(c), load=(0.9,) * WINDOWS) for c in "23"]
    assert where(balance(on, NONE, [seat(1, "a", 0.5, **near)], full)) == {1: 0}


def test_not_beside_the_interrupts_sibling() -> None:
    on = machine(6, siblings=2)
    free = {"allowed": cpus("1-5")}
    assert where(balance(on, cpus("0"), [seat(1, "a", 0.5, **free)], [])) == {1: 2}


def test_a_worker_in_the_cache_of_its_vcpu() -> None:
    on = machine(6, caches=2)
    fed = [
        seat(1, "a", 0.9, allowed=cpus("3")),
        seat(2, "a", 0.9, Role.VHOST, allowed=cpus("1-5")),
    ]
    assert where(balance(on, NONE, fed, []))[2] == 4


def test_cpus_written_by_hand_are_left_to_their_owner() -> None:
    hand = [Occupant("x", Role.VCPU, cpus("1"), reserves=True, load=(0.0,) * WINDOWS)]
    assert where(balance(machine(4), NONE, [seat(1, "a", 0.2)], hand)) == {1: 2}


def test_much_company_is_counted() -> None:
    crowd = [seat(n, "a", 0.0, allowed=cpus("1")) for n in range(1, 7)]
    beside = [Occupant("x", Role.VCPU, cpus("1-2"))]
    found = {key.tid: p.why for key, p in balance(machine(4), NONE, crowd, beside).items()}
    assert found[1].startswith("with a 2, a 3, a 4 and 3 more;")
    assert found[6].startswith("with a 1, a 2, a 3 and 3 more;")
    two = {key.tid: p.why for key, p in balance(machine(4), NONE, crowd[:2], beside).items()}
    assert two[1].startswith("with a 2, x vcpu;")


def test_reasons() -> None:
    on = machine(4)
    some = [
        seat(1, "a", 0.62, allowed=cpus("1-2")),
        seat(2, "a", None, allowed=cpus("2-3")),
        seat(3, "b", 0.0, allowed=cpus("2")),
        seat(4, "c", 0.0, allowed=cpus("3"), booked=UNIT // 4),
    ]
    found = {key.tid: p.why for key, p in balance(on, NONE, some, []).items()}
    assert found[1] == "a CPU of its own; load 62 %; CPU 2 would cost 0.97 more"
    assert found[2].startswith("with b 3; not measured yet, taken for 50 %; CPU 3 would cost 4.")
    assert found[3] == "with a 2; load 0 %; no other CPU is allowed"
    assert found[4] == "a CPU of its own; budget 25 %; no other CPU is allowed"
