"""A switch that is interrupted, whose disk is full, or whose libvirt and guests go their own
way: what was begun is taken back, and no guest loses what it stands on."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import clone_group as clones
import pytest
from attach_host import BOOT, FakeAttachHost
from switch_faults import before_lines
from test_transaction import A0, A1, B0, fails, fresh, kinds, made, recover

from vsrtune.attach import signals
from vsrtune.attach.errors import SwitchError
from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.libvirt_hotplug import (
    GUEST_SECONDS,
    RELEASE_SECONDS,
    RefusedError,
    SilentError,
)
from vsrtune.attach.plan.model import AttachHostState, Switch
from vsrtune.attach.transaction import Switcher
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.domain_xml import DomainNic


@pytest.fixture
def _usual() -> Iterator[None]:
    """Signals as a shell leaves them to a command in the foreground; in the background SIGINT
    is ignored, and then it is nothing to be held."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def forth(host: FakeAttachHost) -> Switch:
    return made(AttachHostState(host.guests(), host.links().values(), ()))


def standing(host: FakeAttachHost) -> bool:
    """Whether every device that a running guest has is there and up."""
    return not any("its device is" in problem for problem in host.problems())


@pytest.mark.usefixtures("_usual")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_held_until_all_is_taken_back(
    number: signal.Signals, host: FakeAttachHost, path: Path
) -> None:
    before = host.picture()
    sleep = host.sleep

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        if host.now < 10 and host.fakes["uuid-b"].live == []:
            host.now = 10
            os.kill(os.getpid(), number)

    host.sleep = interrupted  # type: ignore[method-assign]
    handlers = signal.getsignal(number)
    caught = fails(host, path, f"interrupted .{number.name}.; everything is as")
    assert caught.exit_code == 130
    assert host.now >= 10
    assert host.picture() == before
    assert host.problems() == []
    assert signal.getsignal(number) is handlers


@pytest.mark.usefixtures("_usual")
def test_a_switch_that_fails_by_itself_tells_of_the_signal_too(
    host: FakeAttachHost, path: Path
) -> None:
    """Or the next switch of the same command would be begun."""

    def fail(_number: int) -> None:
        if host.log[-1] == f"plug {B0}":
            host.before = lambda n: None
            os.kill(os.getpid(), signal.SIGTERM)
            raise RefusedError("no")

    host.before = fail
    caught = fails(host, path)
    assert (caught.interrupted, caught.exit_code) == (True, 130)
    assert host.problems() == []


@pytest.mark.usefixtures("_usual")
def test_a_second_signal_is_not_held() -> None:
    """Nor one that nobody asked for before the end, nor what a process handles itself."""
    reached: list[int] = []

    def hit(times: int) -> None:
        with signals.held():
            for number in range(1, times + 1):
                os.kill(os.getpid(), signal.SIGINT)
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        hit(2)
    assert reached == [1]
    with pytest.raises(KeyboardInterrupt):
        hit(1)
    assert reached == [1, 1]
    got: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, _frame: got.append(number))
    try:
        with signals.held() as held:
            os.kill(os.getpid(), signal.SIGTERM)
            held.check()
    finally:
        signal.signal(signal.SIGTERM, old)
    assert got == [signal.SIGTERM]


@pytest.mark.usefixtures("_usual")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_step_is_told(
    number: signal.Signals, host: FakeAttachHost, path: Path
) -> None:
    planned = forth(host)

    def interrupt(_number: int) -> None:
        if host.log.count("define") == len(planned.moves):
            host.after = lambda _number: None
            os.kill(os.getpid(), number)

    host.after = interrupt
    done = f"{number.name}. after the last step: the switch is done"
    with AttachLedger.open(path) as ledger, pytest.raises(signals.Interrupted, match=done):
        Switcher(host, ledger, BOOT).carry_out(planned)
    assert kinds(host) == {"napi_macvtap"}
    assert host.problems() == []


def full(lines: range) -> Callable[[int], None]:
    """The disk takes none of the lines with these numbers."""

    def refuse(number: int) -> None:
        if number in lines:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return refuse


@pytest.mark.parametrize("lines", [1, 2, 10_000])
def test_a_disk_that_fills_up_in_the_middle(lines: int, tmp_path: Path) -> None:
    for first in count(1):
        path, host = tmp_path / f"{first}", fresh()
        before = host.picture()
        lost = full(range(first, first + lines))
        with AttachLedger.open(path) as ledger, before_lines(lost):
            try:
                Switcher(host, ledger, BOOT).carry_out(forth(host))
                break
            except VsrtuneError as error:
                said = str(error)
        assert "No space left" in said
        assert "df " in said
        assert host.picture() == before, (first, host.log)
        # Taking back was not repeated for what could not be written down.
        assert host.log.count(f"plug {A0}") <= 2, (first, host.log)
        recover(host, path)
        assert host.picture() == before, (first, host.log)
    assert first > 6


@pytest.mark.parametrize("lines", [1, 2, 10_000])
def test_clones_stay_whole_when_the_disk_is_full(lines: int, tmp_path: Path) -> None:
    """What is to become of them is said before the end, and counts from the end on alone."""
    for first in count(1):
        path, host = tmp_path / f"{first}", clones.fresh()
        clones.do(host, path, clones.create("vr1", "vr2"))
        before = host.picture()
        lost = full(range(first, first + lines))
        with AttachLedger.open(path) as ledger, before_lines(lost):
            switch = clones.delete(clones.seen(host, ledger))
            try:
                Switcher(host, ledger, BOOT).carry_out(switch)
                break
            except SwitchError:
                pass
            except VsrtuneError:
                break  # after its end
        recover(host, path)
        assert host.picture() == before, (first, host.log)
    assert first > 4


def test_guests_keep_what_they_stand_on_while_libvirt_is_away(tmp_path: Path) -> None:
    """From any change on, for longer than a switch waits."""
    for number in count(1):
        path, host = tmp_path / f"{number}", fresh()
        before = host.picture()

        def away(now: int, number: int = number, host: FakeAttachHost = host) -> None:
            if now == number:
                host.away_until = 1e9

        host.after = away
        with AttachLedger.open(path) as ledger:
            try:
                Switcher(host, ledger, BOOT, patience=2.0).carry_out(forth(host))
                break
            except SwitchError as error:
                told = error
        assert told.put_back or "--recover" in str(told)
        assert standing(host), (number, host.log)
        host.after = lambda n: None
        host.away_until = -1.0
        recover(host, path)
        assert host.picture() == before, (number, host.log)
    assert number > 10


def test_refused_after_libvirt_was_away(host: FakeAttachHost, path: Path) -> None:
    """What the first libvirtd passed on is not forgotten when the second one refuses."""
    before = host.picture()

    def away(_number: int) -> None:
        if host.log[-1] == f"unplug {A0}":
            host.away_until = host.now + 5

    def refuse(_number: int) -> None:
        if host.log[-1] == f"unplug {A1}" and A0 not in str(host.fakes["uuid-a"].live):
            host.before = lambda n: None
            raise RefusedError("cannot acquire state change lock")

    host.before, host.after = refuse, away
    fails(host, path, "state change lock")
    assert host.picture() == before, host.log


def test_a_definition_that_changes_after_the_plan_is_not_overwritten(
    host: FakeAttachHost, path: Path
) -> None:
    """Neither on the way forth nor when that is taken back."""
    b = host.fakes["uuid-b"]

    def edit(_number: int) -> None:
        if host.log[-1] == "define":  # the first guest's
            b.config = b.config.replace("queues='2'", "queues='4'")

    host.before = edit
    caught = fails(host, path, "b: .* of the definition: somebody has changed it")
    assert caught.put_back
    assert "queues='4'" in b.config
    assert kinds(host) == {"macvtap"}


def test_an_interface_that_changes_after_the_plan_is_not_unplugged(
    host: FakeAttachHost, path: Path
) -> None:
    with AttachLedger.open(path) as ledger:
        planned = forth(host)
        guest = host.fakes["uuid-b"]
        assert guest.live is not None
        guest.live = [text.replace('queues="2"', 'queues="4"') for text in guest.live]
        with pytest.raises(SwitchError, match=r"b: .*: somebody has changed it"):
            Switcher(host, ledger, BOOT).carry_out(planned)
    assert not any(line.startswith("unplug") for line in host.log)
    assert kinds(host) == {"macvtap"}


def test_a_guest_that_hangs_keeps_no_other_from_what_it_had(
    host: FakeAttachHost, path: Path
) -> None:
    def refuse(_number: int) -> None:
        if host.log[-1] == f"plug {B0}":
            host.before = lambda n: None
            host.hung = {"uuid-a"}
            raise RefusedError("no")

    host.before = refuse
    fails(host, path, "did not release")
    assert [line for line in host.log if line == f"plug {B0}"], host.log
    assert B0 in str(host.fakes["uuid-b"].live)


@pytest.mark.parametrize("plugged", [0, 2])
def test_all_interfaces_are_taken_back_at_once(
    host: FakeAttachHost, path: Path, plugged: int
) -> None:
    """A guest that releases nothing has its time once for each step, not for each interface:
    from the first request on, or once it has got ``plugged`` new ones."""
    host.add("c", *((f"02:00:00:00:0c:0{n}", "p0") for n in range(6)))
    if not plugged:
        host.hung = {"uuid-c"}

    def refuse(_number: int) -> None:
        if plugged and host.log[-1] == f"plug 02:00:00:00:0c:0{plugged}":
            host.before = lambda n: None
            host.hung = {"uuid-c"}
            raise RefusedError("no")

    host.before = refuse
    with AttachLedger.open(path) as ledger:
        switcher = Switcher(host, ledger, BOOT, tries=1)
        with pytest.raises(SwitchError, match=r"did not release|no;") as caught:
            switcher.carry_out(forth(host))
    # Guest b has what it had, and so has c as far as it has lost nothing.
    assert B0 in str(host.fakes["uuid-b"].live)
    assert caught.value.put_back is not bool(plugged)
    assert host.now < 2 * RELEASE_SECONDS + 5


def test_a_silent_guest_is_asked_once(host: FakeAttachHost, path: Path) -> None:
    """Its QEMU answers for none of its interfaces; the others get back what they had."""
    asked: list[str] = []
    request = host.request_unplug

    def unplug(uuid: str, found: DomainNic) -> None:
        if uuid == "uuid-a":
            asked.append(found.mac)
            host.now += GUEST_SECONDS
            raise SilentError("QEMU is silent")
        request(uuid, found)

    before = host.picture()
    host.request_unplug = unplug  # type: ignore[method-assign]
    fails(host, path, f"QEMU is silent; .* as it was before, but a may still release {A0}, at")
    # Once in the switch, and once when it was taken back.
    assert asked == [A0, A0]
    assert host.picture() == before
    assert host.problems() == []
