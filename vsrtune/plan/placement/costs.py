# SPDX-License-Identifier: GPL-2.0-or-later
"""The cost of a placement: CPU time that threads ask for and do not get.

The unit is one CPU. A thread counts with the share of a CPU that it asks for (its demand). Two
unrelated threads of demand ``a`` and ``b`` want the same CPU at once for ``a * b`` of the time,
and cost that much. The product is weighed:

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

Some neighbours cost more than everything else together (``CLASH``, ``REFUSED``). Interrupt CPUs
have no price, because they are not among the CPUs that a thread may have. docs/placement.md gives
the source of each number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import UNIT, limit
from vsrtune.model.guest import DATA_PLANE, Role, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.load import WINDOWS, mean


@dataclass(frozen=True, slots=True)
class Occupant:
    """A vcpu, vhost or NAPI thread with fixed CPUs: listed by hand (``reserves`` them), held by
    an operator, or of a guest that is not managed. ``load`` is Thread.load, ``booked`` its
    DEADLINE bandwidth (deadline.UNIT), ``links`` the inner links of its guest. One that ``floats``
    in a root domain gives way within it, so its budget is on no CPU of it."""

    guest: str
    role: Role
    cpus: CpuSet
    reserves: bool = False
    load: tuple[float, ...] = ()
    booked: int = 0
    links: frozenset[str] = frozenset()
    floats: bool = False

    @property
    def tight(self) -> bool:
        """True when the thread cannot move away to make room."""
        return len(self.cpus) == 1


@dataclass(frozen=True, slots=True)
class Seat:
    """A thread to place. ``number`` orders the threads of one role in a guest. ``allowed`` is
    not empty. ``previous`` is the CPU it was pinned to, ``nodes`` are the NUMA nodes of the
    guest's NICs (empty when unknown). ``label`` is its name in messages. ``load`` is Thread.load,
    None when the policy does not ask for placement by load. ``booked`` is the bandwidth that its
    policy asks for in class deadline (deadline.UNIT). ``links`` are devices over which its guest
    hands frames to other guests only (Nic.inner)."""

    thread: ThreadKey
    guest: str
    role: Role
    number: int
    allowed: CpuSet
    previous: int | None = None
    nodes: frozenset[int] = frozenset()
    label: str = ""
    load: tuple[float, ...] | None = None
    booked: int = 0
    links: frozenset[str] = frozenset()

    @property
    def order(self) -> tuple[int, int, str, ThreadKey]:
        """vcpus before vhost workers before NAPI threads, the first of every guest before
        the second."""
        return (DATA_PLANE.index(self.role), self.number, self.guest, self.thread)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The CPUs that a thread gets, and the reason if they were selected for it."""

    cpus: CpuSet
    why: str = ""


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
# Two vcpus of a guest on a CPU (docs/results/no-harm.md), and a budget beside threads of another
# guest, whose root domain then is the whole slice's (plan/deadline/root_domains.py).
CLASH = 1e6
# A budget that the kernel would not admit.
REFUSED = 1e8

# The least demand of a thread: an idle thread waits for a busy one beside it, and it was not
# placed to stay idle.
IDLE = 0.1
# The demand of a thread that was not measured: it gets a CPU of its own while CPUs last.
UNKNOWN = 1.0
INTERRUPTS = 0.5
# A link with more guests than this is a network of theirs, not the stages of one router.
STAGED = 16


def demand(load: Sequence[float], booked: int = 0) -> float:
    """The demand of a thread by its windows. A budget counts, used or not."""
    return max(mean(load) if load else UNKNOWN, booked / UNIT, IDLE)


@dataclass(frozen=True, slots=True)
class Party:
    """A thread as the cost counts it."""

    guest: str
    role: Role
    demand: float
    booked: int
    links: frozenset[str]
    floats: bool = False

    def weight(self, other: Party) -> float:
        """The cost of a moment in which both want the same CPU."""
        vcpus = (self.role is Role.VCPU) + (other.role is Role.VCPU)
        if self.guest == other.guest:
            return (WORKERS, HAND_OVER, VCPUS)[vcpus]
        if self.links.isdisjoint(other.links):
            return OTHERS
        return (WORKERS, OTHERS, STAGES)[vcpus]

    def clashes(self, other: Party) -> bool:
        """Whether the two must not share a CPU while there is any other. Budgets divide a CPU
        among the vcpus of a guest on purpose."""
        if self.floats or other.floats:
            return False
        if self.booked or other.booked:
            return self.guest != other.guest or Role.NAPI in (self.role, other.role)
        return self.guest == other.guest and self.role is other.role is Role.VCPU

    def fed_by(self, other: Party) -> bool:
        """Whether frames go from one to the other: a vcpu and a worker of one guest."""
        one_vcpu = (self.role is Role.VCPU) != (other.role is Role.VCPU)
        return one_vcpu and self.guest == other.guest


@dataclass(frozen=True, slots=True)
class _Present:
    """A thread on the board, and what it asks of each of its CPUs. ``bound``: it cannot move away
    from them to make room."""

    party: Party
    shares: dict[int, float]
    bound: bool = True


@dataclass(slots=True)
class _Company:
    """The threads of a thread's own guest, and of guests linked to it, by CPU: their shares, each
    weighed by what it costs more than a thread of others, and how many of them clash with it.
    ``fed``: CPU and share of those to which it hands frames, or which hand it theirs."""

    weighed: dict[int, float]
    clashes: dict[int, int]
    fed: list[tuple[int, float]]


class Board:
    """Threads on CPUs, and the price of one more. Seats have the positions of ``seats``.

    The board keeps sums for every CPU, so that a price depends only on the number of threads of
    the same guest and of guests linked to it. Only budgets look at every thread of a CPU."""

    def __init__(
        self,
        host: Host,
        irq: CpuSet,
        seats: Sequence[Seat],
        occupants: Sequence[Occupant],
        window: int | None = None,
    ) -> None:
        """``window`` selects the demands of one window instead of their mean."""
        self.cpu_of: dict[int, int] = {}
        self._seats = seats
        self._info = {c.id: c for c in host.cpus}
        self._caches = len({c.cache for c in host.cpus}) > 1
        self._siblings = {
            c.id: [s for s in c.siblings if s != c.id and s in self._info] for c in host.cpus
        }
        # What a whole CPU of demand costs on each CPU, by its place and all threads around it.
        self._base = {
            c.id: SHARED * (not c.isolated)
            + SMT * INTERRUPTS * sum(s in irq for s in self._siblings[c.id])
            for c in host.cpus
        }
        self._load = dict.fromkeys(self._info, 0.0)
        self._booked = dict.fromkeys(self._info, 0)
        self._here: dict[int, dict[int, _Present]] = {c: {} for c in self._info}
        self._members: dict[str, dict[int, _Present]] = {}
        self._of_guest: dict[str, float] = {}
        # The least base and load among these CPUs, until a thread comes or goes.
        self._least: dict[CpuSet, tuple[float, float]] = {}
        self._parties = [_party(seat, window) for seat in seats]
        fixed = [(_party(o, window), o) for o in occupants]
        parties = [*self._parties, *(party for party, _ in fixed)]
        self._near = _near(parties)
        self._budgets = any(p.booked for p in parties)
        # The kernel does not change them meanwhile, and each price asks.
        asked = self._info if self._budgets else ()
        self._limits = {cpu: limit(host, CpuSet.single(cpu)) for cpu in asked}
        for number, (party, occupant) in enumerate(fixed, 1):
            # A thread with CPUs by hand is meant to have them alone.
            share = 1.0 if occupant.reserves else party.demand / max(len(occupant.cpus), 1)
            cpus = (c for c in occupant.cpus if c in self._info)
            bound = occupant.reserves or occupant.tight
            self._add(-number, _Present(party, dict.fromkeys(cpus, share), bound))

    def put(self, seat: int, cpu: int) -> None:
        """Place a seat that is not on the board."""
        self.cpu_of[seat] = cpu
        party = self._parties[seat]
        self._add(seat, _Present(party, {cpu: party.demand}))

    def take(self, seat: int) -> int:
        """Take a seat off the board. Returns its CPU."""
        cpu = self.cpu_of.pop(seat)
        party = self._parties[seat]
        del self._members[party.guest][seat]
        del self._here[cpu][seat]
        self._of_guest[party.guest] -= party.demand
        self._ask(cpu, -party.demand)
        self._booked[cpu] -= party.booked
        return cpu

    def _add(self, number: int, present: _Present) -> None:
        guest = present.party.guest
        self._members.setdefault(guest, {})[number] = present
        demand = sum(present.shares.values())
        self._of_guest[guest] = self._of_guest.get(guest, 0.0) + demand
        for cpu, share in present.shares.items():
            self._ask(cpu, share)
            self._booked[cpu] += present.party.booked
            self._here[cpu][number] = present

    def _ask(self, cpu: int, share: float) -> None:
        self._least.clear()
        self._load[cpu] += share
        self._base[cpu] += OTHERS * share
        for sibling in self._siblings[cpu]:
            self._base[sibling] += SMT * share

    def price(self, seat: int, cpu: int) -> float:
        """The cost that a seat which is not on the board would add on a CPU."""
        return self._price(seat, cpu, self._company(self._parties[seat], (cpu,)))

    def cheapest(self, seat: int, among: Collection[int]) -> tuple[float, int]:
        """The lowest price of a seat that is not on the board, and the CPU that has it: of equal
        ones the CPU that it had, then the lowest."""
        had, company = self._seats[seat].previous, self._company(self._parties[seat], among)
        prices = ((round(self._price(seat, cpu, company), 9), cpu != had, cpu) for cpu in among)
        price, _, cpu = min(prices)
        return price, cpu

    def _company(self, one: Party, among: Collection[int], seated: int | None = None) -> _Company:
        """``seated`` is the seat of ``one`` itself if it is on the board."""
        company = _Company({}, {}, [])
        weighed, clashes = company.weighed, company.clashes
        near = (self._members.get(guest, {}).items() for guest in self._near[one.guest])
        for number, other in chain.from_iterable(near):
            if number == seated:
                continue
            if self._caches and one.fed_by(other.party):
                company.fed.extend(other.shares.items())
            for cpu, share in other.shares.items():
                if cpu in among:
                    weight = one.weight(other.party) - OTHERS
                    weighed[cpu] = weighed.get(cpu, 0.0) + weight * share
                    clashes[cpu] = clashes.get(cpu, 0) + one.clashes(other.party)
        return company

    def _price(self, seat: int, cpu: int, company: _Company, *, seated: bool = False) -> float:
        """``seated``: the seat is on the board, on this CPU."""
        one, nodes, info = self._parties[seat], self._seats[seat].nodes, self._info[cpu]
        own = one.demand if seated else 0.0
        cost = self._base[cpu] - OTHERS * own + company.weighed.get(cpu, 0.0)
        cost += REMOTE * (bool(nodes) and info.node not in nodes)
        if info.cache:
            cost += FAR * sum(share for at, share in company.fed if at not in info.cache)
        cost = cost * one.demand + _over(self._load[cpu] - own, one.demand)
        clashes = company.clashes.get(cpu, 0)
        if self._budgets:
            others = (other for number, other in self._here[cpu].items() if number != seat)
            clashes = sum(one.clashes(other.party) for other in others)
            cost += REFUSED * self._refused(one, cpu, one.booked if seated else 0)
        return cost + CLASH * clashes

    def quote(self, seat: int) -> tuple[float, float]:
        """Of a seat on the board: the price of its CPU without it, and a price below which it has
        no CPU."""
        one, allowed, at = self._parties[seat], self._seats[seat].allowed, self.cpu_of[seat]
        here = self._price(seat, at, self._company(one, (at,), seat), seated=True)
        if allowed not in self._least:
            base = min(map(self._base.__getitem__, allowed))
            self._least[allowed] = base, min(map(self._load.__getitem__, allowed))
        base, load = self._least[allowed]
        base = min(base, self._base[at] - OTHERS * one.demand)
        for sibling in self._siblings[at]:
            base = min(base, self._base[sibling] - SMT * one.demand)
        company = sum(self._of_guest.get(guest, 0.0) for guest in self._near[one.guest])
        base -= (OTHERS - WORKERS) * (company - one.demand)
        return here, one.demand * base + _over(min(load, self._load[at] - one.demand), one.demand)

    def alone(self, seat: int) -> bool:
        """Whether no other thread is bound to a seat's CPU."""
        return sum(present.bound for present in self._here[self.cpu_of[seat]].values()) == 1

    def _refused(self, one: Party, cpu: int, own: int) -> bool:
        most = self._limits[cpu] if one.booked else None
        return most is not None and self._booked[cpu] - own + one.booked > most


def _over(load: float, more: float) -> float:
    """The cost of adding to a load what a CPU does not have."""
    return OVER * (max(load + more - 1.0, 0.0) - max(load - 1.0, 0.0))


def _demand(load: tuple[float, ...], booked: int, window: int | None) -> float:
    """A thread with fewer windows asks for the same in each."""
    if window is None or len(load) < WINDOWS:
        return demand(load, booked)
    return demand((load[-WINDOWS:][window],), booked)


def _party(one: Seat | Occupant, window: int | None) -> Party:
    wanted = _demand(one.load or (), one.booked, window)
    if window is not None and isinstance(one, Seat) and not one.load:
        # What nobody has measured yet moves no measured thread.
        wanted = max(one.booked / UNIT, IDLE)
    floats = isinstance(one, Occupant) and one.floats
    return Party(one.guest, one.role, wanted, 0 if floats else one.booked, one.links, floats)


def _near(parties: Iterable[Party]) -> dict[str, tuple[str, ...]]:
    """For each guest, itself and the guests with which it has a link."""
    links = {p.guest: p.links for p in parties}
    on: dict[str, set[str]] = {}
    for guest, names in links.items():
        for name in names:
            on.setdefault(name, set()).add(guest)
    return {
        guest: (
            guest,
            *sorted(set().union(*(on[n] for n in names if len(on[n]) <= STAGED)) - {guest}),
        )
        for guest, names in links.items()
    }
