"""What the daemon does for attachments beside its passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attach_host import BOOT, FakeAttachHost, Killed
from fake_host import FakeHost
from test_daemon import Running

from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.libvirt_hotplug import RELEASE_SECONDS, RefusedError
from vsrtune.attach.plan.model import AttachHostState, SwitchRequest
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.plan.requests import batches, wanted
from vsrtune.attach.plan.steps import NAPI_KIND
from vsrtune.attach.survey import known_origins
from vsrtune.attach.transaction import Switcher
from vsrtune.core.retry import LONGEST
from vsrtune.daemon import attachments
from vsrtune.daemon.attachments import AttachKeeper, AttachThread
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Attachment
from vsrtune.model.host import Link
from vsrtune.policy.model import Policy

A0, B0 = "02:00:00:00:0a:00", "02:00:00:00:0b:00"
FORTH, BACK = Attachment.NAPI_MACVLAN, Attachment.MACVTAP
NAPI = (Policy("p.yaml", "*", attachment=FORTH),)
NONE = (Policy("p.yaml", "*"),)


@pytest.fixture
def host() -> FakeAttachHost:
    fake = FakeAttachHost()
    fake.add("a", (A0, "p0"))
    fake.add("b", (B0, "p0"))
    fake.changes = 0
    return fake


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attach.jsonl"


@pytest.fixture
def keeper(host: FakeAttachHost, path: Path) -> AttachKeeper:
    return the_next(host, path)


def the_next(host: FakeAttachHost, path: Path) -> AttachKeeper:
    """That of a daemon which starts now."""
    kept = path.with_name("settled.json")
    return AttachKeeper(path, path.with_name("journal.jsonl"), host, BOOT, kept)


def kinds(host: FakeAttachHost) -> set[str]:
    return {k.kind for k in host.table.values() if k.lower}


def by_hand(
    host: FakeAttachHost, path: Path, to: Attachment, *guests: str, live: bool = True
) -> None:
    with AttachLedger.open(path) as ledger:
        switcher = Switcher(host, ledger, BOOT)
        asked = SwitchRequest(to, guests or ("a", "b"), live=live)
        made = plan(
            asked, AttachHostState(host.guests(), host.links().values(), switcher.origins())
        )
        switcher.carry_out(made)


def killed_amid(host: FakeAttachHost, path: Path) -> None:
    """A process that switches by hand dies after its fourth step."""

    def kill(number: int) -> None:
        if number == 4:
            raise Killed

    host.after = kill
    with pytest.raises(Killed):
        by_hand(host, path, FORTH)
    host.after = lambda _number: None


def test_nothing_asked_nothing_done(host: FakeAttachHost, keeper: AttachKeeper, path: Path) -> None:
    keeper.update(NONE)
    assert keeper.stop()
    assert host.log == []
    assert not path.exists()


def test_a_policy_is_followed_once_and_undone_at_the_end(
    host: FakeAttachHost, keeper: AttachKeeper
) -> None:
    before = host.picture()
    keeper.update(NAPI)
    assert kinds(host) == {NAPI_KIND}
    assert host.problems() == []
    done = host.changes
    keeper.update(NAPI)
    assert host.changes == done
    assert keeper.stop()
    assert host.picture() == before
    assert host.problems() == []


def test_guests_with_one_mac_switch_to_a_device_each(
    host: FakeAttachHost, keeper: AttachKeeper
) -> None:
    """One batch after the other, because they are on different lower devices."""
    host.add("c", (A0, "p1"))
    before = host.picture()
    keeper.update(NAPI)
    assert {k.lower for k in host.table.values() if k.mac == A0} == {2, 3}
    assert host.problems() == []
    assert keeper.stop()
    assert host.picture() == before


def test_a_reload_without_it_switches_back(host: FakeAttachHost, keeper: AttachKeeper) -> None:
    before = host.picture()
    keeper.update(NAPI)
    keeper.update(NONE)
    assert host.picture() == before


def test_a_guest_that_is_shut_down_can_start_again(
    host: FakeAttachHost, keeper: AttachKeeper
) -> None:
    """Its policy asks as before; with macvtap it could not start beside the other one."""
    keeper.update(NAPI)
    host.stop(host.fakes["uuid-a"])
    changes = host.changes
    keeper.update(NAPI)
    assert host.changes == changes
    host.start(host.fakes["uuid-a"])
    keeper.update(NAPI)
    assert host.problems() == []


def test_a_saved_guest_keeps_its_devices(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """libvirt-guests saves guests before the daemon ends, and restores them after the boot."""
    keeper.update(NAPI)
    for guest in host.fakes.values():
        host.save(guest)
    assert not keeper.stop()
    assert "a: libvirt has saved it" in " ".join(errors(caplog))
    host.reboot()
    with AttachLedger.open(path) as ledger:
        assert Switcher(host, ledger, "boot-2").boot_devices().failed == ()
    for guest in host.fakes.values():
        host.start(guest)
    assert host.problems() == []
    assert kinds(host) == {NAPI_KIND}
    assert keeper.stop()
    assert kinds(host) == {"macvtap"}


def test_a_running_guest_stays_beside_a_saved_one(
    host: FakeAttachHost, keeper: AttachKeeper
) -> None:
    keeper.update(NAPI)
    host.save(host.fakes["uuid-a"])
    keeper.update(NONE)
    assert not keeper.stop()
    host.start(host.fakes["uuid-a"])
    assert host.problems() == []
    keeper.update(NONE)
    assert kinds(host) == {"macvtap"}
    assert host.problems() == []


def test_two_policies_for_a_guest_switch_it_nowhere(
    host: FakeAttachHost, keeper: AttachKeeper
) -> None:
    keeper.update(NAPI)
    changes = host.changes
    keeper.update((*NAPI, Policy("q.yaml", "*", attachment=FORTH)))
    assert host.changes == changes


def test_an_operator_wins_until_the_policies_are_loaded_again(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path
) -> None:
    keeper.update(NAPI)
    by_hand(host, path, BACK)
    for _ in range(3):
        keeper.update(NAPI)
    assert kinds(host) == {"macvtap"}
    keeper.update(NAPI, anew=True)
    assert kinds(host) == {NAPI_KIND}


def test_an_operator_wins_over_a_comment_and_not_over_policies_that_are_loaded_again(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path, journal: Journal
) -> None:
    passed: list[tuple[Policy, ...]] = []

    def update(policies: tuple[Policy, ...], **more: bool) -> None:
        AttachKeeper.update(keeper, policies, **more)
        passed.append(policies)

    keeper.update = update  # type: ignore[method-assign]
    running = Running(FakeHost(), journal, attachments=beside(keeper))

    def loaded(policy: Policy, ask: Callable[[], None]) -> set[str]:
        """What the guests are on after a pass for that policy."""
        running.load = lambda: (policy,)
        ask()
        running.until(lambda: bool(passed) and passed[-1][0] is policy)
        return kinds(host)

    def files() -> None:
        running.daemon.policies_changed("p.yaml has changed")

    comment = Policy("new.yaml", "*", attachment=FORTH, lines={("guest",): 2})
    again = Policy("p.yaml", "*", attachment=FORTH)
    try:
        assert loaded(NAPI[0], files) == {NAPI_KIND}
        by_hand(host, path, BACK)
        assert loaded(comment, files) == {"macvtap"}
        assert loaded(again, running.daemon.ask_reload) == {NAPI_KIND}
        by_hand(host, path, BACK)
        assert loaded(replace(again, keep_off=True), files) == {NAPI_KIND}
    finally:
        running.stop()
    assert kinds(host) == {"macvtap"}


@pytest.mark.parametrize(
    "end", ["upgrade", "crash", "kept", "stop", "damaged", "of an earlier version"]
)
def test_an_operator_wins_over_the_next_daemon_where_nobody_asks_anew(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path, end: str
) -> None:
    keeper.update(NAPI)
    by_hand(host, path, BACK)
    if end in ("upgrade", "kept"):
        beside(keeper).finish(forget=end == "kept")
    elif end == "stop":
        assert keeper.stop()
    elif end == "damaged":
        path.with_name("settled.json").write_text('{"uuid-a": "nowhere"}')
    elif end == "of an earlier version":
        path.with_name("settled.json").write_text('{"a": "napi-macvlan", "b": "napi-macvlan"}')
    the_next(host, path).update(NAPI)
    assert kinds(host) == {"macvtap" if end in ("upgrade", "crash") else NAPI_KIND}


def test_a_policy_that_asks_for_another_attachment_is_followed_by_the_next_daemon(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path
) -> None:
    keeper.update(NAPI)
    the_next(host, path).update((Policy("p.yaml", "*", attachment=BACK),))
    assert kinds(host) == {"macvtap"}


def test_another_guest_of_a_name_that_had_its_turn_has_its_own(
    host: FakeAttachHost, keeper: AttachKeeper
) -> None:
    keeper.update(NAPI)
    host.fakes.clear()
    keeper.update(NAPI)
    assert kinds(host) == set()
    host.add("a", ("02:00:00:00:1a:00", "p0"))
    host.fakes["new"] = host.fakes.pop("uuid-a")
    host.fakes["new"].uuid = "new"
    keeper.update(NAPI)
    assert kinds(host) == {NAPI_KIND}
    assert host.problems() == []


def test_what_an_operator_switched_stays_at_the_end(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path
) -> None:
    by_hand(host, path, FORTH)
    keeper.update(NONE)
    assert keeper.stop()
    assert kinds(host) == {NAPI_KIND}


def test_a_switch_that_fails_is_not_tried_again(host: FakeAttachHost, keeper: AttachKeeper) -> None:
    before = host.picture()

    def fail(_number: int) -> None:
        if host.log[-1].startswith("plug") and kinds(host) & {NAPI_KIND}:
            up = any(k.up for k in host.table.values() if k.kind == NAPI_KIND)
            if up:
                raise RefusedError("no")

    host.before = fail
    keeper.update(NAPI)
    assert host.picture() == before
    done = host.changes
    for _ in range(3):
        keeper.update(NAPI)
    assert host.changes == done


def test_a_dead_process_is_cleaned_up_after(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path
) -> None:
    before = host.picture()

    killed_amid(host, path)
    assert host.picture() != before
    keeper.update(())
    assert host.picture() == before


def test_a_switch_under_way_is_left_to_its_process(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path
) -> None:
    with AttachLedger.open(path) as ledger:
        ledger.add("step", {})
        keeper.update(NAPI)
    assert host.log == []


@pytest.mark.parametrize("policies", [NAPI, NONE])
def test_a_ledger_that_cannot_be_read_is_told_once_and_left_alone(
    host: FakeAttachHost,
    keeper: AttachKeeper,
    path: Path,
    caplog: pytest.LogCaptureFixture,
    policies: tuple[Policy, ...],
) -> None:
    """Another version wrote it, and only that one knows what is to be put back."""
    path.write_text('{"r":"header","version":2}\n{"later":1}\n')
    before = path.read_bytes()
    for _ in range(2):
        keeper.update(policies)
    (told,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "version 2 of the ledger's format" in told.getMessage()
    assert str(path) in told.getMessage()
    assert (host.log, path.read_bytes()) == ([], before)


def test_a_device_that_is_gone_is_made_again(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path
) -> None:
    by_hand(host, path, FORTH)
    a = host.fakes["uuid-a"]
    host.stop(a)
    host.remove(host.index("nvt00000a00"))
    keeper.update(())
    host.start(a)
    assert host.problems() == []


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]


def test_an_end_without_libvirt_is_none(
    host: FakeAttachHost, keeper: AttachKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a pass has said so before or not."""
    keeper.update(NAPI)
    host.away_until = 1e9
    keeper.update(NAPI)
    caplog.clear()
    assert not keeper.stop()
    assert "libvirt does not answer" in " ".join(errors(caplog))


def test_an_end_while_another_process_switches_is_none(
    keeper: AttachKeeper, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper.update(NAPI)
    with AttachLedger.open(path):
        assert not keeper.stop()
    (told,) = errors(caplog)
    assert "another switch is under way" in told
    assert keeper.stop()


def test_an_end_with_a_switch_unfinished_is_none(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed_amid(host, path)
    host.away_until = 1e9
    assert not keeper.stop()
    assert errors(caplog)


def test_the_end_tries_again_what_a_pass_could_not_switch_back(
    host: FakeAttachHost, keeper: AttachKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    before = host.picture()
    keeper.update(NAPI)

    def fail(_number: int) -> None:
        if host.log[-1].startswith("plug"):
            raise RefusedError("no")

    host.before = fail
    keeper.update(NONE)
    caplog.clear()
    assert not keeper.stop()
    assert errors(caplog)
    host.before = lambda _number: None
    assert keeper.stop()
    assert host.picture() == before


def test_a_switch_back_that_was_refused_is_tried_by_each_pass(
    host: FakeAttachHost, keeper: AttachKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    before = host.picture()
    keeper.update(NAPI)
    host.table[90] = Link(90, "x", NAPI_KIND, lower=2, up=True)
    keeper.update(NONE)
    assert "belongs to no libvirt guest" in " ".join(errors(caplog))
    del host.table[90]
    keeper.update(NONE)
    assert host.picture() == before


def test_a_guest_that_releases_nothing_has_its_time_once(
    host: FakeAttachHost, keeper: AttachKeeper
) -> None:
    """However many interfaces it has: once in the switch, once when that is taken back. What it
    releases later it gets back."""
    host.add("c", *((f"02:00:00:00:0c:0{n}", "p0") for n in range(5)))
    before = host.picture()
    host.hung = {"uuid-c"}
    keeper.update(NAPI)
    assert kinds(host) == {"macvtap"}
    assert 2 * RELEASE_SECONDS < host.now < 2 * RELEASE_SECONDS + 5
    then = host.now
    keeper.update(NAPI)
    assert host.now == then
    host.hung = set()
    host.sleep(1)
    assert host.picture() != before
    keeper.update(NAPI)
    assert host.picture() == before
    assert keeper.stop()


def test_a_switch_that_cannot_be_taken_back_is_tried_more_and_more_rarely(
    host: FakeAttachHost, keeper: AttachKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    """A guest takes its new interface, has the next plug fail, and gives nothing back."""
    host.add("c", ("02:00:00:00:0c:00", "p0"), ("02:00:00:00:0c:01", "p0"))
    before = host.picture()

    def fail(_number: int) -> None:
        if host.log[-1] == "plug 02:00:00:00:0c:01":
            host.hung = {"uuid-c"}
            raise RefusedError("no")

    host.before = fail
    begun = []
    for _ in range(300):
        then = host.now
        keeper.update(NAPI)
        if host.now - then >= RELEASE_SECONDS:
            begun.append(then)
        host.sleep(1)
    # What a pass waits for is no pause between two.
    took = 2 * RELEASE_SECONDS
    pauses = [round(b - a - took) // 10 for a, b in pairwise(begun[1:])]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST // 10
    assert len(begun) < 12
    assert len([e for e in errors(caplog) if "did not release" in e]) == 2
    assert host.log.count(f"unplug {B0}") == 2, "forth, and for the first try to take it back"
    # A reload does not wait, and whatever was tried is tried by the end again.
    host.before = lambda _number: None
    host.hung = set()
    keeper.update(NONE, anew=True)
    assert host.picture() == before
    assert keeper.stop()


def test_a_stop_does_not_wait_for_another_try(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path
) -> None:
    before = host.picture()
    killed_amid(host, path)
    host.away_until = 1e9
    keeper.update(NONE)
    host.away_until = -1.0
    assert keeper.stop()
    assert host.picture() == before


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_interrupts_a_switch_and_switches_back(
    host: FakeAttachHost, keeper: AttachKeeper, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    """In the middle of it, or before the next one begins."""
    caplog.set_level("INFO")
    host.add("d", ("02:00:00:00:0d:00", "p1"))
    before = host.picture()

    def interrupt(_number: int) -> None:
        if host.log[-1] == ("plug 02:00:00:00:0a:00" if late else "unplug 02:00:00:00:0a:00"):
            keeper.interrupt()

    host.after = interrupt
    keeper.update(NAPI)
    assert errors(caplog) == []
    assert any("because the daemon stops" in r.getMessage() for r in caplog.records)
    assert "unplug 02:00:00:00:0d:00" not in host.log
    host.after = lambda _number: None
    assert keeper.stop()
    assert host.picture() == before
    assert host.problems() == []


class SlowKeeper:
    """An AttachKeeper whose pass takes until ``go_on``, and notes what is asked of it."""

    def __init__(self) -> None:
        self.did: list[object] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.succeeded = 0

    def update(self, policies: tuple[Policy, ...], *, anew: bool = False) -> None:
        self.did.append(policies)
        self.begun.set()
        self.go_on.wait()
        self.did.append("end")

    def interrupt(self) -> None:
        self.did.append("interrupt")

    def forget(self) -> None:
        self.did.append("forget")

    def stop(self) -> bool:
        self.did.append("stop")
        return True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowKeeper]:
    monkeypatch.setattr(attachments, "_PULSE", 0.01)
    monkeypatch.setattr(attachments, "END_SECONDS", 0.05)
    made = SlowKeeper()
    yield made
    made.go_on.set()


def beside(keeper: Any, pulse: Callable[[], None] = lambda: None) -> AttachThread:
    return AttachThread(keeper, pulse)


def test_the_loop_does_not_wait_for_a_pass(slow: SlowKeeper) -> None:
    """The next one is for the latest policies."""
    thread = beside(slow)
    thread.update(NAPI)
    slow.begun.wait()
    for policies in (NAPI, (), NONE):
        thread.update(policies)
    assert slow.did == [NAPI]
    slow.go_on.set()
    while slow.did != [NAPI, "end", NONE, "end"]:
        time.sleep(0.01)
    assert thread.stop()
    assert slow.did[4:] == ["interrupt", "stop"]


def test_a_stop_waits_for_no_guest_without_end(
    slow: SlowKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    pulses = []
    thread = beside(slow, lambda: pulses.append(1))
    thread.update(NAPI)
    slow.begun.wait()
    assert not thread.stop()
    assert slow.did == [NAPI, "interrupt", "interrupt"]
    assert pulses
    (told,) = errors(caplog)
    assert "`vsrtune undo`" in told


def test_a_stop_waits_while_switches_succeed(slow: SlowKeeper) -> None:
    def pulse() -> None:
        slow.succeeded += 1
        if slow.succeeded == 20:
            slow.go_on.set()

    thread = beside(slow, pulse)
    thread.update(NAPI)
    slow.begun.wait()
    assert thread.stop()
    assert slow.did == [NAPI, "interrupt", "end", "stop"]


def test_a_handover_waits_for_a_switch_and_begins_none(slow: SlowKeeper) -> None:
    """A stop that is asked for meanwhile switches back."""
    thread = beside(slow, slow.go_on.set)
    thread.update(NAPI)
    slow.begun.wait()
    thread.update(NONE)
    thread.finish(forget=False)
    assert slow.did == [NAPI, "end"]
    thread.update(NONE)
    assert thread.stop()
    assert slow.did == [NAPI, "end", "interrupt", "stop"]


def test_a_handover_waits_for_no_guest_without_end(
    slow: SlowKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    thread = beside(slow)
    thread.update(NAPI)
    slow.begun.wait()
    thread.finish(forget=False)
    assert slow.did == [NAPI]
    (told,) = (r.getMessage() for r in caplog.records)
    assert "--recover" in told


def test_a_defect_in_a_pass_is_told_once_and_ends_nothing(
    slow: SlowKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(policies: tuple[Policy, ...], *, anew: bool) -> None:
        slow.did.append(policies)
        raise KeyError("uuid")

    monkeypatch.setattr(slow, "update", broken)
    thread = beside(slow)
    for number in (1, 2):
        thread.update(NAPI)
        while len(slow.did) < number:
            time.sleep(0.01)
    assert thread.stop()
    assert slow.did == [NAPI, NAPI, "interrupt", "stop"]
    (told,) = errors(caplog)
    assert "please report this" in told


def test_what_a_switch_costs_others_is_told(
    host: FakeAttachHost, keeper: AttachKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    """A guest that is off and has no policy cannot start on macvtap there any more."""
    host.add("web", ("02:00:00:00:0d:00", "p0"), running=False)
    keeper.update(tuple(Policy(f"{name}.yaml", name, attachment=FORTH) for name in "ab"))
    assert [m for m in caplog.messages if "web" in m and "cannot start on macvtap" in m]


def test_a_standby_that_is_shut_down_can_start_after_the_switch(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path
) -> None:
    """Also one that is defined later, and one that shares a lower device with a standby alone."""
    host.stop(host.fakes["uuid-b"])
    host.add("c", ("02:00:00:00:0c:00", "p0"), ("02:00:00:00:0c:01", "p1"), running=False)
    host.add("d", ("02:00:00:00:0d:00", "p1"), running=False)
    before = host.picture()
    keeper.update(NAPI)
    host.add("e", ("02:00:00:00:0e:00", "p0"), running=False)
    keeper.update(NAPI)
    for name in "bcde":
        host.start(host.fakes[f"uuid-{name}"])
    assert host.problems() == []
    for name in "bcde":
        host.stop(host.fakes[f"uuid-{name}"])
    by_hand(host, path, BACK, "b", live=False)
    keeper.update(NAPI)
    assert "direct" in host.fakes["uuid-b"].config, "the operator wins"
    assert keeper.stop()
    del host.fakes["uuid-e"]
    assert host.picture() == before


def test_a_guest_that_is_off_and_cannot_move_keeps_no_other_back(
    host: FakeAttachHost, keeper: AttachKeeper, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here an unrelated guest has a macvtap on its second lower device."""
    asked = tuple(Policy(f"{name}.yaml", name, attachment=FORTH) for name in "abcd")
    host.add("c", ("02:00:00:00:0c:00", "p0"), ("02:00:00:00:0c:01", "p1"), running=False)
    host.add("d", ("02:00:00:00:0d:00", "p0"), running=False)
    host.add("web", ("02:00:00:00:0e:00", "p1"))
    keeper.update(asked)
    host.start(host.fakes["uuid-d"])
    assert host.problems() == []
    assert {k.kind for k in host.table.values() if k.lower == 2} == {NAPI_KIND}
    keeper.update(asked)
    (told,) = errors(caplog)
    assert "web 02:00:00:00:0e:00 on p1" in told
    origins = known_origins(path)
    state = AttachHostState(host.guests(), host.links().values(), origins)
    (left,) = batches(state, wanted(state, origins, asked))
    assert (left.guests, left.switch) == (("c",), None)


def test_what_is_refused_is_told_of_guests_that_had_their_turn(
    host: FakeAttachHost, keeper: AttachKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    """A reload would not switch them."""
    asked = tuple(Policy(f"{name}.yaml", name, attachment=FORTH) for name in "abcd")
    keeper.update(asked)
    host.add("c", ("02:00:00:00:0c:00", "p0"), ("02:00:00:00:0c:01", "p1"), running=False)
    host.add("d", ("02:00:00:00:0d:00", "p1"))
    host.add("web", ("02:00:00:00:0e:00", "p1"))
    keeper.update(asked)
    assert "web 02:00:00:00:0e:00 on p1" in " ".join(errors(caplog))
    assert "had its turn" not in caplog.text


@pytest.mark.parametrize("mode", ["bridge", "passthrough"])
def test_a_standby_never_mutes_the_router_that_runs(
    host: FakeAttachHost,
    keeper: AttachKeeper,
    path: Path,
    caplog: pytest.LogCaptureFixture,
    mode: str,
) -> None:
    """Their devices cannot be up together: they have one MAC, or each wants the NIC for itself."""
    a, b = host.fakes.values()
    for guest in (a, b):
        host.stop(guest)
        guest.config = guest.config.replace("mode='bridge'", f"mode='{mode}'")
    if mode == "bridge":
        b.config = b.config.replace(B0, A0)
    host.start(b)
    keeper.update(NAPI)
    assert host.problems() == []
    host.reboot()
    with AttachLedger.open(path) as ledger:
        assert Switcher(host, ledger, "boot-2").boot_devices().failed == ()
    assert [k.up for k in host.table.values() if k.kind == NAPI_KIND] == [True, False]
    host.start(b)
    keeper.update(NAPI)
    assert host.problems() == []
    host.stop(b)
    host.start(a)
    keeper.update(NAPI)
    assert host.problems() == []
    changes = host.changes
    keeper.update(NAPI)
    assert host.changes == changes
    assert errors(caplog) == []

    def refuse(_number: int) -> None:
        if host.log[-1].startswith("plug"):
            host.before = lambda _number: None
            raise RefusedError("no")

    host.before = refuse
    assert not keeper.stop()
    assert host.problems() == []
    assert keeper.stop()
    assert kinds(host) == {"macvtap"}


def test_guests_that_are_shut_down_alone_wait(host: FakeAttachHost, keeper: AttachKeeper) -> None:
    for guest in host.fakes.values():
        host.stop(guest)
    before = host.picture()
    keeper.update(NAPI)
    assert host.picture() == before
    host.start(host.fakes["uuid-b"])
    keeper.update(NAPI)
    assert kinds(host) == {NAPI_KIND}
