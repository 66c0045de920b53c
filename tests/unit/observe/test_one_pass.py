"""A look at some guests around what is known: it must give what a look at everything gives.

Recorded hosts are changed in memory at random, as guests change on a host: threads are
pinned, get another class, come and go; devices change; guests start, stop and start again.
"""

from __future__ import annotations

import errno
import os
import random
import re
from dataclasses import replace

import pytest
import recorded_hosts
from moving_host import MovingHost

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.filesystem import LiveRoot
from vsrtune.host.recorded import load
from vsrtune.model.guest import Confidence, Guest, Role, Sched, SchedClass, Thread, ThreadKey
from vsrtune.model.plan import Place
from vsrtune.model.snapshot import Problem, Snapshot
from vsrtune.observe.host import ProblemLog
from vsrtune.observe.incremental import recheck
from vsrtune.observe.observer import LONG_ROUND, ROUND, SELDOM, Observer
from vsrtune.observe.trust import Standing

HOSTS = ["trixie-e1000e", "trixie-napi", "trixie-veth-multiqueue", "bookworm-veth-plain"]


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> MovingHost:
    return MovingHost(load(recorded_hosts.file(request.param)))


@pytest.mark.parametrize("seed", range(3))
def test_a_look_at_the_guests_that_changed_is_a_look_at_everything(
    host: MovingHost, seed: int
) -> None:
    rng = random.Random(seed)
    some = Observer(host.root, host)
    some.observe()
    for _ in range(12):
        names = frozenset(host.change(rng) for _ in range(rng.randint(1, 3)))
        part = some.observe_some(names)
        assert part.names is None or names <= part.names
        assert part.snapshot == Observer(host.root, host).observe(), host.done[-3:]
        refreshed = [g for g in part.snapshot.guests if part.names is None or g.ref in part.names]
        assert list(part.guests) == refreshed


def test_one_guest_is_looked_at_alone(host: MovingHost) -> None:
    observer = Observer(host.root, host)
    before = observer.observe()
    name = host.running[0]
    host.read.clear()
    part = observer.observe_some(frozenset([name]))
    assert part.snapshot == before
    alone = [g for g in before.guests if g.name != name]
    if part.names is not None:
        assert part.names == {name}
        assert [g.name for g in part.guests] == [name]
        # Of the others no more than who they are.
        who = {f"/proc/{g.pid}/task/{g.pid}/{name}" for g in alone for name in ("status", "cgroup")}
        tasks = tuple(f"/proc/{g.pid}/task" for g in alone)
        assert not [p for p in host.read if p.startswith(tasks) and p not in who]


@pytest.fixture
def named(host: MovingHost) -> tuple[Observer, Guest, Thread]:
    """An observer, a guest of libvirt's and a thread of it whose class, CPUs and cgroup have
    places in the recording."""
    observer = Observer(host.root, host)
    guest = next(g for g in observer.observe().guests if g.source == "libvirt")
    return observer, guest, guest.by_role(Role.VCPU)[0]


def test_a_thread_that_somebody_changed_is_read_alone(
    host: MovingHost, named: tuple[Observer, Guest, Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, guest, vcpu = named
    task = f"/proc/{vcpu.key.pid}/task/{vcpu.key.tid}"
    host.answers.sched[str(vcpu.key.tid)] = Sched(SchedClass.FIFO, 7)
    write(host, f"{task}/status", r"Cpus_allowed_list:.*", "Cpus_allowed_list:\t1")
    now = Observer(host.root, host).observe()
    host.read.clear()
    monkeypatch.setattr(host, "domain", None)
    places: frozenset[Place] = frozenset([("cpus", vcpu.key.tid), ("scheduler", vcpu.key.tid)])
    part = observer.observe_some(frozenset([guest.name]), places)
    assert part.names == {guest.name}
    assert part.snapshot == now
    assert not [path for path in host.read if not path.startswith(f"{task}/")]


def test_a_device_whose_queue_somebody_changed_is_read_alone(
    host: MovingHost, named: tuple[Observer, Guest, Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, guest, _ = named
    device = guest.interfaces[0].target
    host._queue(guest.name, random.Random(1))
    now = Observer(host.root, host).observe()
    host.read.clear()
    monkeypatch.setattr(host, "domain", None)
    part = observer.observe_some(frozenset([guest.name]), frozenset([("txqueuelen", device)]))
    assert part.names == {guest.name}
    assert part.snapshot == now
    assert not [path for path in host.read if f"/net/{device}/" not in path]


@pytest.mark.parametrize("what", ["gone", "cgroup", "device", "index", "another's", "delicate"])
def test_where_a_thread_alone_does_not_suffice_the_guest_is_read(
    host: MovingHost, named: tuple[Observer, Guest, Thread], what: str
) -> None:
    observer, guest, vcpu = named
    tid = vcpu.key.tid
    places: set[Place] = {("cpus", tid)}
    if what == "gone":
        host._take(f"/proc/{guest.pid}/task/{tid}")
        host._list(f"/proc/{guest.pid}/task", remove=str(tid))
    elif what == "cgroup":
        path = f"/proc/{guest.pid}/task/{tid}/cgroup"
        host.texts[path] = host.texts[f"/proc/{guest.pid}/task/{guest.pid}/cgroup"]
    elif what == "device":
        places.add(("napi-threaded", guest.interfaces[0].target))
    elif what == "index":
        places.add(("txqueuelen", guest.interfaces[0].target))
        sysfs = f"/sys/devices/virtual/net/{guest.interfaces[0].target}"
        write(host, f"{sysfs}/uevent", r"IFINDEX=.*", "IFINDEX=4711")
    elif what == "another's":
        places.add(("cpus", 1))
    elif observer._known is not None:
        observer._known = replace(observer._known, partitioned=True)
    host._queue(guest.name, random.Random(1))
    part = observer.observe_some(frozenset([guest.name]), frozenset(places))
    assert part.snapshot == Observer(host.root, host).observe()


def test_processes_that_cannot_be_listed_are_a_problem_only(
    host: MovingHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Observer(host.root, host)
    observer.observe()

    def processes() -> list[tuple[str, int]]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc")

    monkeypatch.setattr(host.root, "processes", processes)
    part = observer.observe_some(frozenset(["started now"]))
    assert part.names is None
    assert Problem("proc", "/proc: Too many open files") in part.snapshot.problems


def settings(snapshot: Snapshot) -> set[tuple[ThreadKey, Sched, CpuSet]]:
    """Classes and CPUs of the threads that a policy can name."""
    threads = (t for g in snapshot.guests for t in g.threads if t.role is not Role.WORKER)
    return {(t.key, t.sched, t.affinity) for t in threads}


@pytest.mark.parametrize(("few", "seldom"), [(0, 1), (0, SELDOM), (16, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_a_patrol_finds_what_nobody_told(
    host: MovingHost, seed: int, few: int, seldom: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads and guests that come and go at the next patrol, and with few guests also their
    settings; settings of many guests within a round, all else within a long one. Where the kernel
    tells of changes, rounds are longer."""
    monkeypatch.setattr("vsrtune.observe.observer.FEW", few)
    rng = random.Random(seed)
    observer = Observer(host.root, host, told=lambda: seldom > 1)
    observer.observe()
    for _ in range(4):
        done = host.change(rng)
        snapshot = observer.observe_unannounced().snapshot
        now = Observer(host.root, host).observe()
        if host.done[-1][0] in ("start", "stop", "hotplug", "unplug"):
            assert snapshot.guests == now.guests, (done, host.done[-1])
        for _ in range(0 if few else ROUND * seldom):
            snapshot = observer.observe_unannounced().snapshot
        assert settings(snapshot) == settings(now)
        for _ in range(LONG_ROUND * seldom):
            snapshot = observer.observe_unannounced().snapshot
        assert snapshot == now


@pytest.mark.parametrize("host", ["trixie-veth-multiqueue"], indirect=True)
@pytest.mark.parametrize("told", [False, True])
def test_threads_are_read_half_as_often_while_the_kernel_tells_of_changes(
    host: MovingHost, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsrtune.observe.observer.FEW", 0)
    observer = Observer(host.root, host, told=lambda: told)
    vcpu = observer.observe().guests[0].by_role(Role.VCPU)[0].key
    host.read.clear()
    for _ in range(ROUND * SELDOM):
        observer.observe_unannounced()
    assert host.read.count(f"/proc/{vcpu.pid}/task/{vcpu.tid}/status") == (1 if told else SELDOM)


def write(host: MovingHost, path: str, old: str, new: str) -> None:
    host.texts[path] = re.sub(old, new, host.texts[path])


@pytest.mark.parametrize("host", ["trixie-e1000e"], indirect=True)
@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("/proc/sys/kernel/sched_rt_runtime_us", r"\d+", "900000"),
        ("/sys/devices/system/cpu/online", r"0-\d", "0-1"),
    ],
)
def test_a_patrol_finds_a_change_of_the_host(
    host: MovingHost, path: str, old: str, new: str
) -> None:
    observer = Observer(host.root, host)
    observer.observe()
    write(host, path, old, new)
    for _ in range(ROUND):
        part = observer.observe_unannounced()
    assert part.snapshot == Observer(host.root, host).observe()


@pytest.mark.parametrize("host", ["trixie-veth-multiqueue"], indirect=True)
def test_a_patrol_reads_counters_and_does_not_re_read_their_guests(host: MovingHost) -> None:
    """What threads ran and what rings dropped; but a worker of which a trace could tell more is
    re-read once it has run."""
    observer = Observer(host.root, host)
    before = observer.observe()
    guest = next(g for g in before.guests if g.source == "libvirt")
    (vcpu, *_), (worker, *_) = guest.by_role(Role.VCPU), guest.by_role(Role.VHOST)
    name, ran = guest.interfaces[0].target, vcpu.cpu_ns + 5_000_000
    write(host, f"/proc/{vcpu.key.pid}/task/{vcpu.key.tid}/schedstat", r"^\d+", str(ran))
    host.texts["/proc/net/dev"] = f"head\nhead\n{name}: 1 2 0 41 0 0 0 0 3 4 0 0 0 0 0 0\n"
    part = observer.observe_unannounced()
    assert (part.names, part.guests) == (frozenset(), ())
    now = next(g for g in part.snapshot.guests if g.ref == guest.ref)
    assert {t.key: t.cpu_ns for t in now.threads}[vcpu.key] == ran
    assert now.interfaces[0].ring_drops == 41
    assert worker.confidence is not Confidence.EXACT
    path = f"/proc/{worker.key.pid}/task/{worker.key.tid}/schedstat"
    write(host, path, r"^\d+", str(worker.cpu_ns + 1))
    assert observer.observe_unannounced().names == {guest.ref}


@pytest.mark.parametrize("host", ["trixie-veth-multiqueue"], indirect=True)
@pytest.mark.parametrize("known", ["everything", "no vcpu", "nothing"])
@pytest.mark.parametrize("standing", [Standing.LISTED, Standing.FOREIGN])
def test_a_guest_of_which_something_is_not_known_is_re_read(
    host: MovingHost, known: str, standing: Standing
) -> None:
    """A monitor that was busy may answer now; a guest that could not be read may be."""
    observer = Observer(host.root, host)
    guest = next(g for g in observer.observe().guests if g.source == "libvirt")
    others = tuple(t for t in guest.threads if t.role is not Role.VCPU)
    cache = observer._pass().whole()
    held = cache.held[guest.pid]
    shown = {"everything": guest, "no vcpu": replace(guest, threads=others), "nothing": None}
    held = replace(held, process=replace(held.process, standing=standing), guest=shown[known])
    _, due = recheck(replace(cache, held={guest.pid: held}), host.root)
    assert bool(due) is (known != "everything" and standing is not Standing.FOREIGN)


@pytest.mark.parametrize("pid", [40, 4000])
@pytest.mark.parametrize("host", ["trixie-veth-multiqueue"], indirect=True)
def test_a_guest_whose_command_line_somebody_has_copied(host: MovingHost, pid: int) -> None:
    """The copy has libvirt's UUID and all else that libvirt leaves in a command line, and its
    user: nobody of whom a plain guest could be."""
    (before,) = [g for g in Observer(host.root, host).observe().guests if g.source == "libvirt"]
    host.copy(before.name, pid, "user.slice/user-0.slice/session-1.scope")
    observer = Observer(host.root, host)
    snapshot = observer.observe()
    guests = {g.pid: g for g in snapshot.guests}
    assert guests[before.pid] == before
    assert pid not in guests
    assert [s.pid for s in snapshot.strangers] == [pid]
    assert observer.observe_some(frozenset([before.name])).snapshot == observer.observe()


def test_processes_of_this_host_keep_their_number() -> None:
    """What tells a process from a later one of the same pid does not change while it runs."""
    root = LiveRoot()
    first = dict(root.processes())
    assert first.items() & dict(root.processes()).items()
    assert "1" in first and root.link_count("/proc/self/task") >= 3


def test_content_that_no_reader_expects_is_a_problem_to_report() -> None:
    log = ProblemLog()
    assert log.attempt("cpus", lambda: int("none"), 7) == 7
    (problem,) = log.problems
    assert problem.reader == "cpus"
    assert problem.what.startswith("unexpected content: invalid literal for int()")
    assert problem.what.endswith("`vsrtune record`")


def test_a_reader_that_calls_itself_too_often_ends_no_pass() -> None:
    def deeper() -> int:
        return deeper()

    log = ProblemLog()
    assert log.attempt("guest vr1", deeper, 7) == 7
    assert [p.reader for p in log.problems] == ["guest vr1"]
