# SPDX-License-Identifier: GPL-2.0-or-later
"""Detects from samples when a guest's tuning keeps threads from running. Pure.

A thread starves if it is runnable (state R) and its run time does not change for SURE seconds
(with a budget, two periods if that is longer), in at least SAMPLES samples. A thread cannot leave
state R without running, so two such samples mean that it waited all the time in between. The
real-time threads of tuned guests that ran on the CPU meanwhile are to blame: those of the starved
thread's own guest if it has any there, otherwise those of the guest that ran most. If no tuned
thread ran there, the starved thread's own guest is to blame. Another guest is to blame only where
a policy or an operator put the starved thread.

A guest stands still if for SURE seconds, in every interval between two samples

- frames arrived at its devices and it sent none,
- none was taken from its rings: all that arrived were dropped; or nothing was dropped, no
  vhost worker ran, and the guest had sent at least half as many a second within the last
  RECENT seconds,
- its vcpus were alive: one was runnable or used CPU time,
- and one of its threads waited for a CPU for a quarter of the interval or more.

These are therefore no standstills. A firewall that drops everything takes the frames from its
rings. A paused guest (suspended, stopped, frozen) has vcpus that sleep and use no CPU time.
Other threads do not hold up a guest that has crashed, nor one that boots, unless its vcpus share
a CPU: that cannot be told from a standstill. A burst fills the rings for less than SURE.
Broadcasts to an idle router do not fill them.

Threads outside tuned guests starve when they wait for STARVED seconds for a CPU that is never
idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vsrtune.model.guest import (
    DATA_PLANE,
    TIMED,
    Guest,
    NicKind,
    Role,
    Sched,
    ThreadKey,
    thread_label,
)
from vsrtune.model.load import GuestFrames, counted_devices
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import StepLevel, Steps
from vsrtune.model.targets import HOST_REF, Target, ThreadSched, Value
from vsrtune.policy.matching import policies_of
from vsrtune.policy.model import Policy

SURE = 1.0
SAMPLES = 3
RECENT = 60.0
STARVED = 4.0

_RUNNABLE = "R"
# How names of kernel threads of a CPU, and of an interrupt, begin.
_VITAL = ("ksoftirqd/", "rcu", "ktimers/", "irq/", "irq_work/", "backlog_napi/", "cpuhp/")
# The resolution of the rates of the last minute, in seconds.
_BUCKET = 5.0


@dataclass(frozen=True, slots=True)
class ThreadSample:
    """``state`` is the letter of /proc/TID/stat, ``cpu`` where it last ran, ``ticks`` its user
    and system time. ``ran_ns`` and ``waited_ns`` are of /proc/TID/schedstat; None where they
    were not read."""

    state: str
    cpu: int
    ticks: int
    ran_ns: int | None = None
    waited_ns: int | None = None

    @property
    def runnable(self) -> bool:
        """Running, or waiting for a CPU."""
        return self.state == _RUNNABLE

    def ran_since(self, before: ThreadSample) -> bool:
        """Whether it ran. On a CPU without ticks (nohz_full), the kernel updates the run time of
        a thread that runs alone once a second, but its ticks whenever they are read."""
        return (self.ticks, self.ran_ns) != (before.ticks, before.ran_ns)


@dataclass(frozen=True, slots=True)
class GuardedThread:
    """One thread of a tuned guest; ``timed``: real-time or deadline. It may wait for
    ``patience`` seconds: a thread with a budget waits for its next period anyway. ``placed``: it
    handles frames or libvirt pinned it where it is, so a policy or an operator chose its CPUs."""

    key: ThreadKey
    label: str
    role: Role
    timed: bool
    patience: float = SURE
    placed: bool = True


@dataclass(frozen=True, slots=True)
class Subject:
    """A tuned guest, with the threads and devices to sample. ``devices``: names and kinds.
    ``cpus``: where the threads may run, empty when that is not known."""

    ref: str
    threads: tuple[GuardedThread, ...]
    devices: tuple[tuple[str, NicKind], ...] = ()
    cpus: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Sight:
    """The sample of a subject at one moment, without threads that are gone. There are none when
    no thread can have waited for a CPU."""

    subject: Subject
    threads: Mapping[ThreadKey, ThreadSample]
    counters: GuestFrames | None = None


@dataclass(frozen=True, slots=True)
class Sign:
    """``guest`` is to be stepped down because of ``why``."""

    guest: str
    why: str


def subject(
    guest: Guest, shared: Collection[int] = (), moved: Collection[ThreadKey] = ()
) -> Subject:
    """What to sample of a guest. Devices with counters that the guest shares (``shared``, by
    ifindex) tell nothing of the guest alone, so it is then judged by its threads. ``moved`` are
    threads that are not where their policy put them."""
    roles = (*DATA_PLANE, Role.EMULATOR)
    threads = tuple(
        GuardedThread(
            t.key,
            thread_label(t),
            t.role,
            t.sched.cls in TIMED,
            max(SURE, 2 * t.sched.period_ns / 1e9),
            t.key not in moved and (role in DATA_PLANE or t.pin == t.affinity),
        )
        for role in roles
        for t in guest.by_role(role)
    )
    cpus = frozenset(cpu for role in roles for t in guest.by_role(role) for cpu in t.affinity)
    return Subject(guest.ref, threads, counted_devices(guest, shared), cpus)


def unguarded(
    snapshot: Snapshot, applied: Mapping[Target, Value], unwatched: Collection[str]
) -> frozenset[Target]:
    """The realtime classes and budgets of threads that the guard does not watch. It watches guests:
    what no guest of that name shows keeps no such class, because a process can hide what it is. It
    chooses its command line, and how many threads it has. ``unwatched`` are the guests that it does
    not watch either. The other settings stay: the guest may have been unreadable."""
    owners = {
        t.key: guest.ref
        for guest in snapshot.guests
        if guest.ref not in unwatched
        for t in guest.threads
    }
    return frozenset(
        t
        for t, value in applied.items()
        if isinstance(t, ThreadSched)
        and t.guest != HOST_REF
        and isinstance(value, Sched)
        and value.cls in TIMED
        and owners.get(t.thread) != t.guest
    )


def unwatched(guests: Iterable[Guest], policies: Sequence[Policy], steps: Steps) -> frozenset[str]:
    """The guests that the guard does not watch, and whose classes a plan might keep: stepped down
    to nothing and refused, or without a policy while libvirt keeps them waiting."""
    undone = {ref for ref, step in steps.items() if step.level is StepLevel.UNDONE}
    return frozenset(undone).union(
        guest.ref for guest in guests if guest.waits and not policies_of(guest, policies)
    )


@dataclass(frozen=True, slots=True)
class _Mark:
    since: float
    counted: int
    sample: ThreadSample


class Waiting:
    """How long threads have been runnable without running."""

    def __init__(self) -> None:
        self._marks: dict[ThreadKey, _Mark] = {}

    def update(
        self, at: float, samples: Mapping[ThreadKey, ThreadSample]
    ) -> dict[ThreadKey, float]:
        """Seconds by thread, of those that waited in SAMPLES samples or more. ``at`` is a steady
        clock's time."""
        marks: dict[ThreadKey, _Mark] = {}
        for key, sample in samples.items():
            if not sample.runnable:
                continue
            known = self._marks.get(key)
            if known is not None and not sample.ran_since(known.sample):
                marks[key] = replace(known, counted=known.counted + 1)
            else:
                marks[key] = _Mark(at, 1, sample)
        self._marks = marks
        return {key: at - mark.since for key, mark in marks.items() if mark.counted >= SAMPLES}

    def clear(self) -> None:
        """Forget all threads."""
        self._marks = {}


@dataclass(slots=True)
class _Flow:
    """The flow of frames of one guest. ``peaks``: the most frames sent a second, by time in units
    of _BUCKET."""

    at: float = 0.0
    before: Sight | None = None
    since: float | None = None
    counted: int = 0
    peaks: dict[int, float] = field(default_factory=dict)

    def update(self, at: float, sight: Sight) -> float:
        """For how many seconds the guest has stood still."""
        before, passed = self.before, at - self.at
        began = self.at
        self.at, self.before = at, sight
        still = before is not None and passed > 0 and self._still(before, sight, passed)
        if not still:
            self.since, self.counted = None, 0
            return 0.0
        self.since = began if self.since is None else self.since
        self.counted += 1
        return at - self.since if self.counted >= SAMPLES - 1 else 0.0

    def _still(self, before: Sight, now: Sight, passed: float) -> bool:
        if before.counters is None or now.counters is None:
            return False
        arrived = now.counters.arrived - before.counters.arrived
        dropped = now.counters.dropped - before.counters.dropped
        sent = now.counters.sent - before.counters.sent
        self._remember(sent / passed)
        if sent or arrived <= 0:
            return False
        if dropped:
            taken = arrived > dropped
        else:
            usual = 2 * max(self.peaks.values(), default=0.0) >= arrived / passed
            taken = not usual or _ran(before, now, Role.VHOST)
        alive = _alive(before, now)
        return not taken and alive and _waited(before, now, passed)

    def _remember(self, rate: float) -> None:
        bucket = int(self.at // _BUCKET)
        oldest = bucket - int(RECENT // _BUCKET)
        self.peaks = {n: peak for n, peak in self.peaks.items() if n >= oldest}
        self.peaks[bucket] = max(rate, self.peaks.get(bucket, 0.0))


def _pairs(before: Sight, now: Sight) -> Iterable[tuple[GuardedThread, ThreadSample, ThreadSample]]:
    for thread in now.subject.threads:
        old, new = before.threads.get(thread.key), now.threads.get(thread.key)
        if old is not None and new is not None:
            yield thread, old, new


def _ran(before: Sight, now: Sight, role: Role) -> bool:
    return any(t.role is role and new.ran_since(old) for t, old, new in _pairs(before, now))


def _alive(before: Sight, now: Sight) -> bool:
    return any(
        t.role is Role.VCPU and (new.runnable or new.ticks != old.ticks)
        for t, old, new in _pairs(before, now)
    )


def _waited(before: Sight, now: Sight, passed: float) -> bool:
    for _, old, new in _pairs(before, now):
        if not (old.runnable and new.runnable):
            continue
        if not new.ran_since(old):
            return True
        if (
            old.waited_ns is not None
            and new.waited_ns is not None
            and new.waited_ns - old.waited_ns >= passed / 4 * 1e9
        ):
            return True
    return False


class Rule:
    """Judges all tuned guests of a host, a few times a second."""

    def __init__(self) -> None:
        self._waiting = Waiting()
        self._flows: dict[str, _Flow] = {}
        self._before: dict[ThreadKey, ThreadSample] = {}
        # CPU time of tuned real-time threads in the last interval: by CPU, by guest, ns.
        self._held: dict[int, dict[str, int]] = {}

    def update(self, at: float, sights: Iterable[Sight]) -> list[Sign]:
        """The guests to step down now; ``at`` is a steady clock's time."""
        found = list(sights)
        samples = {key: sample for s in found for key, sample in s.threads.items()}
        self._hold(found)
        self._before = samples
        waits = self._waiting.update(at, samples)
        signs: dict[str, Sign] = {}
        for sight in found:
            ref = sight.subject.ref
            for thread in sight.subject.threads:
                waited = waits.get(thread.key, 0.0)
                if waited >= thread.patience:
                    cpu = sight.threads[thread.key].cpu
                    guest = self.holder(cpu, ref) or ref
                    if guest != ref and not thread.placed:
                        # Its QEMU may have moved it there, to have the other guest stepped down.
                        continue
                    whose = thread.label if guest == ref else f"{thread.label} of {ref}"
                    why = f"{whose} (tid {thread.key.tid}) has waited {waited:.1f} s for CPU {cpu}"
                    signs.setdefault(guest, Sign(guest, why))
        flows = {s.subject.ref: self._flows.get(s.subject.ref) or _Flow() for s in found}
        self._flows = flows
        for sight in found:
            ref = sight.subject.ref
            still = flows[ref].update(at, sight)
            if still >= SURE:
                why = f"frames arrive, and none was taken or sent for {still:.1f} s"
                signs.setdefault(ref, Sign(ref, why))
        return list(signs.values())

    def begin_anew(self) -> None:
        """Begin anew, because the scheduling has changed. Rates are kept."""
        self._waiting.clear()
        for flow in self._flows.values():
            flow.since, flow.counted, flow.before = None, 0, None

    def holder(self, cpu: int, first: str = "") -> str:
        """The guest whose real-time threads hold a CPU: ``first`` if it is one of them,
        otherwise the one that ran most; "" when none did."""
        held = self._held.get(cpu, {})
        return first if first in held else max(held, key=held.__getitem__, default="")

    def _hold(self, sights: Iterable[Sight]) -> None:
        self._held = {}
        for sight in sights:
            for thread in sight.subject.threads:
                new, old = sight.threads.get(thread.key), self._before.get(thread.key)
                if not thread.timed or new is None or old is None or not new.ran_since(old):
                    continue
                # A tick is 10 ms (procfs.CLOCK_TICKS).
                ran = (new.ticks - old.ticks) * 10_000_000
                if new.ran_ns is not None and old.ran_ns is not None:
                    ran = max(ran, new.ran_ns - old.ran_ns)
                on = self._held.setdefault(new.cpu, {})
                on[sight.subject.ref] = on.get(sight.subject.ref, 0) + ran


def vital(name: str, kernel: bool) -> bool:
    """Whether a thread is a kernel thread bound to its CPUs whose starvation hangs the host, or
    what it serves: SoftIRQ, RCU, an interrupt, CPU hotplug, a bound worker."""
    if not kernel:
        return False
    bound_worker = name.startswith("kworker/") and name[8:9].isdigit()
    return bound_worker or name.startswith(_VITAL)
