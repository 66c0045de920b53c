"""The journal's space on the disk: undo works on one that has filled up meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_kernel import (
    BOOT,
    KERNELS,
    FakeKernel,
    failing_at,
    key,
    make_host,
    make_plan,
    releases,
)

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import JournalError
from vsrtune.execute import jsonl_log
from vsrtune.execute.executor import apply, undo
from vsrtune.execute.journal import Journal
from vsrtune.host import state_files
from vsrtune.model.guest import Sched, SchedClass, ThreadKey
from vsrtune.model.journal_records import undo_order
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import (
    HOST_REF,
    CpusetFile,
    CpusetList,
    ThreadAffinity,
    ThreadSched,
    TxQueueLen,
)

QUEUE = TxQueueLen("vr1", "macvtap1", 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.jsonl"


@pytest.fixture
def fills_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Call it, and no file gets a block any more beside those that it has."""
    with (tmp_path / "probe").open("wb") as probe:
        state_files.claim(probe.fileno(), 0, 4096)
        if not os.fstat(probe.fileno()).st_blocks:
            pytest.skip("no fallocate on this file system")
    real = state_files.write_all

    def within(fd: int, data: bytes) -> None:
        status = os.fstat(fd)
        if status.st_size + len(data) > 512 * status.st_blocks:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, data)

    def fill() -> None:
        for module in (jsonl_log, state_files):
            monkeypatch.setattr(module, "write_all", within)
            monkeypatch.setattr(module, "claim", refuse)

    return fill


def refuse(_fd: int, _offset: int, _length: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def write(journal: Journal, action: Action) -> None:
    journal.intent(action)
    journal.done(action.target)


def tune(journal: Journal, *actions: Action) -> None:
    """A pass."""
    journal.reserve(actions)
    for action in actions:
        write(journal, action)


def undo_all(journal: Journal) -> None:
    for entry in undo_order(journal.entries()):
        write(journal, Action(entry.target, entry.written, entry.original, "undo"))


def a_guest(number: int) -> list[Action]:
    """What a pass does to one of many guests."""
    name, reason = f"vr{number}", "cpus.vhost: 1 (/etc/vsrtune/policies/10-routers.yaml:7)"
    every, one = CpuSet(range(4)), CpuSet([1])
    keys = [ThreadKey(number, 10 * number + n, 5000) for n in range(3)]
    actions = [Action(ThreadAffinity(name, k, "vhost"), every, one, reason) for k in keys]
    actions.append(Action(TxQueueLen(name, f"macvtap{number}", number), 500, 100, reason))
    return actions


def test_a_disk_that_fills_up_after_many_passes_leaves_room_to_undo_all(
    path: Path, fills_up: Callable[[], None]
) -> None:
    """Each pass had claimed only its own, from where the one before had claimed for its undo."""
    with Journal.open(path, BOOT) as journal:
        for number in range(1, 31):
            tune(journal, *a_guest(number))
        for change in range(40):
            tune(journal, Action(QUEUE, 100 + change, 101 + change, "drift"))
        fills_up()
        with pytest.raises(JournalError, match="No space"):
            journal.reserve(a_guest(99))
        undo_all(journal)
        assert journal.entries() == ()


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kind_of_change_has_room_to_be_undone(
    path: Path, fills_up: Callable[[], None], kernel: str
) -> None:
    """Among them moves between cgroups, which write about an affinity as well."""
    host = make_host(kernel)
    before = host.visible()
    with Journal.open(path, BOOT) as journal:
        for action in make_plan(host).actions:
            assert apply(Plan((action,)), host.ops(), journal).failed == ()
        fills_up()
        assert undo(host.ops(), journal).failed == ()
        assert journal.entries() == ()
    assert host.visible() == before


def test_a_disk_that_fills_up_after_a_compaction_leaves_room_to_undo_all(
    path: Path, monkeypatch: pytest.MonkeyPatch, fills_up: Callable[[], None]
) -> None:
    """The new file had nothing claimed, were it in the middle of a pass."""
    with Journal.open(path, BOOT) as journal:
        for number in range(1, 21):
            tune(journal, *a_guest(number))
        size = path.stat().st_size
        actions = a_guest(21)
        journal.reserve(actions)
        monkeypatch.setattr(jsonl_log, "MAX_SIZE", 1)
        while path.stat().st_size >= size:
            write(journal, Action(QUEUE, 500, 100, "policy"))
        monkeypatch.undo()
        fills_up()
        for action in actions:
            write(journal, action)
        undo_all(journal)
        assert journal.entries() == ()


def test_without_room_to_undo_all_a_compaction_keeps_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open(path, BOOT) as journal:
        tune(journal, *a_guest(1))
        journal.reserve([Action(QUEUE, 500, 100, "policy")] * 100)
        monkeypatch.setattr(state_files, "claim", refuse)
        inode = path.stat().st_ino
        for _ in range(100):
            write(journal, Action(QUEUE, 500, 100, "policy"))
        assert (path.stat().st_ino, os.listdir(path.parent)) == (
            inode,
            ["journal.jsonl", "journal.jsonl.lock"],
        )


def test_an_adopted_journal_has_room_to_undo_all(path: Path, fills_up: Callable[[], None]) -> None:
    """A version that claimed less, or a torn end, which is cut off with all behind it."""
    with Journal.open(path, BOOT) as journal:
        for number in range(1, 21):
            for action in a_guest(number):
                write(journal, action)
    with Journal.open(path, BOOT) as journal:
        fills_up()
        undo_all(journal)
        assert journal.entries() == ()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("full_at", [0, 6])
def test_a_first_write_that_is_refused_costs_the_pass_no_room(
    path: Path, fills_up: Callable[[], None], kernel: str, full_at: int
) -> None:
    """It is the only entry and is taken back; the file became an empty one, with nothing claimed.
    The disk fills up after the pass, or at its nth write."""
    host = make_host(kernel)
    plan = make_plan(host)
    host.state["irqs"]["41"]["managed"] = True
    before = host.visible()
    full = failing_at(full_at, KeyError)

    def behind(what: str) -> None:
        try:
            full(what)
        except KeyError:
            fills_up()

    host.behind = behind
    with Journal.open(path, BOOT) as journal:
        result = apply(plan, host.ops(), journal)
        assert (result.failed, len(result.fixed)) == ((), 1)
        fills_up()
        assert undo(host.ops(), journal).failed == ()
        assert journal.entries() == ()
    assert host.visible() == before


def test_a_pass_that_releases_all_before_it_tunes_has_room(
    path: Path, fills_up: Callable[[], None]
) -> None:
    """The policy names another guest now."""
    host = make_host("6.12")
    before = host.visible()
    plan = make_plan(host)
    first = [a for a in plan.actions if a.target.guest == "qemu:vr2"]
    second = [a for a in plan.actions if a.target.guest != "qemu:vr2"]
    with Journal.open(path, BOOT) as journal:
        apply(Plan(tuple(first)), host.ops(), journal)
        result = apply(Plan((*releases(journal).actions, *second)), host.ops(), journal)
        assert result.failed == ()
        fills_up()
        assert undo(host.ops(), journal).failed == ()
        assert journal.entries() == ()
    assert host.visible() == before


def test_an_emptied_journal_holds_no_space(path: Path) -> None:
    host = make_host("6.12")
    with Journal.open(path, BOOT) as journal:
        apply(make_plan(host), host.ops(), journal)
        assert apply(releases(journal), host.ops(), journal).failed == ()
        assert (path.stat().st_size, path.stat().st_blocks) == (0, 0)


def crowded(count: int) -> tuple[FakeKernel, Plan]:
    """A slice with so many threads that have masks of their own, of which no plan knows, and its
    new list."""
    host = make_host("6.1")
    for tid in range(5000, 5000 + count):
        host.state["threads"][str(tid)] = host.state["threads"]["1002"] | {"pid": tid}
    target = CpusetFile(HOST_REF, "machine.slice", "cpuset.cpus")
    plan = Plan((Action(target, CpusetList(""), CpusetList("1-2"), "keep off"),))
    return host, plan


def test_masks_that_the_host_has_and_no_plan_have_room_to_be_undone(
    path: Path, fills_up: Callable[[], None]
) -> None:
    host, plan = crowded(300)
    with Journal.open(path, BOOT) as journal:
        assert apply(plan, host.ops(), journal).failed == ()
        fills_up()
        assert undo(host.ops(), journal).failed == ()
        assert journal.entries() == ()
    assert {host.mask(tid) for tid in range(5000, 5300)} == {"2"}


def test_masks_for_which_there_is_no_room_are_not_lost(
    path: Path, fills_up: Callable[[], None]
) -> None:
    """Nor is room that undo of what was set before needs."""
    host, plan = crowded(300)
    before = host.visible()
    queue = Action(TxQueueLen("vr1", "macvtap0", 7), 500, 100, "policy")
    host.behind = lambda _what: fills_up()
    with Journal.open(path, BOOT) as journal:
        with pytest.raises(JournalError, match="No space left"):
            apply(Plan((queue, *plan.actions)), host.ops(), journal)
        assert [e.target for e in journal.entries()] == [queue.target]
        assert undo(host.ops(), journal).failed == ()
        assert journal.entries() == ()
    assert host.visible() == before


def lowered(host: FakeKernel, *tids: int, to: Sched) -> Plan:
    """A step down of these threads of vr2."""
    targets = [ThreadSched("qemu:vr2", key(host, tid), "vcpu") for tid in tids]
    why = "stepped down to other: frames arrive, and none was taken"
    return Plan(tuple(Action(t, host.ops().read(t), to, why) for t in targets))


@pytest.mark.parametrize("count", [1, 4, 16])
def test_a_full_disk_stops_neither_steps_down_nor_undo_after_them(
    path: Path, fills_up: Callable[[], None], count: int
) -> None:
    """A host that starves and a log that fills the disk belong together. The room for a step was
    asked for anew, on top of that for undo."""
    host = make_host("6.12")
    tids = range(6000, 6000 + count)
    for tid in tids:
        host.state["threads"][str(tid)] = host.state["threads"]["2010"] | {"pid": tid}
    before = host.visible()
    fifo, rr = (Sched(c, 10, reset_on_fork=True) for c in (SchedClass.FIFO, SchedClass.RR))
    with Journal.open(path, BOOT) as journal:
        assert apply(lowered(host, *tids, to=fifo), host.ops(), journal).failed == ()
        fills_up()
        for cls in (rr, Sched(nice=5)):
            assert len(apply(lowered(host, *tids, to=cls), host.ops(), journal).done) == count
            assert {host.sched_attr(tid) for tid in tids} == {cls}
        assert undo(host.ops(), journal).failed == ()
        assert journal.entries() == ()
    assert host.visible() == before


def test_on_a_full_disk_only_what_relieves_the_host_is_done(
    path: Path, fills_up: Callable[[], None]
) -> None:
    """A guest that is released altogether, and classes that become lower. The rest has failed, and
    the host's part stays for those who keep their own."""
    host = make_host("6.12")
    with Journal.open(path, BOOT) as journal:
        apply(make_plan(host), host.ops(), journal)
        fills_up()
        vr1 = ThreadSched("vr1", key(host, 1010), "vcpu 0")
        fifo = Sched(SchedClass.FIFO, 10, reset_on_fork=True)
        queue = TxQueueLen("vr1", "macvtap0", 7)
        others = Plan(
            (
                *releases(journal, "qemu:vr2", HOST_REF).actions,
                Action(queue, 100, 200, "drift"),
                Action(vr1, fifo, Sched(), "step"),
            )
        )
        result = apply(others, host.ops(), journal)
        assert {a.target for a, _ in result.failed} >= {queue}
        assert {a.target.guest for a, _ in result.failed} == {"vr1", HOST_REF}
        assert all("No space left" in str(error) for _, error in result.failed)
        assert {a.target.guest for a in result.done} == {"qemu:vr2", "vr1"}
        assert (host.sched_attr(1010), host.sched_attr(2010)) == (Sched(), Sched())
        assert journal.guests() == {"vr1", HOST_REF}
        with pytest.raises(JournalError, match="No space left"):
            apply(Plan((Action(queue, 100, 200, "drift"),)), host.ops(), journal)
        whole = apply(releases(journal), host.ops(), journal)
        assert (whole.failed, journal.entries()) == ((), ())
    assert host.visible() == make_host("6.12").visible()


def test_a_journal_never_grows_beyond_what_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undo has room there too."""

    def passes() -> None:
        for number in range(1, 100):
            tune(journal, *a_guest(number))

    def intents() -> None:
        for number in range(100, 1000):
            journal.intent(a_guest(number)[0])

    monkeypatch.setattr(jsonl_log, "LARGEST", 40_000)
    with Journal.open(path, BOOT) as journal:
        with pytest.raises(JournalError, match="it may have"):
            passes()
        tuned = journal.entries()
    with Journal.open(path, BOOT) as journal:
        assert journal.entries() == tuned
        undo_all(journal)
        assert journal.entries() == ()
        with pytest.raises(JournalError, match="File too large"):
            intents()
    assert 39_000 < path.stat().st_size <= 40_000
    Journal.open(path, BOOT).close()
