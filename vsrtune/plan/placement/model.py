# SPDX-License-Identifier: GPL-2.0-or-later
"""What a placement takes and gives: threads to place, threads that stay, and the CPUs chosen."""

from __future__ import annotations

from dataclasses import dataclass

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, Role, ThreadKey


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
