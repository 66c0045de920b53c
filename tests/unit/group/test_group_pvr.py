"""Guests become one router and guests again: done whole, or taken back whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from attach_host import BOOT, FakeAttachHost
from pvr_group import A0, A1, B0, B1, create, delete, live
from switch_faults import do, refused

from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.plan.model import SwitchRequest
from vsrtune.attach.plan.planner import plan as attach_plan
from vsrtune.attach.plan.steps import EVERY_QUEUE, NAPI_KIND
from vsrtune.attach.transaction import Switcher
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.ledger import read_pending
from vsrtune.group import planner
from vsrtune.group import scale as group_scale
from vsrtune.model.guest import Attachment


def test_created_and_deleted_all_is_as_it_was(host: FakeAttachHost, path: Path) -> None:
    before = host.picture()
    do(host, path, create)
    assert host.problems() == []
    shared = [(A0, "edge-in"), (A1, "edge-out")]
    assert live(host, "a") == live(host, "b") == shared
    devices = {k.name: k for k in host.table.values() if k.kind == NAPI_KIND}
    assert {n: (d.mac, d.mtu, d.queue, d.up) for n, d in devices.items()} == {
        "edge-in": (A0, 1500, 500, True),
        "edge-out": (A1, 9000, 500, True),
    }
    assert all(host.flag(name, EVERY_QUEUE) for name in devices)
    # One order on all sides, so that a queue's number is one member.
    plugs = [entry for entry in host.log if entry.startswith("plug")]
    assert plugs == [f"plug {A0}", f"plug {A1}"] * 2
    # A member that starts anew joins again.
    guest = host.fakes["uuid-b"]
    host.stop(guest)
    host.start(guest)
    assert live(host, "b") == shared
    do(host, path, delete)
    assert host.problems() == []
    assert host.picture() == before
    assert read_pending(path) == []


def test_a_saved_member_keeps_its_group(host: FakeAttachHost, path: Path) -> None:
    do(host, path, create)
    b = host.fakes["uuid-b"]
    host.save(b)
    assert "virsh start b" in refused(host, path, delete)
    host.start(b)
    assert live(host, "b") == [(A0, "edge-in"), (A1, "edge-out")]
    do(host, path, delete)
    assert host.problems() == []


def test_drain_and_scale(host: FakeAttachHost, path: Path) -> None:
    before = host.picture()
    do(host, path, create)
    do(host, path, lambda h: group_scale.drain("edge", "a", h))
    assert live(host, "a") == []
    assert live(host, "b") == [(A0, "edge-in"), (A1, "edge-out")]
    with pytest.raises(VsrtuneError, match="no running member would be left"):
        do(host, path, lambda h: group_scale.drain("edge", "b", h))
    # The queue is the device's, and may be set by a policy by now.
    host.set_queue(next(k.index for k in host.table.values() if k.name == "edge-in"), 777)
    # The first members stay: those who come are plugged in before the others go.
    switch = do(host, path, lambda h: group_scale.scale("edge", 1, h))
    assert [str(step).split()[0] for step in switch.steps] == ["plug", "unplug"]
    assert live(host, "a") == [(A0, "edge-in"), (A1, "edge-out")]
    assert live(host, "b") == []
    link = host.link("edge-in")
    assert link is not None and link.queue == 777
    assert do(host, path, lambda h: group_scale.scale("edge", 1, h)).steps == ()
    # From half a group back to two guests.
    do(host, path, delete)
    assert host.problems() == []
    assert host.picture() == before


def test_a_member_that_died_is_no_obstacle(host: FakeAttachHost, path: Path) -> None:
    do(host, path, create)
    guest = host.fakes["uuid-b"]
    host.stop(guest)
    switch = do(host, path, lambda h: group_scale.scale("edge", 2, h))
    assert switch.steps == ()
    assert switch.notes == ("b does not run; it joins when it is started",)
    do(host, path, delete)
    host.start(guest)
    assert host.problems() == []
    assert live(host, "b") == [(B0, "macvtap2"), (B1, "macvtap3")]


def test_devices_come_again_with_their_flag(host: FakeAttachHost, path: Path) -> None:
    do(host, path, create)
    host.reboot()
    with AttachLedger.open(path) as ledger:
        did = Switcher(host, ledger, BOOT).boot_devices()
    assert did.failed == ()
    assert host.flag("edge-in", EVERY_QUEUE)
    assert host.flag("edge-out", EVERY_QUEUE)
    for guest in host.fakes.values():
        host.start(guest)
    assert host.problems() == []
    host.flagged.clear()
    with AttachLedger.open(path) as ledger:
        did = Switcher(host, ledger, BOOT).sweep()
    assert did.did == tuple(
        f"set every-queue of {name}, which needs it" for name in ("edge-in", "edge-out")
    )


def test_what_is_in_the_way_is_named(host: FakeAttachHost, path: Path) -> None:
    stranger = host.add("c", ("02:00:00:00:0c:00", "p0"), queues=1)
    assert "c has a macvtap on it and is no member of edge" in refused(host, path, create)
    host.stop(stranger)
    host.stop(host.fakes["uuid-b"])
    assert "edge.yaml:1: b does not run" in refused(host, path, create)
    host.start(host.fakes["uuid-b"])
    host.old_module = True
    assert "no flag every-queue" in refused(host, path, create)
    host.old_module = False
    do(host, path, create)
    assert "already" in refused(host, path, create)
    assert "its members: a, b" in refused(host, path, lambda h: group_scale.drain("edge", "c", h))
    assert "created groups: edge" in refused(host, path, lambda h: planner.delete("core", h))
    assert "from 1 to 2" in refused(host, path, lambda h: group_scale.scale("edge", 3, h))


def test_a_member_of_several_queues_would_hear_twice(path: Path) -> None:
    host = FakeAttachHost()
    host.add("a", (A0, "p0"), (A1, "p1"), queues=1)
    host.add("b", (B0, "p0"), (B1, "p1"), queues=2)
    assert "b: p0: it has 2 queue pairs" in refused(host, path, create)


def test_attach_leaves_members_to_their_group(host: FakeAttachHost, path: Path) -> None:
    do(host, path, create)
    asked = SwitchRequest(Attachment.MACVTAP, ("a",), all_of_lower=True)
    assert refused(host, path, lambda h: attach_plan(asked, h)) == (
        f"a: its interface {A0} is on edge-in of the group edge; vsrtune group delete edge"
    )
    asked = SwitchRequest(Attachment.NAPI_MACVLAN, ("a", "b"))
    assert do(host, path, lambda h: attach_plan(asked, h)).moves == ()
