"""Groups that others were at, or whose end was not reached: they can always be deleted, and
what they had is given back."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import clone_group as clones
import msr_group as msr
import pvr_group as pvr
import pytest
from attach_host import BOOT, FakeAttachHost
from switch_faults import do, refused, survey

from vsrtune.attach.ledger import GROUP, AttachLedger
from vsrtune.attach.libvirt_hotplug import RefusedError
from vsrtune.attach.plan.model import AttachHostState, Switch, SwitchRequest
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.plan.steps import Plug
from vsrtune.attach.transaction import Switcher
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.ledger import read_pending
from vsrtune.group import msr_rules, planner
from vsrtune.group import scale as group_scale
from vsrtune.group.parser import parse
from vsrtune.model.domain_xml import nics, replaced
from vsrtune.model.guest import Attachment

C0 = "02:00:00:00:0c:00"


def sweep(host: FakeAttachHost, path: Path) -> None:
    with AttachLedger.open(path) as ledger:
        assert Switcher(host, ledger, BOOT).sweep().failed == ()


def undefine(host: FakeAttachHost, uuid: str) -> None:
    host.stop(host.fakes[uuid])
    del host.fakes[uuid]


def switched(to: Attachment, host: AttachHostState) -> Switch:
    """Guest c, by its definition alone."""
    return plan(SwitchRequest(to, ("c",), live=False), host)


forth = partial(switched, Attachment.NAPI_MACVLAN)
back = partial(switched, Attachment.MACVTAP)
drain = partial(group_scale.drain, "edge", "b")
both = partial(group_scale.scale, "edge", 2)


def test_what_is_left_of_an_old_group_is_not_taken_for_a_new_one(path: Path) -> None:
    """The clones of both have the same UUIDs."""
    host = clones.fresh()
    clones.do(host, path, clones.create("vr1", "vr2"))
    kept = dict(host.files)

    def fail(_number: int) -> None:
        if host.log[-1].startswith("remove /"):
            raise OSError(5, "Input/output error")

    host.before = fail
    with AttachLedger.open(path) as ledger:
        switcher = Switcher(host, ledger, BOOT)
        assert len(switcher.carry_out(clones.delete(clones.seen(host, ledger))).failed) == 2
        host.files.clear()
        with pytest.raises(VsrtuneError, match=r"not all removed yet.*--recover"):
            switcher.carry_out(clones.create("vr1", "vr2")(clones.seen(host, ledger)))
    assert sorted(g.name for g in host.fakes.values()) == ["a", "router"]
    host.files = kept
    host.before = lambda n: None
    sweep(host, path)
    assert host.files == {}
    clones.do(host, path, clones.create("vr1", "vr2"))
    assert clones.live(host, "vr1") == clones.SHARED


@pytest.mark.parametrize("daemon", [True, False])
def test_clones_that_somebody_undefined_can_be_deleted(daemon: bool, path: Path) -> None:
    host = clones.fresh()
    before = host.picture()
    clones.do(host, path, clones.create("vr1", "vr2"))
    for name in ("vr1", "vr2"):
        undefine(host, clones.uuid(host, name))
    if daemon:
        sweep(host, path)
    clones.do(host, path, clones.delete)
    assert host.picture() == before
    assert read_pending(path) == []


@pytest.mark.parametrize("kept", ["macvtap", "none"])
def test_a_drained_router_comes_again_whatever_its_definition_is(kept: str, path: Path) -> None:
    host = msr.fresh()
    before = host.picture()
    guest = host.fakes["uuid-b"]
    original = guest.config
    do(host, path, msr.create)
    none = "<domain><name>b</name><devices/></domain>"
    guest.config = original if kept == "macvtap" else none
    had = msr.live(host, "b")
    do(host, path, drain)
    sweep(host, path)
    assert msr.live(host, "b") == []
    do(host, path, both)
    assert msr.live(host, "b") == had
    do(host, path, drain)
    do(host, path, msr.delete)
    guest.config = original
    assert host.picture() == before
    assert read_pending(path) == []


def test_a_router_that_has_that_mac_already_is_not_scaled_up(path: Path) -> None:
    host = msr.fresh()
    guest = host.fakes["uuid-b"]
    original = guest.config
    do(host, path, msr.create)
    do(host, path, drain)
    guest.config = original
    host.stop(guest)
    # Its macvtaps find p0 and p1 free: the devices of this kind of group stand elsewhere.
    host.start(guest)
    said = refused(host, path, both)
    assert "already" in said
    assert "virsh detach-interface b" in said


@pytest.mark.parametrize("links", ["bridge", "hub", "vlan"])
def test_rules_without_a_router_that_is_gone(links: str, path: Path) -> None:
    host = msr.fresh()
    do(host, path, partial(msr.create, links=links))
    undefine(host, "uuid-a")
    sweep(host, path)
    with AttachLedger.open(path) as ledger:
        book = msr_rules.of_group("edge", None, survey(host, ledger))
    assert book.routers == ("b",)
    for side, mac in zip(book.sides, (msr.B0, msr.B1), strict=True):
        assert side.routers == (mac,)
        assert len(side.inner) == 1
        device = host.links()[f"edge-{1 + book.sides.index(side)}r2"]
        below = next(k for k in host.table.values() if k.index == device.lower)
        assert side.inner[0][1] == below.name


@pytest.mark.parametrize("links", ["hub", "vlan"])
def test_rules_without_a_router_to_which_no_interface_leads(links: str, path: Path) -> None:
    host = msr.fresh()
    do(host, path, partial(msr.create, links=links))
    balancer = host.fakes["uuid-lb1"]
    host.stop(balancer)
    taken = next(n.mac for n in nics(balancer.config) if n.device == "edge-1b1")
    balancer.config = replaced(balancer.config, taken, "")
    sweep(host, path)
    with AttachLedger.open(path) as ledger:
        book = msr_rules.of_group("edge", None, survey(host, ledger))
    assert book.routers == ("b",)
    assert [(side.routers, len(side.inner)) for side in book.sides] == [
        ((msr.B0,), 1),
        ((msr.B1,), 1),
    ]


def test_rules_without_a_balancer(path: Path) -> None:
    host = msr.fresh()
    do(host, path, msr.create)
    undefine(host, "uuid-lb1")
    for _ in ("before the daemon sees it", "and after"):
        with pytest.raises(VsrtuneError, match=r"the balancer is gone.*group delete edge"):
            msr.book(host, path)
        sweep(host, path)


def test_the_way_out_beside_another_guest_is_the_one_that_is_told(path: Path) -> None:
    host = pvr.fresh()
    do(host, path, pvr.create)
    guest = host.add("c", (C0, "p0"), queues=1, running=False)
    do(host, path, forth)
    host.start(guest)
    said = refused(host, path, pvr.delete)
    assert "virsh shutdown c, then: vsrtune attach --to macvtap c" in said
    host.stop(guest)
    said = refused(host, path, pvr.delete)
    assert "virsh" not in said
    assert "vsrtune attach --to macvtap c" in said
    do(host, path, back)
    do(host, path, pvr.delete)
    host.start(guest)
    assert host.problems() == []


def test_clones_go_whatever_stands_beside_them(path: Path) -> None:
    """No macvtap comes back for them."""
    host = clones.fresh()
    clones.do(host, path, clones.create("vr1", "vr2"))
    guest = host.add("c", (C0, "p0"), queues=1, running=False)
    clones.do(host, path, forth)
    host.start(guest)
    clones.do(host, path, clones.delete)
    assert host.problems() == []
    assert host.files == {}


def test_a_group_whose_nic_is_gone_can_be_deleted(path: Path) -> None:
    host = pvr.fresh()
    original = host.fakes["uuid-a"].config
    do(host, path, pvr.create)
    host.reboot()
    host.table = {i: link for i, link in host.table.items() if link.name != "p0"}
    do(host, path, pvr.delete)
    assert host.fakes["uuid-a"].config.count("direct") == original.count("direct") == 2
    assert read_pending(path) == []


def test_its_own_device_that_nobody_names_is_no_obstacle(path: Path) -> None:
    host = pvr.fresh()
    original = host.fakes["uuid-b"].config
    do(host, path, pvr.create)
    do(host, path, drain)
    host.fakes["uuid-b"].config = original
    undefine(host, "uuid-a")
    do(host, path, pvr.delete)
    assert [mac for mac, _ in pvr.live(host, "b")] == [pvr.B0, pvr.B1]
    assert host.problems() == []


def test_an_old_group_of_that_name_is_not_taken_for_one_that_failed(path: Path) -> None:
    """Its last line may not have been written."""
    host = pvr.fresh()
    before = host.picture()
    with AttachLedger.open(path) as ledger:
        ledger.add(GROUP, {"name": "edge"})
    sweep(host, path)

    def fail(_number: int) -> None:
        if host.log[-1] == "define":
            host.before = lambda n: None
            raise RefusedError("no")

    host.before = fail
    assert "everything is as it was before" in refused(host, path, pvr.create)
    assert host.picture() == before
    assert read_pending(path) == []


def test_members_leave_one_after_the_other(path: Path) -> None:
    """In one order on all sides, because a queue that goes gives its number to the last."""
    host = FakeAttachHost()
    names = ("a", "b", "d")
    for n, name in enumerate(names):
        host.add(name, (f"02:00:00:00:{n:02}:00", "p0"), (f"02:00:00:00:{n:02}:01", "p1"), queues=1)
    group = parse(
        "group: {name: edge, kind: pvr, members: [a, b, d], lower: {in: p0, out: p1}}", "edge.yaml"
    )
    do(host, path, partial(planner.create, group))
    switch = do(host, path, partial(group_scale.scale, "edge", 1))
    leaving = [
        {card.guest for card in s.cards} for s in switch.steps if isinstance(s, Plug) and not s.on
    ]
    assert leaving == [{"b"}, {"d"}]
