"""Balancers come in front of routers and go again: done whole, or taken back whole."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import golden
import pytest
from attach_host import BOOT, FakeAttachHost
from msr_group import A0, A1, B0, B1, FILE, L0, M1, book, create, delete, edge, live
from switch_faults import Choose, do, refused, survey

from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.plan.steps import NAPI_KIND, UPLINK
from vsrtune.attach.transaction import Switcher
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.ledger import read_pending
from vsrtune.group import msr_rules, planner
from vsrtune.group import scale as group_scale
from vsrtune.group.members import free_mac
from vsrtune.group.msr import FIRST_VLAN, side_links
from vsrtune.group.parser import parse
from vsrtune.group.schema import LINKS
from vsrtune.model.daemon_state import GroupGuest
from vsrtune.views.group_status import places, table

GOLDEN = Path(__file__).parent / "golden_group"


def other(text: str) -> Choose:
    return lambda host: planner.create(edge("hub", text), host)


def drain(name: str) -> Choose:
    return lambda host: group_scale.drain("edge", name, host)


def scale(number: int) -> Choose:
    return lambda host: group_scale.scale("edge", number, host)


@pytest.mark.parametrize("links", LINKS)
def test_created_and_deleted_all_is_as_it_was(host: FakeAttachHost, path: Path, links: str) -> None:
    before = host.picture()
    ahead = book(host, path, edge(links))
    switch = do(host, path, functools.partial(create, links=links))
    golden.matches(
        GOLDEN / f"create-{links}.txt",
        "\n".join([*map(str, switch.steps), *(f"note: {n}" for n in switch.notes), ""]),
    )
    assert host.problems() == []
    assert [m for _, m in live(host, "a")] == [A0, A1]
    assert [d for d, _ in live(host, "a")] == ["edge-1r1", "edge-2r1"]
    assert [d for d, _ in live(host, "b")] == ["edge-1r2", "edge-2r2"]
    ends = ["edge-1b"] if links == "bridge" else ["edge-1b1", "edge-1b2"]
    assert [d for d, _ in live(host, "lb1")] == [*ends, "macvtap0"]
    table = host.links()
    below = {name: host.table[link.lower].name for name, link in table.items() if link.lower}
    for number, end in enumerate(ends, 1):
        assert below[end] == below[f"edge-1r{number}"]
        assert host.flag(end, UPLINK)
    assert len({below["edge-1r1"], below["edge-1r2"]}) == len(ends)
    assert table["edge-2r2"].queue == 123
    assert table["edge-2r2"].mtu == 9000
    # Rules ahead of time and now are the same, whatever was made meanwhile.
    assert book(host, path) == ahead
    # The balancer sees of a vlan what it sees of a hub.
    golden.matches(GOLDEN / f"rules-{links.replace('vlan', 'hub')}.nft", ahead)
    # All who start anew come back to their places.
    for guest in host.fakes.values():
        host.stop(guest)
        host.start(guest)
    assert host.problems() == []
    assert book(host, path) == ahead
    do(host, path, delete)
    assert host.problems() == []
    assert host.picture() == before
    assert [k.name for k in host.table.values() if k.kind != "macvtap"] == ["p0", "p1"]
    assert read_pending(path) == []


def test_one_balancer_for_both_sides(path: Path) -> None:
    host = FakeAttachHost()
    host.add("lb1", (L0, "p0"), (M1, "p1"), queues=4)
    host.add("a", (A0, "p0"), (A1, "p1"))
    before = host.picture()
    text = FILE.replace("lb1: [in], lb2: [out]", "lb1: [in, out]").replace("a, b", "a")
    do(host, path, other(text))
    assert [d for d, _ in live(host, "lb1")] == ["edge-1b1", "edge-2b1", "macvtap0", "macvtap1"]
    inner = [x for x in host.fakes["uuid-lb1"].live or () if "edge-" in x]
    assert all("queues" not in x for x in inner)
    with AttachLedger.open(path) as ledger:
        rules = msr_rules.of_group("edge", None, survey(host, ledger))
    golden.matches(GOLDEN / "rules-one.nft", rules.text())
    do(host, path, delete)
    assert host.picture() == before


def test_drain_and_scale_and_their_rules(host: FakeAttachHost, path: Path) -> None:
    before = host.picture()
    do(host, path, create)
    both = book(host, path)
    with AttachLedger.open(path) as ledger:
        rules = msr_rules.of_group("edge", None, survey(host, ledger))
    switch = do(host, path, scale(1))
    assert "frames for b are lost until the balancers have loaded" in switch.notes[0]
    assert live(host, "b") == []
    one = book(host, path)
    assert one == "".join(rules.text(name, 1) for name in ("lb1", "lb2"))
    assert one == "".join(rules.text(name, None, ["b"]) for name in ("lb1", "lb2"))
    assert "chain to_in_2" not in one, "no frame of a flow goes to it"
    assert "mod" not in one
    # It hears who its neighbours are all the same: it comes again before the balancers know.
    assert one.count(B0) == both.count(B0) - 1
    for what, said in (
        (lambda: rules.text(), "it has several balancers; name one: lb1, lb2"),
        (lambda: rules.text("a"), "it is no balancer of the group edge"),
        (lambda: rules.text("lb1", 3), "it has 2 routers, not 3"),
        (lambda: rules.text("lb1", 1, ["a"]), "no router would be left"),
        (lambda: rules.text("lb1", 1, ["c"]), "its routers: a, b"),
    ):
        with pytest.raises(VsrtuneError) as caught:
            what()
        assert said in str(caught.value)
    with pytest.raises(VsrtuneError, match="no running member would be left"):
        do(host, path, drain("a"))
    with pytest.raises(VsrtuneError, match="its members: a, b"):
        do(host, path, drain("lb1"))
    switch = do(host, path, scale(2))
    assert "b gets frames when the balancers have loaded" in switch.notes[0]
    assert book(host, path) == both
    do(host, path, drain("a"))
    do(host, path, delete)
    assert host.problems() == []
    assert host.picture() == before


@pytest.mark.parametrize("links", LINKS)
def test_rules_with_the_names_that_a_guest_says(
    host: FakeAttachHost, path: Path, links: str
) -> None:
    do(host, path, functools.partial(create, links=links))
    with AttachLedger.open(path) as ledger:
        rules = msr_rules.of_group("edge", None, survey(host, ledger))
    plain = rules.text("lb1")
    defined = re.findall(r"define (\w+) = \w+    # (\S+)", plain)
    called = {mac: f"enp{n}s0" for n, (_, mac) in enumerate(defined)}
    text = rules.text("lb1", called={**called, "02:00:00:00:00:99": "x; drop"})
    assert re.findall(r"define (\w+) = (\w+)", text) == [
        (name, f"enp{n}s0") for n, (name, _) in enumerate(defined)
    ]
    assert re.sub(r"= \w+ ", "", text) == re.sub(r"= \w+ ", "", plain), "nothing else differs"
    assert msr_rules.choosers(text) == {"to_in_1", "to_in_2"}
    assert msr_rules.choosers(rules.text("lb1", 2, ["a"], called)) == {"to_in_2"}
    first = next(iter(called))
    for name in (
        "",
        "eth0\n}\n",
        "eth0; flush ruleset",
        "0",
        "-f",
        "e" * 16,
        "eth0 ",
        "ethü",
        "$x",
    ):
        with pytest.raises(VsrtuneError, match=f"no interface with the MAC {first} whose name"):
            rules.text("lb1", called={**called, first: name})
    with pytest.raises(VsrtuneError, match="no interface with the MAC"):
        rules.text("lb1", called={})


def test_status_shows_what_the_daemon_says(host: FakeAttachHost, path: Path) -> None:
    do(host, path, create)
    with AttachLedger.open(path) as ledger:
        read = survey(host, ledger)
    watched = (
        GroupGuest("edge", "lb1", "balancer", "rules due", hint="load it"),
        GroupGuest("edge", "a", "router"),
        GroupGuest("edge", "b", "router", "stalled"),
        GroupGuest("core", "lb2", "balancer", "silent"),
    )
    found = places(read.groups["edge"], read, (), watched)
    assert {p.member: p.health for p in found} == {
        "lb1": "rules due; load it", "lb2": "", "a": "good", "b": "stalled",
    }  # fmt: skip
    assert table("edge", found).columns[-1] == "health"
    assert "health" not in table("edge", places(read.groups["edge"], read, ())).columns


def test_who_stands_where(host: FakeAttachHost, path: Path) -> None:
    do(host, path, lambda h: create(h, "vlan"))
    do(host, path, drain("a"))
    host.stop(host.fakes["uuid-lb2"])
    with AttachLedger.open(path) as ledger:
        read = survey(host, ledger)
    found = [(p.member, p.role, p.side, p.device, p.lower, p.state) for p in
             places(read.groups["edge"], read, ())]  # fmt: skip
    assert found == [
        ("lb1", "balancer", "in", "edge-1b1", "edge-1l1", "plugged"),
        ("lb1", "balancer", "in", "edge-1b2", "edge-1l2", "plugged"),
        ("lb2", "balancer", "out", "edge-2b1", "edge-2l1", "stopped"),
        ("lb2", "balancer", "out", "edge-2b2", "edge-2l2", "stopped"),
        ("a", "router", "in", "edge-1r1", "edge-1l1", "drained"),
        ("a", "router", "out", "edge-2r1", "edge-2l1", "drained"),
        ("b", "router", "in", "edge-1r2", "edge-1l2", "plugged"),
        ("b", "router", "out", "edge-2r2", "edge-2l2", "plugged"),
    ]


def test_devices_come_again_in_their_order(host: FakeAttachHost, path: Path) -> None:
    do(host, path, lambda h: create(h, "vlan"))
    host.reboot()
    with AttachLedger.open(path) as ledger:
        did = Switcher(host, ledger, BOOT).boot_devices()
    assert did.failed == ()
    assert did.did[:2] == ("made edge-1l, edge stands on it", "brought edge-1l up")
    for guest in host.fakes.values():
        host.start(guest)
    assert host.problems() == []
    # Somebody clears a flag, and removes a link with all that stands on it.
    host.flagged.discard((host.index("edge-1b1"), UPLINK))
    host.remove(host.index("edge-2l2"))
    with AttachLedger.open(path) as ledger:
        did = Switcher(host, ledger, BOOT).sweep()
    assert did.failed == ()
    assert "set uplink of edge-1b1, which needs it" in did.did
    assert "made edge-2l2 on edge-2l, edge stands on it" in did.did
    assert host.flag("edge-1b1", UPLINK)
    # Stopped and undefined, nobody names a device any more.
    for guest in host.fakes.values():
        host.stop(guest)
        guest.config = guest.config.replace("edge-", "other-")
    with AttachLedger.open(path) as ledger:
        did = Switcher(host, ledger, BOOT).sweep()
        assert did.failed == ()
        assert ledger.pending() == []
    assert not [name for name in host.links() if name.startswith("edge-")]


def test_what_is_in_the_way_is_named(host: FakeAttachHost, path: Path) -> None:
    # Others may stay on the lower devices, which carry macvtaps before and after.
    host.add("c", ("02:00:00:00:0c:00", "p0"))
    for line, name in ((5, "lb2"), (6, "b")):
        host.stop(host.fakes[f"uuid-{name}"])
        assert f"edge.yaml:{line}: {name} does not run" in refused(host, path, create)
        host.start(host.fakes[f"uuid-{name}"])
    swapped = other(FILE.replace("lb1: [in], lb2: [out]", "lb1: [out], lb2: [in]"))
    assert "lb2: p0: it has no interface on this device" in refused(host, path, swapped)
    nowhere = other(FILE.replace("p0", "p7"))
    assert "edge.yaml:4: there is no such device" in refused(host, path, nowhere)
    host.old_module = True
    assert "no flag uplink" in refused(host, path, create)
    host.old_module = False
    do(host, path, create)
    core = parse(FILE.replace("name: edge", "name: core"), "core.yaml")
    said = refused(host, path, functools.partial(planner.create, core))
    assert "a is a member of the group edge" in said


def test_routers_of_one_mac_are_refused(path: Path) -> None:
    host = FakeAttachHost()
    host.add("lb1", (L0, "p0"))
    host.add("lb2", (M1, "p1"))
    host.add("a", (A0, "p0"), (A1, "p1"))
    host.add("b", (A0, "p0"), (B1, "p1"))
    assert "b: its MAC 02:00:00:00:0a:00 is that of a too" in refused(host, path, create)


def test_an_interface_that_somebody_took_out_is_no_obstacle(
    host: FakeAttachHost, path: Path
) -> None:
    guest = host.fakes["uuid-lb1"]
    definition = guest.config
    do(host, path, create)
    host._detach(guest.uuid, next(m for d, m in live(host, "lb1") if d == "edge-1b"))
    guest.config = definition
    do(host, path, delete)
    assert not [name for name in host.links() if name.startswith("edge-")]


def test_names_fit_and_macs_are_nobodys() -> None:
    links, to_routers, _ = side_links("abcdefghi", 9, "vlan", 99, 1500, set())
    ends = [device for _, device in to_routers]
    devices = [*links, *ends]
    assert max(len(d.name) for d in devices) <= 15
    assert links[-1].vlan == FIRST_VLAN + 99
    macs = [d.mac for d in devices]
    assert len(set(macs)) == len(devices) == 1 + 2 * 99
    assert all(int(one[:2], 16) & 3 == 2 for one in macs)
    assert free_mac("x", ()) == free_mac("x", ["02:00:00:00:00:00"])
    assert free_mac("x", [free_mac("x", ())]) != free_mac("x", ())
    assert all(d.kind == NAPI_KIND and d.flags == (UPLINK,) for d in ends)


def test_what_a_guest_lists_is_read_once() -> None:
    """Empty lines took the square of their number, hours for what an agent may answer."""
    rules = "\n" * 500_000 + "table netdev vsrtune_edge {\n\tchain to_in_1 {\n"
    assert msr_rules.choosers(rules) == {"to_in_1"}
