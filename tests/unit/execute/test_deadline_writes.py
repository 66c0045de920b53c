"""Root domains written to an imitated kernel, and taken back from every point of failure.

The imitation refuses DEADLINE where the kernel does, and counts the bandwidth that a
sleeping thread leaves booked, and partitions changed below DEADLINE threads.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from fake_kernel import (
    BOOT,
    LIBVIRT,
    SCOPE,
    UUID,
    FakeKernel,
    failing_at,
    key,
    make_host,
    without_rights,
)

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import PendingError, WriteError
from vsrtune.execute.executor import apply, recover, undo
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.model.cpuset_tree import upwards
from vsrtune.model.deadline import lag_seconds
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.model.journal_records import Fold
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    CpusetFile,
    CpusetList,
    Partition,
    PartitionState,
    Pin,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadMask,
    ThreadSched,
    Value,
    VcpuPin,
)

BUDGET = Sched(
    SchedClass.DEADLINE,
    reset_on_fork=True,
    runtime_ns=4_000_000,
    deadline_ns=10_000_000,
    period_ns=10_000_000,
)
VCPU0, EMULATOR = f"{LIBVIRT}/vcpu0", f"{LIBVIRT}/emulator"
OWN = f"{LIBVIRT}/vsrtune.cpus2"
TOP = "vsrtune.cpus2.1000"
CPUS, EXCLUSIVE = "cpuset.cpus", "cpuset.cpus.exclusive"
ROOT = PartitionState("root")


def awake(host: FakeKernel) -> FakeKernel:
    """Every thread has run on the CPU it will be given. Beside the guests are threads of others,
    with masks of their own."""
    for tid, cpu in (("1010", 1), ("1020", 2)):
        host.state["threads"][tid]["cpu"] = cpu
    for tid, cgroup, mask, more in (
        (4000, "system.slice", "2", {}),
        (4001, "system.slice", "1-3", {}),
        (4002, "", "1-2", {"kthread": True}),
        (4003, "", "2", {"kthread": True, "per_cpu": True}),
    ):
        own = {"guest": 0, "pid": tid, "cgroup": cgroup, "mask": mask, "user": mask}
        host.state["threads"][str(tid)] = host.state["threads"]["2010"] | own | more
    return host


def tight() -> FakeKernel:
    return awake(make_host("6.12"))


def old() -> FakeKernel:
    host = awake(make_host("6.1"))
    for tid in ("1020", "1021"):
        host.state["threads"][tid]["kthread"] = True
    return host


def plan_of(host: FakeKernel, wanted: list[tuple[Target, Value]]) -> Plan:
    """Actions with what a plan would hold as values before."""
    copy = host.clone()
    ops = copy.ops()
    actions = []
    for target, value in wanted:
        try:
            now = ops.read(target)
        except WriteError:
            empty = isinstance(target, CpusetFile)
            now = CpusetList("") if empty else PartitionState("member")
        actions.append(Action(target, now, value, "test"))
        if isinstance(target, CpusetFile | CgroupDir):
            ops.write(target, value)
    return Plan(tuple(actions))


def tight_plan(host: FakeKernel) -> Plan:
    worker, vcpu = key(host, 1020), key(host, 1010)
    return plan_of(
        host,
        [
            (CgroupDir("vr1", OWN), True),
            (CpusetFile("vr1", OWN, CPUS), CpusetList("2")),
            (ThreadAffinity("vr1", worker, "vhost"), CpuSet([2])),
            (VcpuPin("vr1", UUID, 0, vcpu), Pin(CpuSet([1]), "1")),
            (ThreadCgroup("vr1", worker, "vhost"), OWN),
            (CpusetFile(HOST_REF, "machine.slice", EXCLUSIVE), CpusetList("1-2")),
            (CpusetFile("vr1", SCOPE, EXCLUSIVE), CpusetList("1-2")),
            (CpusetFile("vr1", LIBVIRT, EXCLUSIVE), CpusetList("1-2")),
            (CpusetFile("vr1", EMULATOR, EXCLUSIVE), CpusetList("0")),
            (CpusetFile("vr1", f"{LIBVIRT}/vcpu1", EXCLUSIVE), CpusetList("3")),
            (CpusetFile("vr1", VCPU0, EXCLUSIVE), CpusetList("1")),
            (CpusetFile("vr1", OWN, EXCLUSIVE), CpusetList("2")),
            (Partition("vr1", VCPU0), ROOT),
            (Partition("vr1", OWN), ROOT),
            (ThreadSched("vr1", vcpu, "vcpu 0"), BUDGET),
            (ThreadSched("vr1", worker, "vhost"), BUDGET),
        ],
    )


def old_plan(host: FakeKernel) -> Plan:
    worker, vcpu = key(host, 1020), key(host, 1010)
    return plan_of(
        host,
        [
            (CgroupDir("vr1", TOP), True),
            (CpusetFile("vr1", TOP, CPUS), CpusetList("2")),
            (ThreadAffinity("vr1", worker, "vhost"), CpuSet([2])),
            (VcpuPin("vr1", UUID, 0, vcpu), Pin(CpuSet([1]), "1")),
            (ThreadCgroup("vr1", worker, "vhost"), TOP),
            (CpusetFile(HOST_REF, "machine.slice", CPUS), CpusetList("1")),
            (Partition("vr1", TOP), ROOT),
            (Partition(HOST_REF, "machine.slice"), ROOT),
            (ThreadSched("vr1", vcpu, "vcpu 0"), BUDGET),
            (ThreadSched("vr1", worker, "vhost"), BUDGET),
        ],
    )


CASES = {"tight": (tight, tight_plan), "6.1": (old, old_plan)}


def visible(host: FakeKernel) -> dict[str, object]:
    """What an operator sees; a list of all CPUs counts as none."""
    seen = host.visible()
    for cgroup in seen["cgroups"].values():
        cgroup.setdefault("partition", "member")
        cgroup.setdefault("exclusive", "")
        if cgroup["cpus"] == seen["possible"]:
            cgroup["cpus"] = ""
    seen.pop("leaked", None)
    return seen


def open_journal(path: Path) -> Journal:
    return Journal.open(path / "journal.jsonl", BOOT)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[FakeKernel, Plan]:
    make, plan = CASES[request.param]
    host = make()
    return host, plan(host)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _fd: None)
    monkeypatch.setattr("vsrtune.execute.cgroups._RMDIR_PAUSE", 0)


def test_applied_and_undone_exactly(case: tuple[FakeKernel, Plan], tmp_path: Path) -> None:
    host, plan = case
    before = visible(host)
    with open_journal(tmp_path) as journal:
        result = apply(plan, host.ops(), journal)
        assert (result.failed, result.pending) == ((), ())
        assert len(result.done) == len(plan.actions)
        for tid in (1010, 1020):
            assert host.sched_attr(tid) == BUDGET
            assert host.root_domain(tid) == CpuSet.parse(host.mask(tid))
        undone = undo(host.ops(), journal)
        assert (undone.failed, undone.left) == ((), ())
        assert journal.entries() == ()
    assert visible(host) == before
    assert host.state.get("leaked", 0) == 0
    assert "miscounted" not in host.state


def test_masks_that_others_have_got_since_stay(tmp_path: Path) -> None:
    """6.1: a mask is noted when the partition is made, and is of no use when its owner has chosen
    another one."""
    host = old()
    with open_journal(tmp_path) as journal:
        assert apply(old_plan(host), host.ops(), journal).failed == ()
        assert [host.mask(tid) for tid in (4000, 4001, 4002)] == ["0,3", "3", "0,3"]
        host.set_affinity(4001, CpuSet.parse("0-3"))
        host.set_affinity(4002, CpuSet([0]))
        assert undo(host.ops(), journal).failed == ()
    assert [host.mask(tid) for tid in (4000, 4001, 4002)] == ["2", "0-3", "0"]


def test_killed_between_a_partition_and_the_masks_no_mask_is_lost(tmp_path: Path) -> None:
    """6.1: they come back with the partition that stays, for it may stay for months."""
    host = old()
    plan = old_plan(host)

    def die(what: str) -> None:
        if what.endswith(f"{TOP}/cpuset.cpus.partition root"):
            raise _KilledError

    host.behind = die
    with open_journal(tmp_path) as journal, suppress(_KilledError):
        apply(plan, host.ops(), journal)
    host.behind = lambda _what: None
    assert host.mask(4001) == "0-1,3"
    with open_journal(tmp_path) as journal:
        assert recover(host.ops(), journal).failed == ()
    assert host.mask(4001) == "1,3"


def with_mask(host: FakeKernel, mask: str) -> None:
    """The worker's own mask, before vsrtune."""
    host.state["threads"]["1020"] |= {"mask": mask, "user": mask}


@pytest.mark.parametrize("mask", ["0-3", "1-3", "1"])
@pytest.mark.parametrize("side", ["ahead", "behind"])
def test_every_failing_write_is_rolled_back(
    case: tuple[FakeKernel, Plan], tmp_path: Path, side: str, mask: str
) -> None:
    host, plan = case
    with_mask(host, mask)
    plan = plan_of(host, [(a.target, a.after) for a in plan.actions])
    before = visible(host)
    copy = host.clone()
    with open_journal(tmp_path / "count") as journal:
        apply(plan, copy.ops(), journal)
    for n in range(1, len(copy.log) + 1):
        broken = host.clone()
        setattr(broken, side, failing_at(n, lambda: OSError(5, "I/O error")))
        with open_journal(tmp_path / f"{n}") as journal:
            result = apply(plan, broken.ops(), journal)
            assert result.failed, n
            undone = undo(broken.ops(), journal)
            assert (undone.failed, undone.left) == ((), ()), n
        assert visible(broken) == before, n
        assert broken.state.get("leaked", 0) == 0, n
        assert "miscounted" not in broken.state, n


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("mask", ["0-3", "1-3", "1"])
def test_no_mask_is_lost_in_a_slice_that_stays_a_root_domain(
    tmp_path: Path, mask: str, again: bool
) -> None:
    """6.1: the guest fails, the host's part of the pass stays. The worker returned into a slice
    with none of its CPUs, and what the kernel gave it there became its original."""
    host = old()
    with_mask(host, mask)
    before = visible(host)
    plan = old_plan(host)

    def refuse(what: str) -> None:
        if what.startswith("sched 1020 deadline"):
            raise OSError(16, "Device or resource busy")

    host.ahead = refuse
    with open_journal(tmp_path) as journal:
        result = apply(plan, host.ops(journal), journal)
        assert not result.rolled_back
        assert all(e.state == "done" for e in journal.entries())
        worker = ThreadAffinity("vr1", key(host, 1020), "vhost")
        entry = journal.entry(worker)
        assert entry is not None
        assert (str(entry.original), str(entry.written), host.mask(1020)) == (mask, "2", "2")
        told = {a.target.kind: str(error) for a, error in result.failed}
        assert told["thread-cgroup"].endswith(
            "waits for host/: cgroup machine.slice cpuset.cpus, which stays for now; `vsrtune undo` "
            "puts back both"
        )
        assert "waits for vr1: vhost (tid 1020) cgroup" in told["thread-affinity"]
        host.ahead = lambda _what: None
        if again:
            rest = plan_of(host, [(a.target, a.after) for a in plan.actions])
            rest = Plan(tuple(a for a in rest.actions if a.before != a.after))
            assert apply(rest, host.ops(journal), journal).failed == ()
            assert host.sched_attr(1020) == BUDGET
        undone = undo(host.ops(journal), journal)
        assert (undone.failed, undone.left, journal.entries()) == ((), (), ())
    assert visible(host) == before
    assert "miscounted" not in host.state


def test_a_mask_that_followed_its_thread_is_no_original(tmp_path: Path) -> None:
    """6.12: a partition cannot be taken back, so the worker that returns has other CPUs for now."""
    host = tight()
    before = visible(host)

    def refuse(what: str) -> None:
        if what.startswith("sched 1020 deadline") or what.endswith(
            "cpus2/cpuset.cpus.partition member"
        ):
            raise OSError(12, "Cannot allocate memory")

    host.ahead = refuse
    with open_journal(tmp_path) as journal:
        assert not apply(tight_plan(host), host.ops(), journal).rolled_back
        worker = journal.entry(ThreadAffinity("vr1", key(host, 1020), "vhost"))
        assert worker is None or worker.original == CpuSet(range(4))
        host.ahead = lambda _what: None
        undone = undo(host.ops(), journal)
        assert (undone.failed, undone.left, journal.entries()) == ((), (), ())
    assert visible(host) == before
    assert host.state["threads"]["1020"]["user"] == "0-3"


def test_a_slice_that_is_refused_at_first_loses_no_mask(tmp_path: Path) -> None:
    """6.1: its list overlaps the partition beside it until that is gone (validate_change)."""
    host = old()
    host.state["cgroups"]["machine.slice"]["cpus"] = "0-3"
    with_mask(host, "1-3")
    before = host.visible()

    def refuse(what: str) -> None:
        beside = host.state["cgroups"].get(TOP, {}).get("partition") == "root"
        if beside and what.endswith("machine.slice/cpuset.cpus 0-3"):
            raise OSError(22, "Invalid argument")

    with open_journal(tmp_path) as journal:
        assert apply(old_plan(host), host.ops(), journal).failed == ()
        host.ahead = refuse
        undone = undo(host.ops(), journal)
        assert (undone.failed, undone.left, journal.entries()) == ((), (), ())
    for cgroup in (now := host.visible())["cgroups"].values():
        if cgroup.get("partition") == "member":
            del cgroup["partition"]
    now.pop("leaked", None)
    assert now == before


def test_a_thread_that_stays_deadline_keeps_its_root_domain(
    case: tuple[FakeKernel, Plan], tmp_path: Path
) -> None:
    """Its guest's part of it, and the host's: a slice, and what is above the partitions."""
    host, plan = case
    before = visible(host)

    with open_journal(tmp_path) as journal:
        apply(plan, host.ops(), journal)
        tuned = visible(host)
        host.ahead = without_rights(1020)
        result = undo(host.ops(), journal)
        assert host.sched_attr(1010) == Sched()
        assert visible(host)["cgroups"] == tuned["cgroups"]
        assert "miscounted" not in host.state
        assert {a.target for a, _ in result.failed} == {e.target for e in journal.entries()}
        host.ahead = lambda _what: None
        again = undo(host.ops(), journal)
        assert (again.failed, again.left, journal.entries()) == ((), (), ())
    assert visible(host) == before
    assert "miscounted" not in host.state


def test_a_partition_that_stays_keeps_the_lists_of_its_cpus(
    case: tuple[FakeKernel, Plan], tmp_path: Path
) -> None:
    host, plan = case
    before = visible(host)

    def refuse(what: str) -> None:
        if what.endswith("cpuset.cpus.partition member"):
            raise OSError(5, "I/O error")

    with open_journal(tmp_path) as journal:
        apply(plan, host.ops(), journal)
        lists = {c: (v["cpus"], v.get("exclusive")) for c, v in host.state["cgroups"].items()}
        host.ahead = refuse
        undo(host.ops(), journal)
        for path, cgroup in host.state["cgroups"].items():
            if cgroup.get("partition") == "root":
                for above in upwards(path):
                    now = host.state["cgroups"][above]
                    assert (now["cpus"], now.get("exclusive")) == lists[above], above
        host.ahead = lambda _what: None
        assert undo(host.ops(), journal).failed == ()
    assert visible(host) == before


class _KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("side", ["ahead", "behind"])
def test_killed_anywhere_the_next_start_puts_all_back(
    case: tuple[FakeKernel, Plan], tmp_path: Path, side: str
) -> None:
    host, plan = case
    before = visible(host)
    copy = host.clone()
    with open_journal(tmp_path / "count") as journal:
        apply(plan, copy.ops(), journal)
        forward = len(copy.log)
        undo(copy.ops(), journal)
    for n in range(1, len(copy.log) + 1):
        broken = host.clone()
        setattr(broken, side, failing_at(n, _KilledError))
        path = tmp_path / f"{n}"
        with open_journal(path) as journal, suppress(_KilledError):
            apply(plan, broken.ops(), journal)
            undo(broken.ops(), journal)
            raise AssertionError(n)
        setattr(broken, side, lambda _what: None)
        with open_journal(path) as journal:
            assert recover(broken.ops(), journal).failed == (), n
            result = undo(broken.ops(), journal)
            assert (result.failed, result.left) == ((), ()), n
        assert visible(broken) == before, (n, forward)
        assert broken.state.get("leaked", 0) == 0, n


def test_a_thread_that_runs_while_it_is_refused_is_asked_again(
    case: tuple[FakeKernel, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was on its old CPU for the kernel, and is on its own when we look why."""
    host, plan = case
    thread = host.state["threads"]["1020"]
    thread["cpu"] = 0
    kernels = host._set_sched

    def runs_afterwards(tid: int, sched: Sched) -> None:
        try:
            kernels(tid, sched)
        finally:
            if tid == 1020:
                thread["cpu"] = 2

    monkeypatch.setattr(host, "_set_sched", runs_afterwards)
    with open_journal(tmp_path) as journal:
        result = apply(plan, host.ops(), journal)
    assert (result.failed, result.pending, len(result.done)) == ((), (), len(plan.actions))


def test_a_sleeping_thread_is_pending_and_the_rest_is_done(
    case: tuple[FakeKernel, Plan], tmp_path: Path
) -> None:
    host, plan = case
    host.state["threads"]["1020"]["cpu"] = 0
    with open_journal(tmp_path) as journal:
        result = apply(plan, host.ops(), journal)
        assert (result.failed, len(result.done)) == ((), len(plan.actions) - 1)
        ((action, error),) = result.pending
        assert isinstance(error, PendingError)
        assert str(error) == (
            "vr1: vhost (tid 1020) scheduling: the thread has not run since it was given CPUs 2 "
            "(last on CPU 0), and the kernel takes class deadline only then; tried again when it "
            "has run"
        )
        assert action.target not in journal.applied()
        assert undo(host.ops(), journal).failed == ()


def test_a_partition_the_kernel_calls_invalid_is_a_failure(tmp_path: Path) -> None:
    host = tight()
    plan = tight_plan(host)
    host.state["cgroups"][f"{LIBVIRT}/rival"] = {"cpus": "1-2", "type": "threaded"}
    before = visible(host)
    with open_journal(tmp_path) as journal:
        result = apply(plan, host.ops(), journal)
        ((action, error),) = result.failed
        assert isinstance(action.target, Partition)
        assert str(error) == (
            f"vr1: partition {VCPU0}: the kernel made no partition of it: root invalid (Cpu list "
            "in cpuset.cpus not exclusive); look at cpuset.cpus and cpuset.cpus.exclusive of the "
            "cgroups beside and above it"
        )
        assert undo(host.ops(), journal).failed == ()
    assert visible(host) == before


def test_an_invalid_partition_is_still_ours_to_take_back(tmp_path: Path) -> None:
    host = tight()
    before = visible(host)
    with open_journal(tmp_path) as journal:
        apply(tight_plan(host), host.ops(), journal)
        host.state["cgroups"][VCPU0]["partition"] = "root invalid (Parent is not a partition root)"
        host.state["threads"]["1010"]["sched"] = host.state["threads"]["1011"]["sched"]
        undone = undo(host.ops(), journal)
        assert undone.failed == ()
        assert [str(left.target) for left in undone.left] == ["vr1: vcpu 0 (tid 1010) scheduling"]
    after = visible(host)
    assert after["cgroups"] == before["cgroups"]


@pytest.mark.parametrize("path", ["machine.slice", "user.slice"])
@pytest.mark.parametrize("forward", [True, False])
def test_killed_between_a_list_and_the_masks_below_no_mask_is_lost(
    tmp_path: Path, path: str, forward: bool
) -> None:
    """6.1: a failed write is taken back, or an undo writes the original: the text first, then the
    masks. user.slice has threads of its own, so the kernel leaves it a list of all CPUs."""
    host = old()
    host.state["cgroups"]["user.slice"] = {"cpus": "", "type": "domain"}
    host.state["threads"]["4000"] = {
        **host.state["threads"]["2010"], "pid": 4000, "cgroup": "user.slice", "mask": "1", "user": "1",
    }  # fmt: skip
    before = visible(host)
    file = f"{path}/{CPUS} "
    plan = plan_of(host, [(CpusetFile(HOST_REF, path, CPUS), CpusetList("0-1"))])

    def behind(what: str) -> None:
        if forward and what.endswith(f"{file}0-1"):
            raise OSError(5, "I/O error")
        if what.endswith((file, f"{file}0-3")):
            raise _KilledError

    with open_journal(tmp_path) as journal, suppress(_KilledError):
        if not forward:
            assert apply(plan, host.ops(), journal).failed == ()
        host.behind = behind
        (apply(plan, host.ops(), journal) if forward else undo(host.ops(), journal))
        raise AssertionError("not killed")
    host.behind = lambda _what: None
    assert visible(host) != before
    with open_journal(tmp_path) as journal:
        assert recover(host.ops(), journal).failed == ()
        undone = undo(host.ops(), journal)
        assert (undone.failed, undone.left, journal.entries()) == ((), (), ())
    assert visible(host) == before


def test_a_thread_tuned_before_leaves_the_class_before_its_partition_goes(tmp_path: Path) -> None:
    """Its scheduling and its cgroup were written first when it had another class."""
    for make, planned in CASES.values():
        host = make()
        before = visible(host)
        worker = key(host, 1020)
        fifo = Sched(SchedClass.FIFO, 10, reset_on_fork=True)
        first = plan_of(
            host,
            [
                (CgroupDir("vr1", f"{LIBVIRT}/vsrtune"), True),
                (ThreadCgroup("vr1", worker, "vhost"), f"{LIBVIRT}/vsrtune"),
                (ThreadSched("vr1", worker, "vhost"), fifo),
            ],
        )
        with open_journal(tmp_path / make.__name__) as journal:
            assert apply(first, host.ops(), journal).failed == ()
            assert apply(planned(host), host.ops(), journal).failed == ()
            result = undo(host.ops(), journal)
            assert (result.failed, result.left) == ((), ())
        assert visible(host) == before
        assert "miscounted" not in host.state
        assert host.state.get("leaked", 0) == 0


def test_on_an_isolated_cpu_a_sleeping_thread_leaves_nothing_booked(tmp_path: Path) -> None:
    """There is no partition to take away there."""
    host = make_host("6.12")
    host.state["threads"]["2010"]["mask"] = host.state["online"]
    target = ThreadSched("qemu:vr2", key(host, 2010), "vcpu 0")
    with open_journal(tmp_path) as journal:
        assert apply(plan_of(host, [(target, BUDGET)]), host.ops(), journal).failed == ()
        assert undo(host.ops(), journal).failed == ()
    assert host.sched_attr(2010) == Sched()
    assert host.state["leaked"] == 0


def test_a_root_domain_changes_one_period_after_its_threads_left_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = tight()
    now, order = 100.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        order.append("waited")
        now += seconds

    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("time.sleep", sleep)
    with open_journal(tmp_path) as journal:
        apply(tight_plan(host), host.ops(), journal)
        host.behind = lambda what: order.append(what.rpartition("/")[2])
        undo(host.ops(), journal)
    assert order[:4] == [
        "sched 1020 other", "sched 1010 other", "waited", "cpuset.cpus.partition member",
    ]  # fmt: skip
    assert now >= 100.0 + BUDGET.period_ns / 1e9


def test_whoever_goes_on_after_a_crash_waits_for_the_same_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who took the threads out of the class is dead, and its clock with it."""
    host = tight()
    now, slept = 100.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    def die(what: str) -> None:
        if "partition" in what:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("time.sleep", sleep)
    with open_journal(tmp_path) as journal:
        apply(tight_plan(host), host.ops(), journal)
        host.ahead = die
        with pytest.raises(KeyboardInterrupt):
            undo(host.ops(), journal)
    host.ahead = lambda what: None
    slept.clear()
    # The journal is as young as can be, however busy this machine is.
    monkeypatch.setattr("time.time", lambda: 0.0)
    with open_journal(tmp_path) as journal:
        ops = LiveSysOps(root=host, calls=host, budgets_end=journal.budgets_end)
        result = undo(ops, journal)
    assert (result.failed, result.left) == ((), ())
    assert len(slept) == 1
    assert slept[0] == pytest.approx(lag_seconds(BUDGET))


def test_a_compacted_journal_still_tells_how_long_to_wait(tmp_path: Path) -> None:
    host = tight()
    fold = Fold()
    for action in tight_plan(host).actions:
        fold.intent(action)
        fold.done(action.target)
    leave = ThreadSched("libvirt:vr1", key(host, 1010), "vcpu 0")
    fold.intent(Action(leave, BUDGET, Sched(), "undo"))
    again = Fold()
    for record in fold.compacted():
        again.record(record)
    assert again.lag == fold.lag == lag_seconds(BUDGET)
    assert again.live == fold.live


def test_a_list_above_thousands_of_cgroups_is_read_with_the_masks_below() -> None:
    """A user makes as many cgroups as he likes, one in another, below the slice of a guest."""
    host = old()
    host.state["cgroups"]["user.slice"] = {"cpus": "", "type": "domain"}
    deep = f"user.slice{'/a' * 1200}"
    for path in upwards(deep):
        host.state["cgroups"].setdefault(path, {"cpus": None, "type": "domain"})
    host.state["threads"]["4000"] = {
        **host.state["threads"]["2010"], "pid": 4000, "cgroup": deep, "mask": "1", "user": "1",
    }  # fmt: skip
    target = CpusetFile(HOST_REF, "user.slice", CPUS)
    read = host.ops().read(target)
    assert isinstance(read, CpusetList)
    found = host.ops().renewed(target, read)
    assert found == CpusetList("", (ThreadMask(key(host, 4000), CpuSet([1])),))
    assert found.masks == (ThreadMask(key(host, 4000), CpuSet([1])),)
