"""One script of writes and reads that a real kernel and the imitated one must answer alike.

``play`` runs it on whatever has the calls of syscalls.LiveCalls and the reads of
filesystem.HostRoot, and returns the answer to each step: the errno of a refused write, and all
values that can be read afterwards. tests/lab/inside/test_imitation.py plays it on the lab's
kernel and on FakeKernel.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.procfs import read_thread
from vsrtune.model.guest import Sched, SchedClass

ROOT = "/sys/fs/cgroup"
# A threaded domain with two threaded cgroups, as libvirt makes for a guest.
TOP = "vsrtune-script"
FIRST, SECOND, NEW = f"{TOP}/first", f"{TOP}/second", f"{TOP}/new"
BESIDE = "vsrtune-beside"
DEVICE = "script0"
CPU2 = "/sys/devices/system/cpu/cpu2/online"
FIFO = Sched(SchedClass.FIFO, 10, reset_on_fork=True)


class Calls(Protocol):
    """The writes of syscalls.LiveCalls that the script uses."""

    def write(self, path: str, text: str) -> None: ...
    def mkdir(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def set_affinity(self, tid: int, cpus: CpuSet) -> None: ...
    def set_sched(self, tid: int, sched: Sched) -> None: ...


@dataclass(frozen=True)
class Scene:
    """Two threads of process ``pid``, which sleep: ``one`` begins in FIRST, ``two`` in SECOND."""

    pid: int
    one: int
    two: int


def budget(share: float) -> Sched:
    """A DEADLINE budget of that share of a CPU, with a period of 10 ms."""
    return Sched(
        SchedClass.DEADLINE,
        runtime_ns=int(share * 10_000_000),
        deadline_ns=10_000_000,
        period_ns=10_000_000,
        reset_on_fork=True,
    )


def steps(scene: Scene) -> Iterator[tuple[str, Callable[[Calls], None]]]:
    """What is done, in order. All lists are of a host of three CPUs."""
    one, two = scene.one, scene.two

    def affinity(tid: int, cpus: str) -> Callable[[Calls], None]:
        return lambda calls: calls.set_affinity(tid, CpuSet.parse(cpus))

    def sched(tid: int, value: Sched) -> Callable[[Calls], None]:
        return lambda calls: calls.set_sched(tid, value)

    def write(path: str, text: str) -> Callable[[Calls], None]:
        return lambda calls: calls.write(path, text)

    def cpuset(cgroup: str, cpus: str) -> Callable[[Calls], None]:
        return write(f"{ROOT}/{cgroup}/cpuset.cpus", cpus)

    def move(tid: int, cgroup: str) -> Callable[[Calls], None]:
        return write(f"{ROOT}/{cgroup}/cgroup.threads", str(tid))

    yield "bind one to 1", affinity(one, "1")
    yield "bind two to 1-2", affinity(two, "1-2")
    yield "make a cgroup beside", lambda calls: calls.mkdir(f"{ROOT}/{BESIDE}")
    yield "give it 2", cpuset(BESIDE, "2")
    yield "make it a partition", write(f"{ROOT}/{BESIDE}/cpuset.cpus.partition", "root")
    yield "bind two to a CPU of the partition", affinity(two, "2")
    yield "bind one to 0 and one of the partition", affinity(one, "0,2")
    yield "end the partition", write(f"{ROOT}/{BESIDE}/cpuset.cpus.partition", "member")
    yield "remove the cgroup beside", lambda calls: calls.rmdir(f"{ROOT}/{BESIDE}")
    yield "bind one to 1 once more", affinity(one, "1")
    yield "free two", affinity(two, "0-2")
    yield "widen one", affinity(one, "0-2")
    yield "limit first to 0-1", cpuset(FIRST, "0-1")
    yield "bind one beyond its cpuset", affinity(one, "2")
    yield "bind one to one CPU of its cpuset and one beyond", affinity(one, "1-2")
    yield "widen first", cpuset(FIRST, "0-2")
    yield "bind one to 0", affinity(one, "0")
    yield "limit first to 1-2, so that one's CPU is not in it", cpuset(FIRST, "1-2")
    yield "give first 0 again", cpuset(FIRST, "0-1")
    yield "empty first's list while a thread is inside", cpuset(FIRST, "")
    yield "a CPU that the host does not have", cpuset(FIRST, "1024")
    yield "limit second to 2", cpuset(SECOND, "2")
    yield "move one to second", move(one, SECOND)
    yield "move one back", move(one, FIRST)
    yield "limit top to 1", cpuset(TOP, "1")
    yield "free top", cpuset(TOP, "0-2")
    yield "make a cgroup", lambda calls: calls.mkdir(f"{ROOT}/{NEW}")
    yield "move one there before it is threaded", move(one, NEW)
    yield "make it threaded", write(f"{ROOT}/{NEW}/cgroup.type", "threaded")
    yield "move one there", move(one, NEW)
    yield "remove the cgroup with a thread inside", lambda calls: calls.rmdir(f"{ROOT}/{NEW}")
    yield "move one away", move(one, FIRST)
    yield "remove the cgroup", lambda calls: calls.rmdir(f"{ROOT}/{NEW}")
    yield "remove it again", lambda calls: calls.rmdir(f"{ROOT}/{NEW}")
    yield "free first", cpuset(FIRST, "0-2")
    yield "free second", cpuset(SECOND, "0-2")
    yield "bind one to all", affinity(one, "0-2")
    yield "bind two to all", affinity(two, "0-2")
    yield "fifo", sched(one, FIFO)
    yield "back to other, with a nice value", sched(one, Sched(nice=-5))
    yield "a budget", sched(one, budget(0.3))
    yield "bind a thread with a budget", affinity(one, "1")
    yield "limit a thread with a budget", cpuset(FIRST, "1")
    yield "change the budget inside", sched(one, budget(0.2))
    yield "widen it again", cpuset(FIRST, "0-2")
    yield "a second budget", sched(two, budget(0.5))
    yield "bind it to all CPUs", affinity(two, "0-2")
    yield "no budget", sched(one, Sched())
    yield "no second budget", sched(two, Sched())
    yield "bind one to 1 again", affinity(one, "1")
    yield "a budget on a part of the CPUs", sched(one, budget(0.3))
    yield "bind one to all again", affinity(one, "0-2")
    yield "a queue of 300", write(f"/sys/class/net/{DEVICE}/tx_queue_len", "300")
    yield "limit first to 2", cpuset(FIRST, "2")
    yield "take CPU 2 offline", write(CPU2, "0")
    yield "bind two to a CPU that is offline", affinity(two, "2")
    yield "bind two to an online CPU and one that is not", affinity(two, "1-2")
    yield "bring CPU 2 back", write(CPU2, "1")
    yield "free first again", cpuset(FIRST, "0-2")


def state(root: Any, scene: Scene) -> dict[str, str]:
    """Everything that the script may change, as a reader sees it."""
    found = {}
    online = CpuSet.parse(root.read("/sys/devices/system/cpu/online"))
    for name, tid in (("one", scene.one), ("two", scene.two)):
        thread = read_thread(root, scene.pid, tid)
        assert thread is not None
        found[name] = f"CPUs {thread.affinity & online}, {thread.cgroup}, {root.sched_attr(tid)}"
    for cgroup in (TOP, FIRST, SECOND, NEW, BESIDE):
        for name in ("cgroup.type", "cpuset.cpus", "cpuset.cpus.effective"):
            try:
                found[f"{cgroup}/{name}"] = root.read(f"{ROOT}/{cgroup}/{name}").strip()
            except OSError as error:
                found[f"{cgroup}/{name}"] = errno.errorcode[error.errno or 0]
    found["queue"] = root.read(f"/sys/class/net/{DEVICE}/tx_queue_len").strip()
    return found


def play(calls: Calls, root: Any, scene: Scene) -> list[tuple[str, str, dict[str, str]]]:
    """The name of each step, the errno of a refusal ("" for none), and the state behind it."""
    answers = []
    for name, step in steps(scene):
        refused = ""
        try:
            step(calls)
        except OSError as error:
            refused = errno.errorcode[error.errno or 0]
        answers.append((name, refused, state(root, scene)))
    return answers
