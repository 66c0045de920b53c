"""Which thread runs on which CPU when a policy says ``auto``.

Pins are tight, one thread on one CPU, because threads that may move bounce between CPUs in
overload (Abeni et al., section 3.2). Every thread gets a CPU of its own while free CPUs last;
then threads share CPUs.

With three passes, guests that come and go move the others as little as possible:

1. A thread keeps the CPU it had if that is allowed.
2. Every other thread, vcpus first, takes the CPU with the lowest ``rank``.
3. A thread moves while it would have less company elsewhere, even after its move; the last in
   order moves first. A thread that is alone never moves, so planning again changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, Role, ThreadKey
from vsrtune.model.host import Cpu

# Reasons name this many guests on a CPU, and count the rest.
NAMED = 4

Rank = tuple[int, int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Occupant:
    """A vcpu, vhost or NAPI thread with fixed CPUs: listed by hand (``reserves`` them), held by
    an operator, or of a guest that is not managed. ``load`` is Thread.load, ``booked`` its
    DEADLINE bandwidth (deadline.UNIT), ``links`` the inner links of its guest."""

    guest: str
    role: Role
    cpus: CpuSet
    reserves: bool = False
    load: tuple[float, ...] = ()
    booked: int = 0
    links: frozenset[str] = frozenset()

    @property
    def tight(self) -> bool:
        """True when the thread cannot move away to make room."""
        return len(self.cpus) == 1


@dataclass(frozen=True, slots=True)
class Seat:
    """A thread to place. ``number`` orders the threads of one role in a guest. ``allowed`` is
    not empty. ``previous`` is the CPU it was pinned to, ``nodes`` are the NUMA nodes of the
    guest's NICs (empty when unknown). ``label`` is its name in messages, ``load`` is
    Thread.load, ``booked`` the bandwidth that its policy asks for in class deadline
    (deadline.UNIT). ``links`` are devices over which its guest hands frames to other guests
    only (Nic.inner)."""

    thread: ThreadKey
    guest: str
    role: Role
    number: int
    allowed: CpuSet
    previous: int | None = None
    nodes: frozenset[int] = frozenset()
    label: str = ""
    load: tuple[float, ...] = ()
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


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a thread goes, and why."""

    cpu: int
    why: str


@dataclass(slots=True)
class Company:
    """Who is on one CPU, counted: ``tight`` threads are bound to it, ``reserving`` ones have
    it reserved among others; ``guests`` counts all of them by guest, ``vcpus_of`` the vcpus."""

    total: int = 0
    tight: int = 0
    reserving: int = 0
    vcpus: int = 0
    guests: Counter[str] = field(default_factory=Counter)
    vcpus_of: Counter[str] = field(default_factory=Counter)

    @property
    def load(self) -> int:
        """Threads that are bound to the CPU or reserve it."""
        return self.tight + self.reserving

    def add(self, who: Occupant, sign: int = 1) -> None:
        """Count one more thread, or with ``sign`` -1 one less."""
        self.total += sign
        self.tight += sign * who.tight
        self.reserving += sign * (who.reserves and not who.tight)
        if who.role is Role.VCPU:
            self.vcpus += sign
            self.vcpus_of[who.guest] += sign
        self.guests[who.guest] += sign
        if not self.guests[who.guest]:
            del self.guests[who.guest]


class _Board:
    """The threads on each CPU during placement."""

    def __init__(self, occupants: Sequence[Occupant], cpus: Mapping[int, Cpu]) -> None:
        self.cpus = cpus
        self.on = {cpu: Company() for cpu in cpus}
        self.taken: dict[ThreadKey, int] = {}
        for occupant in occupants:
            for cpu in occupant.cpus:
                self.on.setdefault(cpu, Company()).add(occupant)

    def settle(self, seat: Seat, cpu: int) -> None:
        self.taken[seat.thread] = cpu
        self.on[cpu].add(Occupant(seat.guest, seat.role, CpuSet.single(cpu)))

    def leave(self, seat: Seat) -> None:
        cpu = self.taken.pop(seat.thread)
        self.on[cpu].add(Occupant(seat.guest, seat.role, CpuSet.single(cpu)), -1)

    def load(self, cpu: int) -> int:
        return self.on[cpu].load

    def best(self, seat: Seat, among: Iterable[int]) -> int:
        return min(among, key=lambda c: rank(seat, c, self.on, self.cpus))


def place(
    seats: Sequence[Seat], occupants: Sequence[Occupant], cpus: Mapping[int, Cpu]
) -> dict[ThreadKey, Placed]:
    """Place every seat; the result depends on the arguments alone, not on their order."""
    board = _Board(occupants, cpus)
    ordered = sorted(seats, key=lambda s: s.order)
    for seat in ordered:
        kept = seat.previous is not None and seat.previous in seat.allowed
        if seat.previous is not None and kept and not twins(seat, board.on[seat.previous]):
            board.settle(seat, seat.previous)
    for seat in ordered:
        if seat.thread not in board.taken:
            board.settle(seat, board.best(seat, seat.allowed))
    while _spread(board, ordered):
        pass
    first = {cpu: sorted(here.guests)[: NAMED + 1] for cpu, here in board.on.items()}
    return {
        s.thread: Placed(at := board.taken[s.thread], _why(s, board.on[at], first[at]))
        for s in ordered
    }


def _spread(board: _Board, ordered: Sequence[Seat]) -> bool:
    """Move threads to emptier CPUs; True when one moved. Every move lowers the sum of the
    squared loads, so the moves come to an end."""
    moved = False
    # A thread leaves a CPU only for one that has at least two threads less, so the least load
    # never falls meanwhile.
    lowest: dict[CpuSet, int] = {}
    least = min((here.load for here in board.on.values()), default=0)
    for seat in reversed(ordered):
        load = board.load(board.taken[seat.thread])
        if load <= least + 1:
            continue
        # The lowest load is the same for all threads that have the same allowed CPUs.
        known = lowest.get(seat.allowed)
        if known is None:
            known = lowest[seat.allowed] = min(map(board.load, seat.allowed))
        if known + 1 >= load:
            continue
        emptier = [
            c for c in seat.allowed if board.load(c) + 1 < load and not twins(seat, board.on[c])
        ]
        if emptier:
            board.leave(seat)
            board.settle(seat, board.best(seat, emptier))
            lowest.clear()
            moved = True
    return moved


def rank(seat: Seat, cpu: int, on: Mapping[int, Company], cpus: Mapping[int, Cpu]) -> Rank:
    """The lowest rank is the best CPU. In this order:

    1. for a vcpu, fewest vcpus of its own guest (docs/results/no-harm.md)
    2. fewest threads bound to it (0: the CPU is free)
    3. fewest threads that may run there among other CPUs
    4. fewest threads of other guests: share with one's own first
    5. fewest vcpus: two vhost workers share better than a worker and the vcpu
       both depend on (Abeni et al., section 4.1)
    6. CPUs isolated at boot first: nothing else is scheduled there
    7. the NUMA node of the guest's NICs first
    8. fewest threads on the SMT siblings
    9. the CPU it had before first
    10. the lowest number
    """
    here = on[cpu]
    info = cpus[cpu]
    siblings = sum(on[s].total for s in info.siblings if s != cpu and s in on)
    return (
        twins(seat, here),
        here.tight,
        here.total - here.tight,
        here.total - here.guests.get(seat.guest, 0),
        here.vcpus,
        0 if info.isolated else 1,
        0 if not seat.nodes or info.node in seat.nodes else 1,
        siblings,
        0 if cpu == seat.previous else 1,
        cpu,
    )


def twins(seat: Seat, here: Company) -> int:
    """How many vcpus of its own guest a vcpu would share the CPU with."""
    return here.vcpus_of[seat.guest] if seat.role is Role.VCPU else 0


def _why(seat: Seat, here: Company, first: Sequence[str]) -> str:
    """``here`` counts all threads on the seat's CPU, its own included; ``first`` are the first
    of their guests by name, one more than the reason names."""
    if here.total == 1:
        return "a CPU of its own"
    others = len(here.guests) - (seat.guest in here.guests)
    company = [g for g in first if g != seat.guest][:NAMED]
    if others > NAMED:
        company.append(f"{others - NAMED} more")
    if here.guests[seat.guest] > 1:
        company.insert(0, "its own guest's threads")
    return f"no CPU is free, shared with {', '.join(company)}"
