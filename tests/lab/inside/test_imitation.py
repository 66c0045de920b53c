"""The kernel that the unit tests imitate answers as this host's kernel does."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import labhelp
import pytest

sys.path.insert(0, "/mnt/tests/unit/support")

from fake_kernel import FakeKernel
from kernel_script import BESIDE, CPU2, DEVICE, FIRST, SECOND, TOP, Scene, play

from vsrtune.core.codec import encode
from vsrtune.execute.syscalls import LiveCalls
from vsrtune.host.filesystem import LiveRoot
from vsrtune.host.procfs import read_thread
from vsrtune.model.guest import Sched
from vsrtune.model.host import release_of

CGROUP = Path("/sys/fs/cgroup")
THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(9999,)).start()
print(flush=True)
time.sleep(9999)
"""


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A process of two threads, in cgroups and with a device of the test's own."""
    if labhelp.lab_cpus() != 3:
        pytest.skip("needs a lab of three CPUs")
    (CGROUP / "cgroup.subtree_control").write_text("+cpuset")
    for path in (TOP, FIRST, SECOND):
        (CGROUP / path).mkdir()
    child = subprocess.Popen([sys.executable, "-c", THREADS], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    (CGROUP / TOP / "cgroup.procs").write_text(str(child.pid))
    for path in (FIRST, SECOND):
        (CGROUP / path / "cgroup.type").write_text("threaded")
    (CGROUP / TOP / "cgroup.subtree_control").write_text("+cpuset")
    one, two = sorted(int(tid) for tid in os.listdir(f"/proc/{child.pid}/task"))
    (CGROUP / FIRST / "cgroup.threads").write_text(str(one))
    (CGROUP / SECOND / "cgroup.threads").write_text(str(two))
    labhelp.sh("ip", "link", "add", DEVICE, "txqueuelen", "1000", "type", "veth")
    try:
        yield Scene(child.pid, one, two)
    finally:
        Path(CPU2).write_text("1")
        child.kill()
        child.wait()
        labhelp.sh("ip", "link", "del", DEVICE)
        labhelp.wait_for(lambda: not (CGROUP / TOP / "cgroup.procs").read_text(), "they are gone")
        for path in (FIRST, SECOND, TOP, BESIDE):
            if (CGROUP / path).exists():
                (CGROUP / path).rmdir()


def imitated(scene: Scene) -> FakeKernel:
    """The imitated kernel of this release with the same threads, cgroups and device."""
    release = release_of(platform.release())
    threads = {}
    for tid, cgroup in ((scene.one, FIRST), (scene.two, SECOND)):
        raw = read_thread(LiveRoot(), scene.pid, tid)
        assert raw is not None
        threads[str(tid)] = {
            "guest": 0, "pid": scene.pid, "start": raw.key.start_time, "comm": raw.name,
            "cgroup": cgroup, "mask": "0-2", "user": "0-2", "sched": encode(Sched()),
        }  # fmt: skip
    return FakeKernel({
        "kernel": "6.1" if release < (6, 2) else "6.12",
        "possible": "0-2",
        "online": "0-2",
        "threads": threads,
        "cgroups": {
            TOP: {"cpus": "", "type": "domain threaded"},
            FIRST: {"cpus": "", "type": "threaded"},
            SECOND: {"cpus": "", "type": "threaded"},
        },
        "irqs": {},
        "devices": {DEVICE: {"guest": 0, "ifindex": 99, "tx_queue_len": 1000}},
    })  # fmt: skip


def test_the_imitated_kernel_answers_as_this_one(scene: Scene) -> None:
    fake = imitated(scene)
    time.sleep(0.2)  # both threads sleep
    here = play(LiveCalls(), LiveRoot(), scene)
    there = play(fake, fake, scene)
    differences = []
    for (name, refused, state), (_, fake_refused, fake_state) in zip(here, there, strict=True):
        if refused != fake_refused:
            differences.append(f"{name}: kernel {refused or 'ok'}, imitated {fake_refused or 'ok'}")
        differences += [
            f"{name}: {key}: kernel {value!r}, imitated {fake_state[key]!r}"
            for key, value in state.items()
            if fake_state[key] != value
        ]
    assert differences == []
