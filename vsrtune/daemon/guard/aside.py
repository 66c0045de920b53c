"""Keeps the daemon's own threads off the CPUs where guests have real-time threads.

An ordinary thread that wakes up on a CPU that a FIFO thread holds waits until the kernel
balances, which takes seconds, and the daemon is then the one that could have helped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import REALTIME, Guest
from vsrtune.model.snapshot import Snapshot


def real_time_cpus(guests: Iterable[Guest]) -> CpuSet:
    """The CPUs on which real-time threads of guests may run."""
    return CpuSet(
        cpu
        for guest in guests
        for thread in guest.threads
        if thread.sched.cls in REALTIME
        for cpu in thread.affinity
    )


class Aside:
    """Moves all threads of this process. Where no CPU would be left they may run on all that
    they had when the process began."""

    def __init__(self) -> None:
        self._allowed = CpuSet(os.sched_getaffinity(0))
        self._now = self._allowed

    def step(self, snapshot: Snapshot | None) -> None:
        """Step aside for the guests of a snapshot."""
        busy = real_time_cpus(snapshot.guests) if snapshot is not None else CpuSet()
        cpus = self._allowed - busy or self._allowed
        if cpus == self._now:
            return
        self._now = cpus
        for tid in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(tid), set(cpus))
            except OSError:
                continue  # gone, or these CPUs are offline by now: then any will do
