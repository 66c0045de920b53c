"""Members of a group that are made from a template: made whole, taken back whole, ended whole."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from attach_host import BOOT, FakeAttachHost, Killed
from clone_group import (
    A0,
    A1,
    CHOICES,
    SHARED,
    SWITCHES,
    TEXT,
    create,
    delete,
    do,
    keep,
    live,
    refused,
    seen,
    uuid,
)
from clone_samples import DISK, MACS, UUID, definition, nic
from golden import matches
from switch_faults import before_lines

from vsrtune.attach.errors import SwitchError
from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.libvirt_hotplug import RefusedError
from vsrtune.attach.plan.clone_model import File
from vsrtune.attach.plan.model import Switch
from vsrtune.attach.transaction import Switcher
from vsrtune.execute.ledger import read_pending
from vsrtune.group import clone_xml
from vsrtune.group import scale as group_scale
from vsrtune.model.host import Link

GOLDEN = Path(__file__).parent / "golden_group"
IMAGES = "/var/lib/libvirt/images"


def told(switch: Switch) -> str:
    return "".join(f"{n}. {step}\n" for n, step in enumerate(switch.steps, 1))


def test_a_group_of_clones_alone(host: FakeAttachHost, path: Path) -> None:
    before = host.picture()
    switch = do(host, path, create("vr1", "vr2"))
    matches(GOLDEN / "clones.txt", told(switch))
    assert host.problems() == []
    # They are the router that the template would be.
    assert live(host, "vr1") == live(host, "vr2") == SHARED
    assert host.files == {
        f"{IMAGES}/{name}-vda.qcow2": File(
            f"{IMAGES}/{name}-vda.qcow2", f"{IMAGES}/router.qcow2", "qcow2"
        )
        for name in ("vr1", "vr2")
    }
    for name in ("vr1", "vr2"):
        config = host.fakes[uuid(host, name)].config
        assert clone_xml.disks(config) == (f"{IMAGES}/{name}-vda.qcow2",)
    # The template cannot start beside them: the lower devices are taken.
    with pytest.raises(RefusedError, match="p0 is busy"):
        host.start(host.fakes[UUID])
    host.fakes[UUID].live = None
    # A member like any other.
    do(host, path, lambda h: group_scale.drain("edge", "vr2", h))
    assert live(host, "vr2") == []
    do(host, path, lambda h: group_scale.scale("edge", 2, h))
    assert live(host, "vr2") == SHARED
    switch = do(host, path, delete)
    matches(GOLDEN / "clones-deleted.txt", told(switch))
    assert host.picture() == before
    assert read_pending(path) == []


def test_clones_beside_a_running_guest(host: FakeAttachHost, path: Path) -> None:
    host.start(host.fakes["uuid-a"])
    before = host.picture()
    switch = do(host, path, create("a", "vr2"))
    matches(GOLDEN / "clones-mixed.txt", told(switch))
    assert live(host, "a") == live(host, "vr2") == [(A0, "edge-in"), (A1, "edge-out")]
    assert host.problems() == []
    do(host, path, delete)
    assert host.picture() == before


def test_kept_clones_are_guests_of_their_own(host: FakeAttachHost, path: Path) -> None:
    do(host, path, create("vr1", "vr2"))
    do(host, path, lambda h: group_scale.drain("edge", "vr2", h))
    do(host, path, keep)
    assert host.problems() == []
    assert len(host.files) == 2
    macs = {mac for name in ("vr1", "vr2") for mac, _ in live(host, name)}
    assert len(macs) == 4  # nobody has another's
    assert not macs & set(MACS)
    assert read_pending(path) == []
    # They are there now, so they are adopted, and stay theirs who kept them.
    do(host, path, create("vr1", "vr2"))
    do(host, path, delete)
    assert host.problems() == []
    assert {mac for name in ("vr1", "vr2") for mac, _ in live(host, name)} == macs


ready, changes = SWITCHES.ready, SWITCHES.changes


@pytest.mark.parametrize("what", CHOICES)
def test_killed_before_any_line_of_the_ledger(what: str, tmp_path: Path) -> None:
    """Among them those that say whose a clone is, after the last step."""
    end = ready(what, tmp_path / "end")
    do(end, tmp_path / "end", CHOICES[what])
    for n in count(1):
        path = tmp_path / f"{n}"
        host = ready(what, path)
        before = host.picture()

        def killed(number: int, n: int = n) -> None:
            if number == n:
                raise Killed

        with suppress(Killed), AttachLedger.open(path) as ledger, before_lines(killed):
            Switcher(host, ledger, BOOT).carry_out(CHOICES[what](seen(host, ledger)))
            break
        with AttachLedger.open(path) as ledger:
            switcher = Switcher(host, ledger, BOOT)
            assert switcher.recover() == []
            assert switcher.sweep().failed == ()
            assert host.picture() in (before, end.picture()), (n, host.log)
            whole = host.picture() == (end.picture() if what in ("create", "mixed") else before)
            assert bool(switcher.clones()) == whole, n
    assert n > 5


def test_libvirt_may_be_away_for_a_while(path: Path) -> None:
    for what in CHOICES:
        total, _ = changes(what, path.with_name(f"{what}-0"))
        for n in range(1, total + 1):
            own = path.with_name(f"{what}-{n}")
            host = ready(what, own)

            def go_away(number: int, n: int = n, host: FakeAttachHost = host) -> None:
                if number == n:
                    host.away_until = host.now + 3

            host.before = go_away
            do(host, own, CHOICES[what])
            assert host.problems() == [], (what, n)


def test_what_is_in_the_way_is_named(host: FakeAttachHost, path: Path) -> None:
    both = create("vr1", "vr2")
    router = host.fakes[UUID]
    router.live = []
    assert "edge.yaml:1: router runs, and writes to the disks" in refused(host, path, both)
    router.live = None
    assert "there is no libvirt guest core that is defined, to make vr1" in refused(
        host, path, create("vr1", text=TEXT.replace("router", "core"))
    )
    plain = TEXT.replace(", template: router", "")
    assert "can be made from a template:" in refused(host, path, create("vr1", text=plain))
    text, router.config = router.config, definition(DISK + nic(MACS[0], "p0", 2))
    assert "router: p1: it has no interface on this device" in refused(host, path, both)
    router.config = text.replace("type='file' device", "type='network' device")
    assert "router: disk vda: a clone cannot have it" in refused(host, path, both)
    router.config = text.replace(MACS[1], MACS[0])
    assert f"several interfaces with the MAC {MACS[0]}" in refused(host, path, both)
    router.config = text
    host.files[f"{IMAGES}/vr2-vda.qcow2"] = File("somebody's", "")
    assert f"vr2 would get {IMAGES}/vr2-vda.qcow2" in refused(host, path, both)
    host.files.clear()
    assert "cannot be the name of a file" in refused(host, path, create("vr1", "'a/b'"))
    host._add(Link(0, "tap7", "tun", mac=MACS[0]))
    assert f"tap7 has the MAC {MACS[0]}" in refused(host, path, create("vr1"))


def test_a_file_that_comes_in_between_is_nobody_of_ours(host: FakeAttachHost, path: Path) -> None:
    """Somebody makes a file of that name after the plan: it is there afterwards."""
    theirs = File(f"{IMAGES}/vr1-vda.qcow2", "theirs")

    def come(number: int) -> None:
        if number == 1:
            host.files[theirs.path] = theirs

    host.before = come
    with AttachLedger.open(path) as ledger:
        switch = create("vr1", "vr2")(seen(host, ledger))
        with pytest.raises(SwitchError, match="there is a file of that name") as caught:
            Switcher(host, ledger, BOOT).carry_out(switch)
    assert caught.value.put_back
    assert host.files == {theirs.path: theirs}
    assert uuid(host, "router") == UUID
    assert len(host.fakes) == 2


def test_a_delete_that_fails_has_ended_no_clone(host: FakeAttachHost, path: Path) -> None:
    """What a guest had in its memory would not come back."""
    host.start(host.fakes["uuid-a"])
    host.add("b", ("02:00:00:00:0b:00", "p0"), ("02:00:00:00:0b:01", "p1"), queues=1)
    do(host, path, create("a", "b", "vr3", "vr4"))
    before = host.picture()
    host.log.clear()

    def fail(_number: int) -> None:
        if host.log[-1] == f"plug {A0}":
            host.before = lambda n: None
            raise RefusedError("no")

    host.before = fail
    with AttachLedger.open(path) as ledger:
        switch = delete(seen(host, ledger))
        with pytest.raises(SwitchError, match="everything is as it was before"):
            Switcher(host, ledger, BOOT).carry_out(switch)
    assert host.picture() == before
    assert not [line for line in host.log if line.startswith(("stop", "start"))]
    # The clones keep their queues, and so the order on both sides.
    unplugs = [f"1. unplug a {A0}, a {A1}", f"2. unplug b {A0}, b {A1}"]
    assert told(switch).splitlines()[:2] == unplugs
    do(host, path, delete)
    assert host.problems() == []


def test_what_others_did_to_a_clone_meanwhile(host: FakeAttachHost, path: Path) -> None:
    do(host, path, create("vr1", "vr2", "vr3"))
    # Undefined by somebody: told, and what was made for it goes.
    gone = host.fakes.pop(uuid(host, "vr1"))
    # Undefined, and its overlay given to another guest: that is left.
    other = host.fakes.pop(uuid(host, "vr2"))
    keeper = host.add("keeper", running=False)
    keeper.config = definition(DISK.replace("router.qcow2", "vr2-vda.qcow2"), name="keeper")
    # On another file, of which the overlay may be a part.
    third = host.fakes[uuid(host, "vr3")]
    text, third.config = third.config, third.config.replace("vr3-vda.qcow2", "vr3.snapshot")
    said = refused(host, path, delete)
    assert f"vr3: it does not stand on its overlay {IMAGES}/vr3-vda.qcow2 any more" in said
    assert "--keep-clones" in said
    third.config = text
    with AttachLedger.open(path) as ledger:
        switch = delete(seen(host, ledger))
        swept = Switcher(host, ledger, BOOT).carry_out(switch)
    assert (gone.name, other.name) == ("vr1", "vr2")
    assert [note.partition(";")[0] for note in switch.notes] == [
        "vr1 was undefined by somebody meanwhile", "vr2 was undefined by somebody meanwhile",
    ]  # fmt: skip
    assert f"left {IMAGES}/vr2-vda.qcow2: keeper names it" in swept.did
    assert f"removed {IMAGES}/vr1-vda.qcow2" in swept.did
    assert set(host.files) == {f"{IMAGES}/vr2-vda.qcow2"}
    assert {g.name for g in host.fakes.values()} == {"a", "router", "keeper"}


@pytest.mark.parametrize("nvram", ["<nvram>{}</nvram>", "<nvram><source file='{}'/></nvram>"])
def test_the_nvram_of_a_guest_of_that_name_is_left(
    nvram: str, host: FakeAttachHost, path: Path
) -> None:
    """libvirt calls the file of a new guest as the clone's was called."""
    place = "/var/lib/libvirt/qemu/nvram"
    router = host.fakes[UUID]
    router.config = router.config.replace("</os>", f"{nvram.format(f'{place}/r.fd')}</os>")
    do(host, path, create("vr1", "vr2"))
    del host.fakes[uuid(host, "vr2")]
    own = host.add("vr2", running=False)
    own.config = definition("", os=nvram.format(f"{place}/vr2_VARS.fd"), name="vr2")
    with AttachLedger.open(path) as ledger:
        swept = Switcher(host, ledger, BOOT).carry_out(delete(seen(host, ledger)))
    assert f"left {place}/vr2_VARS.fd: vr2 names it" in swept.did
    assert set(host.files) == {f"{place}/vr2_VARS.fd"}


@pytest.mark.parametrize("what", ["create", "delete"])
def test_the_daemon_leaves_files_to_a_command(what: str, tmp_path: Path) -> None:
    """It takes back, or ends, all that it may reach, at once."""
    total, after = changes(what, tmp_path / "0")
    path = tmp_path / "1"
    host = ready(what, path)
    before = host.picture()

    def kill(number: int) -> None:
        if number == total - after + (what == "delete"):
            raise Killed

    host.after = kill
    with AttachLedger.open(path) as ledger, pytest.raises(Killed):
        Switcher(host, ledger, BOOT).carry_out(CHOICES[what](seen(host, ledger)))
    host.after = lambda n: None
    host.files_hidden = True
    begun = host.now
    with AttachLedger.open(path) as ledger:
        switcher = Switcher(host, ledger, BOOT, patience=2)
        failed = (*switcher.recover(), *switcher.sweep().failed)
    assert [error.where for error in failed] == [
        f"{IMAGES}/{name}-vda.qcow2" for name in (("vr2", "vr1") if what == "create" else ("vr1", "vr2"))
    ]  # fmt: skip
    assert host.now == begun
    assert {g.name for g in host.fakes.values()} == {"a", "router"}
    assert len(host.files) == 2
    host.files_hidden = False
    with AttachLedger.open(path) as ledger:
        assert Switcher(host, ledger, BOOT).recover() == []
        assert ledger.pending() == []
    assert host.files == {}
    if what == "create":
        assert host.picture() == before
