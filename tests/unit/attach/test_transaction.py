"""A switch of guests between macvtap and NAPI-macvlan: done whole, or taken back whole."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from attach_host import BOOT, FakeAttachHost, Killed
from switch_faults import Choose, Switches, crash, do, refused, start_all, survey

from vsrtune.attach.errors import SwitchError
from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.libvirt_hotplug import RefusedError
from vsrtune.attach.plan.model import AttachHostState, Switch, SwitchRequest
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.plan.steps import NAPI_KIND
from vsrtune.attach.sweep import LATE_SECONDS, Swept
from vsrtune.attach.transaction import Switcher
from vsrtune.execute.ledger import read_pending
from vsrtune.model.domain_xml import nic
from vsrtune.model.guest import Attachment
from vsrtune.model.host import Link

A0, A1, B0 = "02:00:00:00:0a:00", "02:00:00:00:0a:01", "02:00:00:00:0b:00"
FORTH, BACK = Attachment.NAPI_MACVLAN, Attachment.MACVTAP


def fresh() -> FakeAttachHost:
    """Guest a on p0 and p1, guest b on p0; a's queue on p0 is not the usual one."""
    fake = FakeAttachHost()
    fake.add("a", (A0, "p0"), (A1, "p1"))
    fake.add("b", (B0, "p0"))
    fake.set_queue(next(k.index for k in fake.table.values() if k.mac == A0), 123)
    fake.changes = 0
    return fake


def made(state: AttachHostState, to: Attachment = FORTH, **more: bool) -> Switch:
    return plan(SwitchRequest(to, ("a",), all_of_lower=True, **more), state)


SWITCHES = Switches(
    fresh,
    {"forth": made, "back": partial(made, to=BACK)},
    {"forth": (), "back": (made,)},
)
both = pytest.mark.parametrize("to", SWITCHES.choices)


def switch(host: FakeAttachHost, path: Path, to: Attachment, **more: bool) -> None:
    do(host, path, partial(made, to=to, **more))


def fails(host: FakeAttachHost, path: Path, match: str | None = None) -> SwitchError:
    """The way forth fails."""
    with AttachLedger.open(path) as ledger, pytest.raises(SwitchError, match=match) as caught:
        Switcher(host, ledger, BOOT).carry_out(made(survey(host, ledger)))
    host.before = host.after = lambda n: None
    return caught.value


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
    assert read_pending(path) == []


def test_guests_with_one_mac_have_a_device_each(path: Path) -> None:
    """They are on different lower devices, and stay there."""
    host = FakeAttachHost()
    host.add("a", (A0, "p0"))
    host.add("b", (A0, "p1"))
    before = host.picture()

    def both(to: Attachment) -> Choose:
        return partial(plan, SwitchRequest(to, ("a", "b")))

    do(host, path, both(FORTH))
    lowers = [(k.name, k.lower) for k in host.table.values() if k.kind == NAPI_KIND]
    assert lowers == [("nvt00000a00", 2), ("nvt00000a002", 3)]
    assert host.problems() == []
    do(host, path, both(BACK))
    assert host.picture() == before


def test_a_device_on_another_lower_device_is_not_ours(host: FakeAttachHost, path: Path) -> None:
    """It came after the plan."""
    with AttachLedger.open(path) as ledger:
        planned = made(survey(host, ledger))
        host.make(planned.moves[-1].device, host.index("p1"))
        with pytest.raises(SwitchError, match=r"nvt00000b00: is not .* on p0 that .* on another"):
            Switcher(host, ledger, BOOT).carry_out(planned)


@both
def test_a_change_that_fails_is_taken_back(to: str, tmp_path: Path) -> None:
    total, late = SWITCHES.changes(to, tmp_path / "total")
    assert total > 8
    SWITCHES.fail(to, tmp_path)
    # Devices that are left go after the end; what fails of that is done later.
    for n in range(total - late + 1, total + 1):
        path = tmp_path / f"late{n}"
        host = SWITCHES.ready(to, path)

        def fail(number: int, n: int = n) -> None:
            if number == n:
                raise OSError(5, "no")

        host.before = fail
        with AttachLedger.open(path) as ledger:
            Switcher(host, ledger, BOOT).carry_out(SWITCHES.choices[to](survey(host, ledger)))
        assert host.problems() == [], (n, host.log)
        recover(host, path)
        assert kinds(host) == {"macvtap"}


@both
def test_killed_after_any_change_it_is_recovered(to: str, tmp_path: Path) -> None:
    for killing in SWITCHES.kill(to, tmp_path):
        recover(killing.host, killing.path)
        assert killing.host.problems() == [], killing.host.log
        SWITCHES.undone(killing, to)
        assert killing.host.problems() == [], killing.host.log


@both
def test_killed_while_recovering_it_is_recovered(to: str, tmp_path: Path) -> None:
    total, _ = SWITCHES.changes(to, tmp_path / "0")
    for n in range(2, total + 1, 2):
        for m in range(1, 12):
            path = tmp_path / f"{n}-{m}"
            host = SWITCHES.ready(to, path)

            def kill(number: int, stops: tuple[int, ...] = (n, n + m)) -> None:
                if number in stops:
                    raise Killed

            host.after = kill
            for _ in (1, 2):
                with suppress(Killed), AttachLedger.open(path) as ledger:
                    switcher = Switcher(host, ledger, BOOT)
                    if switcher.unfinished():
                        switcher.recover()
                    else:
                        switcher.carry_out(SWITCHES.choices[to](survey(host, ledger)))
            host.after = lambda n: None
            recover(host, path)
            assert host.problems() == [], (n, m, host.log)


@pytest.mark.parametrize("when", ["before", "after"])
@both
def test_libvirtd_that_is_away_for_a_while_is_waited_for(
    to: str, when: str, tmp_path: Path
) -> None:
    """Whether it did what it was asked for last or not."""
    total, _ = SWITCHES.changes(to, tmp_path / "0")
    for n in range(1, total + 1):
        path = tmp_path / f"{n}"
        host = SWITCHES.ready(to, path)

        def away(number: int, n: int = n, host: FakeAttachHost = host) -> None:
            if number == n:
                host.away_until = host.now + 10
                host._answer()

        setattr(host, when, away)
        with AttachLedger.open(path) as ledger:
            put_back = True
            try:
                Switcher(host, ledger, BOOT).carry_out(SWITCHES.choices[to](survey(host, ledger)))
            except SwitchError as error:
                put_back = error.put_back
            assert put_back, (n, host.log)
            assert host.problems() == [], (n, host.log)
            assert not Switcher(host, ledger, BOOT).unfinished()


@pytest.mark.parametrize("then", ["releases", "switches", "ends", "boots"])
def test_a_guest_that_does_not_release_keeps_what_it_has(
    host: FakeAttachHost, path: Path, then: str
) -> None:
    """QEMU keeps the request: a guest that acts on it later gets back what it had. A guest that
    was switched by then, or started anew, is asked for nothing any more."""
    before = host.picture()
    host.stubborn = True
    caught = fails(host, path, f"as it was before, but a b may still release {A0} {A1} {B0}, at")
    assert caught.put_back
    assert host.picture() == before
    with AttachLedger.open(path) as ledger:
        Switcher(FakeAttachHost("qemu:///session"), ledger, BOOT).sweep()
        assert Switcher(host, ledger, BOOT).sweep() == Swept((), ())
    host.stubborn = False
    if then == "switches":
        switch(host, path, FORTH)
        switch(host, path, BACK)
    else:
        host.sleep(1)
        assert host.picture() != before
    if then == "ends":
        for guest in host.fakes.values():
            host.stop(guest)
            host.start(guest)
    if then in ("ends", "switches"):
        host._detach("uuid-a", A0)  # by an operator
        before = host.picture()
    with AttachLedger.open(path) as ledger:
        # As whoever switches next does before it plans.
        boot = "boot-2" if then == "boots" else BOOT
        swept = Switcher(host, ledger, boot).take_back_unfinished()
    assert swept.failed == ()
    assert len(swept.did) == (3 if then == "releases" else 0)
    assert (host.picture() == before) is (then != "boots")
    assert read_pending(path) == []


def test_no_cdev_is_found_before_a_guest_is_touched(host: FakeAttachHost, path: Path) -> None:
    before = host.picture()
    host.no_cdev = True
    fails(host, path, "/dev/tap")
    assert host.picture() == before
    assert not any(line.startswith("unplug") for line in host.log)


def test_a_guest_that_stops_meanwhile(host: FakeAttachHost, path: Path) -> None:
    b = host.fakes["uuid-b"]

    def stop(number: int) -> None:
        if host.log[-1].startswith("unplug") and b.live is not None:
            host.stop(b)

    host.after = stop
    assert fails(host, path).put_back
    assert host.problems() == []
    host.start(b)
    assert host.problems() == []


def test_a_guest_that_libvirt_ends_is_started_anew(host: FakeAttachHost, path: Path) -> None:
    """A libvirtd that died at the wrong moment ends the guest when it comes again."""

    def end(n: int) -> None:
        if n == 5:
            host.stop(host.fakes["uuid-a"])
            host.ended.add("uuid-a")

    before = host.picture()
    host.before = end
    fails(host, path, "but a was ended by libvirt and has been started anew")
    assert host.problems() == []
    assert kinds(host) == {"macvtap"}
    index = next(k.index for k in host.table.values() if k.mac == A0)
    host.set_queue(index, 123)  # a start gives the usual one
    assert host.picture() == before


@pytest.mark.parametrize("late", [0.0, LATE_SECONDS - 1])
def test_after_a_reboot_the_devices_come_before_the_guests(
    host: FakeAttachHost, path: Path, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    switch(host, path, FORTH)
    host.reboot()
    # Nobody but libvirt, for a macvtap, brings a NIC up that serves guests alone.
    host.table[2] = replace(host.table[2], up=False)
    # A NIC may have another MTU by now.
    host.table[3] = replace(host.table[3], mtu=1500)
    begun = host.now
    links = host.links

    def there() -> dict[str, Link]:
        """One NIC comes late."""
        return {n: k for n, k in links().items() if n != "p0" or host.now >= begun + late}

    monkeypatch.setattr(host, "links", there)
    monkeypatch.setattr(host, "link", lambda name: there().get(name))
    with AttachLedger.open(path) as ledger:
        host.away_until = 1e9  # libvirtd is not there yet
        swept = Switcher(host, ledger, "boot-2").boot_devices()
        assert swept.failed == ()
        assert len(swept.did) == 6
    assert host.now - begun < late + 1
    host.away_until = -1
    for guest in host.fakes.values():
        host.start(guest)
    assert host.problems() == []
    assert {k.mtu for k in host.table.values()} == {1500}
    # It gets the usual one later than vsrtune-devices runs.
    host.table[3] = replace(host.table[3], mtu=9000)
    with AttachLedger.open(path) as ledger:
        switcher = Switcher(host, ledger, "boot-2")
        assert switcher.sweep().did == (
            "set the MTU of nvt00000a01 to 9000, as its interface had before",
        )
        assert switcher.sweep() == Swept((), ())
    assert {k.mac: k.mtu for k in host.table.values() if k.lower == 3} == {A1: 9000}
    switch(host, path, BACK)
    assert kinds(host) == {"macvtap"}


def test_a_nic_that_is_gone_keeps_no_guest_of_another_one_from_its_start(
    host: FakeAttachHost, path: Path
) -> None:
    switch(host, path, FORTH)
    host.reboot()
    del host.table[2]
    begun = host.now
    with AttachLedger.open(path) as ledger:
        swept = Switcher(host, ledger, "boot-2").boot_devices()
    assert {k.lower for k in host.table.values() if k.lower} == {3}
    assert "no device p0" in str(swept.failed[0])
    assert host.now - begun == pytest.approx(LATE_SECONDS, abs=1)


@both
@pytest.mark.parametrize("first", ["guests", "recovery"])
def test_a_crash_of_the_host_in_between(to: str, first: str, tmp_path: Path) -> None:
    """Guests start from their definitions, whichever those are by then: libvirt starts them
    before the daemon or after it has taken the switch back."""
    for killing in SWITCHES.kill(to, tmp_path):
        host = killing.host
        crash(host, killing.path)
        if first == "guests":
            start_all(host)
        recover(host, killing.path, "boot-2")
        start_all(host)
        with AttachLedger.open(killing.path) as ledger:
            assert Switcher(host, ledger, "boot-2").sweep().failed == ()
        assert host.problems() == [], host.log
        assert kinds(host) == ({"macvtap"} if killing.undone == (to == "forth") else {NAPI_KIND})


def test_after_a_reboot_macvtap_in_a_definition_comes_first(
    host: FakeAttachHost, path: Path
) -> None:
    switch(host, path, FORTH, config=False)
    crash(host, path)
    start_all(host)
    with AttachLedger.open(path) as ledger:
        assert Switcher(host, ledger, "boot-2").sweep().failed == ()
    assert host.problems() == []
    assert kinds(host) == {"macvtap"}


def test_without_definitions_to_read_every_device_comes_up(
    host: FakeAttachHost, path: Path
) -> None:
    switch(host, path, FORTH)
    host.definitions = lambda: None  # type: ignore[assignment,method-assign]
    crash(host, path)
    start_all(host)
    assert host.problems() == []


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


def test_what_cannot_be_done_for_another_guest_is_no_part_of_a_switch(
    host: FakeAttachHost, path: Path
) -> None:
    """Its NIC is gone, so its device cannot be made."""
    host.table[40] = Link(40, "p2", "veth", mtu=1500)
    host.add("c", ("02:00:00:00:0c:00", "p2"), running=False)
    do(host, path, partial(plan, SwitchRequest(FORTH, ("c",))))
    host.table = {i: link for i, link in host.table.items() if 40 not in (i, link.lower)}
    before = host.picture()

    def fail(_number: int, error: BaseException) -> None:
        if host.log[-1].startswith("define"):
            host.before = lambda n: None
            raise error

    host.before = partial(fail, error=RefusedError("no"))
    assert fails(host, path, "everything is as it was before").put_back
    host.before = partial(fail, error=Killed())
    with suppress(Killed):
        do(host, path, made)
    with AttachLedger.open(path) as ledger:
        switcher = Switcher(host, ledger, BOOT)
        assert switcher.unfinished()
        switcher.take_back_unfinished()
        assert host.picture() == before
        (failed,) = switcher.sweep().failed
        assert "there is no device p2 for it" in str(failed)


def test_a_definition_that_somebody_changed_is_left_alone(tmp_path: Path) -> None:
    *_, killing = SWITCHES.kill("forth", tmp_path)
    host = killing.host
    a, b = host.fakes["uuid-a"], host.fakes["uuid-b"]
    a.config = a.config.replace('queues="2"', 'queues="4"', 1)
    b.config = "<domain><name>b</name><devices/></domain>"
    changed = (a.config.count('queues="4"'), b.config)
    recover(host, killing.path)
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
    assert "all-of-lower" in refused(host, path, partial(plan, SwitchRequest(BACK, ("a",))))
    switch(host, path, BACK)
    assert kinds(host) == {"macvtap"}
    host.start(b)
    assert host.problems() == []


def test_a_saved_guest_comes_back_on_its_device(host: FakeAttachHost, path: Path) -> None:
    """Whatever its definition names."""
    switch(host, path, FORTH, config=False)
    a = host.fakes["uuid-a"]
    host.save(a)
    with AttachLedger.open(path) as ledger:
        assert Switcher(host, ledger, BOOT).sweep().did == ()
    assert "virsh start a" in refused(host, path, partial(made, to=BACK))
    assert "virsh start a" in refused(host, path, partial(made, to=BACK, live=False))
    only_b = partial(plan, SwitchRequest(BACK, ("b",)))
    assert f"a {A0} on p0" in refused(host, path, only_b)
    host.start(a)
    assert [nic(text).device for text in a.live or ()] == ["nvt00000a00", "nvt00000a01"]
    switch(host, path, BACK)
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


def test_what_another_libvirts_guests_stand_on_stays(host: FakeAttachHost, path: Path) -> None:
    """One ledger, two libvirts: to ask one of them tells nothing of the other's guests."""
    switch(host, path, FORTH)
    before = host.picture()
    other = FakeAttachHost("qemu:///session")
    other.table = host.table
    with AttachLedger.open(path) as ledger:
        assert Switcher(other, ledger, BOOT).sweep() == Swept((), ())
        assert Switcher(other, ledger, BOOT).recover() == []
    assert host.picture() == before
    assert host.problems() == []
    switch(host, path, BACK)
    assert kinds(host) == {"macvtap"}


def test_a_switch_over_another_libvirt_is_not_taken_back(host: FakeAttachHost, path: Path) -> None:
    def kill(number: int) -> None:
        if number == 9:
            raise Killed

    host.after = kill
    with suppress(Killed):
        switch(host, path, FORTH)
    host.after = lambda n: None
    pending, picture = read_pending(path), host.picture()
    other = FakeAttachHost("qemu:///session")
    other.table = host.table
    with AttachLedger.open(path) as ledger:
        (error, *_) = Switcher(other, ledger, BOOT).recover()
    assert "vsrtune attach --recover --connect qemu:///system" in str(error)
    assert (read_pending(path), host.picture()) == (pending, picture)
    recover(host, path)
    assert kinds(host) == {"macvtap"}
