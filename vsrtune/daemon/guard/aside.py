# SPDX-License-Identifier: GPL-2.0-or-later
"""Keeps the daemon's own threads off the CPUs where guests have real-time threads.

An ordinary thread that wakes up on a CPU held by a FIFO thread waits until the kernel balances,
which takes seconds. The daemon must not wait there, because it is the one that can help.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import REALTIME, Guest
from vsrtune.model.snapshot import Snapshot


def real_time_cpus(guests: Iterable[Guest]) -> CpuSet:
    """The CPUs on which real-time threads of guests may run."""
    return CpuSet.union(
        t.affinity for guest in guests for t in guest.threads if t.sched.cls in REALTIME
    )


class Aside:
    """Moves all threads of this process. If no CPU would be left, they may run on all CPUs that
    this process had at the start."""

    def __init__(self) -> None:
        self._allowed = CpuSet(os.sched_getaffinity(0))
        self._now = self._allowed

    def step(self, snapshot: Snapshot | None) -> None:
        """Leave the CPUs to the real-time threads of a snapshot's guests."""
        busy = real_time_cpus(snapshot.guests) if snapshot is not None else CpuSet()
        cpus = self._allowed - busy or self._allowed
        if cpus == self._now:
            return
        self._now = cpus
        for tid in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(tid), set(cpus))
            except OSError:
                continue  # the thread is gone, or these CPUs are offline: then any will do
