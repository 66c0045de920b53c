"""Class deadline on a real kernel: budgets in force, and nothing left behind."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import deadlinehelp
import hoststate
import labhelp
import pytest
from deadlinehelp import BUDGET, Engine, budget, policy, problems
from labhelp import LabGuest

from vsrtune.core.errors import WriteError
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.host.procfs import parse_stat
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.model.journal_records import Entry
from vsrtune.model.targets import Partition, PartitionState, ThreadSched

CYCLES = 20
# Milliseconds.
PERIOD = 20
LONG = "{class: deadline, runtime: 200ms, period: 1s}"


@pytest.fixture(scope="module", autouse=True)
def debugfs() -> None:
    """The kernel's books."""
    debug = Path("/sys/kernel/debug")
    if not (debug / "sched").exists():
        subprocess.run(["mount", "-t", "debugfs", "debugfs", str(debug)], check=True)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def unbooked(restored: None) -> Iterator[None]:
    """The test fails when a cgroup, a partition or bandwidth is not as it was."""
    before = deadlinehelp.cpusets()
    assert deadlinehelp.nothing_booked()
    yield
    labhelp.reset()
    assert deadlinehelp.cpusets() == before
    assert deadlinehelp.nothing_booked(), deadlinehelp.books()


def test_budgets_of_vcpu_and_workers(
    unbooked: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    """The whole way, with the command: plan, apply, show, verify, undo."""
    text = policy(
        libvirt_guest,
        "{class: deadline, bandwidth: 80%, period: 10ms, deadline: 9ms}",
        "{class: deadline, runtime: 3ms, period: 10ms}",
    )
    (labhelp.POLICIES / "test.yaml").write_text(text)
    shown = labhelp.vsrtune("apply", "-v").stdout
    deadlinehelp.wake(libvirt_guest)
    Engine().tune(libvirt_guest, text)
    wanted = {
        "vcpu": ({1}, budget(8, 10, 9)),
        "vhost": ({2}, budget(3, 10)),
    }
    assert problems(libvirt_guest, wanted) == []
    assert ("tight" in shown) == deadlinehelp.exclusive()
    deadlinehelp.forwards(libvirt_guest)
    for tid, cpu in (
        (*libvirt_guest.vcpus().values(), 1),
        *((t, 2) for t in libvirt_guest.workers()),
    ):
        assert hoststate.last_cpu(tid) == cpu
    own = deadlinehelp.fair_server()
    assert deadlinehelp.books()[1] - 8 * 2**20 // 10 in (0, own)
    assert deadlinehelp.books()[2] - 2 * (3 * 2**20 // 10) in (0, own)
    assert labhelp.vsrtune("verify").stdout.startswith("no drift")
    shown = labhelp.vsrtune("show").stdout
    assert "Budgets" in shown
    assert "Root domains" in shown
    labhelp.vsrtune("undo")


@labhelp.one_release("the kernel that books a sleeping thread the longest")
def test_twenty_cycles_leave_nothing_booked(
    unbooked: None, libvirt_guest: LabGuest, irq_cpus: set[int], engine: Engine
) -> None:
    """Most threads sleep when they leave the class, which is when bandwidth is lost."""
    text = policy(libvirt_guest, BUDGET, BUDGET)
    before = deadlinehelp.cpusets()
    threads = libvirt_guest.data_plane()
    for cycle in range(CYCLES):
        engine.apply(text)
        if cycle % 5 == 0:
            engine.tune(libvirt_guest, text)
            wanted = {"vcpu": ({1}, budget(2, 10)), "vhost": ({2}, budget(2, 10))}
            assert problems(libvirt_guest, wanted) == []
        done = engine.undo()
        assert (done.failed, done.left) == ((), ()), cycle
        assert deadlinehelp.nothing_booked(), (cycle, deadlinehelp.books())
        assert all(hoststate.sched(t).startswith("policy=0 flags=0 ") for t in threads)
    assert deadlinehelp.cpusets() == before
    # A thread that the kernel still held for throttled would never run again.
    engine.tune(libvirt_guest, text)
    wanted = {"vcpu": ({1}, budget(2, 10)), "vhost": ({2}, budget(2, 10))}
    assert problems(libvirt_guest, wanted) == []
    deadlinehelp.forwards(libvirt_guest)


@labhelp.one_release("where a partition is made", "trixie")
def test_vcpu_and_workers_share_a_cpu(
    unbooked: None, libvirt_guest: LabGuest, irq_cpus: set[int], engine: Engine
) -> None:
    text = policy(
        libvirt_guest,
        "{class: deadline, bandwidth: 50%, period: 20ms}",
        "{class: deadline, bandwidth: 15%, period: 20ms}",
        "1",
        "1",
    )
    engine.tune(libvirt_guest, text)
    assert (
        problems(libvirt_guest, {"vcpu": ({1}, budget(10, 20)), "vhost": ({1}, budget(3, 20))})
        == []
    )
    deadlinehelp.forwards(libvirt_guest)
    too_much = text.replace("15%", "30%")
    with engine.journal() as journal:
        (refusal,) = engine.plan(too_much, journal).refusals
    most = "90 % (95 % less 5 % of the fair_server)" if deadlinehelp.fair_server() else "95 %"
    rest = "10 %" if deadlinehelp.fair_server() else "15 %"
    assert f"asks 30 % of CPU 1, of which {rest} remains beside" in refusal.reason
    assert refusal.reason.endswith(f"the kernel admits {most}")


@labhelp.one_release("when a thread is asked again")
def test_a_sleeping_thread_is_pending_until_it_has_run(
    unbooked: None, libvirt_guest: LabGuest, irq_cpus: set[int], engine: Engine
) -> None:
    workers = libvirt_guest.workers()
    head = f'guest: "{libvirt_guest.ref}"\nprofile: none\n'
    place = f"{head}cpus: {{irq: 0, vhost: 1}}\n"
    engine.apply(place)
    deadlinehelp.wake(libvirt_guest)
    assert {hoststate.last_cpu(t) for t in workers} == {1}
    time.sleep(deadlinehelp.QUIET)
    # The vcpu takes CPU 1 and the workers are given CPU 2, on which they have not run.
    text = policy(libvirt_guest, BUDGET, BUDGET)
    _, result = engine.apply(text)
    waiting = {a.target.thread.tid for a, _ in result.pending if isinstance(a.target, ThreadSched)}
    assert result.failed == ()
    assert set(workers) <= waiting
    told = [str(error) for _, error in result.pending]
    wanted = "the thread has not run since it was given CPUs 2 (last on CPU 1)"
    assert len([text for text in told if wanted in text]) == len(workers)
    with engine.journal() as journal:
        again = engine.plan(text, journal)
    assert len([s for s in again.skipped if s.pending]) >= len(workers)
    engine.tune(libvirt_guest, text)
    assert problems(libvirt_guest, {"vhost": ({2}, budget(2, 10))}) == []


def test_virsh_cannot_break_the_partition(
    untuned: None, libvirt_guest: LabGuest, irq_cpus: set[int], engine: Engine
) -> None:
    text = policy(libvirt_guest, BUDGET, BUDGET)
    engine.tune(libvirt_guest, text)
    wanted = {"vcpu": ({1}, budget(2, 10)), "vhost": ({2}, budget(2, 10))}
    everywhere = f"0-{labhelp.lab_cpus() - 1}"
    for cpus, refused in (("0", True), (everywhere, False)):
        pin = ("virsh", "vcpupin", libvirt_guest.name, "0", cpus, "--live")
        pinned = labhelp.sh(*pin, check=False)
        # One that has all CPUs of its root domain is no restriction of the thread.
        assert ("Device or resource busy" in pinned.stderr) == refused, pinned
    labhelp.sh("virsh", "emulatorpin", libvirt_guest.name, everywhere, "--live", check=False)
    assert problems(libvirt_guest, wanted) == []
    states = {
        entry.target.path: LiveSysOps().read(entry.target)
        for entry in _entries(engine)
        if isinstance(entry.target, Partition)
    }
    assert set(states.values()) == {PartitionState("root")}
    engine.undo()
    assert deadlinehelp.nothing_booked(), deadlinehelp.books()


@pytest.fixture
def strangers() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Programs that something bound to CPUs, by these."""
    started = {
        cpus: subprocess.Popen(["taskset", "--cpu-list", cpus, "sleep", "infinity"])
        for cpus in ("0", "1", "1-2")
    }
    for cpus, program in started.items():
        labhelp.wait_for(lambda p=program: hoststate.comm(p.pid) == "sleep", f"{cpus} is bound")
    yield started
    for program in started.values():
        program.kill()
        program.wait()


def test_masks_of_other_programs_come_back(
    unbooked: None,
    libvirt_guest: LabGuest,
    irq_cpus: set[int],
    engine: Engine,
    strangers: dict[str, subprocess.Popen[bytes]],
) -> None:
    """Before 6.2 a partition costs all threads of the host their masks, when it is made and when it
    ends. Later kernels remember masks that programs were given, and so not those of interrupts'
    threads."""
    before = masks()

    def now() -> dict[str, str]:
        return {
            cpus: hoststate.status_field(p.pid, "Cpus_allowed_list")
            for cpus, p in strangers.items()
        }

    text = policy(libvirt_guest, BUDGET, BUDGET, "2", "2")
    engine.apply(text)
    assert any(isinstance(e.target, Partition) for e in _entries(engine))
    assert now() == {"0": "0", "1": "1", "1-2": "1"}
    done = engine.undo()
    assert (done.failed, done.left) == ((), ())
    assert now() == {cpus: cpus for cpus in strangers}
    after = masks()
    assert {t: (before[t], after[t]) for t in before if after.get(t, before[t]) != before[t]} == {}


def masks() -> dict[tuple[int, int], str]:
    """The CPUs of every thread that somebody may bind, by its number and start."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        try:
            stat = parse_stat((path / "stat").read_text())
            mask = hoststate.status_field(stat.tid, "Cpus_allowed_list")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if not stat.bound and (deadlinehelp.forgetful() or not stat.kthread):
            found[stat.tid, stat.start_time] = mask
    return found


def _entries(engine: Engine) -> tuple[Entry, ...]:
    with engine.journal() as journal:
        return journal.entries()


def test_a_partition_taken_away_is_made_anew(
    unbooked: None, libvirt_guest: LabGuest, irq_cpus: set[int], engine: Engine
) -> None:
    text = policy(libvirt_guest, BUDGET, BUDGET)
    engine.tune(libvirt_guest, text)
    paths = [e.target.path for e in _entries(engine) if isinstance(e.target, Partition)]
    for path in paths:
        (deadlinehelp.CGROUP / path / "cpuset.cpus.partition").write_text("member\n")
    engine.tune(libvirt_guest, text)
    wanted = {"vcpu": ({1}, budget(2, 10)), "vhost": ({2}, budget(2, 10))}
    assert problems(libvirt_guest, wanted) == []
    for path in paths:
        state = (deadlinehelp.CGROUP / path / "cpuset.cpus.partition").read_text()
        assert state.strip() == "root"


def test_a_budget_of_the_whole_guest_is_divided(
    unbooked: None, libvirt_guest: LabGuest, irq_cpus: set[int], engine: Engine
) -> None:
    """40 % of a CPU for all threads together, then twice as much."""
    threads = len(libvirt_guest.data_plane())
    for share in (40, 80):
        text = (
            f'guest: "{libvirt_guest.ref}"\nprofile: none\n'
            "cpus: {irq: 0, vcpu: 1, vhost: 2}\n"
            f"scheduler: {{budget: {{cpu: {share}%, period: {PERIOD}ms}}}}\n"
        )
        engine.tune(libvirt_guest, text)
        part = share * PERIOD * 10 // threads / 1000
        wanted = {"vcpu": ({1}, budget(part, PERIOD)), "vhost": ({2}, budget(part, PERIOD))}
        assert problems(libvirt_guest, wanted) == []
    deadlinehelp.forwards(libvirt_guest)
    engine.undo()


@labhelp.one_release("when a thread is asked again", "trixie")
def test_the_daemon_retries_pending_threads_and_restores_on_stop(
    unbooked: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    (labhelp.POLICIES / "test.yaml").write_text(policy(libvirt_guest, BUDGET, BUDGET))
    labhelp.start()
    deadlinehelp.wake(libvirt_guest)
    wanted = {"vcpu": ({1}, budget(2, 10)), "vhost": ({2}, budget(2, 10))}
    labhelp.wait_for(lambda: not problems(libvirt_guest, wanted), "all threads are DEADLINE", 30)
    labhelp.wait_for(lambda: "1 guest tuned" in labhelp.status_text(), "tuned", 20)
    labhelp.stop()


@labhelp.one_release("how errors are told")
def test_what_the_kernel_refuses_is_told(
    untuned: None, libvirt_guest: LabGuest, irq_cpus: set[int], engine: Engine
) -> None:
    """A mask that is no root domain, a budget that does not fit, a partition that the
    kernel calls invalid."""
    ops = LiveSysOps()
    thread = next(
        t for g in engine.observe().guests for t in g.threads
        if t.key.tid == libvirt_guest.vcpus()[0]
    )  # fmt: skip
    target = ThreadSched(libvirt_guest.ref, thread.key, "vcpu 0")
    asked = Sched(
        SchedClass.DEADLINE,
        reset_on_fork=True,
        runtime_ns=5_000_000,
        deadline_ns=10_000_000,
        period_ns=10_000_000,
    )
    head = f'guest: "{libvirt_guest.ref}"\nprofile: none\n'
    engine.apply(f"{head}cpus: {{irq: 0, vcpu: 1, vhost: 2}}\n")
    deadlinehelp.wake(libvirt_guest)
    with pytest.raises(WriteError) as mask:
        ops.write(target, asked)
    assert "failed with EPERM because" in str(mask.value)
    assert "its mask is not a whole root domain" in str(mask.value)
    engine.undo()
    text = policy(libvirt_guest, BUDGET, BUDGET, "1", "1")
    engine.tune(libvirt_guest, text)
    with pytest.raises(WriteError) as full:
        ops.write(target, replace(asked, runtime_ns=9_000_000))
    assert "failed with EBUSY because admission control" in str(full.value)
    engine.undo()
    engine.tune(libvirt_guest, text)
    if not deadlinehelp.exclusive():
        return
    # Nothing stands between the lists of libvirt and the partition without exclusive CPUs
    # of the emulator's, and what libvirt writes then makes it invalid.
    (path,) = [e.target.path for e in _entries(engine) if isinstance(e.target, Partition)]
    libvirts = deadlinehelp.CGROUP / Path(path).parent
    (libvirts / "emulator" / "cpuset.cpus").write_text("0\n")
    (libvirts / "emulator" / "cpuset.cpus.exclusive").write_text("\n")
    (libvirts / "emulator" / "cpuset.cpus").write_text("0-1\n")
    assert "invalid" in (libvirts / "vcpu0" / "cpuset.cpus.partition").read_text()
    with pytest.raises(WriteError) as invalid:
        ops.write(Partition(libvirt_guest.ref, path), PartitionState("root"))
    assert "the kernel made no partition of it: root invalid (" in str(invalid.value)
    engine.tune(libvirt_guest, text)
    shared = {"vcpu": ({1}, budget(2, 10)), "vhost": ({1}, budget(2, 10))}
    assert problems(libvirt_guest, shared) == []
    engine.undo()
    # The next start of the daemon would take it for what its undo leaves: none follows.
    (libvirts / "emulator" / "cpuset.cpus").write_text(f"0-{labhelp.lab_cpus() - 1}\n")


def test_killed_between_the_class_and_the_root_domain(
    unbooked: None, libvirt_guest: LabGuest, irq_cpus: set[int], engine: Engine
) -> None:
    """A thread's bandwidth leaves the books a period after it left the class: who takes
    the root domain away before that leaves the books wrong."""
    text = policy(libvirt_guest, LONG, LONG)
    engine.tune(libvirt_guest, text)
    # The threads leave first.
    assert labhelp.in_child(Engine().undo, len(libvirt_guest.data_plane()))
    sched = [hoststate.sched(t) for t in libvirt_guest.data_plane()]
    assert all(s.startswith("policy=0 ") for s in sched), sched
    done = Engine().undo()
    assert (done.failed, done.left) == ((), ())
    assert deadlinehelp.nothing_booked(), deadlinehelp.books()


@labhelp.one_release("where a partition is made", "trixie")
def test_two_guests_share_a_cpu(
    unbooked: None, guests: list[LabGuest], irq_cpus: set[int], engine: Engine
) -> None:
    """Their threads cannot be in one cgroup but their slice's."""
    routers = [g for g in guests if g.kind == "libvirt"]
    if len(routers) < 2:
        pytest.skip("needs two libvirt routers, which another boot has")
    # All threads of both take 60 % of the CPU.
    each = 60 // sum(len(g.data_plane()) for g in routers)
    runtime = each * PERIOD / 100
    small = f"{{class: deadline, bandwidth: {each}%, period: {PERIOD}ms}}"
    texts = [policy(g, small, small, "1", "1") for g in routers]
    engine.tune_all(routers, texts)
    for guest in routers:
        wanted = dict.fromkeys(("vcpu", "vhost"), ({1}, budget(runtime, PERIOD)))
        assert problems(guest, wanted) == []
        deadlinehelp.forwards(guest)
