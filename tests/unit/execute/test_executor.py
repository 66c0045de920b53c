"""The executor on a host that behaves: plans, undo, drift, vanishing objects."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_kernel import (
    BOOT,
    KERNELS,
    LIBVIRT,
    OURS,
    UUID,
    FakeKernel,
    failing_at,
    key,
    make_host,
    make_plan,
    releases,
    replan,
    without_lists,
    without_rights,
)

from vsrtune.core.codec import encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import (
    BusyError,
    JournalError,
    Lasting,
    LateError,
    SilentJobError,
    StaleError,
    UntriedError,
)
from vsrtune.execute.executor import apply, recover, undo
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.execute.waits import check_busy
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    EmulatorPin,
    IrqAffinity,
    Pin,
    QueueCpus,
    RrTimeslice,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TimeSlice,
    TxQueueLen,
    Value,
    VcpuPin,
)


@pytest.fixture(params=KERNELS)
def host(request: pytest.FixtureRequest) -> FakeKernel:
    return make_host(request.param)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as opened:
        yield opened


def emulator(host: FakeKernel) -> EmulatorPin:
    return EmulatorPin("vr1", UUID, key(host, 1000))


def test_apply_gives_the_plan_and_undo_the_host_as_it_was(
    host: FakeKernel, journal: Journal
) -> None:
    before = host.visible()
    plan = make_plan(host)
    result = apply(plan, host.ops(), journal)
    assert [(a.target, a.after) for a in result.done] == [(a.target, a.after) for a in plan.actions]
    assert (result.failed, result.vanished, result.left, result.skipped) == ((), (), (), ())
    for action in plan.actions:
        assert host.ops().read(action.target) == action.after
    assert host.mask(1001) == "0", "a thread beside the emulator follows its pin"
    back = undo(host.ops(), journal)
    assert back.failed == ()
    assert back.left == ()
    assert len(back.done) == len(plan.actions)
    assert host.visible() == before
    assert journal.entries() == ()


def test_a_plan_that_was_carried_out_is_stale(host: FakeKernel, journal: Journal) -> None:
    plan = make_plan(host)
    apply(plan, host.ops(), journal)
    host.log.clear()
    for owner in ("vr1", "qemu:vr2", HOST_REF):
        own = tuple(a for a in plan.actions if a.target.guest == owner)
        result = apply(Plan(own), host.ops(), journal)
        assert [type(error) for _, error in result.failed] == [StaleError]
        assert host.log == []
        assert result.done == ()
        assert result.rolled_back
    assert len(journal.entries()) == len(plan.actions)


def test_a_value_that_came_with_an_earlier_write_counts_as_done(
    host: FakeKernel, journal: Journal
) -> None:
    before = host.visible()
    beside = ThreadAffinity("vr1", key(host, 1001), "call_rcu")
    all_cpus, zero = CpuSet(range(4)), CpuSet([0])
    pin = Action(emulator(host), Pin(all_cpus, ""), Pin(zero, "0"), "policy")
    plan = Plan((pin, Action(beside, all_cpus, zero, "policy")))
    result = apply(plan, host.ops(), journal)
    assert [a.target for a in result.done] == [emulator(host), beside]
    assert [e.target for e in journal.entries()] == [emulator(host)]
    undo(host.ops(), journal)
    assert host.visible() == before


def test_threads_follow_later_widenings_as_before(host: FakeKernel, journal: Journal) -> None:
    apply(make_plan(host), host.ops(), journal)
    undo(host.ops(), journal)
    host.pin(UUID, None, CpuSet([0]))
    host.pin(UUID, None, CpuSet(range(4)))
    assert [host.mask(t) for t in (1000, 1001, 1020)] == ["0-3"] * 3


def test_a_thread_born_while_the_emulator_was_narrow_is_widened(
    host: FakeKernel, journal: Journal
) -> None:
    apply(make_plan(host), host.ops(), journal)
    threads = host.state["threads"]
    threads["1030"] = threads["1000"] | {"comm": "worker", "user": "0", "start": 9000}
    undo(host.ops(), journal)
    assert host.mask(1030) == "0-3"


def test_a_thread_that_inherited_the_emulators_mask_gets_what_that_had(
    host: FakeKernel, journal: Journal
) -> None:
    """Without libvirt: QEMU's main thread makes a vcpu or, from 6.4 on, a worker at a hotplug."""
    apply(make_plan(host), host.ops(), journal)
    main = ThreadAffinity("qemu:vr2", key(host, 2000), "emulator")
    apply(Plan((Action(main, host.ops().read(main), CpuSet([0]), "x"),)), host.ops(), journal)
    threads = host.state["threads"]
    threads["2030"] = threads["2000"] | {"comm": "CPU 1/KVM", "start": 9000}
    born = ThreadAffinity("qemu:vr2", key(host, 2030), "vcpu 1")
    apply(Plan((Action(born, CpuSet([0]), CpuSet([2]), "x"),)), host.ops(), journal)
    assert host.mask(2030) == "2"
    undo(host.ops(), journal)
    assert host.mask(2030) == host.mask(2000) == "0-3"
    assert journal.entries() == ()


def test_a_thread_that_inherited_and_is_rolled_back_has_its_original_still(
    host: FakeKernel, journal: Journal
) -> None:
    apply(make_plan(host), host.ops(), journal)
    main = ThreadAffinity("qemu:vr2", key(host, 2000), "emulator")
    apply(Plan((Action(main, host.ops().read(main), CpuSet([0]), "x"),)), host.ops(), journal)
    threads = host.state["threads"]
    threads["2030"] = threads["2000"] | {"comm": "CPU 1/KVM", "start": 9000}
    born = ThreadAffinity("qemu:vr2", key(host, 2030), "vcpu 1")
    stale = Action(main, CpuSet([3]), CpuSet([1]), "x")
    found = apply(Plan((Action(born, CpuSet([0]), CpuSet([2]), "x"), stale)), host.ops(), journal)
    assert [a.target for a, _ in found.failed] == [main]
    assert host.mask(2030) == "0"
    undo(host.ops(), journal)
    assert host.mask(2030) == "0-3"


def test_two_guests_of_whose_job_libvirt_says_nothing_are_enough(
    host: FakeKernel, journal: Journal
) -> None:
    """One has a QEMU that is silent, and keeps no other waiting."""
    first, second, third = (VcpuPin(g, UUID, 0, key(host, 1001)) for g in ("a", "b", "c"))
    error = SilentJobError("x", lasting=Lasting.TRANSIENT)
    action = Action(first, Pin(CpuSet([0]), ""), Pin(CpuSet([1]), "1"), "x")
    check_busy(second, [(action, error)])
    with pytest.raises(UntriedError):
        check_busy(third, [(action, error), (replace(action, target=second), error)])


def test_a_stale_value_fails_only_its_guest(host: FakeKernel, journal: Journal) -> None:
    plan = make_plan(host)
    host.set_affinity(1021, CpuSet([1]))
    before = host.visible()
    result = apply(plan, host.ops(), journal)
    ((action, error),) = result.failed
    assert action.target == ThreadAffinity("vr1", key(host, 1021), "vhost 1")
    assert isinstance(error, StaleError)
    assert error.lasting is Lasting.TRANSIENT
    assert result.rolled_back
    assert {a.target.guest for a in result.done} == {"qemu:vr2", HOST_REF}
    assert {a.target.guest for a in result.skipped} == {"vr1"}
    after = host.visible()
    assert after["devices"]["tap1"]["tx_queue_len"] == 1000
    for name in ("1000", "1001", "1002", "1010", "1011", "1020", "1021"):
        assert after["threads"][name] == before["threads"][name]
    assert after["cgroups"] == before["cgroups"]


def test_values_changed_by_others_are_left_alone(host: FakeKernel, journal: Journal) -> None:
    apply(make_plan(host), host.ops(), journal)
    host.pin(UUID, 0, CpuSet([3]))
    host.write("/sys/class/net/macvtap0/tx_queue_len", "77")
    result = undo(host.ops(), journal)
    assert {left.target for left in result.left} == {
        VcpuPin("vr1", UUID, 0, key(host, 1010)),
        TxQueueLen("vr1", "macvtap0", 7),
    }
    assert all("left alone" in str(left) for left in result.left)
    told = "is 77 now, vsrtune had written 100 in place of 500; left alone"
    assert f"vr1: macvtap0 txqueuelen: {told}" in map(str, result.left)
    assert host.mask(1010) == "3"
    assert host.state["devices"]["macvtap0"]["tx_queue_len"] == 77
    assert host.mask(1011) == "0-2"
    assert journal.entries() == ()


def test_a_class_that_its_owner_lowered_is_put_back(host: FakeKernel, journal: Journal) -> None:
    """He needs no privilege for that, and only root could have given the class."""
    before = host.visible()
    plan = make_plan(host)
    apply(plan, host.ops(), journal)
    given = {
        a.target: a.after
        for a in plan.actions
        if isinstance(a.target, ThreadSched) and isinstance(a.after, Sched) and a.after.priority > 1
    }
    assert given
    for target, sched in given.items():
        host.ops().write(target, replace(sched, priority=1))
    assert undo(host.ops(), journal).left == ()
    assert host.visible() == before


def test_a_class_does_not_outlive_its_program(
    host: FakeKernel, journal: Journal, tmp_path: Path
) -> None:
    """The thread has another number after execve(2), and the same class."""
    plan = make_plan(host)
    apply(plan, host.ops(), journal)
    (target,) = [
        a.target for a in plan.actions
        if isinstance(a.target, ThreadSched) and a.target.thread.tid == 1010
    ]  # fmt: skip
    main = replace(target, thread=key(host, 1000))
    for priority in (10, 1):  # as it was given, and lowered
        there, fold = host.clone(), Path(f"{tmp_path}/{priority}")
        fold.write_bytes(journal.path.read_bytes())
        there.ops().write(target, Sched(SchedClass.FIFO, priority, reset_on_fork=True))
        there.execve(1010)
        with Journal.open(fold, BOOT) as again:
            result = undo(there.ops(), again)
            assert target in result.vanished and result.failed == ()
            assert again.entries() == ()
        now = there.ops().read(main)
        assert isinstance(now, Sched) and now.cls is SchedClass.OTHER


def test_a_class_that_was_not_ours_stays(
    host: FakeKernel, journal: Journal, tmp_path: Path
) -> None:
    """A vcpu that is unplugged ends too. What else the main thread has, is not its class."""
    plan = make_plan(host)
    apply(plan, host.ops(), journal)
    main = ThreadSched("vr1", key(host, 1000), "emulator")
    rows = (Sched(SchedClass.FIFO, 10), Sched(SchedClass.RR, 5, reset_on_fork=True), Sched(nice=-5))
    for number, sched in enumerate(rows):
        there, fold = host.clone(), Path(f"{tmp_path}/{number}")
        fold.write_bytes(journal.path.read_bytes())
        there.ops().write(main, sched)
        there.end_thread(1010)
        with Journal.open(fold, BOOT) as again:
            undo(there.ops(), again)
        assert there.ops().read(main) == sched


def test_a_class_that_cannot_be_taken_is_remembered(host: FakeKernel, journal: Journal) -> None:
    plan = make_plan(host)
    apply(plan, host.ops(), journal)
    host.execve(1010)

    host.ahead = without_rights(1000)
    failed = [a.target for a, _ in undo(host.ops(), journal).failed]
    assert 1010 in [t.thread.tid for t in failed if isinstance(t, ThreadSched)]
    host.ahead = lambda _what: None
    assert undo(host.ops(), journal).failed == ()
    assert journal.entries() == ()
    assert host.state["threads"]["1000"]["sched"]["cls"] == "other"


def busy_with_pins(host: FakeKernel) -> list[str]:
    """From now on libvirt takes no pins; every one that it is asked for is noted."""
    asked: list[str] = []

    def refuse(what: str) -> None:
        if what.startswith("libvirt cpuset"):
            asked.append(what)
            raise BusyError("libvirt is busy with the domain", lasting=Lasting.TRANSIENT)

    host.ahead = refuse
    return asked


def test_undo_asks_a_busy_libvirt_for_one_pin_of_a_guest_only(
    host: FakeKernel, journal: Journal
) -> None:
    """It may wait 30 s for each, and systemd waits 120 s for a daemon that stops."""
    before = host.visible()
    apply(make_plan(host), host.ops(), journal)
    asked = busy_with_pins(host)
    result = undo(host.ops(), journal)
    pins = {e.target for e in journal.entries() if isinstance(e.target, VcpuPin | EmulatorPin)}
    assert len(pins) > 1
    assert len(asked) == 1
    assert pins <= {a.target for a, _ in result.failed}
    assert all(error.lasting is Lasting.TRANSIENT for _, error in result.failed)
    waits = "waits for vr1: vcpu 1 pin, for which libvirt was busy; tried again with it"
    assert f"vr1: emulator pin: {waits}" in {str(error) for _, error in result.failed}
    host.ahead = lambda _what: None
    assert undo(host.ops(), journal).failed == ()
    assert host.visible() == before


def two_guests(host: FakeKernel) -> tuple[list[Target], Plan]:
    """A pin of each of two guests, and a plan for both and a third, which needs no libvirt."""
    pins: list[Target] = [
        VcpuPin("vr1", UUID, 0, key(host, 1010)),
        VcpuPin("vr2", UUID, 1, key(host, 1011)),
    ]
    pinned = [Action(t, host.ops().read(t), Pin(CpuSet([1]), "1"), "policy") for t in pins]
    return pins, Plan((*pinned, Action(TxQueueLen("vr3", "macvtap0", 7), 500, 100, "policy")))


def late_with_pins(host: FakeKernel, step: str = "libvirt cpuset") -> list[str]:
    """From now on this step of a pin ends after half a minute without success; each is noted."""
    asked: list[str] = []

    def wait(what: str) -> None:
        if what.startswith(step):
            asked.append(what)
            raise LateError("cannot acquire state change lock", lasting=Lasting.TRANSIENT)

    host.ahead = wait
    return asked


def test_a_pass_waits_for_libvirt_once(host: FakeKernel, journal: Journal) -> None:
    """Two waits are all the time that the watchdog gives, and four what systemd gives a start."""
    pins, plan = two_guests(host)
    asked = late_with_pins(host)
    result = apply(plan, host.ops(), journal)
    assert len(asked) == 1
    assert [(a.target, type(e)) for a, e in result.failed] == [
        (pins[0], LateError),
        (pins[1], UntriedError),
    ]
    assert "virsh domjobinfo vr1" in result.failed[1][1].hint
    assert [a.target.guest for a in result.done] == ["vr3"]
    host.ahead = lambda _what: None
    again = tuple(a for a in plan.actions if a.target in pins)
    assert apply(Plan(again), host.ops(), journal).failed == ()


def test_a_pin_that_waits_half_way_is_waited_for_twice_and_no_other(
    host: FakeKernel, journal: Journal
) -> None:
    """Once for its other half, and once to take the first back."""
    pins, plan = two_guests(host)
    before = host.visible()
    asked = late_with_pins(host, "libvirt affinity")
    result = apply(plan, host.ops(), journal)
    assert len(asked) == 2
    assert "could not be taken back" in str(result.failed[0][1])
    assert [(a.target, type(e)) for a, e in result.failed[1:]] == [(pins[1], UntriedError)]
    host.ahead = lambda _what: None
    assert undo(host.ops(), journal).failed == ()
    assert host.visible() == before


def test_an_undo_waits_for_libvirt_once_and_restores_what_needs_none(
    host: FakeKernel, journal: Journal
) -> None:
    before = host.visible()
    pins, plan = two_guests(host)
    apply(plan, host.ops(), journal)
    asked = late_with_pins(host)
    result = undo(host.ops(), journal)
    assert len(asked) == 1
    assert [(a.target, type(e)) for a, e in result.failed] == [
        (pins[1], LateError),
        (pins[0], UntriedError),
    ]
    assert [a.target.guest for a in result.done] == ["vr3"]
    assert {e.target for e in journal.entries()} == set(pins)
    host.ahead = lambda _what: None
    assert undo(host.ops(), journal).failed == ()
    assert host.visible() == before


def test_each_write_is_a_sign_of_life(host: FakeKernel, journal: Journal) -> None:
    pulses: list[str] = []
    ops = LiveSysOps(root=host, calls=host, pulse=lambda: pulses.append(""))
    result = apply(make_plan(host), ops, journal)
    assert len(pulses) >= len(result.done)
    pulses.clear()
    assert len(undo(ops, journal).done) <= len(pulses)


def test_a_guest_with_which_libvirt_becomes_busy_half_way_is_put_back_later(
    host: FakeKernel, journal: Journal
) -> None:
    before = host.visible()
    asked: list[str] = []

    def refuse(what: str) -> None:
        if what.startswith("libvirt cpuset"):
            asked.append(what)
            if len(asked) > 2:
                raise BusyError("libvirt is busy with the domain", lasting=Lasting.TRANSIENT)

    host.ahead = refuse
    result = apply(make_plan(host), host.ops(), journal)
    assert len(asked) == 3, "two pins, and one that failed; those two are not tried again"
    assert not result.rolled_back
    host.ahead = lambda _what: None
    assert undo(host.ops(), journal).failed == ()
    assert host.visible() == before


def test_drift_makes_the_other_value_the_original(host: FakeKernel, journal: Journal) -> None:
    apply(make_plan(host), host.ops(), journal)
    host.set_affinity(1020, CpuSet([0, 1]))
    apply(replan(host, make_plan(make_host(host.state["kernel"]))), host.ops(), journal)
    assert host.mask(1020) == "1"
    undo(host.ops(), journal)
    assert host.mask(1020) == "0-1"


def enforcing(plan: Plan) -> Plan:
    """That puts back what somebody has changed."""
    return replace(plan, actions=tuple(replace(a, enforced=True) for a in plan.actions))


@pytest.mark.parametrize(
    ("refused", "left_out"),
    [
        ("sched_rr_timeslice_ms", {"rr-timeslice"}),
        ("sched 20 ", {"thread-sched"}),
        ("smp_affinity_list", {"irq-affinity", "queue-cpus"}),
    ],
)
def test_ksoftirqd_and_the_slice_stand_alone_on_the_host(
    host: FakeKernel, journal: Journal, refused: str, left_out: set[str]
) -> None:
    """As where a container has /proc/sys read-only."""
    threads = host.state["threads"]
    threads["20"] = threads["3000"] | {"pid": 20, "comm": "ksoftirqd/1"}
    host.state["rr_timeslice"] = 100
    wanted: list[tuple[Target, Value]] = [
        (QueueCpus(HOST_REF, "eth0", 2, "rx-0"), CpuSet([1])),
        (IrqAffinity(HOST_REF, 41, "eth0-rx-0"), CpuSet([1])),
        (RrTimeslice(HOST_REF), TimeSlice(4)),
        (ThreadSched(HOST_REF, key(host, 20), "ksoftirqd/1"), Sched(SchedClass.FIFO, 10)),
    ]
    plan = Plan(tuple(Action(t, host.ops().read(t), v, "test") for t, v in wanted))

    def refuse(what: str) -> None:
        if refused in what:
            raise OSError(errno.EROFS, "read-only")

    host.ahead = refuse
    result = apply(plan, host.ops(), journal)
    assert len(result.failed) == 1
    assert result.rolled_back
    done = {a.target for a in result.done}
    assert {a.target.kind for a in plan.actions} - {t.kind for t in done} == left_out
    assert {e.target for e in journal.entries()} == done
    for action in plan.actions:
        expected = action.after if action.target in done else action.before
        assert host.ops().read(action.target) == expected


def test_what_is_enforced_goes_back_to_what_was_ahead_of_us(
    host: FakeKernel, journal: Journal
) -> None:
    before = host.visible()
    plan = make_plan(host)
    apply(plan, host.ops(), journal)
    host.set_affinity(1020, CpuSet([0, 1]))
    host.set_sched(1011, Sched(SchedClass.FIFO, 50))
    result = apply(enforcing(replan(host, plan)), host.ops(), journal)
    assert len(result.done) == 2
    undo(host.ops(), journal)
    assert host.visible() == before


def test_what_could_not_be_put_back_is_left_alone(host: FakeKernel, journal: Journal) -> None:
    """And put back later it still has the original."""
    plan = make_plan(host)
    apply(plan, host.ops(), journal)
    host.set_sched(1011, Sched(SchedClass.FIFO, 50))
    entry = journal.entry(ThreadSched("vr1", key(host, 1011), "vcpu 1"))
    host.ahead = failing_at(1, lambda: OSError(1, "no"))
    assert apply(enforcing(replan(host, plan)), host.ops(), journal).failed != ()
    assert entry is not None
    assert journal.entry(entry.target) == entry
    host.ahead = lambda _what: None
    result = undo(host.ops(), journal)
    assert [left.target for left in result.left] == [entry.target]
    assert host.ops().read(entry.target) == Sched(SchedClass.FIFO, 50)


@pytest.mark.parametrize("known", [True, False])
def test_what_is_rolled_back_to_somebody_elses_value_is_not_ours(
    host: FakeKernel, journal: Journal, known: bool
) -> None:
    """Neither one that was written before, nor one that was as asked by itself."""
    plan = make_plan(host)
    apply(plan, host.ops(), journal)
    affinity = ThreadAffinity("vr1", key(host, 1020), "vhost 0")
    if not known:
        journal.drop(affinity, "as if it had been found so")
    entries = journal.entries()
    host.set_affinity(1020, CpuSet([0, 1]))
    host.set_sched(1011, Sched(SchedClass.FIFO, 50))
    again = enforcing(replan(host, plan))
    assert again.actions[0].target == affinity
    host.ahead = failing_at(2, lambda: OSError(1, "no"))
    assert apply(again, host.ops(), journal).failed != ()
    host.ahead = lambda _what: None
    assert host.ops().read(affinity) == CpuSet([0, 1])
    assert journal.entries() == entries
    undo(host.ops(), journal)
    assert host.ops().read(affinity) == CpuSet([0, 1])


def test_a_move_between_cgroups_keeps_what_undo_knows_of_the_affinity(
    host: FakeKernel, journal: Journal
) -> None:
    """Somebody else's mask that is kept across it is no write of ours."""
    before = host.visible()
    plan = make_plan(host)
    apply(plan, host.ops(), journal)
    host.write(f"/sys/fs/cgroup/{LIBVIRT}/emulator/cgroup.threads", "1020")
    host.set_affinity(1020, CpuSet([0]))
    affinity = ThreadAffinity("vr1", key(host, 1020), "vhost 0")
    entry = journal.entry(affinity)
    again = replan(host, plan)
    assert [type(a.target) for a in again.actions] == [ThreadCgroup, ThreadAffinity]
    apply(replace(again, actions=again.actions[:1]), host.ops(), journal)
    assert journal.entry(affinity) == entry
    apply(enforcing(replan(host, plan)), host.ops(), journal)
    undo(host.ops(), journal)
    assert host.visible() == before


def test_killed_in_a_move_to_a_cgroup_of_fewer_cpus_it_is_finished(
    host: FakeKernel, journal: Journal
) -> None:
    """The mask that is kept across the move has CPUs that the new cgroup lacks."""
    emulator = f"{LIBVIRT}/emulator"
    host.write(f"/sys/fs/cgroup/{emulator}/cpuset.cpus", "1-2")
    affinity = ThreadAffinity("vr1", key(host, 1020), "vhost 0")
    mask = CpuSet([0, 1])
    move = ThreadCgroup("vr1", key(host, 1020), "vhost 0")
    place = host.ops().read(move)
    assert place == emulator
    journal.intent(Action(affinity, mask, mask, "kept across the move between cgroups"))
    host.set_affinity(1020, mask)
    assert host.mask(1020) == "1"
    assert recover(host.ops(), journal).failed == ()
    assert (host.mask(1020), journal.entries()) == ("1", ())


def test_a_record_that_follows_an_unwritten_one_stops_no_undo(
    host: FakeKernel, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that dies in a move leaves the intent of the mask, and stays dead. Undo gives back
    what needs no record, also what comes after that worker."""
    plan = make_plan(host)
    affinity = ThreadAffinity("vr1", key(host, 1020), "vhost 0")
    append, dead = Journal._append, False

    def dies(self: Journal, record: dict[str, Any]) -> None:
        nonlocal dead
        dead = dead or (record["r"] == "revert" and record["target"] == encode(affinity))
        if dead:
            raise JournalError("EIO")
        append(self, record)

    monkeypatch.setattr(Journal, "_append", dies)
    with pytest.raises(JournalError):
        apply(plan, host.ops(), journal)
    with pytest.raises(JournalError):
        undo(host.ops(), journal)
    assert host.ops().read(IrqAffinity(HOST_REF, 41, "eth0-rx-0")) == plan.actions[0].before


def test_a_changed_policy_keeps_the_first_original(host: FakeKernel, journal: Journal) -> None:
    target = ThreadAffinity("vr1", key(host, 1020), "vhost 0")
    for before, after in (("0-3", "1"), ("1", "2"), ("2", "3")):
        plan = Plan((Action(target, CpuSet.parse(before), CpuSet.parse(after), "policy"),))
        assert apply(plan, host.ops(), journal).failed == ()
    assert [e.original for e in journal.entries()] == [CpuSet(range(4))]
    undo(host.ops(), journal)
    assert host.mask(1020) == "0-3"


def test_writing_the_original_ends_the_entry(host: FakeKernel, journal: Journal) -> None:
    target = TxQueueLen("vr1", "macvtap0", 7)
    apply(Plan((Action(target, 500, 100, "policy"),)), host.ops(), journal)
    apply(Plan((Action(target, 100, 500, "policy"),)), host.ops(), journal)
    assert journal.entries() == ()


def test_a_rolled_back_change_of_policy_is_still_ours(host: FakeKernel, journal: Journal) -> None:
    length = TxQueueLen("vr1", "macvtap0", 7)
    sched = ThreadSched("vr1", key(host, 1010), "vcpu 0")
    apply(Plan((Action(length, 500, 100, "first"),)), host.ops(), journal)
    host.ahead = failing_at(2, lambda: OSError(22, "no"))
    fifo = Sched(SchedClass.FIFO, 1)
    second = Plan((Action(length, 100, 50, "second"), Action(sched, Sched(), fifo, "second")))
    assert apply(second, host.ops(), journal).rolled_back
    assert journal.applied() == {length: 100}
    host.ahead = lambda _what: None
    undo(host.ops(), journal)
    assert host.state["devices"]["macvtap0"]["tx_queue_len"] == 500


@pytest.mark.parametrize("tid", [1010, 1020, 1000, 2010])
def test_a_vanished_thread_is_no_failure(host: FakeKernel, journal: Journal, tid: int) -> None:
    plan = make_plan(host)
    gone = {a.target for a in plan.actions if getattr(a.target, "thread", None) == key(host, tid)}
    host.end_thread(tid)
    result = apply(plan, host.ops(), journal)
    assert result.failed == ()
    assert set(result.vanished) == gone
    assert len(result.done) == len(plan.actions) - len(gone)
    assert {e.target for e in journal.entries()}.isdisjoint(gone)


def test_a_reused_tid_is_never_touched(host: FakeKernel, journal: Journal) -> None:
    plan = make_plan(host)
    apply(plan, host.ops(), journal)
    for tid in ("1010", "1020"):
        host.state["threads"][tid]["start"] += 1
    stranger = {t: dict(host.state["threads"][t]) for t in ("1010", "1020")}
    result = undo(host.ops(), journal)
    assert ThreadSched("vr1", plan.actions[9].target.thread, "vcpu 0") in result.vanished  # type: ignore[union-attr]
    assert {t: host.state["threads"][t] for t in ("1010", "1020")} == stranger


def test_a_guest_that_died_leaves_nothing_in_the_journal(
    host: FakeKernel, journal: Journal
) -> None:
    apply(make_plan(host), host.ops(), journal)
    host.end_guest(1000)
    result = undo(host.ops(), journal)
    assert result.failed == ()
    assert result.left == ()
    assert CgroupDir("vr1", OURS) in result.vanished
    assert journal.entries() == ()


def test_a_new_device_of_the_same_name_is_not_the_old_one(
    host: FakeKernel, journal: Journal
) -> None:
    apply(make_plan(host), host.ops(), journal)
    host.state["devices"]["macvtap0"] = {"guest": 1000, "ifindex": 99, "tx_queue_len": 100}
    result = undo(host.ops(), journal)
    assert TxQueueLen("vr1", "macvtap0", 7) in result.vanished
    assert host.state["devices"]["macvtap0"]["tx_queue_len"] == 100


def test_a_renamed_device_is_found_by_its_index(host: FakeKernel, journal: Journal) -> None:
    apply(make_plan(host), host.ops(), journal)
    devices = host.state["devices"]
    devices["lan0"] = devices.pop("macvtap0")
    undo(host.ops(), journal)
    assert devices["lan0"]["tx_queue_len"] == 500


def test_releases_of_one_guest_leave_the_other(host: FakeKernel, journal: Journal) -> None:
    apply(make_plan(host), host.ops(), journal)
    plan = releases(journal, "qemu:vr2")
    assert apply(plan, host.ops(), journal).done == plan.actions
    assert host.mask(2010) == "0-1"
    assert {e.target.guest for e in journal.entries()} == {"vr1", HOST_REF}
    assert host.mask(1010) == "1"


def test_undo_that_fails_is_kept_and_its_dependents_wait(
    host: FakeKernel, journal: Journal
) -> None:
    before = host.visible()
    apply(make_plan(host), host.ops(), journal)

    def refuse(what: str) -> None:
        if what.startswith("libvirt cpuset emulator"):
            raise OSError(16, "busy")

    host.ahead = refuse
    result = undo(host.ops(), journal)
    stuck = {
        EmulatorPin("vr1", UUID, key(host, 1000)),
        ThreadCgroup("vr1", key(host, 1020), "vhost 0"),
        ThreadCgroup("vr1", key(host, 1021), "vhost 1"),
        CgroupDir("vr1", OURS),
    }
    assert {a.target for a, _ in result.failed} == stuck
    assert {e.target for e in journal.entries()} == stuck
    failed = {str(a.target): (str(e), e.lasting) for a, e in result.failed}
    solved = "which could not be put back; undo again once that is solved"
    for waits, for_what in (
        ("vr1: vhost 0 (tid 1020) cgroup", "vr1: emulator pin"),
        ("vr1: vhost 1 (tid 1021) cgroup", "vr1: emulator pin"),
        (f"vr1: cgroup {OURS}", "vr1: vhost 1 (tid 1021) cgroup"),
    ):
        assert failed[waits] == (f"{waits}: waits for {for_what}, {solved}", Lasting.TRANSIENT)
    host.ahead = lambda _what: None
    assert undo(host.ops(), journal).failed == ()
    assert host.visible() == before


def test_a_cgroup_with_a_stranger_inside_is_kept_and_named(
    host: FakeKernel, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsrtune.execute.cgroups._RMDIR_PAUSE", 0)
    apply(make_plan(host), host.ops(), journal)
    host.state["threads"]["1001"]["cgroup"] = OURS
    ((action, error),) = undo(host.ops(), journal).failed
    assert action.target == CgroupDir("vr1", OURS)
    assert "1001" in str(error)
    assert error.lasting is Lasting.TRANSIENT


def test_a_value_that_does_not_read_back_fails_its_guest(
    host: FakeKernel, journal: Journal
) -> None:
    target = ThreadAffinity("vr1", key(host, 1010), "vcpu 0")
    host.write(f"/sys/fs/cgroup/{LIBVIRT}/vcpu0/cpuset.cpus", "0-1")
    plan = Plan((Action(target, CpuSet([0, 1]), CpuSet([1, 2]), "wider than its cpuset"),))
    ((_, error),) = apply(plan, host.ops(), journal).failed
    assert "but the host has CPUs 1" in str(error) or "but the host has 1" in str(error)
    assert host.mask(1010) == "0-1"
    assert journal.entries() == ()


def test_an_offline_cpu_does_not_make_a_value_foreign(host: FakeKernel, journal: Journal) -> None:
    before = host.visible()
    target = ThreadAffinity("qemu:vr2", key(host, 2010), "vcpu 0")
    plan = Plan((Action(target, CpuSet([0, 1]), CpuSet([2, 3]), "policy"),))
    apply(plan, host.ops(), journal)
    host.state["online"] = "0-2"
    host.state["threads"]["2010"]["mask"] = "2"
    result = undo(host.ops(), journal)
    assert result.left == ()
    assert result.failed == ()
    host.state["online"] = "0-3"
    assert host.visible() == before


NEARLY: list[tuple[Target, Value, Value]] = [
    (QueueCpus(HOST_REF, "eth0", 2, "rx-0"), CpuSet(), CpuSet([3])),
    (QueueCpus(HOST_REF, "eth0", 2, "tx-0"), CpuSet([1, 2, 3]), CpuSet([1, 2])),
    (IrqAffinity(HOST_REF, 42, "eth0-tx-0"), CpuSet([2]), CpuSet([2, 3])),
    (RrTimeslice(HOST_REF), TimeSlice(4), TimeSlice(10)),
]


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize(("target", "original", "written"), NEARLY)
def test_what_differs_from_the_original_is_written(
    host: FakeKernel,
    journal: Journal,
    target: Target,
    original: Value,
    written: Value,
    released: bool,
) -> None:
    """By an offline CPU alone, or by little. It was taken for the original, and the entry was
    forgotten."""
    if isinstance(original, TimeSlice):
        host.state["rr_timeslice"] = original.ms
    before = host.visible()
    assert apply(Plan((Action(target, original, written, "t"),)), host.ops(), journal).failed == ()
    host.state["online"] = "0-2"
    back = apply(releases(journal), host.ops(), journal) if released else undo(host.ops(), journal)
    assert [a.target for a in back.done] == [target]
    assert journal.entries() == ()
    host.state["online"] = "0-3"
    assert host.visible() == before


@pytest.mark.parametrize("near", [5, 22])
def test_a_slice_that_somebody_set_near_the_original_or_ours_is_left(
    host: FakeKernel, journal: Journal, near: int
) -> None:
    """The file shows what was written; the kernel rounds to its tick inside."""
    host.state["rr_timeslice"] = 4
    target = RrTimeslice(HOST_REF)
    apply(Plan((Action(target, TimeSlice(4), TimeSlice(20), "t"),)), host.ops(), journal)
    host.state["rr_timeslice"] = near
    (left,) = undo(host.ops(), journal).left
    assert (left.current, left.original) == (TimeSlice(near), TimeSlice(4))


@pytest.mark.parametrize("fails", [True, False])
def test_an_interrupt_that_the_kernel_moved_gets_its_original_back(
    host: FakeKernel, journal: Journal, fails: bool
) -> None:
    """Its CPU went offline, and it is served on all others."""
    target = IrqAffinity(HOST_REF, 41, "eth0-rx-0")
    plan = Plan((Action(target, CpuSet(range(4)), CpuSet([3]), "policy"),))
    assert apply(plan, host.ops(), journal).failed == ()
    (entry,) = journal.entries()
    host.state["online"] = "0-2"
    host.state["irqs"]["41"]["mask"] = "0-2"
    if fails:
        host.ahead = failing_at(1, lambda: OSError(16, "busy"))
        assert len(undo(host.ops(), journal).failed) == 1
        assert journal.entries() == (entry,)
    assert undo(host.ops(), journal).failed == ()
    assert (host.state["irqs"]["41"]["mask"], journal.entries()) == ("0-3", ())


def test_a_failed_write_leaves_no_value_near_the_one_before(
    host: FakeKernel, journal: Journal
) -> None:
    host.state["rr_timeslice"] = 4
    host.behind = failing_at(1, lambda: OSError(5, "I/O error"))
    plan = Plan((Action(RrTimeslice(HOST_REF), TimeSlice(4), TimeSlice(10), "t"),))
    assert apply(plan, host.ops(), journal).rolled_back
    assert (host.state["rr_timeslice"], journal.entries()) == (4, ())


def test_a_pin_by_hand_to_the_same_cpus_is_still_taken_back(
    host: FakeKernel, journal: Journal
) -> None:
    before = host.visible()
    apply(make_plan(host), host.ops(), journal)
    host.pin(UUID, None, CpuSet([0]))
    undo(host.ops(), journal)
    assert host.visible() == before


def test_without_a_cpuset_controller_pins_are_affinities(
    host: FakeKernel, journal: Journal
) -> None:
    without_lists(host)
    host.state["threads"]["1011"]["mask"] = "0-3"
    before = host.visible()
    target = EmulatorPin("vr1", UUID, key(host, 1000))
    value = Pin(CpuSet([0]), None)
    plan = Plan((Action(target, Pin(CpuSet(range(4)), None), value, "policy"),))
    assert apply(plan, host.ops(), journal).failed == ()
    assert [host.mask(t) for t in (1000, 1001)] == ["0", "0-3"]
    undo(host.ops(), journal)
    assert host.visible() == before


def test_threads_beside_one_that_somebody_moved_get_back_what_they_had(
    host: FakeKernel, journal: Journal
) -> None:
    target = emulator(host)
    before, beside = host.ops().read(target), host.mask(1001)
    plan = Plan((Action(target, before, Pin(CpuSet([0, 1]), "0-1"), "policy"),))
    assert apply(plan, host.ops(), journal).failed == ()
    assert host.mask(1001) == "0-1"
    host.set_affinity(1000, CpuSet([1]))
    assert undo(host.ops(), journal).failed == ()
    assert (host.mask(1000), host.mask(1001)) == ("1", beside)


def test_without_a_list_a_thread_that_somebody_moved_is_left_there(
    host: FakeKernel, journal: Journal
) -> None:
    """And what comes after it in undo is still given back."""
    without_lists(host)
    host.state["threads"]["1011"]["mask"] = "0-3"
    vcpu = VcpuPin("vr1", UUID, 1, key(host, 1011))
    length = TxQueueLen("vr1", "macvtap0", 7)
    free, ours = Pin(CpuSet(range(4)), None), Pin(CpuSet([2]), None)
    plan = Plan((Action(length, 500, 100, "policy"), Action(vcpu, free, ours, "policy")))
    assert apply(plan, host.ops(), journal).failed == ()
    host.set_affinity(1011, CpuSet([3]))
    result = undo(host.ops(), journal)
    assert [left.target for left in result.left] == [vcpu]
    assert (host.mask(1011), host.state["devices"]["macvtap0"]["tx_queue_len"]) == ("3", 500)
    assert journal.entries() == ()


def test_recover_of_a_settled_journal_changes_nothing(host: FakeKernel, journal: Journal) -> None:
    apply(make_plan(host), host.ops(), journal)
    host.log.clear()
    entries = journal.entries()
    assert recover(host.ops(), journal).done == ()
    assert host.log == []
    assert journal.entries() == entries


def test_recover_leaves_a_foreign_value_alone(host: FakeKernel, journal: Journal) -> None:
    target = TxQueueLen("vr1", "macvtap0", 7)
    journal.intent(Action(target, 500, 100, "policy"))
    host.write("/sys/class/net/macvtap0/tx_queue_len", "321")
    (left,) = recover(host.ops(), journal).left
    assert (left.current, left.written, left.original) == (321, 100, 500)
    assert journal.entries() == ()
    assert host.state["devices"]["macvtap0"]["tx_queue_len"] == 321


def test_apply_resolves_an_unfinished_write_of_its_target(
    host: FakeKernel, journal: Journal
) -> None:
    target = TxQueueLen("vr1", "macvtap0", 7)
    journal.intent(Action(target, 500, 100, "crashed"))
    result = apply(Plan((Action(target, 500, 200, "policy"),)), host.ops(), journal)
    assert result.failed == ()
    assert [(e.original, e.written, e.state) for e in journal.entries()] == [(500, 200, "done")]
