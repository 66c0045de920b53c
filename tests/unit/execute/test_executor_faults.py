"""The executor interrupted: every write fails once, and the process is killed at every
change of the host and of the journal. What remains must be all or nothing.

The kills are real: a forked child works on a host whose state is a file, and sends
itself SIGKILL. The kills in pairs (in recovery as well) are imitated by an exception
that nothing catches. Of these every third is tried, beginning elsewhere for each first kill;
LAB_STRIDE=1 tries all.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_kernel import (
    BOOT,
    KERNELS,
    LIBVIRT,
    FakeKernel,
    Killed,
    failing_at,
    make_host,
    make_plan,
    releases,
    replan,
    without_rights,
)

from vsrtune.core.errors import JournalError
from vsrtune.execute.executor import apply, recover, undo
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import HOST_REF, CpusetFile, CpusetList, TxQueueLen
from vsrtune.plan.interrupts import refused

SIDES = ("ahead", "behind")
STRIDE = 1 if os.environ.get("LAB_STRIDE") == "1" else 3
# What belongs to whom on the fake host.
PARTS = ("threads", "devices", "irqs")
PIDS = {"vr1": 1000, "qemu:vr2": 2000, HOST_REF: 0}


@pytest.fixture(params=KERNELS)
def host(request: pytest.FixtureRequest) -> FakeKernel:
    return make_host(request.param)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses nothing that was written, synced or not, so no test needs the disk."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    monkeypatch.setattr("vsrtune.execute.cgroups._RMDIR_PAUSE", 0)


def open_journal(path: Path) -> Journal:
    return Journal.open(path / "journal.jsonl", BOOT)


def tuned(host: FakeKernel, plan: Plan, path: Path) -> dict[str, Any]:
    """What the host looks like with the whole plan applied."""
    copy = host.clone()
    (path / "tuned").mkdir()
    with open_journal(path / "tuned") as journal:
        apply(plan, copy.ops(), journal)
    return copy.visible()


def part(seen: dict[str, Any], pids: set[int]) -> dict[str, object]:
    """Threads, devices and interrupts of some guests or the host (0), and the cgroups."""
    return {
        "threads": {t: v for t, v in seen["threads"].items() if v["guest"] in pids},
        "devices": {d: v for d, v in seen["devices"].items() if v["guest"] in pids},
        "irqs": {i: v for i, v in seen["irqs"].items() if v["guest"] in pids},
        "cgroups": seen["cgroups"] if 1000 in pids else None,
    }


def steps_of(host: FakeKernel, plan: Plan, path: Path) -> int:
    """How many changes of the host the plan takes."""
    copy = host.clone()
    with open_journal(path) as journal:
        apply(plan, copy.ops(), journal)
    return len(copy.log)


# -- failing writes


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.usefixtures("quick")
def test_every_failing_write_is_rolled_back(host: FakeKernel, tmp_path: Path, side: str) -> None:
    plan = make_plan(host)
    before = host.visible()
    wanted = tuned(host, plan, tmp_path)
    count = steps_of(host, plan, tmp_path / "count")
    assert count > len(plan.actions)
    for n in range(1, count + 1):
        broken = host.clone()
        setattr(broken, side, failing_at(n, lambda: OSError(12, "Cannot allocate memory")))
        with open_journal(tmp_path / str(n)) as journal:
            result = apply(plan, broken.ops(), journal)
            failed = [a.target.guest for a, _ in result.failed]
            # With the host fail the guests, which are to be realtime beside its interrupts.
            all_of_them = HOST_REF in failed
            assert (len(failed), result.rolled_back) == (3 if all_of_them else 1, True), n
            victim = {PIDS[guest] for guest in failed}
            sound = set(PIDS.values()) - victim
            assert part(broken.visible(), victim) == part(before, victim), n
            assert part(broken.visible(), sound) == part(wanted, sound), n
            assert {e.target.guest for e in journal.entries()}.isdisjoint(failed), n
            assert undo(broken.ops(), journal).failed == ()
        assert broken.visible() == before, n


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), None])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.usefixtures("quick")
def test_a_failure_or_kill_while_all_is_released_and_set_again_loses_no_original(
    host: FakeKernel, tmp_path: Path, side: str, error: OSError | None
) -> None:
    """A root domain that is made anew has such a plan."""
    plan = make_plan(host)
    before = host.visible()
    for n in range(1, 120, STRIDE):
        broken = host.clone()
        with open_journal(tmp_path / str(n)) as journal:
            apply(plan, broken.ops(), journal)
            both = Plan((*releases(journal).actions, *plan.actions))
            setattr(broken, side, failing_at(n, lambda: error or Killed()))
            try:
                result = apply(both, broken.ops(), journal)
                assert not result.rolled_back
                if not result.failed:
                    break
            except Killed:
                pass
        with open_journal(tmp_path / str(n)) as journal:
            assert recover(broken.ops(), journal).failed == ()
            assert undo(broken.ops(), journal).failed == ()
        assert broken.visible() == before, n
    else:
        raise AssertionError("the plan has more writes than were tried")


@pytest.mark.usefixtures("quick")
def test_an_interrupt_that_the_kernel_keeps_is_no_failure(host: FakeKernel, tmp_path: Path) -> None:
    """A managed interrupt stays as it is; all that is planned beside it is done, and undone."""
    plan = make_plan(host)
    host.state["irqs"]["41"]["managed"] = True
    before = host.visible()
    with open_journal(tmp_path) as journal:
        result = apply(plan, host.ops(), journal)
        assert (result.failed, result.rolled_back) == ((), False)
        ((action, error),) = result.fixed
        assert refused(result.fixed) == ((41, "eth0-rx-0"),)
        assert "kernel-managed" in str(error)
        assert error.hint
        assert set(result.done) == set(plan.actions) - {action}
        assert action.target not in {e.target for e in journal.entries()}
        assert undo(host.ops(), journal).failed == ()
    assert host.visible() == before


@pytest.mark.parametrize(
    ("error", "told"),
    # The kernel's own errors have other words in each operation.
    [(OSError(5, "I/O error"), ""), (ZeroDivisionError(), "ZeroDivisionError")],
)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.usefixtures("quick")
def test_every_failing_undo_is_kept_and_succeeds_later(
    host: FakeKernel, tmp_path: Path, side: str, error: Exception, told: str
) -> None:
    """A fault of our own, too, keeps no other original from coming back."""
    plan = make_plan(host)
    before = host.visible()
    for n in range(1, 60):
        broken = host.clone()
        with open_journal(tmp_path / str(n)) as journal:
            apply(plan, broken.ops(), journal)
            setattr(broken, side, failing_at(n, lambda: error))
            length = len(broken.log)
            result = undo(broken.ops(), journal)
            setattr(broken, side, lambda _what: None)
            if len(broken.log) - length < n and not result.failed:
                assert n > len(plan.actions)
                return
            assert told in str(result.failed[0][1])
            assert "test_executor_faults.py" not in str(result.failed[0][1])
            assert {a.target for a, _ in result.failed} == {e.target for e in journal.entries()}
            again = undo(broken.ops(), journal)
            assert (again.failed, again.left) == ((), ()), n
            assert journal.entries() == ()
        assert broken.visible() == before, n
    raise AssertionError("undo never ran to its end")


@pytest.mark.usefixtures("quick")
def test_a_write_that_fails_for_good_leaves_what_undo_can_finish(
    host: FakeKernel, tmp_path: Path
) -> None:
    """From the nth change on everything fails, the way back included."""
    plan = make_plan(host)
    before = host.visible()
    for n in range(1, steps_of(host, plan, tmp_path / "count") + 1):
        broken = host.clone()
        seen = 0

        def refuse(_what: str) -> None:
            nonlocal seen
            seen += 1
            if seen >= n:  # noqa: B023
                raise OSError(5, "I/O error")

        broken.ahead = refuse
        with open_journal(tmp_path / str(n)) as journal:
            result = apply(plan, broken.ops(), journal)
            assert result.failed
            broken.ahead = lambda _what: None
            assert undo(broken.ops(), journal).failed == ()
            assert journal.entries() == ()
        assert broken.visible() == before, n


@pytest.mark.usefixtures("quick")
def test_a_thread_that_stays_realtime_keeps_its_cpus_and_the_interrupts_away(
    host: FakeKernel, tmp_path: Path
) -> None:
    """Undo unpinned it, and had the host's interrupts return to where it ran."""
    before = host.visible()
    with open_journal(tmp_path) as journal:
        apply(make_plan(host), host.ops(), journal)
        tuned = host.visible()
        host.ahead = without_rights(1011, 1021)
        result = undo(host.ops(), journal)
        now = host.visible()
        for tid in ("1011", "1021"):
            assert now["threads"][tid] == tuned["threads"][tid]
        assert (now["irqs"], now["devices"]["eth0"]) == (tuned["irqs"], tuned["devices"]["eth0"])
        for tid in ("1000", "1010", "1020", "2010"):
            assert now["threads"][tid] == before["threads"][tid], "the others are put back"
        failed = {a.target: str(error) for a, error in result.failed}
        assert failed.keys() == {e.target for e in journal.entries()}
        assert sum("sched_setattr" in text for text in failed.values()) == 2
        waits = [text for text in failed.values() if "sched_setattr" not in text]
        assert all("waits for vr1: " in w and "undo again once that is solved" in w for w in waits)
        host.ahead = lambda _what: None
        assert undo(host.ops(), journal).failed == ()
    assert host.visible() == before


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.usefixtures("quick")
def test_nothing_waits_for_a_thread_that_is_gone_or_somebody_elses(
    host: FakeKernel, tmp_path: Path, gone: bool
) -> None:
    """Its class could not be taken back, and then it ended, or got a class by another program."""
    before = host.visible()
    with open_journal(tmp_path) as journal:
        apply(make_plan(host), host.ops(), journal)
        host.ahead = without_rights(1011)
        if gone:
            # Right after its own failure, as the next thread leaves its class.
            host.behind = lambda what: (
                host.end_thread(1011) if what.startswith("sched 1010 ") else None
            )
        else:
            assert undo(host.ops(), journal).failed != ()
            host.state["threads"]["1011"]["sched"] |= {"priority": 50}
        failed = {a.target.kind for a, _ in undo(host.ops(), journal).failed}
        assert failed == ({"thread-sched"} if gone else set())
        host.behind = lambda _what: None
        assert undo(host.ops(), journal).failed == ()
        assert journal.entries() == ()
    now = host.visible()
    for seen in (before, now):
        seen["threads"].pop("1011", None)
    assert [now[k] for k in PARTS] == [before[k] for k in PARTS]


@pytest.mark.parametrize("name", ["online", "cpuset.cpus.effective"])
@pytest.mark.usefixtures("quick")
def test_an_undo_that_cannot_read_which_cpus_there_are_says_so_and_goes_on(
    host: FakeKernel, tmp_path: Path, name: str
) -> None:
    before = host.visible()
    with open_journal(tmp_path) as journal:
        apply(make_plan(host), host.ops(), journal)
        real = host.read

        def read(path: str) -> str:
            if path.endswith(f"/{name}"):
                raise OSError(24, "Too many open files")
            return real(path)

        host.read = read  # type: ignore[method-assign]
        result = undo(host.ops(), journal)
        assert any("Too many open files" in str(error) for _, error in result.failed)
        assert result.done
        host.read = real  # type: ignore[method-assign]
        assert undo(host.ops(), journal).failed == ()
    assert host.visible() == before


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.usefixtures("quick")
def test_an_unfinished_list_that_is_refused_is_told_and_put_back_later(
    host: FakeKernel, tmp_path: Path, killed: bool
) -> None:
    """Of a daemon that was killed, or a write that could not be taken back. Lists are tried twice
    in an undo, and this one was taken out of the failures without being tried."""
    before = host.visible()
    target = CpusetFile("vr1", f"{LIBVIRT}/vcpu1", "cpuset.cpus")
    plan = Plan((Action(target, host.ops().read(target), CpusetList("2"), "test"),))

    def busy(_what: str) -> None:
        raise OSError(16, "Device or resource busy")

    with open_journal(tmp_path) as journal:
        if killed:
            host.behind = failing_at(1, Killed)
            with pytest.raises(Killed):
                apply(plan, host.ops(), journal)
            host.behind = lambda _what: None
        else:
            host.behind = failing_at(1, lambda: OSError(16, "busy"))
            host.ahead = failing_at(2, lambda: OSError(16, "busy"))
            assert apply(plan, host.ops(), journal).failed != ()
    host.ahead = busy
    with open_journal(tmp_path) as journal:
        for result in (undo(host.ops(), journal), apply(releases(journal), host.ops(), journal)):
            assert [a.target for a, _ in result.failed] == [target]
            assert [e.target for e in journal.entries()] == [target]
        host.ahead = lambda _what: None
        assert undo(host.ops(), journal).failed == ()
        assert journal.entries() == ()
    assert host.visible() == before


# -- a disk that fails


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.usefixtures("quick")
def test_without_a_journal_record_the_host_is_not_written(
    host: FakeKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    plan = make_plan(host)
    before = host.visible()
    real = getattr(os, call)
    for n in range(1, 1000):
        broken = host.clone()
        with open_journal(tmp_path / str(n)) as journal:
            left = n

            def full(fd: int, *rest: bytes) -> int | None:
                nonlocal left
                left -= 1
                if left == 0:
                    raise OSError(28, "No space left on device")
                return real(fd, *rest)  # type: ignore[no-any-return]

            monkeypatch.setattr(os, call, full)
            said = ""
            try:
                apply(plan, broken.ops(), journal)
            except JournalError as error:
                said = str(error)
            monkeypatch.setattr(os, call, real)
            if not said:
                assert n > 2 * len(plan.actions), "each action writes an intent and a result"
                return
            assert "host is not written" in said
            written = len(broken.log)
        with open_journal(tmp_path / str(n)) as journal:
            assert len(broken.log) == written
            recover(broken.ops(), journal)
            undo(broken.ops(), journal)
        assert broken.visible() == before, n
    raise AssertionError("the plan never ran to its end")


# -- killed for real


def in_child(work: Callable[[], None]) -> int | None:
    """Run ``work`` in a fork; the signal that ended it, None when it ran to its end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.WEXITSTATUS(status) == 0
    return None


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_points(n: int, side: str, host: FakeKernel) -> None:
    """Arm this process to die at its nth change: of the host, or a write or fsync of
    the journal. A journal write killed ``behind`` leaves half a line."""
    left = n

    def count() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def hook(_what: str) -> None:
        if count():
            kill()

    setattr(host, side, hook)
    write, fsync = os.write, os.fsync

    def dying_write(fd: int, data: bytes) -> int:
        if count():
            if side == "behind":
                write(fd, data[: len(data) // 2])
            kill()
        return write(fd, data)

    def dying_fsync(fd: int) -> None:
        if side == "behind":
            fsync(fd)
        if count():
            kill()
        if side == "ahead":
            fsync(fd)

    os.write, os.fsync = dying_write, dying_fsync  # type: ignore[assignment]


def killed_at_each(
    host: FakeKernel, path: Path, side: str, work: Callable[[FakeKernel, Path], None]
) -> Iterator[tuple[int, Path]]:
    """Kill ``work`` at its first, second ... change until it runs to its end; yields
    the directory with what is left of host and journal."""
    n = 0
    while True:
        n += 1
        place = path / f"{side}{n}"
        place.mkdir(parents=True)
        start = host.clone()
        start.path = place / "host.json"
        start.save()

        def child() -> None:
            here = FakeKernel.load(place / "host.json")  # noqa: B023
            work(here, place)  # noqa: B023

        def armed() -> None:
            here = FakeKernel.load(place / "host.json")  # noqa: B023
            kill_points(n, side, here)  # noqa: B023
            work(here, place)  # noqa: B023

        ended = in_child(armed)
        yield n, place
        if ended is None:
            return
        assert ended == signal.SIGKILL


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.usefixtures("quick")
def test_killed_anywhere_in_apply(host: FakeKernel, tmp_path: Path, side: str) -> None:
    plan = make_plan(host)
    before, wanted = host.visible(), tuned(host, plan, tmp_path)

    def work(here: FakeKernel, place: Path) -> None:
        with open_journal(place) as journal:
            assert apply(plan, here.ops(), journal).failed == ()

    count = 0
    for n, place in killed_at_each(host, tmp_path, side, work):
        count = n
        text = (place / "journal.jsonl").read_bytes() if n > 2 else b""
        forward = FakeKernel.load(place / "host.json").clone()
        with open_journal(place) as journal:
            result = recover(forward.ops(), journal)
            assert (result.failed, result.left) == ((), ()), n
            assert all(e.state == "done" for e in journal.entries())
            again = apply(replan(forward, plan), forward.ops(), journal)
            assert again.failed == (), n
            assert forward.visible() == wanted, n
            assert undo(forward.ops(), journal).left == (), n
            assert forward.visible() == before, n
        if text:
            (place / "journal.jsonl").write_bytes(text)
        back = FakeKernel.load(place / "host.json").clone()
        with open_journal(place) as journal:
            recover(back.ops(), journal)
            result = undo(back.ops(), journal)
            assert (result.failed, result.left) == ((), ()), n
            assert back.visible() == before, n
        if text:
            (place / "journal.jsonl").write_bytes(text)
        straight = FakeKernel.load(place / "host.json").clone()
        with open_journal(place) as journal:
            assert undo(straight.ops(), journal).left == (), n
            assert straight.visible() == before, n
    # Each action: an intent and a result, written and synced, and its own changes.
    assert count > 5 * len(plan.actions)
    print(f"{side}: killed at {count - 1} points")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.usefixtures("quick")
def test_killed_while_it_enforces(host: FakeKernel, tmp_path: Path, side: str) -> None:
    """What was not put back yet is somebody else's, and undo leaves it; what was goes back to
    the original."""
    plan = make_plan(host)
    originals = {a.target: a.before for a in plan.actions}
    before = host.visible()
    with open_journal(tmp_path) as journal:
        apply(plan, host.ops(), journal)
    text = (tmp_path / "journal.jsonl").read_bytes()
    host.ops().write(TxQueueLen("vr1", "macvtap0", 7), 77)
    host.set_sched(1011, Sched(SchedClass.FIFO, 50))
    again = replan(host, plan)
    again = replace(again, actions=tuple(replace(a, enforced=True) for a in again.actions))
    for n in range(len(again.actions)):
        (tmp_path / f"{n}").mkdir()
        (tmp_path / f"{n}" / "journal.jsonl").write_bytes(text)
        copy = host.clone()
        setattr(copy, side, failing_at(n + 1, Killed))
        with open_journal(tmp_path / f"{n}") as journal, pytest.raises(Killed):
            apply(again, copy.ops(), journal)
        setattr(copy, side, lambda _what: None)
        with open_journal(tmp_path / f"{n}") as journal:
            recover(copy.ops(), journal)
            result = undo(copy.ops(), journal)
            assert journal.entries() == ()
        theirs = again.actions[n + (side == "behind") :]
        assert {x.target: x.current for x in result.left} == {a.target: a.before for a in theirs}
        for action in theirs:
            copy.ops().write(action.target, originals[action.target])
        assert copy.visible() == before


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.usefixtures("quick")
def test_killed_anywhere_in_undo(host: FakeKernel, tmp_path: Path, side: str) -> None:
    plan = make_plan(host)
    before = host.visible()
    (tmp_path / "first").mkdir()
    with open_journal(tmp_path / "first") as journal:
        apply(plan, host.ops(), journal)
    text = (tmp_path / "first" / "journal.jsonl").read_bytes()

    def work(here: FakeKernel, place: Path) -> None:
        (place / "journal.jsonl").write_bytes(text)
        with open_journal(place) as journal:
            assert undo(here.ops(), journal).failed == ()

    count = 0
    for n, place in killed_at_each(host, tmp_path, side, work):
        count = n
        back = FakeKernel.load(place / "host.json").clone()
        with open_journal(place) as journal:
            recover(back.ops(), journal)
            result = undo(back.ops(), journal)
            assert (result.failed, result.left) == ((), ()), n
            assert journal.entries() == ()
        assert back.visible() == before, n
    assert count > 5 * len(plan.actions)
    print(f"{side}: killed at {count - 1} points")


# -- killed again while recovering


@pytest.mark.parametrize("first_side", SIDES)
@pytest.mark.usefixtures("quick")
def test_killed_in_apply_and_again_in_recovery(
    host: FakeKernel, tmp_path: Path, first_side: str
) -> None:
    plan = make_plan(host)
    before = host.visible()
    pairs = 0
    for n in range(1, steps_of(host, plan, tmp_path / "count") + 1):
        half = host.clone()
        setattr(half, first_side, failing_at(n, Killed))
        place = tmp_path / str(n)
        with open_journal(place) as journal, pytest.raises(Killed):
            apply(plan, half.ops(), journal)
        text = (place / "journal.jsonl").read_bytes()
        setattr(half, first_side, lambda _what: None)
        for second_side in SIDES:
            for m in range(1 + n % STRIDE, 100, STRIDE):
                (place / "journal.jsonl").write_bytes(text)
                twice = half.clone()
                setattr(twice, second_side, failing_at(m, Killed))
                ended = True
                with open_journal(place) as journal:
                    try:
                        recover(twice.ops(), journal)
                        undo(twice.ops(), journal)
                    except Killed:
                        ended = False
                setattr(twice, second_side, lambda _what: None)
                with open_journal(place) as journal:
                    recover(twice.ops(), journal)
                    result = undo(twice.ops(), journal)
                    assert (result.failed, result.left) == ((), ()), (n, m)
                assert twice.visible() == before, (n, m)
                if ended:
                    break
                pairs += 1
            else:
                raise AssertionError("recovery never ran to its end")
    print(f"{first_side}: {pairs} pairs of kills")
    assert pairs > 300 // STRIDE


def test_the_fake_kernel_imitates_the_loss_that_61_has() -> None:
    """The tests above are worth nothing on a kernel that forgives everything."""
    for kernel, mask in (("6.1", "0-3"), ("6.12", "1-3")):
        host = make_host(kernel)
        host.write("/sys/fs/cgroup/" + host.state["threads"]["1021"]["cgroup"] + "/cpuset.cpus", "")
        assert host.mask(1021) == mask
