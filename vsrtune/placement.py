"""Which thread runs on which CPU when a policy says ``auto``.

Pins are tight, one thread on one CPU, because threads that may move bounce
between CPUs in overload (Abeni et al., section 3.2). While free CPUs last every
thread gets its own; then CPUs are shared.

Two passes, so that guests that come and go move the others as little as possible:

1. A thread keeps the CPU it had when that is allowed and nobody else holds it.
2. Every other thread, vcpus first, takes the CPU with the lowest ``rank``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vsrtune.cpuset import CpuSet
from vsrtune.model import Cpu, Role, ThreadKey

ROLE_ORDER = (Role.VCPU, Role.VHOST)

Rank = tuple[int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Occupant:
    """A vcpu or vhost thread whose CPUs are settled: asked for by hand, held by
    an operator, or of a guest that is not managed."""

    guest: str
    role: Role
    cpus: CpuSet


@dataclass(frozen=True, slots=True)
class Seat:
    """A thread to be placed. ``number`` orders the threads of one role in a guest,
    ``allowed`` is not empty, ``previous`` the CPU it was pinned to, ``nodes`` the
    NUMA nodes of the guest's NICs (empty when unknown)."""

    thread: ThreadKey
    guest: str
    role: Role
    number: int
    allowed: CpuSet
    previous: int | None = None
    nodes: frozenset[int] = frozenset()

    @property
    def order(self) -> tuple[int, int, str, ThreadKey]:
        """vcpus before vhost workers, the first of every guest before the second."""
        return (ROLE_ORDER.index(self.role), self.number, self.guest, self.thread)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a thread goes, and why."""

    cpu: int
    why: str


def place(
    seats: Sequence[Seat], occupants: Sequence[Occupant], cpus: Mapping[int, Cpu]
) -> dict[ThreadKey, Placed]:
    """Place every seat; the result depends on the arguments alone, not on their order."""
    on: dict[int, list[Occupant]] = {cpu: [] for cpu in cpus}
    for occupant in occupants:
        for cpu in occupant.cpus:
            on.setdefault(cpu, []).append(occupant)
    ordered = sorted(seats, key=lambda s: s.order)
    taken: dict[ThreadKey, int] = {}

    def settle(seat: Seat, cpu: int) -> None:
        taken[seat.thread] = cpu
        on[cpu].append(Occupant(seat.guest, seat.role, CpuSet([cpu])))

    for seat in ordered:
        before = seat.previous
        if before is not None and before in seat.allowed and not on[before]:
            settle(seat, before)
    for seat in ordered:
        if seat.thread not in taken:
            settle(seat, min(seat.allowed, key=lambda c: rank(seat, c, on, cpus)))
    return {s.thread: Placed(taken[s.thread], _why(s, on[taken[s.thread]])) for s in ordered}


def rank(
    seat: Seat, cpu: int, on: Mapping[int, Sequence[Occupant]], cpus: Mapping[int, Cpu]
) -> Rank:
    """The lowest rank is the best CPU. In this order:

    1. fewest threads already there (0: the CPU is free)
    2. fewest threads of other guests: share with one's own first
    3. fewest vcpus: two vhost workers share better than a worker and the vcpu
       both depend on (Abeni et al., section 4.1)
    4. CPUs isolated at boot first: nothing else is scheduled there
    5. the NUMA node of the guest's NICs first
    6. fewest threads on the SMT siblings
    7. the CPU it had before first
    8. the lowest number
    """
    here = on[cpu]
    info = cpus[cpu]
    siblings = sum(len(on.get(s, ())) for s in info.siblings if s != cpu)
    return (
        len(here),
        sum(1 for o in here if o.guest != seat.guest),
        sum(1 for o in here if o.role is Role.VCPU),
        0 if info.isolated else 1,
        0 if not seat.nodes or info.node in seat.nodes else 1,
        siblings,
        0 if cpu == seat.previous else 1,
        cpu,
    )


def _why(seat: Seat, here: Sequence[Occupant]) -> str:
    """``here`` holds everyone on the seat's CPU, the seat's own thread included."""
    if len(here) == 1:
        return "a CPU of its own"
    company = sorted({o.guest for o in here if o.guest != seat.guest})
    if sum(1 for o in here if o.guest == seat.guest) > 1:
        company.insert(0, "its own guest's threads")
    return f"no CPU is free, shared with {', '.join(company)}"
