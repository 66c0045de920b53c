"""The cost of a placement: CPU time that threads ask for and do not get.

The unit is one CPU. A thread counts with the share of a CPU that it asks for (its demand). Two
unrelated threads of demand ``a`` and ``b`` want the same CPU at once for ``a * b`` of the time,
and cost that much. ``pair`` and ``own`` weigh the product:

- a thread of another guest on the same CPU: 1 (``OTHERS``)
- a thread of the same guest: a worker beside its vcpu ``HAND_OVER``, two workers ``WORKERS``, two
  vcpus ``VCPUS``
- a thread of a guest that exchanges frames with this one over a link between guests: two workers
  ``WORKERS``, two vcpus ``STAGES``
- a busy SMT sibling: ``SMT``; interrupts served there count as half busy
- more demand than a CPU has: ``OVER`` for the excess, in addition
- a CPU off the NUMA node of the guest's NICs: ``REMOTE`` of the thread's demand
- a worker and a vcpu of a guest that share no cache: ``FAR``
- a CPU that is not isolated from the host's other tasks: ``SHARED`` of the thread's demand

Interrupt CPUs have no price, because they are not among the CPUs that a thread may have.
docs/placement.md gives the source of each number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import UNIT, limit
from vsrtune.model.guest import Role
from vsrtune.model.host import Host
from vsrtune.model.load import WINDOWS, mean
from vsrtune.plan.placement.ranked import Occupant, Seat

OTHERS = 1.0
HAND_OVER = 0.8
WORKERS = 0.7
VCPUS = 1.5
STAGES = 0.9
SMT = 0.85
OVER = 2.0
REMOTE = 0.3
FAR = 0.1
SHARED = 0.02
# Costs that no CPU can make up for: a budget that the kernel would not admit, and a root domain
# that guests share, which then is the whole slice's (plan/deadline/root_domains.py).
REFUSED = 100.0
MIXED = 4.0

# The least demand of a thread: an idle thread waits for a busy one beside it, and it was not
# placed to stay idle.
IDLE = 0.1
# The demand of a thread that was not measured yet: between idle and busy.
PRIOR = 0.5
INTERRUPTS = 0.5


def demand(load: Sequence[float], booked: int = 0, prior: float = PRIOR) -> float:
    """The demand of a thread by its windows. A budget counts, used or not."""
    return max(mean(load) if load else prior, booked / UNIT, IDLE)


def demands(load: Sequence[float], booked: int = 0) -> tuple[float, ...]:
    """The demand of a thread in each of the latest windows, the oldest first. If it has fewer
    windows, its demand is the same in each."""
    if len(load) < WINDOWS:
        return (demand(load, booked),) * WINDOWS
    return tuple(demand((one,), booked) for one in load[-WINDOWS:])


@dataclass(frozen=True, slots=True)
class Asking:
    """A seat, or a thread that stays where it is, with its demand. ``cpus`` are the CPUs it stays
    on, empty for a seat."""

    guest: str
    role: Role
    demand: float
    booked: int = 0
    cpus: CpuSet = field(default_factory=CpuSet)
    links: frozenset[str] = frozenset()

    def weight(self, other: Asking) -> float:
        """The cost of a moment in which both want the same CPU."""
        extra = 0.0
        if (self.booked or other.booked) and (
            self.guest != other.guest or Role.NAPI in (self.role, other.role)
        ):
            extra = MIXED / max(self.demand * other.demand, IDLE * IDLE)
        vcpus = (self.role is Role.VCPU) + (other.role is Role.VCPU)
        if self.guest == other.guest:
            return (WORKERS, HAND_OVER, VCPUS)[vcpus] + extra
        if self.links.isdisjoint(other.links):
            return OTHERS + extra
        return (WORKERS, OTHERS, STAGES)[vcpus] + extra

    def fed_by(self, other: Asking) -> bool:
        """Whether frames go from one to the other: a vcpu and a worker of one guest."""
        one_vcpu = (self.role is Role.VCPU) != (other.role is Role.VCPU)
        return one_vcpu and self.guest == other.guest


class Costs:
    """The prices of one situation. Positions identify seats and CPUs here: ``cpus[p]`` is the
    CPU at position p."""

    def __init__(
        self,
        host: Host,
        irq: CpuSet,
        seats: Sequence[Seat],
        occupants: Sequence[Occupant],
        window: int | None = None,
    ) -> None:
        """``window`` selects the demands of one window instead of their mean."""
        self.seats = seats
        self.asking = [
            Asking(s.guest, s.role, _at(s.load, s.booked, window), s.booked, links=s.links)
            for s in seats
        ]
        self.near = _near(self.asking)
        self.cpus = sorted({c for s in seats for c in s.allowed})
        self.position = {cpu: p for p, cpu in enumerate(self.cpus)}
        self._info = {c.id: c for c in host.cpus}
        self._fixed: dict[int, list[Asking]] = {}
        fixed = [_fixed(o, window) for o in occupants if o.cpus]
        for one in fixed:
            for cpu in one.cpus:
                self._fixed.setdefault(cpu, []).append(one)
        self.budgets = any(a.booked for a in (*self.asking, *fixed))
        self.base = [self._demand_on(cpu) for cpu in self.cpus]
        self.booked = [sum(o.booked for o in self._fixed.get(c, ())) for c in self.cpus]
        self.limits = [limit(host, CpuSet([cpu])) for cpu in self.cpus]
        self._beside = [
            sum(self._demand_on(s) + INTERRUPTS * (s in irq) for s in self._siblings(cpu))
            for cpu in self.cpus
        ]
        self.siblings = [
            [self.position[s] for s in self._siblings(cpu) if s in self.position]
            for cpu in self.cpus
        ]
        self._by_guest: dict[str, list[Asking]] = {}
        for one in fixed:
            self._by_guest.setdefault(one.guest, []).append(one)

    def own(self, seat: int, at: int) -> float:
        """The cost of a seat at a CPU beside all threads that stay where they are."""
        one, cpu = self.asking[seat], self.cpus[at]
        info = self._info[cpu]
        nodes = self.seats[seat].nodes
        cost = SHARED * (not info.isolated) + SMT * self._beside[at]
        cost += REMOTE * (bool(nodes) and info.node not in nodes)
        for other in self._fixed.get(cpu, ()):
            cost += one.weight(other) * other.demand / len(other.cpus)
        for other in self._by_guest.get(one.guest, ()):
            if one.fed_by(other) and len(other.cpus) == 1:
                cost += FAR * other.demand * self._far(cpu, other.cpus.first())
        return cost * one.demand

    def pair(self, seat: int, at: int, other: int, there: int) -> float:
        """The cost between two seats at these CPUs."""
        one, two = self.asking[seat], self.asking[other]
        if at == there:
            weight = one.weight(two)
        elif there in self.siblings[at]:
            weight = SMT
        elif one.fed_by(two) and self._far(self.cpus[at], self.cpus[there]):
            weight = FAR
        else:
            return 0.0
        return weight * one.demand * two.demand

    def over(self, at: int, load: float, booked: int) -> float:
        """The cost of overloading a CPU with seats of this demand and bandwidth in sum."""
        most = self.limits[at]
        refused = booked > 0 and most is not None and booked + self.booked[at] > most
        return OVER * max(self.base[at] + load - 1.0, 0.0) + REFUSED * refused

    def total(self, placed: Mapping[int, int]) -> float:
        """The cost of a placement: position of the seat -> position of its CPU."""
        seats = sorted(placed)
        cost = sum(self.own(s, placed[s]) for s in seats)
        for n, seat in enumerate(seats):
            cost += sum(self.pair(seat, placed[seat], o, placed[o]) for o in seats[:n])
        for at in set(placed.values()):
            here = [self.asking[s] for s in seats if placed[s] == at]
            cost += self.over(at, sum(a.demand for a in here), sum(a.booked for a in here))
            cost -= self.over(at, 0.0, 0)
        return cost

    def alike(self, at: int, other: int) -> bool:
        """Whether two CPUs, both empty, differ only in their number."""
        one, two = self._info[self.cpus[at]], self._info[self.cpus[other]]
        return (
            not self.siblings[at] and not self.siblings[other]
            and (one.node, one.isolated, one.cache) == (two.node, two.isolated, two.cache)
            and (self.base[at], self.booked[at], self.limits[at])
            == (self.base[other], self.booked[other], self.limits[other])
        )  # fmt: skip

    def _siblings(self, cpu: int) -> CpuSet:
        return self._info[cpu].siblings - CpuSet([cpu])

    def _demand_on(self, cpu: int) -> float:
        return sum(o.demand / len(o.cpus) for o in self._fixed.get(cpu, ()))

    def _far(self, cpu: int, other: int) -> bool:
        cache = self._info[cpu].cache
        return bool(cache) and other not in cache


def _at(load: Sequence[float], booked: int, window: int | None) -> float:
    return demand(load, booked) if window is None else demands(load, booked)[window]


def _fixed(occupant: Occupant, window: int | None) -> Asking:
    # A thread with CPUs by hand is meant to have them alone.
    asks = 1.0 if occupant.reserves else _at(occupant.load, occupant.booked, window)
    return Asking(
        occupant.guest, occupant.role, asks, occupant.booked, occupant.cpus, occupant.links
    )


def _near(asking: Sequence[Asking]) -> dict[str, tuple[str, ...]]:
    """For each guest, itself and the guests with which it has a link."""
    links = {a.guest: a.links for a in asking}
    on: dict[str, set[str]] = {}
    for guest, names in links.items():
        for name in names:
            on.setdefault(name, set()).add(guest)
    return {
        guest: (guest, *sorted(set().union(*(on[n] for n in names)) - {guest}))
        for guest, names in links.items()
    }
