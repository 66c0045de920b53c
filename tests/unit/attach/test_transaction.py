"""A switch of guests between macvtap and NAPI-macvlan: done whole, or taken back whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attach_host import BOOT, FakeAttachHost, Killed

from vsrtune.attach.errors import SwitchError
from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.libvirt_hotplug import RefusedError
from vsrtune.attach.plan.model import AttachHostState, Switch, SwitchRequest
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.plan.steps import NAPI_KIND
from vsrtune.attach.transaction import Switcher
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.domain_xml import nic
from vsrtune.model.guest import Attachment

A0, A1, B0 = "02:00:00:00:0a:00", "02:00:00:00:0a:01", "02:00:00:00:0b:00"
FORTH, BACK = Attachment.NAPI_MACVLAN, Attachment.MACVTAP


@pytest.fixture
def host() -> FakeAttachHost:
    """Guest a on p0 and p1, guest b on p0; a's queue on p0 is not the usual one."""
    fake = FakeAttachHost()
    fake.add("a", (A0, "p0"), (A1, "p1"))
    fake.add("b", (B0, "p0"))
    index = next(k.index for k in fake.table.values() if k.mac == A0)
    fake.set_queue(index, 123)
    fake.changes = 0
    return fake


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attach.jsonl"


def planned(host: FakeAttachHost, ledger: AttachLedger, to: Attachment, **more: object) -> Switch:
    asked = SwitchRequest(to, ("a",), all_of_lower=True, **more)  # type: ignore[arg-type]
    origins = Switcher(host, ledger, BOOT).origins()
    return plan(asked, AttachHostState(host.guests(), host.links().values(), origins))


def switch(host: FakeAttachHost, path: Path, to: Attachment, **more: object) -> None:
    with AttachLedger.open(path) as ledger:
        Switcher(host, ledger, BOOT).carry_out(planned(host, ledger, to, **more))


def recover(host: FakeAttachHost, path: Path, boot: str = BOOT) -> None:
    with AttachLedger.open(path) as ledger:
        assert Switcher(host, ledger, boot).recover() == []
        assert not Switcher(host, ledger, boot).unfinished()


def kinds(host: FakeAttachHost) -> set[str]:
    return {k.kind for k in host.table.values() if k.lower}


def test_there_and_back_is_exactly_as_it_was(host: FakeAttachHost, path: Path) -> None:
    before = host.picture()
    switch(host, path, FORTH)
    assert host.problems() == []
    assert kinds(host) == {NAPI_KIND}
    devices = {k.mac: k for k in host.table.values() if k.kind == NAPI_KIND}
    assert (devices[A0].queue, devices[A0].mtu, devices[A0].mode) == (123, 1500, 4)
    assert (devices[A1].queue, devices[A1].mtu) == (500, 9000)
    # A guest that starts anew finds its devices.
    guest = host.fakes["uuid-a"]
    host.stop(guest)
    host.start(guest)
    assert host.problems() == []
    switch(host, path, BACK)
    assert host.problems() == []
    assert host.picture() == before
    with AttachLedger.open(path) as ledger:
        assert ledger.pending() == []


def test_nothing_to_do_is_done_without_a_step(host: FakeAttachHost, path: Path) -> None:
    with AttachLedger.open(path) as ledger:
        made = planned(host, ledger, BACK)
    assert (made.moves, made.steps) == ((), ())
    assert any("already" in note for note in made.notes)


def count_changes(host: FakeAttachHost, path: Path, to: Attachment) -> int:
    before = host.changes
    switch(host, path, to)
    return host.changes - before


def ready(host_factory: Callable[[], FakeAttachHost], path: Path, to: Attachment) -> FakeAttachHost:
    """A host on the other side of ``to``."""
    host = host_factory()
    if to is BACK:
        switch(host, path, FORTH)
    host.changes = 0
    return host


def fresh() -> FakeAttachHost:
    fake = FakeAttachHost()
    fake.add("a", (A0, "p0"), (A1, "p1"))
    fake.add("b", (B0, "p0"))
    fake.changes = 0
    return fake


@pytest.mark.parametrize("to", [FORTH, BACK])
def test_a_change_that_fails_is_taken_back(to: Attachment, tmp_path: Path) -> None:
    total = count_changes(ready(fresh, tmp_path / "0", to), tmp_path / "0", to)
    assert total > 8
    for n in range(1, total + 1):
        path = tmp_path / f"{n}"
        host = ready(fresh, path, to)
        before = host.picture()

        def fail(number: int, n: int = n, host: FakeAttachHost = host) -> None:
            if number == n:
                raise RefusedError("refused") if "plug" in host.log[-1] else OSError(5, "no")

        host.before = fail
        with AttachLedger.open(path) as ledger:
            made = planned(host, ledger, to)
            removing = n > total - len(made.leaves)
            if removing:
                Switcher(host, ledger, BOOT).carry_out(made)
            else:
                with pytest.raises(SwitchError) as caught:
                    Switcher(host, ledger, BOOT).carry_out(made)
                assert caught.value.put_back, (n, host.log)
        assert host.problems() == [], (n, host.log)
        if removing:
            recover(host, path)
            assert kinds(host) == {"macvtap"}
        else:
            assert host.picture() == before, (n, host.log)


@pytest.mark.parametrize("to", [FORTH, BACK])
def test_killed_after_any_change_it_is_recovered(to: Attachment, tmp_path: Path) -> None:
    total = count_changes(ready(fresh, tmp_path / "0", to), tmp_path / "0", to)
    for n in range(1, total + 1):
        path = tmp_path / f"{n}"
        host = ready(fresh, path, to)
        before = host.picture()

        def kill(number: int, n: int = n) -> None:
            if number == n:
                raise Killed

        host.after = kill
        with AttachLedger.open(path) as ledger:
            made = planned(host, ledger, to)
            with pytest.raises(Killed):
                Switcher(host, ledger, BOOT).carry_out(made)
        host.after = lambda n: None
        recover(host, path)
        assert host.problems() == [], (n, host.log)
        if n <= total - len(made.leaves):
            assert host.picture() == before, (n, host.log)
        # And it can be done anew.
        switch(host, path, to)
        assert host.problems() == []


@pytest.mark.parametrize("to", [FORTH, BACK])
def test_killed_while_recovering_it_is_recovered(to: Attachment, tmp_path: Path) -> None:
    total = count_changes(ready(fresh, tmp_path / "0", to), tmp_path / "0", to)
    for n in range(2, total + 1, 2):
        for m in range(1, 12):
            path = tmp_path / f"{n}-{m}"
            host = ready(fresh, path, to)

            def kill(number: int, stops: tuple[int, ...] = (n, n + m)) -> None:
                if number in stops:
                    raise Killed

            host.after = kill
            for _ in (1, 2):
                try:
                    with AttachLedger.open(path) as ledger:
                        switcher = Switcher(host, ledger, BOOT)
                        if switcher.unfinished():
                            switcher.recover()
                        else:
                            switcher.carry_out(planned(host, ledger, to))
                except Killed:
                    continue
            host.after = lambda n: None
            recover(host, path)
            assert host.problems() == [], (n, m, host.log)


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("to", [FORTH, BACK])
def test_libvirtd_that_is_away_for_a_while_is_waited_for(
    to: Attachment, done: bool, tmp_path: Path
) -> None:
    """Whether it did what it was asked for last (``done``) or not."""
    total = count_changes(ready(fresh, tmp_path / "0", to), tmp_path / "0", to)
    for n in range(1, total + 1):
        path = tmp_path / f"{n}"
        host = ready(fresh, path, to)

        def away(number: int, n: int = n, host: FakeAttachHost = host) -> None:
            if number == n:
                host.away_until = host.now + 10
                host._answer()

        if done:
            host.after = away
        else:
            host.before = away
        with AttachLedger.open(path) as ledger:
            made = planned(host, ledger, to)
            put_back = True
            try:
                Switcher(host, ledger, BOOT).carry_out(made)
            except SwitchError as error:
                put_back = error.put_back
        assert put_back, (n, host.log)
        assert host.problems() == [], (n, host.log)
        with AttachLedger.open(path) as ledger:
            assert not Switcher(host, ledger, BOOT).unfinished()


def test_libvirtd_that_stays_away_leaves_it_to_recover(host: FakeAttachHost, path: Path) -> None:
    before = host.picture()

    def away(number: int) -> None:
        if number == 5:
            host.away_until = 1e9

    host.after = away
    with AttachLedger.open(path) as ledger:
        with pytest.raises(SwitchError, match="--recover") as caught:
            Switcher(host, ledger, BOOT).carry_out(planned(host, ledger, FORTH))
        assert not caught.value.put_back
    host.after = lambda n: None
    host.away_until = -1
    recover(host, path)
    assert host.picture() == before
    assert host.problems() == []


def test_a_guest_that_does_not_release_keeps_what_it_has(host: FakeAttachHost, path: Path) -> None:
    before = host.picture()
    host.stubborn = True
    with AttachLedger.open(path) as ledger:
        with pytest.raises(SwitchError, match="did not release") as caught:
            Switcher(host, ledger, BOOT).carry_out(planned(host, ledger, FORTH))
        assert caught.value.put_back
    host.releasing.clear()
    assert host.picture() == before
    assert host.problems() == []


def test_no_cdev_is_found_before_a_guest_is_touched(host: FakeAttachHost, path: Path) -> None:
    before = host.picture()
    host.no_cdev = True
    with pytest.raises(SwitchError, match="/dev/tap"):
        switch(host, path, FORTH)
    assert host.picture() == before
    assert not any(line.startswith("unplug") for line in host.log)


def test_a_guest_that_stops_meanwhile(host: FakeAttachHost, path: Path) -> None:
    def stop(number: int) -> None:
        if host.log[-1].startswith("unplug") and host.fakes["uuid-b"].live is not None:
            host.stop(host.fakes["uuid-b"])

    host.after = stop
    with pytest.raises(SwitchError) as caught:
        switch(host, path, FORTH)
    assert caught.value.put_back
    host.after = lambda n: None
    assert host.problems() == []
    host.start(host.fakes["uuid-b"])
    assert host.problems() == []


def test_a_guest_that_libvirt_ends_is_started_anew(host: FakeAttachHost, path: Path) -> None:
    """A libvirtd that died at the wrong moment ends the guest when it comes again."""

    def end(n: int) -> None:
        if n == 5:
            host.stop(host.fakes["uuid-a"])
            host.ended.add("uuid-a")

    before = host.picture()
    host.before = end
    with pytest.raises(SwitchError, match="but a was ended by libvirt and has been started anew"):
        switch(host, path, FORTH)
    assert host.problems() == []
    assert kinds(host) == {"macvtap"}
    index = next(k.index for k in host.table.values() if k.mac == A0)
    host.set_queue(index, 123)  # a start gives the usual one
    assert host.picture() == before


def test_after_a_reboot_the_devices_come_before_the_guests(
    host: FakeAttachHost, path: Path
) -> None:
    switch(host, path, FORTH)
    host.reboot()
    with AttachLedger.open(path) as ledger:
        host.away_until = 1e9  # libvirtd is not there yet
        swept = Switcher(host, ledger, "boot-2").boot_devices()
        assert swept.failed == ()
        assert len(swept.did) == 6
    host.away_until = -1
    for guest in host.fakes.values():
        host.start(guest)
    assert host.problems() == []
    switch(host, path, BACK)
    assert kinds(host) == {"macvtap"}


def test_a_crash_of_the_host_in_between(tmp_path: Path) -> None:
    """Guests start from their definitions, whichever those are by then."""
    total = count_changes(fresh(), tmp_path / "0", FORTH)
    for n in range(1, total + 1):
        path = tmp_path / f"{n}"
        host = fresh()

        def kill(number: int, n: int = n) -> None:
            if number == n:
                raise Killed

        host.after = kill
        with pytest.raises(Killed):
            switch(host, path, FORTH)
        host.after = lambda n: None
        host.reboot()
        with AttachLedger.open(path) as ledger:
            Switcher(host, ledger, "boot-2").boot_devices()
        recover(host, path, "boot-2")
        for guest in host.fakes.values():
            host.start(guest)
        assert host.problems() == [], (n, host.log)
        assert kinds(host) == {"macvtap"}


def test_a_definition_that_waits_for_the_guest_to_stop(host: FakeAttachHost, path: Path) -> None:
    """Only the definitions: the running guests keep macvtap, the devices stay down."""
    switch(host, path, FORTH, live=False)
    assert kinds(host) == {"macvtap", NAPI_KIND}
    a = host.fakes["uuid-a"]
    host.stop(host.fakes["uuid-b"])
    host.stop(a)
    with AttachLedger.open(path) as ledger:
        assert Switcher(host, ledger, BOOT).sweep().failed == ()
    host.start(a)
    assert host.problems() == []


def test_a_definition_that_somebody_changed_is_left_alone(tmp_path: Path) -> None:
    total = count_changes(fresh(), tmp_path / "0", FORTH)
    host = fresh()

    def kill(number: int) -> None:
        if number == total:
            raise Killed

    host.after = kill
    with pytest.raises(Killed):
        switch(host, tmp_path / "1", FORTH)
    host.after = lambda n: None
    a, b = host.fakes["uuid-a"], host.fakes["uuid-b"]
    a.config = a.config.replace('queues="2"', 'queues="4"', 1)
    b.config = "<domain><name>b</name><devices/></domain>"
    changed = (a.config.count('queues="4"'), b.config)
    recover(host, tmp_path / "1")
    assert (a.config.count('queues="4"'), b.config) == changed
    assert kinds(host) == {"macvtap", NAPI_KIND}


def test_a_guest_that_does_not_run_gives_way(host: FakeAttachHost, path: Path) -> None:
    b = host.fakes["uuid-b"]
    host.stop(b)
    switch(host, path, FORTH)
    assert host.problems() == []
    host.start(b)
    assert host.problems() == []
    host.stop(b)
    # Its device is up and holds the lower one.
    with AttachLedger.open(path) as ledger:
        origins = Switcher(host, ledger, BOOT).origins()
    with pytest.raises(VsrtuneError, match="all-of-lower"):
        plan(
            SwitchRequest(BACK, ("a",)),
            AttachHostState(host.guests(), host.links().values(), origins),
        )
    switch(host, path, BACK)
    assert kinds(host) == {"macvtap"}
    host.start(b)
    assert host.problems() == []


def test_a_device_that_nobody_names_any_more_goes(host: FakeAttachHost, path: Path) -> None:
    before = host.picture()
    switch(host, path, FORTH, config=False)
    for guest in host.fakes.values():
        host.stop(guest)
    with AttachLedger.open(path) as ledger:
        assert Switcher(host, ledger, BOOT).sweep().failed == ()
        assert ledger.pending() == []
    for guest in host.fakes.values():
        host.start(guest)
    assert host.problems() == []
    assert kinds(host) == {"macvtap"}
    assert host.picture() != before  # the queue of a new macvtap is libvirt's


def test_what_the_guest_sees_stays(host: FakeAttachHost, path: Path) -> None:
    before = {nic(x).mac: x for x in host.fakes["uuid-a"].live or ()}
    switch(host, path, FORTH)
    for text in host.fakes["uuid-a"].live or ():
        old = before[nic(text).mac]
        for part in ("<model", "<driver", "<address"):
            line = next(p for p in old.split("<") if f"<{p}".startswith(part))
            assert line.split("/>")[0].strip() in text
