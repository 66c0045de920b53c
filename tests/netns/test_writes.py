"""The writing half on real devices, threads and cgroups."""

from __future__ import annotations

import os
import select
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nethelp import ip

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import WriteError
from vsrtune.execute.cpuset_clear import clear
from vsrtune.execute.executor import apply, recover, undo
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.execute.syscalls import LiveCalls
from vsrtune.host.filesystem import LiveRoot
from vsrtune.host.procfs import parse_cgroup
from vsrtune.model.guest import Sched, SchedClass, ThreadKey
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import CgroupDir, ThreadAffinity, ThreadCgroup, ThreadSched, TxQueueLen

NET = Path("/sys/class/net")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.jsonl", "this boot") as opened:
        yield opened


def length(device: str) -> TxQueueLen:
    return TxQueueLen("g", device, int((NET / device / "ifindex").read_text()))


def text(device: str, name: str) -> int:
    return int((NET / device / name).read_text())


# -- devices


@pytest.mark.parametrize("kind", ["macvtap", "tap"])
def test_queue_length_goes_and_comes_back(
    request: pytest.FixtureRequest, journal: Journal, kind: str
) -> None:
    if kind == "macvtap":
        device = request.getfixturevalue("macvtap")
    else:
        request.getfixturevalue("namespace")
        ip("tuntap", "add", "t0", "mode", "tap")
        device = "t0"
    before = text(device, "tx_queue_len")
    ops = LiveSysOps()
    target = length(device)
    assert ops.read(target) == before
    assert apply(Plan((Action(target, before, 77, "t"),)), ops, journal).failed == ()
    assert text(device, "tx_queue_len") == 77
    assert undo(ops, journal).failed == ()
    assert text(device, "tx_queue_len") == before


def open_ring(device: str) -> int:
    """Open the character device of a macvtap, as QEMU does."""
    (node,) = (NET / device).glob("tap[0-9]*")
    major, _, minor = (node / "dev").read_text().partition(":")
    path = Path(f"/tmp/vsrtune-test-{os.getpid()}-{node.name}")
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(int(major), int(minor)))
    try:
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        pytest.skip(f"this machine cannot open a macvtap's device: {error}")
    finally:
        path.unlink()


def send(frames: int, device: str, to: str) -> None:
    """Send frames into ``device`` for the MAC of ``to``."""
    target = bytes.fromhex((NET / to / "address").read_text().strip().replace(":", ""))
    frame = target + b"\x02\0\0\0\0\x01" + b"\x88\xb5" + bytes(46)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((device, 0))
        for _ in range(frames):
            sock.send(frame)


def frames_in(ring: int) -> int:
    """How many frames wait in the ring; takes them out."""
    count = 0
    while select.select([ring], [], [], 0.3)[0]:
        os.read(ring, 2048)
        count += 1
    return count


def test_an_open_ring_is_resized_and_resized_back(macvtap: str, journal: Journal) -> None:
    ring = open_ring(macvtap)
    try:
        ops, target = LiveSysOps(), length(macvtap)
        original = text(macvtap, "tx_queue_len")
        assert isinstance(original, int)
        assert original > 100
        apply(Plan((Action(target, original, 16, "t"),)), ops, journal)
        send(60, "v1", macvtap)
        assert frames_in(ring) == 16
        undo(ops, journal)
        send(60, "v1", macvtap)
        assert frames_in(ring) == 60
    finally:
        os.close(ring)


class Meddling(LiveCalls):
    """Something happens right ahead of a write."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def write(self, path: str, text: str) -> None:
        self._happens()
        super().write(path, text)


def test_a_device_deleted_under_the_write_has_vanished(macvtap: str, journal: Journal) -> None:
    gone, stays = length(macvtap), length("v1")
    original = text("v1", "tx_queue_len")

    def happens() -> None:
        if (NET / macvtap).exists():
            ip("link", "del", macvtap)

    plan = Plan(
        (Action(gone, text(macvtap, "tx_queue_len"), 50, "t"), Action(stays, original, 60, "t"))
    )
    result = apply(plan, LiveSysOps(calls=Meddling(happens)), journal)
    assert (result.vanished, result.failed) == ((gone,), ())
    assert text("v1", "tx_queue_len") == 60
    assert [e.target for e in journal.entries()] == [stays]


def test_a_device_deleted_before_undo_has_vanished(macvtap: str, journal: Journal) -> None:
    target = length(macvtap)
    apply(Plan((Action(target, text(macvtap, "tx_queue_len"), 50, "t"),)), LiveSysOps(), journal)
    ip("link", "del", macvtap)
    ip("link", "add", "link", "v0", "name", macvtap, "type", "macvtap", "mode", "bridge")
    ip("link", "set", macvtap, "txqueuelen", "50")
    result = undo(LiveSysOps(), journal)
    assert result.vanished == (target,)
    assert text(macvtap, "tx_queue_len") == 50, "the new device of that name is not ours"
    assert journal.entries() == ()


def test_a_renamed_device_is_restored(macvtap: str, journal: Journal) -> None:
    original = text(macvtap, "tx_queue_len")
    apply(Plan((Action(length(macvtap), original, 50, "t"),)), LiveSysOps(), journal)
    ip("link", "set", macvtap, "down")
    ip("link", "set", macvtap, "name", "lan0")
    undo(LiveSysOps(), journal)
    assert text("lan0", "tx_queue_len") == original


def test_a_length_the_kernel_refuses_fails_with_its_reason(macvtap: str, journal: Journal) -> None:
    original = text(macvtap, "tx_queue_len")
    plan = Plan((Action(length(macvtap), original, 1 << 33, "t"),))
    ((_, error),) = apply(plan, LiveSysOps(), journal).failed
    assert isinstance(error, WriteError)
    assert error.hint
    assert text(macvtap, "tx_queue_len") == original
    assert journal.entries() == ()


# -- threads

_CHILD = """
import threading, sys
stop = threading.Event()
ids = []
for _ in range(2):
    t = threading.Thread(target=stop.wait, daemon=True); t.start(); ids.append(t.native_id)
print(*ids, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], list[ThreadKey]]]:
    """A process with two threads that wait, and their identities."""
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        keys = []
        for tid in map(int, process.stdout.readline().split()):
            fields = Path(f"/proc/{process.pid}/task/{tid}/stat").read_text()
            start = int(fields.rpartition(")")[2].split()[19])
            keys.append(ThreadKey(process.pid, tid, start))
        yield process, keys
        process.kill()


def allowed(key: ThreadKey) -> str:
    for line in Path(f"/proc/{key.pid}/task/{key.tid}/status").read_text().splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return line.split()[1]
    raise AssertionError("no Cpus_allowed_list")


def test_affinity_and_class_go_and_come_back(
    child: tuple[subprocess.Popen[str], list[ThreadKey]], journal: Journal
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, for SCHED_FIFO")
    _, (first, second) = child
    ops = LiveSysOps()
    masks = [allowed(k) for k in (first, second)]
    cpus = CpuSet.parse(masks[0])
    if len(cpus) < 2:
        pytest.skip("needs 2 CPUs")
    one = CpuSet([max(cpus)])
    fifo = Sched(SchedClass.FIFO, 7, reset_on_fork=True)
    plan = Plan(
        (
            Action(ThreadAffinity("g", first, "a"), cpus, one, "t"),
            Action(ThreadSched("g", first, "a"), Sched(), fifo, "t"),
            Action(ThreadSched("g", second, "b"), Sched(), Sched(SchedClass.IDLE), "t"),
        )
    )
    assert apply(plan, ops, journal).failed == ()
    assert allowed(first) == str(one)
    shown = os.sched_getscheduler(first.tid)
    assert shown == os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    assert os.sched_getparam(first.tid).sched_priority == 7
    assert os.sched_getscheduler(second.tid) == os.SCHED_IDLE
    assert undo(ops, journal).failed == ()
    assert [allowed(k) for k in (first, second)] == masks
    assert [os.sched_getscheduler(k.tid) for k in (first, second)] == [os.SCHED_OTHER] * 2


def test_a_process_that_dies_takes_its_entries_along(
    child: tuple[subprocess.Popen[str], list[ThreadKey]], journal: Journal
) -> None:
    process, keys = child
    ops = LiveSysOps()
    plan = Plan(tuple(Action(ThreadSched("g", k, "t"), Sched(), Sched(nice=4), "t") for k in keys))
    apply(plan, ops, journal)
    journal.intent(Action(ThreadSched("g", keys[0], "t"), Sched(nice=4), Sched(nice=5), "t"))
    process.kill()
    process.wait()
    result = recover(ops, journal)
    assert result.vanished == (ThreadSched("g", keys[0], "t"),)
    assert undo(ops, journal).vanished == (ThreadSched("g", keys[1], "t"),)
    assert journal.entries() == ()


# -- cgroups


@pytest.fixture
def domain(
    child: tuple[subprocess.Popen[str], list[ThreadKey]],
) -> Iterator[tuple[str, list[ThreadKey]]]:
    """A threaded domain as libvirt makes it: TEST/emulator holds the process."""
    process, keys = child
    own = parse_cgroup(Path("/proc/self/cgroup").read_text())
    if own is None:
        pytest.skip("the cpuset controller of this machine is on cgroup v1")
    mount = Path("/sys/fs/cgroup")
    name = f"vsrtune-test-{os.getpid()}"
    top = mount / name
    try:
        top.mkdir()
    except OSError as error:
        pytest.skip(f"this machine allows no cgroups: {error}")
    emulator = top / "emulator"
    try:
        if "cpuset" not in (mount / "cgroup.subtree_control").read_text().split():
            pytest.skip("the cpuset controller is not delegated below the root cgroup")
        (top / "cgroup.procs").write_text(str(process.pid))
        emulator.mkdir()
        (emulator / "cgroup.type").write_text("threaded")
        (top / "cgroup.subtree_control").write_text("+cpuset")
        for thread in (process.pid, *(k.tid for k in keys)):
            (emulator / "cgroup.threads").write_text(str(thread))
        yield name, keys
    finally:
        process.kill()
        process.wait()
        for path in (top / "vsrtune", emulator, top):
            if path.exists():
                path.rmdir()


def test_a_thread_moves_alone_and_keeps_its_mask(
    domain: tuple[str, list[ThreadKey]], journal: Journal
) -> None:
    name, (first, second) = domain
    ops = LiveSysOps()
    online = ops.online()
    if len(online) < 2:
        pytest.skip("needs 2 CPUs")
    one = CpuSet([max(online)])
    os.sched_setaffinity(first.tid, one)
    ours, emulator = f"{name}/vsrtune", f"{name}/emulator"
    plan = Plan(
        (
            Action(CgroupDir("g", ours), False, True, "t"),
            Action(ThreadCgroup("g", first, "a"), emulator, ours, "t"),
            Action(ThreadCgroup("g", second, "b"), emulator, ours, "t"),
        )
    )
    assert apply(plan, ops, journal).failed == ()
    mount = Path("/sys/fs/cgroup")
    assert (mount / ours / "cgroup.type").read_text() == "threaded\n"
    moved = set((mount / ours / "cgroup.threads").read_text().split())
    assert moved == {str(first.tid), str(second.tid)}
    assert str(first.pid) in (mount / emulator / "cgroup.threads").read_text().split()
    assert (allowed(first), allowed(second)) == (str(one), str(online))
    (mount / emulator / "cpuset.cpus").write_text("0")
    assert allowed(second) == str(online), "the emulator's cpuset does not reach it"
    (mount / emulator / "cpuset.cpus").write_text(str(online))
    assert undo(ops, journal).failed == ()
    assert not (mount / ours).exists()
    assert (allowed(first), allowed(second)) == (str(one), str(online))


def test_a_populated_cpuset_is_emptied(domain: tuple[str, list[ThreadKey]]) -> None:
    """What the kernel refuses to do in one step, and why it takes more."""
    name, keys = domain
    emulator = Path("/sys/fs/cgroup") / name / "emulator"
    inside = (emulator / "cgroup.threads").read_text()
    masks = [allowed(k) for k in keys]
    (emulator / "cpuset.cpus").write_text("0")
    with pytest.raises(OSError, match="No space left on device"):
        (emulator / "cpuset.cpus").write_text("\n")
    assert [allowed(k) for k in keys] == ["0", "0"]
    clear(LiveRoot(), LiveCalls(), f"{name}/emulator", "test")
    assert (emulator / "cpuset.cpus").read_text().strip() == ""
    assert set((emulator / "cgroup.threads").read_text().split()) == set(inside.split())
    assert [allowed(k) for k in keys] == masks
    assert sorted(p.name for p in emulator.parent.iterdir() if p.is_dir()) == ["emulator"]
