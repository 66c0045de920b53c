# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads the guard's samples: states and run times of threads, counters of devices."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

from vsrtune.host.cpus import parse_cpu_times
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.netdev import DeviceFrames, guest_frames, parse_net_dev
from vsrtune.host.procfs import Stat, parse_stat
from vsrtune.model.guest import Role, ThreadKey
from vsrtune.plan.safety.starvation import Sight, Subject, ThreadSample, vital

# Duration of one step of the walk through all threads, seconds.
SLICE = 0.004


class GuardSampler:
    """Reads below ``root``. Answers omit whatever is gone."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root

    def sights(
        self, subjects: Collection[Subject], busy: frozenset[int] | None = None
    ) -> list[Sight]:
        """All subjects as they are now. With ``busy``, the threads of those only that may run on
        one of these CPUs."""
        devices = self._devices() if any(s.devices for s in subjects) else {}
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
        """Ticks by CPU in which it had nothing to run. Raises OSError."""
        times = parse_cpu_times(self._root.read("/proc/stat"))
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

    def _devices(self) -> dict[str, DeviceFrames]:
        try:
            return parse_net_dev(self._root.read("/proc/net/dev"))
        except (OSError, ValueError, IndexError):
            return {}

    # -- threads of others

    def walk(self, cpus: Collection[int]) -> Iterator[dict[ThreadKey, tuple[str, bool]]]:
        """Yield runnable threads that last ran on ``cpus``, with their names and whether they
        are vital, in steps of about SLICE seconds (listing /proc is one step). Kernel threads
        of the boot come first. Ends after all threads."""
        try:
            pids = sorted(int(name) for name, _ in self._root.processes())
        except OSError:
            return
        yield {}
        found: dict[ThreadKey, tuple[str, bool]] = {}
        end = time.monotonic() + SLICE
        for pid in pids:
            for key, name, important in self._runnable(pid, cpus):
                found[key] = name, important
            if time.monotonic() >= end:
                yield found
                found, end = {}, time.monotonic() + SLICE
        yield found

    def _runnable(self, pid: int, cpus: Collection[int]) -> Iterator[tuple[ThreadKey, str, bool]]:
        try:
            stat = parse_stat(self._root.read(f"/proc/{pid}/stat"))
            tids = [str(pid)]
            if stat.threads > 1:
                tids = self._root.listdir(f"/proc/{pid}/task")
        except (OSError, ValueError, IndexError):
            return
        for tid in tids:
            try:
                if stat.threads > 1:
                    stat = parse_stat(self._root.read(f"/proc/{pid}/task/{tid}/stat"))
            except (OSError, ValueError, IndexError):
                continue
            if stat.state == "R" and stat.processor in cpus:
                important = vital(stat.comm, stat.kthread)
                yield ThreadKey(pid, int(tid), stat.start_time), stat.comm, important
