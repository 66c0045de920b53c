"""Placement: what each cost decides, what loads change, that threads come to rest, and reasons."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_samples import cpus, host, router, snapshot, with_cpusets

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import UNIT
from vsrtune.model.guest import Role, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.load import WINDOWS, merged
from vsrtune.model.targets import EmulatorPin, ThreadAffinity, VcpuPin, pinned_cpus
from vsrtune.plan.placement.costs import Board, Chosen, Occupant, Seat
from vsrtune.plan.placement.greedy import FEE, MOVES, place
from vsrtune.plan.planner import plan
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.parser import parse

NONE = CpuSet()
BOUNDED = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def machine(count: int, siblings: int = 1, nodes: int = 1, caches: int = 1) -> Host:
    """A host with CPUs 0..count-1: SMT siblings side by side, then caches, then nodes."""

    def block(cpu: int, size: int) -> CpuSet:
        first = cpu // size * size
        return CpuSet(range(first, min(first + size, count)))

    base = host(
        count,
        {},
        siblings={c: str(block(c, siblings)) for c in range(count)},
        nodes={c: c * nodes // count for c in range(count)},
    )
    size = -(-count // caches)
    return replace(base, cpus=tuple(replace(c, cache=block(c.id, size)) for c in base.cpus))


def seat(number: int, role: Role = Role.VCPU, guest: str = "a", **more: object) -> Seat:
    """A thread whose policy does not ask for placement by load."""
    tid = 100 * (ord(guest[0]) - 96) + (50 if role is Role.VHOST else 0) + number
    fields: dict[str, object] = {"allowed": cpus("1-3"), "label": f"{guest} {tid}", **more}
    return Seat(ThreadKey(1, tid, tid), guest, role, number, **fields)  # type: ignore[arg-type]


def busy(tid: int, guest: str, load: float | None, role: Role = Role.VCPU, **more: object) -> Seat:
    """A thread placed by its load, None when it was not measured yet."""
    windows = () if load is None else (load,) * WINDOWS
    fields: dict[str, object] = {"allowed": cpus("1-3"), "label": f"{guest} {tid}", "load": windows}
    return Seat(ThreadKey(1, tid, tid), guest, role, tid, **{**fields, **more})  # type: ignore[arg-type]


def bound(text: str, guest: str = "b", role: Role = Role.VHOST, reserves: bool = False) -> Occupant:
    return Occupant(guest, role, cpus(text), reserves)


def where(
    seats: list[Seat], occupants: list[Occupant] | None = None, on: Host | None = None
) -> list[int]:
    placed = place(on or host(4), NONE, seats, occupants or [])
    return [placed[s.thread].cpus.first() for s in seats]


def places(found: Mapping[ThreadKey, Chosen]) -> dict[ThreadKey, int]:
    return {key: placed.cpus.first() for key, placed in found.items()}


def rested(seats: list[Seat], now: Mapping[ThreadKey, int]) -> list[Seat]:
    """The seats at a later pass under the same load. After a move, new windows have filled."""
    return [replace(s, previous=now[s.thread]) for s in seats]


# -- what decides without loads


def test_own_cpu_each_while_they_last() -> None:
    assert where([seat(0), seat(0, Role.VHOST), seat(1, Role.VHOST)]) == [1, 2, 3]


def test_vcpus_choose_first_and_the_first_of_every_guest_before_the_second() -> None:
    assert where([seat(0, Role.VHOST), seat(0)]) == [2, 1]
    assert where([seat(0), seat(1), seat(0, guest="b"), seat(1, guest="b")])[::2] == [1, 2]


def test_one_cpu_is_shared_by_all() -> None:
    one = {"allowed": cpus("1")}
    assert where([seat(0, **one), seat(1, **one), seat(0, Role.VHOST, **one)]) == [1, 1, 1]


BESIDE = {
    "taken CPUs come last": ([seat(0), seat(1)], [bound("1")], [2, 3]),
    "roaming threads count less": ([seat(0)], [bound("1"), bound("2-3")], [2]),
    "with its own guest first": (
        [seat(0)], [bound("1", "b"), bound("2", "a"), bound("3", "b")], [2],
    ),
    "a worker beside a worker rather than a vcpu": (
        [seat(0, Role.VHOST)],
        [bound("1", "a", Role.VCPU), bound("2", "a"), bound("3", "a", Role.VCPU)],
        [2],
    ),
    "a vcpu never beside its guest's vcpus while there is any other CPU": (
        [seat(0), seat(0, guest="b", role=Role.VHOST)],
        [bound("2", "a", Role.VCPU), bound("3", "a", Role.VCPU), *[bound("1", "c")] * 9],
        [1, 2],
    ),
    "a kept vcpu leaves its guest's other vcpu": (
        [seat(0, previous=1), seat(1, previous=1)], [bound("2"), bound("3"), bound("3")], [1, 2],
    ),
    "stays where it was": ([seat(0, previous=3), seat(1, previous=1)], [], [3, 1]),
    "leaves what is not allowed": ([seat(0, previous=0)], [], [1]),
    "the worker leaves a shared CPU when one is free": (
        [seat(0, previous=2), seat(0, Role.VHOST, previous=2)], [], [2, 1],
    ),
    "leaves a CPU that was reserved by hand": (
        [seat(0, previous=2)], [bound("2-3", "a", reserves=True)], [1],
    ),
    "does not leave a CPU for threads that only may run there": (
        [seat(0, previous=2)], [bound("2-3", "a")], [2],
    ),
    "stays where moving helps nobody": (
        [seat(0, previous=1), seat(0, Role.VHOST, previous=1)], [bound("2"), bound("3")], [1, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_beside_others(case: str) -> None:
    seats, occupants, expected = BESIDE[case]
    assert where(seats, occupants) == expected
    assert where(seats[::-1], occupants[::-1]) == expected[::-1]


def test_isolated_first() -> None:
    assert where([seat(0)], on=host(4, isolated="3")) == [3]


@pytest.mark.parametrize("others", [["0-4"], ["0-1", "2-4"]], ids=["unbound", "bound"])
def test_emulators_avoid_isolated_cpus_beside_guests_without_a_policy(others: list[str]) -> None:
    guests = [router(online="0-8")]
    guests += [router(f"vm{n}", 2000 + 100 * n, online=mask) for n, mask in enumerate(others)]
    made = plan(snapshot(*guests, on=host(9, isolated="5-8")), [parse("guest: vr1\n", "p")])
    (pin,) = (a.after for a in made.actions if isinstance(a.target, EmulatorPin))
    assert pinned_cpus(pin) == cpus("1-4" if len(others) == 1 else "0")


def test_the_cpu_left_free_is_not_that_of_a_router() -> None:
    """Somebody pins a guest without a policy to it; the routers stay where they are."""
    policies = [
        parse("guest: vr1\ncpus: {irq: auto}\nscheduler: {vcpu: {class: fifo, priority: 5}}\n", "p")
    ]
    alone = snapshot(router(online="0-3", vcpus=3, interfaces=()), on=host(4))
    made = plan(alone, policies)
    tuned = project_actions(alone, made.actions)
    other = router("ci", 5000, online="0", interfaces=())
    later = replace(tuned, guests=(other, *tuned.guests))
    again = plan(later, policies, {a.target: a.after for a in made.actions})
    assert made.actions and (again.refusals, again.actions) == ((), ())


@pytest.mark.parametrize("services", ["0", "0-1", "0-3"])
def test_one_cpu_of_the_services_is_left_to_them(services: str) -> None:
    """AllowedCPUs= of system.slice; the NIC's interrupts are elsewhere."""
    seen = with_cpusets(snapshot(router(online="0-4"), on=host(5, nics={"p0": "4", "p1": "4"})))
    there = tuple(
        replace(c, cpus=services, effective=cpus(services)) if c.path == "system.slice" else c
        for c in seen.host.cpusets
    )
    seen = replace(seen, host=replace(seen.host, cpusets=there))
    made = plan(seen, [parse("guest: vr1\n", "p")])
    assert made.refusals == ()
    kinds = (VcpuPin, ThreadAffinity)
    taken = CpuSet.union(
        pinned_cpus(a.after) or CpuSet() for a in made.actions if isinstance(a.target, kinds)
    )
    assert taken and not cpus(services) <= taken
    by_hand = plan(seen, [parse(f"guest: vr1\ncpus: {{vcpu: {services}, vhost: 0}}\n", "p")])
    assert "not in AllowedCPUs= of system.slice" in by_hand.refusals[0].hint


def test_empty_cores_before_busy_siblings() -> None:
    on = host(4, siblings={0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"})
    assert where([seat(0)], [bound("0")], on=on) == [2]


@pytest.mark.parametrize("count", range(1, 10))
def test_numbers_of_threads_differ_by_one_at_most(count: int) -> None:
    found = where([seat(n, Role.VHOST, previous=1) for n in range(count)])
    counts = [found.count(c) for c in (1, 2, 3)]
    assert max(counts) - min(counts) <= 1


# -- the price of CPU 1 (docs/placement.md, Cost)


def beside(role: Role, guest: str = "a", cpu: str = "1", **more: object) -> Occupant:
    """A thread that asks for 0.4 of the CPU."""
    return Occupant(guest, role, cpus(cpu), load=(0.4,) * WINDOWS, **more)  # type: ignore[arg-type]


LINKED = {"links": frozenset({"edge"})}
HALF, WORKER = busy(1, "a", 0.5), busy(1, "a", 0.5, Role.VHOST)
# A thread that asks for half a CPU (otherwise its demand), those beside it, and what it costs more
# than on a CPU without others.
PRICES: dict[str, tuple[Seat, float, list[Occupant], float]] = {
    "nobody": (HALF, 0.5, [], 0),
    "another guest's vcpu": (HALF, 0.5, [beside(Role.VCPU, "b")], 0.2),
    "another guest's worker": (HALF, 0.5, [beside(Role.VHOST, "b")], 0.2),
    "its worker": (HALF, 0.5, [beside(Role.VHOST)], 0.8 * 0.2),
    "its NAPI thread": (HALF, 0.5, [beside(Role.NAPI)], 0.8 * 0.2),
    "two workers": (WORKER, 0.5, [beside(Role.VHOST)], 0.7 * 0.2),
    "two vcpus": (HALF, 0.5, [beside(Role.VCPU)], 1.5 * 0.2 + 1e6),
    "linked vcpus": (replace(HALF, **LINKED), 0.5, [beside(Role.VCPU, "b", **LINKED)], 0.9 * 0.2),
    "linked workers": (
        replace(WORKER, **LINKED), 0.5, [beside(Role.VHOST, "b", **LINKED)], 0.7 * 0.2,
    ),
    "a linked worker and a vcpu": (
        replace(WORKER, **LINKED), 0.5, [beside(Role.VCPU, "b", **LINKED)], 0.2,
    ),
    "two on two CPUs": (HALF, 0.5, [beside(Role.VHOST, "b", "1-2")] * 2, 0.2),
    "a reserved CPU": (HALF, 0.5, [beside(Role.VCPU, "b", reserves=True)], 0.5 + 2 * 0.5),
    "more than there is": (HALF, 0.5, [beside(Role.VHOST, "b")] * 2, 0.4 + 2 * 0.3),
    "more than there was": (HALF, 0.5, [beside(Role.VHOST, "b")] * 3, 0.6 + 2 * 0.5),
    "not measured": (busy(1, "a", None), 1.0, [beside(Role.VHOST, "b")], 0.4 + 2 * 0.4),
    "idle": (busy(1, "a", 0.0), 0.1, [beside(Role.VHOST, "b")], 0.04),
    "an idle one beside it": (HALF, 0.5, [replace(beside(Role.VHOST, "b"), load=(0.0,))], 0.05),
    "a budget": (busy(1, "a", 0.1, booked=UNIT // 2), 0.5, [beside(Role.VHOST, "b")], 0.2 + 1e6),
    "budgets of a guest": (
        busy(1, "a", 0.1, booked=UNIT // 4), 0.25, [beside(Role.VCPU, booked=UNIT // 4)], 0.15,
    ),
    "budgets that do not fit": (
        busy(1, "a", 0.1, booked=UNIT // 2), 0.5, [beside(Role.VCPU, booked=UNIT // 2)],
        1.5 * 0.25 + 1e8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PRICES)
def test_prices(case: str) -> None:
    one, demand, others, price = PRICES[case]
    found = Board(machine(4), NONE, [one], others).price(0, 1)
    assert found == pytest.approx(price + 0.02 * demand, rel=0, abs=1e-6)
    apart = replace(machine(4), cpus=tuple(replace(c, isolated=True) for c in machine(4).cpus))
    found = Board(apart, NONE, [one], others).price(0, 1)
    assert found == pytest.approx(price, rel=0, abs=1e-6)


@pytest.mark.parametrize(
    ("on", "irq", "others", "price"),
    [
        (machine(4, siblings=2), "", [beside(Role.VHOST, "b", "0")], 0.85 * 0.2),
        (machine(4, siblings=2), "", [beside(Role.VHOST, "b", "2")], 0.0),
        (machine(4, siblings=2), "0", [], 0.85 * 0.25),
        (machine(4, nodes=2), "", [], 0.3 * 0.5),
        (machine(4, nodes=1), "", [], 0.3 * 0.5),
        (machine(4, caches=2), "", [beside(Role.VHOST, cpu="2")], 0.1 * 0.2),
        (machine(4, caches=2), "", [beside(Role.VHOST, cpu="0")], 0.0),
        (machine(4, caches=2), "", [beside(Role.VHOST, "b", "2")], 0.0),
        (machine(4, caches=2), "", [beside(Role.VCPU, cpu="2")], 0.0),
    ],
)
def test_prices_by_topology(on: Host, irq: str, others: list[Occupant], price: float) -> None:
    node = frozenset({1}) if not irq and not others else frozenset[int]()
    found = Board(on, cpus(irq), [replace(HALF, nodes=node)], others).price(0, 1)
    assert found == pytest.approx(price + 0.02 * 0.5)


@pytest.mark.parametrize(("guests", "weight"), [(16, 0.7), (17, 1.0)])
def test_a_link_of_many_guests_makes_no_stages(guests: int, weight: float) -> None:
    crowd = [beside(Role.VHOST, f"b{n}", "3", **LINKED) for n in range(guests - 2)]
    crowd.append(beside(Role.VHOST, "b", **LINKED))
    found = Board(machine(4), NONE, [replace(WORKER, **LINKED)], crowd).price(0, 1)
    assert found == pytest.approx(weight * 0.2 + 0.01)


# -- what holds for all

LOADS = st.one_of(
    st.just(()),
    st.sampled_from((0.0, 0.01, 0.3, 0.5, 0.9, 1.0)).map(lambda load: (load,) * WINDOWS),
    st.lists(st.integers(0, 1000).map(lambda n: n / 1000), min_size=1, max_size=WINDOWS).map(tuple),
)
ROLES = st.sampled_from((Role.VCPU, Role.VHOST, Role.VHOST, Role.NAPI))
# What the guests hand frames over: a and b to one another, b and c over another link.
LINKS = {"a": frozenset({"d0"}), "b": frozenset({"d0", "d1"}), "c": frozenset({"d1"})}


@st.composite
def machines(draw: st.DrawFn) -> Host:
    count = draw(st.integers(1, 5))
    few = st.integers(1, 2)
    built = machine(count, draw(st.sampled_from((1, 1, 2))), draw(few), draw(few))
    isolated = draw(st.sets(st.integers(0, count - 1)))
    return replace(built, cpus=tuple(replace(c, isolated=c.id in isolated) for c in built.cpus))


@st.composite
def seats(draw: st.DrawFn, on: Host, *, budgets: bool = True, loads: bool = True) -> list[Seat]:
    every = [c.id for c in on.cpus]
    links = draw(st.sampled_from(({}, LINKS)))
    found = []
    for tid in range(1, draw(st.integers(1, 8)) + 1):
        guest = draw(st.sampled_from("abc"))
        some = st.sets(st.sampled_from(every), min_size=1)
        allowed = CpuSet(draw(st.one_of(st.just(every), st.just(every), some)))
        share = draw(st.sampled_from((0, 0, 0, 0, 0.3, 0.6))) if budgets else 0
        one = Seat(
            ThreadKey(1, tid, tid),
            guest,
            draw(ROLES),
            draw(st.integers(0, 2)),
            allowed,
            draw(st.sampled_from((None, *every))),
            draw(st.sampled_from((frozenset(), frozenset({0}), frozenset({1})))),
            f"{guest} thread {tid}",
            draw(LOADS) if loads else None,
            int(share * UNIT),
            links.get(guest, frozenset()),
        )
        found.append(one)
    return found


@st.composite
def occupants(draw: st.DrawFn, on: Host) -> list[Occupant]:
    some = st.sets(st.sampled_from([c.id for c in on.cpus]), min_size=1).map(CpuSet)
    guests = draw(st.lists(st.sampled_from("abcd"), max_size=3))
    return [Occupant(g, draw(ROLES), draw(some), draw(st.booleans()), draw(LOADS)) for g in guests]


@BOUNDED
@given(st.data(), st.booleans())
def test_allowed_cpus_only_and_the_order_does_not_matter(data: st.DataObject, loads: bool) -> None:
    on = data.draw(machines())
    some, beside = data.draw(seats(on, loads=loads)), data.draw(occupants(on))
    found = place(on, NONE, some, beside)
    assert set(found) == {s.thread for s in some}
    assert all(found[s.thread].cpus <= s.allowed for s in some)
    assert all(p.why for p in found.values())
    assert place(on, NONE, some[::-1], beside[::-1]) == found


@BOUNDED
@given(st.data())
def test_without_loads_planning_again_moves_nobody(data: st.DataObject) -> None:
    on = data.draw(machines())
    some, beside = data.draw(seats(on, loads=False)), data.draw(occupants(on))
    found = places(place(on, NONE, some, beside))
    assert places(place(on, NONE, rested(some, found), beside)) == found


@BOUNDED
@given(st.data())
def test_few_moves_at_a_time_and_an_end_of_them(data: st.DataObject) -> None:
    """From any placement: at most MOVES at a time besides those that may not stay, and after some
    passes nobody moves any more."""
    on = data.draw(machines())
    some, beside = data.draw(seats(on, budgets=False)), data.draw(occupants(on))
    some = [replace(s, role=Role.VHOST) for s in some]  # vcpus of a guest must part at once
    now = places(place(on, NONE, some, beside))
    for _ in range(40):
        some = rested(some, now)
        before, now = now, places(place(on, NONE, some, beside))
        if now == before:
            return
        assert sum(now[key] != before[key] for key in now) <= MOVES
    raise AssertionError("they do not come to rest")


@BOUNDED
@given(st.data())
def test_a_little_noise_moves_nobody(data: st.DataObject) -> None:
    """A fiftieth more or less of every load, in every window, of new threads at their places."""
    on = data.draw(machines())
    some = [replace(s, previous=None) for s in data.draw(seats(on, budgets=False))]
    found = places(place(on, NONE, some, []))
    noise = st.floats(0.98, 1.02)
    shaken = [
        replace(s, load=tuple(min(one * data.draw(noise), 1.0) for one in s.load or ()))
        for s in rested(some, found)
    ]
    assert places(place(on, NONE, shaken, [])) == found


@BOUNDED
@given(st.data())
def test_quotes_hold(data: st.DataObject) -> None:
    """The price of a seat where it is, a bound that no CPU goes below, and the cheapest CPU."""
    on = data.draw(machines())
    some, others = data.draw(seats(on)), data.draw(occupants(on))
    board = Board(on, NONE, some, others)
    for n, one in enumerate(some):
        board.put(n, data.draw(st.sampled_from(list(one.allowed))))
    for n, one in enumerate(some):
        here, least = board.quote(n)
        at = board.take(n)
        prices = {cpu: board.price(n, cpu) for cpu in one.allowed}
        price, cpu = board.cheapest(n, one.allowed)
        board.put(n, at)
        assert here == pytest.approx(prices[at])
        assert least <= min(prices.values()) + 1e-6
        assert price == pytest.approx(min(prices.values())) == pytest.approx(prices[cpu])


@pytest.mark.parametrize("previous", [None, 0, 1])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_budgets_that_fit_are_admitted(count: int, previous: int | None) -> None:
    """A budget of 60 % each, of one thread of each guest, on as many CPUs as guests."""
    more = {"allowed": CpuSet(range(count)), "booked": int(0.6 * UNIT), "previous": previous}
    some = [busy(n, f"g{n}", 0.1, **more) for n in range(count)]
    assert sorted(where(some, on=machine(count))) == list(range(count))


def test_time_is_bounded_with_very_many() -> None:
    """500 guests of three threads: new ones, then at rest."""
    on = machine(64, 2, 2)
    roles = (Role.VCPU, Role.VHOST, Role.VHOST)
    some = [
        Seat(
            ThreadKey(n, n, n), f"vr{n // 3}", roles[n % 3], n % 3, CpuSet(range(2, 64)),
            load=(0.1 + n * 37 % 60 / 100,) * WINDOWS if n % 2 else None,
        )
        for n in range(1500)
    ]  # fmt: skip
    begin = time.process_time()
    found = places(place(on, CpuSet([0, 1]), some, []))
    assert places(place(on, CpuSet([0, 1]), rested(some, found), [])) == found
    assert time.process_time() - begin < 30


# -- what loads change


def test_a_busy_thread_gets_a_cpu_and_idle_ones_share() -> None:
    some = [busy(1, "a", 0.9), busy(2, "a", 0.8), *(busy(n, "b", 0.01, Role.VHOST) for n in (3, 4))]
    found = where(some)
    assert found[0] != found[1]
    assert found[2] == found[3] == ({1, 2, 3} - set(found[:2])).pop()


def test_busy_threads_part_and_then_stay() -> None:
    """Each of two guests on a CPU of four, as an operator had it; then one forwards all the time
    (tests/lab/inside/test_placement.py)."""
    roles = (Role.VCPU, Role.VHOST, Role.VHOST)
    some = [
        busy(n, guest, None, roles[n % 3], previous=cpu)
        for n, (guest, cpu) in enumerate([("a", 1)] * 3 + [("b", 2)] * 3)
    ]
    assert where(some) == [1, 1, 1, 2, 2, 2], "not measured yet: they stay"
    loads = (0.95, 0.4, 0.3, 0.01, 0.01, 0.01)
    some = [replace(s, load=(a,) * WINDOWS) for s, a in zip(some, loads, strict=True)]
    history = [where(some)]
    while history[-1:] != history[-2:-1]:
        some = [replace(s, previous=cpu) for s, cpu in zip(some, history[-1], strict=True)]
        history.append(where(some))
        assert len(history) < 10
    found = history[-1]
    assert found.count(found[0]) == 1, "the busiest thread has a CPU of its own"
    assert len(set(found[3:])) < 3, "idle ones share"
    told = [p.why for p in place(host(4), NONE, some, []).values()]
    assert any(why.startswith("a CPU of its own; load 95 %") for why in told)


def test_idle_ones_leave_a_thread_that_gets_busy_when_it_stays_so() -> None:
    some = [busy(n, "ab"[n % 2], 0.0, Role.VHOST, previous=1 + n % 3) for n in range(6)]
    quiet = [1 + n % 3 for n in range(6)]
    assert where(some) == quiet
    shorter = replace(some[0], load=(0.0, 0.9, 0.9))
    assert where([shorter, *some[1:]]) == quiet, "busy in two windows only"
    found = place(host(4), NONE, [replace(some[0], load=(0.9,) * WINDOWS), *some[1:]], [])
    assert [key.tid for key, placed in found.items() if placed.cpus == cpus("1")] == [0]
    moved = next(p for key, p in found.items() if key.tid == 3)
    assert moved.why.startswith("moved from CPU 1, which saves 0.0")
    assert float(moved.why.split()[6]) >= FEE


def test_a_guest_that_nobody_has_measured_yet_moves_no_measured_thread() -> None:
    allowed = cpus("1-7")
    loads = (0.4, 0.2, 0.3, 0.45, 0.1, 0.35, 0.25, 0.5, 0.15, 0.3, 0.2, 0.4)
    routers = [busy(n, f"r{n // 2}", load, allowed=allowed) for n, load in enumerate(loads)]
    for _ in range(8):
        routers = rested(routers, places(place(host(8), NONE, routers, [])))
    comes = [busy(90 + n, "x", None, allowed=allowed) for n in range(3)]
    found = places(place(host(8), NONE, [*routers, *comes], []))
    assert [found[s.thread] for s in routers] == [s.previous for s in routers]


@pytest.mark.parametrize(
    ("load", "crowd", "better", "moves"),
    [
        (0.4, 0.1, None, False),  # it saves 0.04 of a CPU
        (0.6, 0.1, None, True),
        (1.0, 0.9, 0.88, False),  # it saves 0.06 of a CPU, which is less than a tenth
        (1.0, 0.9, 0.7, True),
    ],
)
def test_a_move_pays_by_a_share_of_a_cpu_and_of_its_cost(
    load: float, crowd: float, better: float | None, moves: bool
) -> None:
    others = [Occupant("x", Role.VHOST, cpus("1"), load=(crowd,) * WINDOWS)]
    if better is not None:
        others.append(Occupant("x", Role.VHOST, cpus("2"), load=(better,) * WINDOWS))
    one = busy(1, "a", load, allowed=cpus("1-2"), previous=1)
    assert where([one], others) == [2 if moves else 1]


def test_four_move_at_a_time() -> None:
    some = [busy(n, f"g{n}", 0.9, allowed=cpus("1-8"), previous=1) for n in range(8)]
    found = where(some, on=machine(9))
    assert found.count(1) == 4
    assert len(set(found)) == 5


def test_not_measured_for_long_enough_is_no_reason_to_move() -> None:
    some = [busy(n, "a", None, Role.VHOST, previous=1) for n in range(3)]
    assert set(where([replace(s, load=merged((0.9, 0.9))) for s in some])) == {1}


def test_near_the_nic_unless_it_is_crowded_there() -> None:
    on = machine(4, nodes=2)
    near = {"allowed": cpus("0-3"), "nodes": frozenset({1})}
    assert where([busy(1, "a", 0.5, **near)], on=on) == where([seat(1, **near)], on=on) == [2]
    full = [Occupant("x", Role.VCPU, cpus(c), load=(0.9,) * WINDOWS) for c in "23"]
    assert where([busy(1, "a", 0.5, **near)], full, on) == [0]


def test_not_beside_the_interrupts_sibling() -> None:
    one = busy(1, "a", 0.5, allowed=cpus("1-5"))
    assert place(machine(6, siblings=2), cpus("0"), [one], [])[one.thread].cpus == cpus("2")


def test_a_worker_in_the_cache_of_its_vcpu() -> None:
    worker = busy(2, "a", 0.9, Role.VHOST, allowed=cpus("1-5"))
    assert where([busy(1, "a", 0.9, allowed=cpus("3")), worker], on=machine(6, caches=2)) == [3, 4]


def test_workers_of_linked_guests_share_rather_than_a_vcpu_and_a_worker() -> None:
    """Abeni et al., section 5: stages of a router, vcpus together and workers together."""
    linked = {"links": frozenset({"edge"}), "allowed": cpus("1-2")}
    here = [
        Occupant("lb", Role.VHOST, cpus("1"), load=(0.4,), links=linked["links"]),
        Occupant("lb", Role.VCPU, cpus("2"), load=(0.4,), links=linked["links"]),
    ]
    assert where([busy(1, "br", 0.4, Role.VHOST, **linked)], here) == [1]
    assert where([busy(1, "br", 0.4, Role.VCPU, **linked)], here) == [2]


def test_cpus_written_by_hand_are_left_to_their_owner() -> None:
    hand = [Occupant("x", Role.VCPU, cpus("1"), reserves=True, load=(0.0,) * WINDOWS)]
    assert where([busy(1, "a", 0.2)], hand) == [2]


# -- reasons


def test_much_company_is_counted() -> None:
    crowd = [busy(n, "a", 0.0, Role.VHOST, allowed=cpus("1")) for n in range(1, 7)]
    beside = [Occupant("x", Role.VCPU, cpus("1-2"))]
    found = {key.tid: p.why for key, p in place(machine(4), NONE, crowd, beside).items()}
    assert found[1].startswith("shared with a 2, a 3, a 4 and 3 more;")
    assert found[6].startswith("shared with a 1, a 2, a 3 and 3 more;")
    two = {key.tid: p.why for key, p in place(machine(4), NONE, crowd[:2], beside).items()}
    assert two[1].startswith("shared with a 2, x vcpu;")


def test_reasons() -> None:
    some = [
        busy(1, "a", 0.62, allowed=cpus("1-2")),
        busy(2, "a", None, Role.VHOST, allowed=cpus("2-3")),
        busy(3, "b", 0.0, allowed=cpus("2")),
        busy(4, "c", 0.0, allowed=cpus("3"), booked=UNIT // 4),
    ]
    found = {key.tid: p.why for key, p in place(machine(4), NONE, some, []).items()}
    assert found[1].startswith("a CPU of its own; load 62 %; CPU 2 would cost ")
    assert (
        found[2] == "shared with b 3; not measured yet, taken for 100 %; no other CPU may be shared"
    )
    assert found[3] == "shared with a 2; load 0 %; no other CPU is allowed"
    assert found[4] == "a CPU of its own; budget 25 %; no other CPU is allowed"
    plain = [seat(0, allowed=cpus("1")), seat(0, Role.VHOST, allowed=cpus("2"))]
    told = place(host(4), NONE, plain, [bound("2", "b")]).values()
    assert [p.why for p in told] == ["a CPU of its own", "shared with b vhost"]
