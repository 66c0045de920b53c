# SPDX-License-Identifier: GPL-2.0-or-later
"""Threads that a realtime vcpu can keep from running for good.

A vcpu whose guest is busy never sleeps: a routing daemon converges, the guest's kernel
polls (``idle=poll``), a data plane busy-polls, or one vcpu spins for another one's lock.
KVM notices the spinning (``kvm_vcpu_on_spin``), but ``yield_to`` has no effect between
realtime threads. Such a vcpu leaves its CPU to no thread of a lower priority and, under
SCHED_FIFO, to none of its own priority (sched(7)): vcpus that wait for each other stand
still for ever, and a vhost worker beside one forwards nothing. SCHED_RR ends the turn of
a thread after a time slice, so equals always get theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, REALTIME, Guest, Role, SchedClass, Thread
from vsrtune.model.plan import Refusal
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.requirements import Requirements, label


@dataclass(frozen=True, slots=True)
class Standstill:
    """``starved`` may never run beside ``vcpu`` on ``cpus``. ``guest`` is the one to refuse, unless
    its policy accepts that."""

    guest: str
    vcpu_guest: str
    vcpu: Thread
    starved_guest: str
    starved: Thread
    cpus: CpuSet


def standstills(
    result: Snapshot, managed: AbstractSet[str], accepting: AbstractSet[str] = frozenset()
) -> Iterator[Standstill]:
    """Every thread of the data plane that realtime vcpus can keep from running, in
    ``result``, the host as a plan leaves it.

    ``managed`` are the refs of guests on which the plan acts, and ``accepting`` of those whose
    policies say ``standstill: accept``. A pair in which neither guest is managed is not judged. If
    both are managed, the later guest is the one to refuse. A pair of accepting guests stands
    for a thread only where no other pair does.
    """
    judged = managed - accepting
    online = result.host.online
    threads = list(_threads(result.guests))
    by_cpu: dict[int, list[tuple[Guest, Thread]]] = {}
    for guest, thread in threads:
        if _spins(thread):
            for cpu in thread.affinity & online:
                by_cpu.setdefault(cpu, []).append((guest, thread))
    if not by_cpu:
        return
    order = {guest.ref: number for number, guest in enumerate(result.guests)}
    # One vcpu of each class and priority: with many guests a CPU has hundreds of a kind.
    kinds = {
        cpu: {(vcpu.sched.cls, vcpu.sched.priority): vcpu for _, vcpu in here}.values()
        for cpu, here in by_cpu.items()
    }
    for guest, thread in threads:
        mask = thread.affinity & online
        if not all(cpu in by_cpu for cpu in mask):
            continue
        if not any(_starves(vcpu, thread) for cpu in mask for vcpu in kinds[cpu]):
            continue
        beside = {
            vcpu.key: (owner, vcpu)
            for cpu in mask
            for owner, vcpu in by_cpu[cpu]
            if vcpu.key != thread.key and _starves(vcpu, thread)
        }
        # A thread that may run on more CPUs than there are such vcpus finds one free.
        covered = CpuSet.union(vcpu.affinity for _, vcpu in beside.values())
        if len(beside) < len(mask) or not mask <= covered:
            continue
        pairs = (
            (refs, owner, vcpu)
            for refs in (judged, managed)
            for owner, vcpu in beside.values()
            if not refs.isdisjoint((guest.ref, owner.ref))
        )
        for refs, owner, vcpu in pairs:
            refused = max(refs & {guest.ref, owner.ref}, key=order.__getitem__)
            both = mask & vcpu.affinity
            yield Standstill(refused, owner.ref, vcpu, guest.ref, thread, both)
            break


def refusals(cases: Iterable[Standstill], per_guest: Sequence[Requirements]) -> list[Refusal]:
    """Refusals of guests whose plans would let a thread stand still. A guest whose policy says
    ``standstill: accept`` is not refused, nor is a guest whose standstills all involve guests
    refused before it: the rest has to be planned and judged again."""
    found: dict[str, list[Standstill]] = {}
    for case in cases:
        found.setdefault(case.guest, []).append(case)
    out: dict[str, Refusal] = {}
    for requirements in per_guest:
        ref = requirements.guest.ref
        if requirements.policy.accept_standstill:
            continue
        for case in found.get(ref, ()):
            if {case.vcpu_guest, case.starved_guest}.isdisjoint(out):
                out[ref] = _refuse(requirements, case)
                break
    return list(out.values())


def _refuse(requirements: Requirements, case: Standstill) -> Refusal:
    ref = requirements.guest.ref
    starved, vcpu = label(case.starved), label(case.vcpu)
    if case.starved_guest != ref:
        starved = f"{starved} of {case.starved_guest}"
    if case.vcpu_guest != ref:
        vcpu = f"{vcpu} of {case.vcpu_guest}"
    return requirements.refusal(
        ("scheduler", "vcpu"),
        f"{vcpu}, {case.vcpu.sched}, would share CPU {case.cpus} with {starved}, "
        f"{case.starved.sched}, and keep it from running for as long as the guest is busy: "
        "the router could stand still",
        "write class: rr with one priority for vcpu and vhost, which take turns, or give "
        "each vcpu a CPU of its own; standstill: accept carries it out all the same",
    )


def without_idle(guest: Guest) -> Guest:
    """The guest without NAPI threads of devices whose NAPI is not threaded."""
    if not guest.by_role(Role.NAPI):
        return guest
    off = {i.target for i in guest.interfaces if not i.threaded}
    kept = (t for t in guest.threads if t.role is not Role.NAPI or t.interface not in off)
    return replace(guest, threads=tuple(kept))


def _threads(guests: Iterable[Guest]) -> Iterator[tuple[Guest, Thread]]:
    for guest in guests:
        for thread in without_idle(guest).threads:
            if thread.role in DATA_PLANE:
                yield guest, thread


def _spins(thread: Thread) -> bool:
    return thread.role is Role.VCPU and thread.sched.cls in REALTIME


def _starves(vcpu: Thread, other: Thread) -> bool:
    if other.sched.cls is SchedClass.DEADLINE:
        return False
    if other.sched.cls not in REALTIME:
        return True
    if other.sched.priority != vcpu.sched.priority:
        return other.sched.priority < vcpu.sched.priority
    return vcpu.sched.cls is SchedClass.FIFO
