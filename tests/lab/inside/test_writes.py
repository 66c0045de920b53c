"""The writing half alone: every kind of action on a real guest, and back to the letter.

Plans are made by hand here, not by the planner. The host is compared with hoststate,
which reads it by itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import Lasting
from vsrtune.execute.executor import apply, recover, undo
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Sched, SchedClass, ThreadKey
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import (
    CgroupDir,
    EmulatorPin,
    Pin,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TxQueueLen,
    Value,
    VcpuPin,
)

CGROUP = Path("/sys/fs/cgroup")
BOOT = "lab"
FIFO = Sched(SchedClass.FIFO, 10, reset_on_fork=True)
OWNER = CpuSet([0])
# The unit tests kill at every write of an imitated host; here every seventh is enough
# to show that the real one behaves like it. LAB_STRIDE=1 tries all of them.
STRIDE = int(os.environ.get("LAB_STRIDE") or "7")


@pytest.fixture(autouse=True)
def untuned() -> None:
    """Each test here ends on the host it began on; there is no daemon to stop after it."""
    labhelp.sh("systemctl", "stop", "vsrtune", check=False)


def same_as(before: dict[str, str], guest: LabGuest) -> None:
    changed = hoststate.differences(before, hoststate.capture())
    assert changed == [], "\n".join([f"{guest.name} is not restored:", *changed])


def key(guest: LabGuest, tid: int) -> ThreadKey:
    """The identity of a thread; a kernel thread is its own process."""
    pid = guest.pid if Path(f"/proc/{guest.pid}/task/{tid}").exists() else tid
    fields = Path(f"/proc/{tid}/stat").read_text().rpartition(")")[2].split()
    return ThreadKey(pid, tid, int(fields[19]))


def scope(guest: LabGuest) -> str:
    """libvirt's threaded domain of the guest, below the cgroup mount."""
    return hoststate.cgroup(guest.pid).lstrip("/").rpartition("/")[0]


def wanted(guest: LabGuest) -> list[tuple[Target, Value]]:
    """Every kind of change that the guest allows."""
    ref = guest.ref
    last = labhelp.lab_cpus() - 1
    work = CpuSet([last])
    changes: list[tuple[Target, Value]] = []
    workers = [(t, key(guest, t)) for t in guest.workers()]
    if guest.kind == "libvirt":
        uuid = hoststate.virsh("domuuid", guest.name)
        ours = f"{scope(guest)}/vsrtune"
        changes.append((CgroupDir(ref, ours), True))
        changes += [(ThreadCgroup(ref, k, f"vhost {t}"), ours) for t, k in workers]
        emulator = EmulatorPin(ref, uuid, key(guest, guest.pid))
        changes.append((emulator, Pin(OWNER, str(OWNER))))
        for number, tid in guest.vcpus().items():
            pin = VcpuPin(ref, uuid, number, key(guest, tid))
            changes.append((pin, Pin(work, str(work))))
    else:
        emulator_mask = ThreadAffinity(ref, key(guest, guest.pid), "emulator")
        changes.append((emulator_mask, OWNER))
        for number, tid in guest.vcpus().items():
            changes.append((ThreadAffinity(ref, key(guest, tid), f"vcpu {number}"), work))
    changes += [(ThreadAffinity(ref, k, f"vhost {t}"), work) for t, k in workers]
    for number, tid in guest.vcpus().items():
        changes.append((ThreadSched(ref, key(guest, tid), f"vcpu {number}"), FIFO))
    changes += [(ThreadSched(ref, k, f"vhost {t}"), FIFO) for t, k in workers]
    for nic in (0, 1):
        device = guest.device(nic)
        index = int(labhelp.text(f"/sys/class/net/{device}/ifindex"))
        changes.append((TxQueueLen(ref, device, index), 100))
    return changes


def make_plan(guest: LabGuest) -> Plan:
    ops = LiveSysOps()
    return Plan(tuple(Action(t, ops.read(t), v, "lab") for t, v in wanted(guest)))


def missing(plan: Plan) -> Plan:
    """What is left of a plan after a crash and recovery."""
    ops = LiveSysOps()
    now = [(a, ops.read(a.target)) for a in plan.actions]
    return Plan(tuple(Action(a.target, v, a.after, a.reason) for a, v in now if v != a.after))


def check_tuned(guest: LabGuest) -> None:
    """What a look from outside says of a tuned guest."""
    last = labhelp.lab_cpus() - 1
    for tid in guest.data_plane():
        assert labhelp.mask(tid) == {last}
        assert "policy=1 flags=1 nice=0 priority=10 " in hoststate.sched(tid)
    assert labhelp.mask(guest.pid) == {0}
    for nic in (0, 1):
        assert labhelp.text(f"/sys/class/net/{guest.device(nic)}/tx_queue_len") == "100"
    if guest.kind == "libvirt":
        assert hoststate.virsh("emulatorpin", guest.name).split()[-1] == "0"
        workers = set(map(str, guest.workers()))
        inside = (CGROUP / scope(guest) / "vsrtune" / "cgroup.threads").read_text().split()
        assert set(inside) == workers
        beside = (CGROUP / scope(guest) / "emulator" / "cgroup.threads").read_text().split()
        assert str(guest.pid) in beside
        assert {str(labhelp.mask(int(t))) for t in beside} == {"{0}"}


@pytest.fixture(params=["libvirt", "qemu"])
def guest(request: pytest.FixtureRequest, guests: list[LabGuest]) -> LabGuest:
    for found in guests:
        if found.kind == request.param:
            return found
    pytest.skip(f"no {request.param} guest in this lab")


@labhelp.core()
def test_every_kind_goes_and_comes_back(guest: LabGuest, tmp_path: Path) -> None:
    before = hoststate.capture()
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as journal:
        plan = make_plan(guest)
        ops = LiveSysOps()
        result = apply(plan, ops, journal)
        assert [str(e) for _, e in result.failed] == []
        assert len(result.done) == len(plan.actions)
        check_tuned(guest)
        back = undo(ops, journal)
        assert [str(e) for _, e in back.failed] == []
        assert back.left == ()
        assert journal.entries() == ()
    same_as(before, guest)


def test_restarts_of_libvirtd_leave_no_descriptor(tuned: set[int], libvirt_guest: LabGuest) -> None:
    """Of the daemon, which opens files for a moment in each pass: what it never gives back raises
    the least of many counts."""
    daemon = labhelp.main_pid()

    def least() -> int:
        counts = []
        for _ in range(40):
            counts.append(len(os.listdir(f"/proc/{daemon}/fd")))
            time.sleep(0.1)
        return min(counts)

    found = [least()]
    for _ in range(3):
        when = time.time()
        labhelp.sh("systemctl", "restart", "libvirtd")
        labhelp.libvirt_talks(libvirt_guest)
        labhelp.wait_for(lambda when=when: labhelp.last_pass() > when, "it has looked again")
        found.append(least())
    assert labhelp.main_pid() == daemon
    assert max(found[1:]) <= found[0], found


@pytest.fixture(scope="module")
def expendable(libvirt_guest: LabGuest) -> Iterator[LabGuest]:
    """A guest whose pins the tests may change by hand: it is started anew in the end,
    because nothing but vsrtune can make a populated cpuset empty again. Tests that come
    between have the operator's settings to go back to instead of the defaults; none may start
    the daemon, which takes an operator's pin to all CPUs for the one that its undo leaves."""
    pid = libvirt_guest.pid
    yield libvirt_guest
    if libvirt_guest.runs and libvirt_guest.pid == pid:
        labhelp.stop_guest(libvirt_guest)
    if not libvirt_guest.runs:
        labhelp.start_guest(libvirt_guest)


def test_masks_follow_libvirt_again_after_undo(expendable: LabGuest, tmp_path: Path) -> None:
    """The kernel's memory of a thread's own mask must not stay narrow."""
    guest, last = expendable, labhelp.lab_cpus() - 1
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as journal:
        ops = LiveSysOps()
        apply(make_plan(guest), ops, journal)
        undo(ops, journal)
    inside = (CGROUP / scope(guest) / "emulator" / "cgroup.threads").read_text().split()
    assert set(map(int, inside)) >= {guest.pid, *guest.workers()}
    for cpus, masks in (("0", {0}), (f"0-{last}", set(range(last + 1)))):
        labhelp.sh("virsh", "emulatorpin", guest.name, cpus, "--live")
        assert {t: labhelp.mask(int(t)) for t in inside} == dict.fromkeys(inside, masks)


@labhelp.one_release("what the journal remembers")
def test_settings_of_an_operator_come_back(expendable: LabGuest, tmp_path: Path) -> None:
    """Masks, classes and pins that are nobody's default."""
    guest, last = expendable, labhelp.lab_cpus() - 1
    inside = (CGROUP / scope(guest) / "emulator" / "cgroup.threads").read_text().split()
    others = [int(t) for t in inside if int(t) not in (guest.pid, *guest.workers())]
    assert others, "QEMU has no thread beside its main one"
    worker, vcpu = guest.workers()[0], guest.vcpus()[0]
    labhelp.sh("virsh", "vcpupin", guest.name, "0", f"0-{last - 1}", "--live")
    os.sched_setaffinity(others[0], {last})
    os.sched_setaffinity(worker, {0, last})
    os.sched_setscheduler(vcpu, os.SCHED_RR, os.sched_param(3))
    os.setpriority(os.PRIO_PROCESS, worker, -7)
    before = hoststate.capture()
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as journal:
        ops = LiveSysOps()
        assert apply(make_plan(guest), ops, journal).failed == ()
        check_tuned(guest)
        assert undo(ops, journal).failed == ()
    same_as(before, guest)


@labhelp.core("bookworm")
@labhelp.one_release("the journal")
def test_killed_after_any_write_of_apply(guest: LabGuest, tmp_path: Path) -> None:
    """Even counts are taken back after recovery, odd ones finished first."""
    before = hoststate.capture()
    plan = make_plan(guest)
    count = 0
    for n in range(1, 200, STRIDE):
        path = tmp_path / f"{n}.jsonl"

        def work() -> None:
            with Journal.open(path, BOOT) as journal:  # noqa: B023
                apply(plan, LiveSysOps(), journal)

        killed = labhelp.in_child(work, n)
        count += killed
        with Journal.open(path, BOOT) as journal:
            ops = LiveSysOps()
            result = recover(ops, journal)
            assert (result.failed, result.left) == ((), ()), n
            if n % 2:
                assert apply(missing(plan), ops, journal).failed == (), n
                check_tuned(guest)
            result = undo(ops, journal)
            assert (result.failed, result.left) == ((), ()), n
        same_as(before, guest)
        if not killed:
            break
    print(f"{guest.name}: killed after {count} different writes")
    assert count >= len(plan.actions) // STRIDE


@labhelp.one_release("the journal", "trixie")
def test_killed_after_any_write_of_undo(guest: LabGuest, tmp_path: Path) -> None:
    before = hoststate.capture()
    count = 0
    for n in range(1, 200, STRIDE):
        path = tmp_path / f"{n}.jsonl"
        plan = make_plan(guest)
        with Journal.open(path, BOOT) as journal:
            assert apply(plan, LiveSysOps(), journal).failed == (), n

        def work() -> None:
            with Journal.open(path, BOOT) as journal:  # noqa: B023
                undo(LiveSysOps(), journal)

        killed = labhelp.in_child(work, n)
        count += killed
        with Journal.open(path, BOOT) as journal:
            result = undo(LiveSysOps(), journal)
            assert (result.failed, result.left) == ((), ()), n
        same_as(before, guest)
        if not killed:
            break
    print(f"{guest.name}: killed after {count} different writes")
    assert count >= len(plan.actions) // STRIDE


def test_a_restarted_libvirtd_is_reached_again(libvirt_guest: LabGuest, tmp_path: Path) -> None:
    before = hoststate.capture()
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as journal:
        ops = LiveSysOps()
        assert apply(make_plan(libvirt_guest), ops, journal).failed == ()
        labhelp.sh("systemctl", "restart", "libvirtd")
        assert undo(ops, journal).failed == ()
    same_as(before, libvirt_guest)


def test_without_libvirtd_nothing_is_tuned_and_the_error_is_transient(
    libvirt_guest: LabGuest, tmp_path: Path
) -> None:
    before = hoststate.capture()
    units = [
        u for u in ("libvirtd.socket", "libvirtd-ro.socket", "libvirtd-admin.socket", "libvirtd")
        if labhelp.sh("systemctl", "is-active", u, check=False).stdout.strip() == "active"
    ]  # fmt: skip
    plan = make_plan(libvirt_guest)
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as journal:
        labhelp.sh("systemctl", "stop", *units)
        try:
            result = apply(plan, LiveSysOps(), journal)
        finally:
            labhelp.sh("systemctl", "start", *units)
        ((_, error),) = result.failed
        assert error.lasting is Lasting.TRANSIENT
        assert "libvirt" in str(error)
        assert error.hint
        assert result.rolled_back
        assert journal.entries() == ()
    same_as(before, libvirt_guest)


def test_a_destroyed_guest_leaves_nothing(libvirt_guest: LabGuest, tmp_path: Path) -> None:
    """Our cgroup does not keep libvirt from removing the guest's."""
    where = CGROUP / scope(libvirt_guest)
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as journal:
        ops = LiveSysOps()
        assert apply(make_plan(libvirt_guest), ops, journal).failed == ()
        labhelp.stop_guest(libvirt_guest)
        try:
            result = undo(ops, journal)
            assert result.failed == ()
            assert result.left == ()
            assert journal.entries() == ()
            labhelp.wait_for(lambda: not where.parent.exists(), "the guest's cgroup is gone", 20)
        finally:
            labhelp.start_guest(libvirt_guest)
