# SPDX-License-Identifier: GPL-2.0-or-later
"""The standstill guard: steps down a tuned router that stops forwarding.

A thread of the daemon samples all tuned guests every EVERY seconds, applies the rule of
starvation.py, and asks the loop to step a guest down. It starts anew once the pass has stepped
the guest down, so that the next level follows only when the sign persists there. With more
than MANY threads it samples less often: sampling takes a few per cent of a CPU at most.

No thread waits for a CPU that is idle. So the guard first asks how long each CPU was idle, which
is one file, and reads the threads of those guests only that may run on one that was not QUIET.
The rule asks that a thread waits for a quarter of the time at least, so nothing is missed but for
the first interval in which a CPU is busy.

On CPUs where guests have real-time threads it also samples threads of others, but only while
such a CPU has not been idle since the last check, for longer than the limit of real-time threads
makes it: a thread that waits for a CPU that idles of itself does not starve. A file tells other
processes (`vsrtune show`) of the starving ones.

The daemon's own threads keep off the CPUs where guests have real-time threads (``Aside``). An
ordinary thread that wakes up there waits until the kernel balances, which takes seconds, and the
daemon is the one that can help.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from vsrtune.core.cpuset import CpuSet
from vsrtune.daemon.events.thread import Sampler
from vsrtune.daemon.systemd import LOGGER, fields
from vsrtune.host.cpus import parse_cpu_times
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.netdev import DeviceFrames, guest_frames, parse_net_dev
from vsrtune.host.procfs import CLOCK_TICKS, Stat, parse_stat
from vsrtune.model.daemon_state import DaemonState, Starved
from vsrtune.model.guest import TIMED, Guest, Role, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.load import shared_devices
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import StepLevel
from vsrtune.model.targets import EmulatorPin, ThreadAffinity, VcpuPin
from vsrtune.observe.samples import parsed
from vsrtune.plan.safety.starvation import (
    STARVED,
    Rule,
    Sight,
    Subject,
    ThreadSample,
    Waiting,
    subject,
    vital,
)

STARVED_PATH = Path("/run/vsrtune/starved.json")


def real_time_masks(guests: Iterable[Guest]) -> set[CpuSet]:
    """The CPUs of each real-time thread of guests, and of each with a budget: one of a whole CPU
    leaves as little."""
    return {t.affinity for guest in guests for t in guest.threads if t.sched.cls in TIMED}


class Aside:
    """Moves all threads of this process. A thread that may run on all CPUs that this process had
    at the start takes none of them from it. If no CPU would be left, they may run on all."""

    def __init__(self) -> None:
        self._allowed = CpuSet(os.sched_getaffinity(0))
        self._now = self._allowed

    def step(self, snapshot: Snapshot | None) -> None:
        """Leave the CPUs to the real-time threads of a snapshot's guests."""
        masks = real_time_masks(snapshot.guests) if snapshot is not None else ()
        busy = CpuSet.union(mask for mask in masks if self._allowed - mask)
        cpus = self._allowed - busy or self._allowed
        if cpus == self._now:
            return
        self._now = cpus
        for tid in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(tid), set(cpus))
            except OSError:
                continue  # the thread is gone, or these CPUs are offline: then any will do


class GuardSampler:
    """Reads below ``root``. Answers omit whatever is gone."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root

    def sights(
        self, subjects: Collection[Subject], busy: frozenset[int] | None = None
    ) -> list[Sight]:
        """All subjects as they are now. With ``busy``, the threads of those only that may run on
        one of these CPUs."""
        devices: dict[str, DeviceFrames] = {}
        if any(s.devices for s in subjects):
            devices = parsed(self._root, "/proc/net/dev", parse_net_dev)
        return [
            Sight(
                s,
                {} if busy is not None and s.cpus and s.cpus.isdisjoint(busy) else self._threads(s),
                guest_frames(s.devices, devices),
            )
            for s in subjects
        ]

    def thread(self, key: ThreadKey, always: bool = True) -> ThreadSample | None:
        """One thread; None when it is gone. With ``always`` false the run time is read only
        while the thread is runnable."""
        where = f"/proc/{key.pid}/task/{key.tid}"
        try:
            stat = parse_stat(self._root.read(f"{where}/stat"))
            if stat.start_time != key.start_time:
                return None
            return self._sample(where, stat, always)
        except (OSError, ValueError, IndexError):
            return None

    def idle(self) -> dict[int, int]:
        """Ticks by CPU in which it had nothing to run; empty when they cannot be read."""
        times = parsed(self._root, "/proc/stat", parse_cpu_times)
        return {cpu: of.idle for cpu, of in times.items()}

    def _sample(self, where: str, stat: Stat, always: bool) -> ThreadSample:
        ran = waited = None
        if always or stat.state == "R":
            ran, waited = map(int, self._root.read(f"{where}/schedstat").split()[:2])
        return ThreadSample(stat.state, stat.processor, stat.cpu_ticks, ran, waited)

    def _threads(self, subject: Subject) -> dict[ThreadKey, ThreadSample]:
        found = {}
        for thread in subject.threads:
            sample = self.thread(thread.key, thread.role is Role.VHOST)
            if sample is not None:
                found[thread.key] = sample
        return found

    # -- threads of others

    def walk(self, cpus: Collection[int]) -> Iterator[dict[ThreadKey, tuple[str, bool]]]:
        """Yield for each thread of all processes its name and whether it is vital, if it is
        runnable and last ran on ``cpus``. Kernel threads of the boot come first."""
        try:
            pids = sorted(int(name) for name, _ in self._root.processes())
        except OSError:
            return
        for pid in pids:
            yield from self._runnable(pid, cpus)

    def _runnable(
        self, pid: int, cpus: Collection[int]
    ) -> Iterator[dict[ThreadKey, tuple[str, bool]]]:
        try:
            stat = parse_stat(self._root.read(f"/proc/{pid}/stat"))
            tids = [str(pid)]
            if stat.threads > 1:
                tids = self._root.listdir(f"/proc/{pid}/task")
        except (OSError, ValueError, IndexError):
            return
        for tid in tids:
            found = {}
            with suppress(OSError, ValueError, IndexError):
                if stat.threads > 1:
                    stat = parse_stat(self._root.read(f"/proc/{pid}/task/{tid}/stat"))
                if stat.state == "R" and stat.processor in cpus:
                    key = ThreadKey(pid, int(tid), stat.start_time)
                    found[key] = stat.comm, vital(stat.comm, stat.kthread)
            yield found


EVERY = 0.25
# About 20 us of CPU time each.
MANY = 500
# Seconds between checks whether CPUs have been idle.
OTHERS = 2.0
# A CPU was quiet if it was idle for more than this share of the time since the last sample: in
# EVERY, 22 of 25 ticks. Both readings are rounded down, so it was busy for five ticks at most, and
# a thread that waited for a quarter of the time (starvation.py) needs more than six.
QUIET = 0.85
# How long to wait for a step before asking for it again, seconds.
UNANSWERED = 5.0
# Duration of one step of the walk through all threads, seconds.
SLICE = 0.004
# Threads of others that are sampled at a time, at most.
MOST = 64


# A guest, the devices that guests share, and its threads that somebody has moved, with what
# follows from them.
_Known = tuple[Guest, frozenset[int], frozenset[ThreadKey], Subject]


class StandstillGuard(Sampler):
    """Samples from ``start`` to ``stop``. ``state`` returns the latest state. This thread calls
    ``step_down`` with a guest, the reason and the guest's level when it saw the sign, and
    ``starving`` with the starving threads of others when these have changed."""

    def __init__(
        self,
        root: HostRoot,
        state: Callable[[], DaemonState],
        step_down: Callable[[str, str, StepLevel], None],
        starving: Callable[[tuple[Starved, ...]], None] = lambda _starved: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            "guard",
            "the guard's check failed: until one succeeds, no guest that stands still or starves "
            "others is stepped down",
        )
        self._sampler = GuardSampler(root)
        self._state = state
        self._step_down = step_down
        self._clock = clock
        self._rule = Rule()
        self._others = _Others(self._sampler, self._rule, starving)
        # When the CPUs were looked at last, and for how many ticks each was idle by then.
        self._idle: tuple[float, dict[int, int]] = (0.0, {})
        self._seen: DaemonState | None = None
        self._subjects: tuple[Subject, ...] = ()
        self._known: dict[str, _Known] = {}
        self._levels: dict[str, StepLevel] = {}
        # Guests with a step under way, and until when to wait for it.
        self._asked: dict[str, float] = {}

    def _pause(self) -> float:
        threads = sum(len(s.threads) for s in self._subjects)
        return EVERY * max(1.0, threads / MANY)

    def update(self) -> None:
        """Sample once everything that is due."""
        state, now = self._state(), self._clock()
        if state is not self._seen:
            self._choose(state)
            self._seen = state
        self._asked = {ref: until for ref, until in self._asked.items() if now < until}
        busy = self._busy(now) if self._subjects else frozenset()
        for sign in self._rule.update(now, self._sampler.sights(self._subjects, busy)):
            self._ask(sign.guest, sign.why, now)
        for starved in self._others.update(now, state.snapshot, self._subjects):
            self._ask(starved.guest, str(starved), now)

    def _busy(self, now: float) -> frozenset[int] | None:
        """The CPUs that were not quiet since the last call; None when that is not known."""
        at, before = self._idle
        idle = self._sampler.idle()
        self._idle = now, idle
        most = QUIET * (now - at) * CLOCK_TICKS
        found = frozenset(c for c, n in idle.items() if n - before.get(c, n) <= most)
        return found if before and idle else None

    def _ask(self, guest: str, why: str, now: float) -> None:
        if guest not in self._asked:
            self._asked[guest] = now + UNANSWERED
            self._step_down(guest, why, self._levels.get(guest, StepLevel.POLICY))

    def _choose(self, state: DaemonState) -> None:
        """Select the guests to sample after a pass. A changed level starts the rule anew."""
        levels = {g.ref: g.step.level for g in state.guests if g.step is not None}
        changed = {
            ref
            for ref in self._levels.keys() | levels.keys()
            if self._levels.get(ref) is not levels.get(ref)
        }
        self._levels = levels
        if changed:
            self._rule.begin_anew()
            for ref in changed:
                self._asked.pop(ref, None)
        self._subjects = ()
        if state.snapshot is None:
            return
        undone = {ref for ref, level in levels.items() if level is StepLevel.UNDONE}
        ours = [g for g in state.guests if g.policy and g.ref not in undone]
        # Nothing is planned for a guest that libvirt keeps waiting: as for one that is refused.
        waiting = {g.ref for g in state.snapshot.guests if g.waits}
        tuned = {
            g.ref for g in ours if not g.refused and (g.tuned or g.pending or g.step is not None)
        } - waiting
        # One that differs from its policy, or is refused by now, keeps the classes that it has.
        others = {g.ref for g in ours} - tuned
        shared = shared_devices(state.snapshot.guests)
        moved: dict[str, frozenset[ThreadKey]] = {}
        for target in (drift.target for drift in state.drifts):
            if isinstance(target, ThreadAffinity | VcpuPin | EmulatorPin):
                moved[target.guest] = moved.get(target.guest, frozenset()) | {target.thread}
        # A pass keeps the Guest objects outside its scope, and there may be many.
        before, self._known = self._known, {}
        for guest in state.snapshot.guests:
            timed = guest.ref in others and any(t.sched.cls in TIMED for t in guest.threads)
            if timed or guest.ref in tuned:
                known, away = before.get(guest.ref), moved.get(guest.ref, frozenset())
                if known is None or known[0] is not guest or known[1:3] != (shared, away):
                    known = guest, shared, away, subject(guest, shared, away)
                self._known[guest.ref] = known
        self._subjects = tuple(subject for _, _, _, subject in self._known.values())


def _forced_idle(host: Host, passed: float) -> float:
    """The ticks, at most, for which the limit of real-time threads makes a CPU idle that they
    hold: the rest of each period and of the one that has begun."""
    period, runtime = host.sched_rt_period_us, host.sched_rt_runtime_us
    if not 0 <= runtime < period:
        return 0.0
    periods = passed * 1e6 / period + 1
    return periods * (period - runtime) / 1e6 * CLOCK_TICKS + 1


class _Others:
    """Threads of others on CPUs where guests have real-time threads."""

    def __init__(
        self,
        sampler: GuardSampler,
        rule: Rule,
        tell: Callable[[tuple[Starved, ...]], None],
    ) -> None:
        self._sampler = sampler
        self._rule = rule
        self._tell = tell
        self._waiting = Waiting()
        self._checked = -OTHERS
        self._idle: dict[int, int] = {}
        # CPUs that were not idle of late, the walk through their threads, its findings.
        self._full: frozenset[int] = frozenset()
        self._walk: Iterator[dict[ThreadKey, tuple[str, bool]]] | None = None
        self._suspects: dict[ThreadKey, tuple[str, bool]] = {}
        self._told: tuple[Starved, ...] = ()

    def update(
        self, now: float, snapshot: Snapshot | None, subjects: tuple[Subject, ...]
    ) -> list[Starved]:
        """The starving threads that are vital to the host and whose CPU a guest holds."""
        if now >= self._checked + OTHERS:
            self._full = self._full_cpus(now - self._checked, snapshot, subjects)
            self._checked = now
        found: list[Starved] = []
        if self._full:
            tuned = {t.key for s in subjects for t in s.threads}
            self._follow(tuned)
            found = self._starved(now)
        else:
            self._walk, self._suspects = None, {}
            self._waiting.clear()
        self._report(tuple(found))
        return [s for s in found if s.vital and s.guest]

    def _full_cpus(
        self, passed: float, snapshot: Snapshot | None, subjects: tuple[Subject, ...]
    ) -> frozenset[int]:
        if snapshot is None:
            return frozenset()
        guarded = {s.ref for s in subjects}
        cpus = CpuSet.union(real_time_masks(g for g in snapshot.guests if g.ref in guarded))
        before, self._idle = self._idle, self._sampler.idle() if cpus else {}
        most = _forced_idle(snapshot.host, passed)
        known = before.keys() & self._idle.keys() & set(cpus)
        return frozenset(c for c in known if self._idle[c] - before[c] <= most)

    def _follow(self, tuned: set[ThreadKey]) -> None:
        """One step of the walk, of about SLICE seconds."""
        if self._walk is None:
            self._walk = self._sampler.walk(self._full)
        end = time.monotonic() + SLICE
        for found in self._walk:
            for key, what in found.items():
                # Whatever else waits, nobody keeps a vital thread from being seen.
                if key not in tuned and (what[1] or len(self._suspects) < MOST):
                    self._suspects[key] = what
            if time.monotonic() >= end:
                return
        self._walk = None

    def _starved(self, now: float) -> list[Starved]:
        samples = {}
        for key in list(self._suspects):
            sample = self._sampler.thread(key)
            if sample is None or not sample.runnable or sample.cpu not in self._full:
                del self._suspects[key]
            else:
                samples[key] = sample
        waits = self._waiting.update(now, samples)
        found = []
        for key, seconds in sorted(waits.items()):
            if seconds >= STARVED:
                name, important = self._suspects[key]
                cpu = samples[key].cpu
                found.append(Starved(key.tid, name, cpu, self._rule.holder(cpu), important))
        return found

    def _report(self, found: tuple[Starved, ...]) -> None:
        if found == self._told:
            return
        known = {s.tid for s in self._told}
        for starved in found:
            if starved.tid not in known:
                LOGGER.warning(
                    "%s",
                    starved,
                    extra=fields(guest=starved.guest or None, cpu=starved.cpu),
                )
        self._told = found
        self._tell(found)
