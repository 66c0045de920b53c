"""Random situations for tests of the placement by load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import strategies as st
from planning_samples import host

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import UNIT
from vsrtune.model.guest import Role, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.load import WINDOWS
from vsrtune.plan.placement.costs import Costs
from vsrtune.plan.placement.ranked import Occupant, Seat

LOADS = st.one_of(
    st.just(()),
    st.sampled_from((0.0, 0.01, 0.3, 0.5, 0.9, 1.0)).map(lambda load: (load,) * WINDOWS),
    st.lists(st.integers(0, 1000).map(lambda n: n / 1000), min_size=1, max_size=WINDOWS).map(tuple),
)
ROLES = st.sampled_from((Role.VCPU, Role.VHOST, Role.VHOST, Role.NAPI))


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


@st.composite
def machines(draw: st.DrawFn, most: int = 4) -> Host:
    count = draw(st.integers(1, most))
    built = machine(
        count, draw(st.sampled_from((1, 1, 2))), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    )
    isolated = draw(st.sets(st.integers(0, count - 1)))
    return replace(built, cpus=tuple(replace(c, isolated=c.id in isolated) for c in built.cpus))


# What the guests hand frames over: a and b to one another, b and c over another link.
LINKS = {"a": frozenset({"d0"}), "b": frozenset({"d0", "d1"}), "c": frozenset({"d1"})}


@st.composite
def seats(
    draw: st.DrawFn, on: Host, least: int = 1, most: int = 8, budgets: bool = True
) -> list[Seat]:
    every = [c.id for c in on.cpus]
    links = draw(st.sampled_from(({}, LINKS)))
    found = []
    for tid in range(1, draw(st.integers(least, most)) + 1):
        guest = draw(st.sampled_from("abc"))
        some = st.sets(st.sampled_from(every), min_size=1)
        allowed = CpuSet(draw(st.one_of(st.just(every), st.just(every), some)))
        share = draw(st.sampled_from((0, 0, 0, 0, 0.3, 0.6))) if budgets else 0
        found.append(
            Seat(
                ThreadKey(1, tid, tid),
                guest,
                draw(ROLES),
                draw(st.integers(0, 2)),
                allowed,
                None,
                draw(st.sampled_from((frozenset(), frozenset({0}), frozenset({1})))),
                f"{guest} thread {tid}",
                draw(LOADS),
                int(share * UNIT),
                links.get(guest, frozenset()),
            )
        )
    return found


@st.composite
def occupants(draw: st.DrawFn, on: Host) -> list[Occupant]:
    some = st.sets(st.sampled_from([c.id for c in on.cpus]), min_size=1).map(CpuSet)
    return [
        Occupant(
            guest := draw(st.sampled_from("abcd")),
            draw(ROLES),
            draw(some),
            draw(st.booleans()),
            draw(LOADS),
            links=draw(st.sampled_from((frozenset(), LINKS.get(guest, frozenset())))),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]


def cheapest(costs: Costs) -> float:
    """The cost of the best of all bindings, each of them tried."""
    options = [[costs.position[c] for c in seat.allowed] for seat in costs.seats]
    count = len(options)
    alone = [[costs.own(n, at) for at in range(len(costs.cpus))] for n in range(count)]
    pairs = {
        (n, at): [
            [costs.pair(n, at, other, there) for there in range(len(costs.cpus))]
            for other in range(n + 1, count)
        ]
        for n in range(count)
        for at in options[n]
    }
    ends: list[float] = []
    load, booked = [0.0] * len(costs.cpus), [0] * len(costs.cpus)
    empty = sum(costs.over(at, 0.0, 0) for at in range(len(costs.cpus)))

    def go(n: int, cost: float, rows: list[list[float]]) -> None:
        if n == count:
            over = sum(map(costs.over, range(len(load)), load, booked))
            ends.append(cost + over - empty)
            return
        for at in options[n]:
            load[at] += costs.asking[n].demand
            booked[at] += costs.asking[n].booked
            more = pairs[n, at]
            after = [
                [a + b for a, b in zip(*both, strict=True)]
                for both in zip(rows[1:], more, strict=True)
            ]
            go(n + 1, cost + rows[0][at], after)
            load[at] -= costs.asking[n].demand
            booked[at] -= costs.asking[n].booked

    go(0, 0.0, alone)
    return min(ends)


def settled(seats: list[Seat], cpus: Mapping[ThreadKey, int]) -> list[Seat]:
    """The seats with their places as the ones they had."""
    return [replace(s, previous=cpus[s.thread]) for s in seats]
