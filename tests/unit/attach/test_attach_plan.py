"""Which switches can be made, how, and what refuses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from attach_host import FakeAttachHost, interface

from vsrtune.attach.plan.model import AttachHostState, GuestNics, Switch, SwitchRequest
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.plan.requests import Batch, batches, wanted
from vsrtune.attach.plan.steps import (
    NAPI_KIND,
    Card,
    Define,
    MadeDevice,
    MakeDevice,
    Origin,
    Plug,
    Raise,
    Step,
    inverse,
)
from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.domain_xml import nic
from vsrtune.model.guest import Attachment
from vsrtune.model.host import Link
from vsrtune.policy.model import Policy

A0, A1, B0 = "02:00:00:00:0a:00", "02:00:00:00:0a:01", "02:00:00:00:0b:00"
FORTH, BACK = Attachment.NAPI_MACVLAN, Attachment.MACVTAP
DEVICE = MadeDevice("nvt1", "p0", A0, 4, 1500, 500)
CARD = Card("a", "u", A0, "<interface type='direct'/>", 7)
BRIDGED = """<interface type='bridge'><mac address='02:00:00:00:0f:00'/><source bridge='br0'/>\
<target dev='vnet0'/><model type='virtio'/></interface>"""


def survey(fake: FakeAttachHost, *origins: Origin) -> AttachHostState:
    return AttachHostState(fake.guests(), fake.links().values(), origins)


def two_guests() -> FakeAttachHost:
    fake = FakeAttachHost()
    fake.add("a", (A0, "p0"), (A1, "p1"))
    fake.add("b", (B0, "p0"))
    return fake


def forth(*guests: str, **more: object) -> Switch:
    """The way of these guests from ``two_guests`` to NAPI-macvlan."""
    return plan(SwitchRequest(FORTH, guests, **more), survey(two_guests()))  # type: ignore[arg-type]


def alone(text: str, *links: Link, to: Attachment = FORTH) -> Switch:
    """The way of a guest with one running interface."""
    host = AttachHostState((GuestNics("a", "u", (nic(text),), None),), (Link(2, "p0"), *links), ())
    return plan(SwitchRequest(to, ("a",), config=False), host)


def names(switch: Switch) -> list[str]:
    return [str(step).split()[0] for step in switch.steps]


@pytest.mark.parametrize(
    "step",
    [
        MakeDevice(DEVICE),
        Plug((CARD, CARD), on=False),
        Raise((DEVICE,)),
        Define("a", "u", A0, "x", ""),
    ],
)
def test_a_step_and_its_inverse(step: Step) -> None:
    assert inverse(inverse(step)) == step
    assert inverse(step) != step
    assert decode(Step, encode(step)) == step
    assert str(step) != str(inverse(step))


def test_an_origin_survives_the_ledger() -> None:
    origin = Origin(DEVICE, "a", "u", "<x/>", "", True)
    assert decode(Origin, encode(origin)) == origin


def test_the_order_of_the_steps() -> None:
    made = forth("a", interface=A1)
    assert names(made) == ["make", "unplug", "bring", "plug", "define"]
    assert [m.mac for m in made.moves] == [A1]
    assert made.notes == ()
    assert made.moves[0].device.name == "nvt00000a01"
    assert 'dev="nvt00000a01" managed="no"' in made.moves[0].live[1]


def test_others_on_the_lower_device_are_named_or_taken_along() -> None:
    with pytest.raises(VsrtuneError, match=f"^p0, p1: .*b {B0} on p0.*--all-of-lower"):
        forth("a")
    assert {m.mac for m in forth("a", all_of_lower=True).moves} == {A0, A1, B0}
    # Only what stands on the same devices goes along.
    assert {m.mac for m in forth("b", all_of_lower=True).moves} == {A0, B0}
    assert {m.mac for m in forth("a", "b").moves} == {A0, A1, B0}


def test_a_guest_that_does_not_run_is_thought_of() -> None:
    fake = two_guests()
    b = fake.fakes["uuid-b"]
    fake.stop(b)
    made = plan(SwitchRequest(FORTH, ("a",)), survey(fake))
    assert any("cannot start on macvtap" in note for note in made.notes)
    made = plan(SwitchRequest(FORTH, ("a",), all_of_lower=True), survey(fake))
    assert [(m.mac, bool(m.live[0]), bool(m.config[0])) for m in made.moves] == [
        (A0, True, True),
        (A1, True, True),
        (B0, False, True),
    ]


def test_what_else_holds_the_lower_device_is_named() -> None:
    fake = two_guests()
    fake.table[50] = Link(50, "mv9", "macvlan", lower=3, up=True)
    request = SwitchRequest(FORTH, ("a",), interface="p1")
    assert refused(request, survey(fake)) == (
        "p1: the macvlan mv9 stands on it and belongs to no libvirt guest; stop what uses it, then "
        "remove it: `ip link delete`"
    )
    del fake.table[50]
    fake.table[51] = Link(51, "br0", "bridge")
    for master, name in ((51, "br0"), (52, "another device")):
        fake.table[3] = Link(3, "p1", master=master)
        assert refused(request, survey(fake)) == (
            f"p1: it is a port of {name}, and NAPI-macvlan wants it for itself; ip link set p1 "
            "nomaster, if nothing needs that"
        )


@pytest.mark.parametrize("name", [A1.upper(), "macvtap1", "p1"])
def test_an_interface_by_any_of_its_names(name: str) -> None:
    assert [m.mac for m in forth("a", interface=name).moves] == [A1]


def refused(request: SwitchRequest, host: AttachHostState) -> str:
    with pytest.raises(VsrtuneError) as caught:
        plan(request, host)
    return str(caught.value)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            SwitchRequest(FORTH, ("a",), "x"),
            f"a: it has no interface x; its interfaces: {A0} (direct), {A1} (direct)",
        ),
        (
            SwitchRequest(FORTH, ("c",)),
            "c: it has no interface on macvtap or NAPI-macvlan; its interfaces: none",
        ),
        (SwitchRequest(FORTH, ("z",)), "z: there is no such libvirt guest; see: virsh list --all"),
        (
            SwitchRequest(FORTH, ("a",)),
            (
                "p0, p1: the lower device serves macvtap or NAPI-macvlan, never both, and other "
                f"interfaces stand on it: b {B0} on p0; --all-of-lower moves them too"
            ),
        ),
        (
            SwitchRequest(FORTH, ("d",), config=False),
            "d: the guest does not run; start it, or use --config",
        ),
        (
            SwitchRequest(FORTH, ("e",), live=False),
            "e: the guest has no persistent definition; use --live",
        ),
        (
            SwitchRequest(FORTH, ("e",)),
            "p9: there is no such device; see: ip link",
        ),
        (
            SwitchRequest(FORTH, ("d",), live=False),
            "d: p9: the lower device is not there; see: ip link",
        ),
        (
            SwitchRequest(BACK, ("g",), "02:00:00:00:0f:00"),
            (
                "g: interface 02:00:00:00:0f:00: its type is bridge, and its device none of vsrtune's; "
                "name another interface with --interface"
            ),
        ),
        (
            SwitchRequest(FORTH, ("f",), "02:00:00:00:0f:00", live=False),
            (
                "interface 02:00:00:00:0f:00: the guest has several interfaces of that MAC; give "
                "every interface its own MAC (virsh edit)"
            ),
        ),
    ],
)
def test_what_is_refused(request_: SwitchRequest, text: str) -> None:
    fake = two_guests()
    gone, bridged = nic(interface(A0, "p9", 2)), nic(BRIDGED)
    more = (
        GuestNics("c", "u-c", (), ()),
        GuestNics("d", "u-d", None, (gone,)),
        GuestNics("e", "u-e", (gone,), None),
        GuestNics("f", "u-f", (bridged,), (bridged, bridged)),
        GuestNics("g", "u-g", (bridged,), None),
    )
    host = AttachHostState((*fake.guests(), *more), fake.links().values(), ())
    assert refused(request_, host) == text


def test_a_device_is_like_the_macvtap_that_it_replaces() -> None:
    (move,) = forth("a", interface=A1).moves
    link = two_guests().links()["macvtap1"]
    assert move.device == MadeDevice("nvt00000a01", "p1", A1, 4, link.mtu, link.queue)
    assert move.queue == link.queue
    fake = two_guests()
    fake.stop(fake.fakes["uuid-a"])
    request = SwitchRequest(FORTH, ("a",), A1, live=False)
    (move,) = plan(request, survey(fake)).moves
    assert move.device == MadeDevice("nvt00000a01", "p1", A1, 4, 9000, 500)
    taken = (Link(60, "nvt00000a01", "dummy"), Link(61, "nvt00000a012", "dummy"))
    host = AttachHostState(fake.guests(), (*fake.links().values(), *taken), ())
    assert plan(request, host).moves[0].device.name == "nvt00000a013"


def test_an_interface_on_a_bridge_stays_there() -> None:
    direct = nic(interface(A0, "p0", 2, "macvtap0"))
    guest = GuestNics("a", "u", (direct, nic(BRIDGED)), (direct, nic(BRIDGED)))
    links = (Link(2, "p0"), Link(3, "macvtap0", "macvtap", 2, 0, 4, A0, 1500, 500, True))
    host = AttachHostState((guest,), links, ())
    assert [m.mac for m in plan(SwitchRequest(FORTH, ("a",)), host).moves] == [A0]
    with pytest.raises(VsrtuneError, match="type is bridge"):
        plan(SwitchRequest(FORTH, ("a",), interface="02:00:00:00:0f:00"), host)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("type='virtio'", "type='e1000'", "needs virtio"),
        ("<source dev='p0'", "<source network='n' dev='p0'", "network n"),
        ("<model", "<virtualport type='802.1Qbg'/><model", "virtualport"),
        ("<model", "<bandwidth><inbound average='9'/></bandwidth><model", "wrong way round"),
    ],
)
def test_interfaces_that_cannot_move(old: str, new: str, reason: str) -> None:
    with pytest.raises(VsrtuneError, match=reason) as caught:
        alone(interface(A0, "p0", 2, "macvtap0").replace(old, new))
    assert caught.value.where == f"a: interface {A0}"
    assert caught.value.hint == "name another interface with --interface"


def test_what_is_told_of_a_switch() -> None:
    text = interface(A0, "p0", 2, "macvtap0")
    made = alone(text.replace("'direct'", "'direct' trustGuestRxFilters='yes'"))
    assert any("trustGuestRxFilters" in note for note in made.notes)
    assert "trustGuestRxFilters" not in made.moves[0].live[1]
    made = forth("a", "b", config=False)
    assert "define" not in names(made)
    keeps = "its definition keeps macvtap, and the guest cannot start again while other guests on"
    assert made.notes == (
        f"a {A0}: {keeps} p0 have NAPI-macvlan",
        f"a {A1}: {keeps} p1 have NAPI-macvlan",
        f"b {B0}: {keeps} p0 have NAPI-macvlan",
    )
    made = forth("a", "b", live=False)
    assert names(made) == ["make"] * 3 + ["define"] * 3
    waits = "comes up when the last macvtap on"
    assert made.notes == (
        f"a {A0}: nvt00000a00 {waits} p0 is gone, which the daemon sees to",
        f"a {A1}: nvt00000a01 {waits} p1 is gone, which the daemon sees to",
        f"b {B0}: nvt00000b00 {waits} p0 is gone, which the daemon sees to",
    )
    made = plan(SwitchRequest(BACK, ("a", "b")), survey(two_guests()))
    assert (made.steps, made.moves, made.leaves) == ((), (), ())
    there = [
        f"{guest} has it on macvtap already" for guest in ("the running guest", "its definition")
    ]
    assert list(made.notes) == [
        f"{name} {mac}: {text}" for name, mac in (("a", A0), ("a", A1), ("b", B0)) for text in there
    ]


def test_an_interface_on_a_bridge_says_what_it_lacks() -> None:
    text = interface(A0, "p0", 2).replace("type='direct'", "type='bridge'")
    with pytest.raises(VsrtuneError, match=r"\(bridge\); one on a bridge must first be of type"):
        alone(text.replace("<source dev='p0' mode='bridge'/>", "<source bridge='br0'/>"))


def test_back_without_having_been_forth() -> None:
    """An interface that somebody put on a device of ours by hand has a way back too."""
    text = interface(A0, "p0", 2).replace("type='direct'", "type='ethernet'")
    text = text.replace("<source dev='p0' mode='bridge'/>", "<target dev='nv7' managed='no'/>")
    made = alone(text, Link(7, "nv7", NAPI_KIND, 2, 0, 2, A0, 1500, 250, True), to=BACK)
    assert '<source dev="p0" mode="vepa"' in made.moves[0].live[1]
    assert made.moves[0].queue == 250
    assert made.leaves == (MadeDevice("nv7", "p0", A0, 2, 1500, 250),)
    with pytest.raises(VsrtuneError) as caught:
        alone(text, Link(7, "nv7", NAPI_KIND, 99, 0, 2, A0, 1500, 250, True), to=BACK)
    assert str(caught.value) == (
        f"a: it has no interface on macvtap or NAPI-macvlan; its interfaces: {A0} (ethernet)"
    )


# -- policies


def asked(host: AttachHostState, *policies: Policy, of: Sequence[Origin] = ()) -> tuple[Batch, ...]:
    return batches(host, wanted(host, of, policies))


def test_a_policy_switches_those_it_names() -> None:
    fake = two_guests()
    host = survey(fake)
    policy = Policy("a.yaml", "a", attachment=FORTH)
    assert wanted(host, (), (policy,)) == {"a": (FORTH, "a.yaml:1")}
    (batch,) = asked(host, policy)
    assert batch.switch is None
    assert "all-of-lower" in str(batch.error)
    (batch,) = asked(host, Policy("all.yaml", "*", attachment=FORTH))
    assert batch.guests == ("a", "b")
    assert batch.switch is not None
    assert all(o.by_policy for o in batch.switch.origins)
    assert asked(host, Policy("all.yaml", "*", attachment=BACK)) == ()
    assert asked(host, Policy("none.yaml", "*")) == ()


def test_guests_on_other_devices_switch_apart() -> None:
    fake = FakeAttachHost()
    fake.add("a", (A0, "p0"))
    fake.add("b", (B0, "p1"))
    found = asked(survey(fake), Policy("all.yaml", "*", attachment=FORTH))
    assert [b.guests for b in found] == [("a",), ("b",)]


def test_who_does_not_switch_along() -> None:
    """A saved guest comes back with what it had, and a group's template is not to start."""
    fake = two_guests()
    everybody = Policy("all.yaml", "*", attachment=FORTH)
    fake.save(fake.fakes["uuid-b"])
    assert [b.guests for b in asked(survey(fake), everybody)] == [("a",)]
    fake.start(fake.fakes["uuid-b"])
    fake.stop(fake.fakes["uuid-b"])
    assert [b.guests for b in asked(survey(fake), everybody)] == [("a", "b")]
    group = Origin(replace(DEVICE, name="g-in"), "c", "uuid-c", "", "", group="g")
    assert [b.guests for b in asked(survey(fake, group), everybody)] == [("a",)]


def test_what_a_policy_switched_goes_back_without_it() -> None:
    fake = two_guests()
    host = survey(fake)
    by_policy = Origin(DEVICE, "a", "uuid-a", "", "", True)
    by_hand = Origin(DEVICE, "b", "uuid-b", "", "", False)
    policies = (Policy("all.yaml", "*", attachment=FORTH),)
    there = (FORTH, "all.yaml:1")
    assert wanted(host, (by_policy, by_hand), policies) == {"a": there, "b": there}
    both = (Policy("all.yaml", "*"), Policy("too.yaml", "*"))
    assert wanted(host, (by_policy, by_hand), both) == {}
    why = "no policy asks for napi-macvlan any more"
    assert wanted(host, (by_policy, by_hand), ()) == {"a": (BACK, why)}
    # They stand on macvtap here already, so nothing is to be done.
    assert asked(host, of=(by_policy, by_hand)) == ()


def test_a_definition_on_another_lower_device_is_not_brought_along() -> None:
    """Somebody has changed it for the next start."""
    fake = two_guests()
    guest = fake.fakes["uuid-a"]
    guest.config = guest.config.replace("dev='p0'", "dev='p1'", 1)
    with pytest.raises(VsrtuneError, match="has it on p0, its definition on p1") as caught:
        plan(SwitchRequest(FORTH, ("a", "b"), all_of_lower=True), survey(fake))
    assert "--live" in caught.value.hint


def test_a_device_made_before_on_another_lower_device_is_not_taken() -> None:
    """Its interface was moved by hand, and nobody has swept since."""
    fake = two_guests()
    left = Origin(replace(DEVICE, lower="p1"), "a", "uuid-a", "", "")
    switch = plan(SwitchRequest(FORTH, ("a", "b"), all_of_lower=True), survey(fake, left))
    assert {m.device.lower for m in switch.moves if m.mac == A0} == {"p0"}
