"""Aside of guard.py: the threads of a process of its own, on the CPUs of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[1]

SCRIPT = """
import os, threading
from dataclasses import replace
import shell_samples as samples
from vsrtune.daemon.guard import Aside
from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Sched, SchedClass

def host(cpus, cls=SchedClass.FIFO, first=None):
    guest = samples.guest()
    threads = [replace(t, sched=Sched(cls, 7), affinity=CpuSet(cpus)) for t in guest.threads]
    threads[0] = replace(threads[0], affinity=CpuSet(first or cpus))
    return samples.snapshot(replace(guest, threads=tuple(threads)))

mine = sorted(os.sched_getaffinity(0))
done, tids = threading.Event(), []
def wait():
    tids.append(threading.get_native_id())
    done.wait()
other = threading.Thread(target=wait, daemon=True)
other.start()
while not tids:
    pass
both = (0, tids[0])
where = lambda: [sorted(os.sched_getaffinity(tid)) for tid in both]
aside = Aside()
aside.step(None)
assert where() == [mine, mine]
aside.step(host(mine[1:]))
assert where() == [mine[:1]] * 2, where()
aside.step(host(mine[1:], SchedClass.OTHER))
assert where() == [mine, mine], where()
aside.step(host(mine[:1]))
assert where() == [mine[1:]] * 2, where()
aside.step(host(mine[:1], first=mine))
assert where() == [mine[1:]] * 2, where()
aside.step(host(mine))
assert where() == [mine, mine], where()
done.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_all_threads_step_aside_and_come_back() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{UNIT}/support:{UNIT.parents[1]}"}
    subprocess.run([sys.executable, "-B", "-c", SCRIPT], check=True, env=environment, timeout=60)
