# SPDX-License-Identifier: GPL-2.0-or-later
"""Moves the routers' interfaces between macvtap, napi_macvtap, bridge and Open vSwitch, and back.

The interfaces are unplugged from the running guests and plugged in again: same MAC, same
PCI address, another back end. All routers on a lower device move together, because a
device that carries a macvtap cannot be a bridge's port. From macvtap to devices of the kernel
module and back, the switch is the one that ``vsrtune attach`` plans.

Each move is a switch of vsrtune.attach, which takes its own steps back when it does not
complete. The bench's ledger has an entry from before the first move: it holds the original
interfaces and the names of the bridges: each has one lower device as port, learns, floods and does
nothing else. A guard can remove a bridge by the ledger alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import shutil
import socket
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from vsrtune.attach import transaction
from vsrtune.attach.host import LiveHost
from vsrtune.attach.ledger import DEFAULT_PATH as LEDGER
from vsrtune.attach.plan.model import STACKED, AttachHostState, Switch, SwitchRequest
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.plan.steps import Card, Plug
from vsrtune.attach.survey import survey
from vsrtune.attach.transaction import Switcher
from vsrtune.bench.setup.commands import run
from vsrtune.bench.spec.model import BenchAttachment, Configuration, Router
from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import VsrtuneError, WriteError
from vsrtune.execute.journal import DEFAULT_PATH as JOURNAL
from vsrtune.model.domain_xml import DomainNic, differences, nic, parse, without_back_end
from vsrtune.model.guest import Attachment


@contextlib.contextmanager
def opened(uri: str) -> Iterator[tuple[Switcher, AttachHostState]]:
    """The host as it is, with no switch unfinished. Raises VsrtuneError."""
    live = LiveHost(uri)
    with transaction.opened(live, LEDGER) as switcher:
        switcher.take_back_unfinished()
        yield switcher, survey(live, switcher.origins(), JOURNAL)


def carry_out(switcher: Switcher, switch: Switch) -> None:
    """Carry out a switch that has steps. Raises VsrtuneError, also for what the sweep after it
    could not remove."""
    if switch.steps and (failed := switcher.carry_out(switch).failed):
        raise failed[0]


NET = Path("/sys/class/net")
OVS_SOCKET = Path("/run/openvswitch/db.sock")

# Of the names of the bench's bridges.
PREFIXES = {BenchAttachment.BRIDGE: "vsrb", BenchAttachment.OPENVSWITCH: "vsro"}

_OVS = ("ovs-vsctl", "--timeout=20")
# libvirt removes a macvtap an instant after it forgets the interface.
_BUSY_SECONDS = 5.0
_PAUSE = 0.1


def name_for(attachment: BenchAttachment, lower: str) -> str:
    """The name of the bench's bridge of that kind on ``lower``; "" for other kinds.
    Raises WriteError."""
    prefix = PREFIXES.get(attachment)
    try:
        return f"{prefix}{socket.if_nametoindex(lower)}" if prefix else ""
    except OSError as error:
        raise WriteError("there is no such device", where=lower) from error


def obstacle(lower: str, own: Collection[str], host: AttachHostState) -> tuple[str, str] | None:
    """Why ``lower`` cannot be a bridge's port, and what to do; None when it can. ``own`` are
    devices on it that will be gone by then. Raises WriteError when there is no such device."""
    link = host.links.get(lower)
    if link is None:
        raise WriteError("there is no such device", where=lower)
    for other in host.links.values():
        if other.lower == link.index and other.kind in STACKED and other.name not in own:
            return (
                f"the {other.kind} {other.name} is on {lower}, which cannot be a bridge's port too",
                "add its guest to the routers, or stop it",
            )
    if link.master:
        master = host.by_index.get(link.master)
        name = master.name if master is not None else "another device"
        return f"{lower} is a port of {name} already", "take it out of there"
    for found in psutil.net_if_addrs().get(lower, ()):
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        address = found.address.partition("%")[0]
        if not ipaddress.ip_address(address).is_link_local:
            return (
                f"{lower} has the address {address}, which would be cut off in a bridge",
                "use a device that this host itself does not need",
            )
    return None


def ovs_obstacle() -> tuple[str, str] | None:
    """Why there can be no Open vSwitch bridge, and what to do; None when there can."""
    if shutil.which("ovs-vsctl") is None:
        return "Open vSwitch is not installed", "apt install openvswitch-switch"
    if not OVS_SOCKET.exists():
        return "Open vSwitch does not run", "systemctl start openvswitch-switch"
    return None


def create(attachment: BenchAttachment, lower: str) -> None:
    """Make the bridge with ``lower`` in it. Raises WriteError."""
    name = name_for(attachment, lower)
    if attachment is BenchAttachment.OPENVSWITCH:
        _retry(lambda: _create_ovs(name, lower))
    else:
        bridge = ["bridge", "stp_state", "0", "forward_delay", "0", "mcast_snooping", "0"]
        run(["ip", "link", "add", "name", name, "type", *bridge])
        _quiet(name)
        _retry(lambda: run(["ip", "link", "set", "dev", lower, "master", name]))
        run(["ip", "link", "set", "dev", name, "up"])


def existing(names: Collection[str]) -> list[str]:
    """Those of the bridges that exist."""
    return [name for name in names if (NET / name).exists() or _in_ovs(name)]


def remove(names: Collection[str]) -> None:
    """Remove those of the bridges that exist. Raises WriteError."""
    for name in existing(names):
        if (NET / name / "bridge").exists():
            run(["ip", "link", "delete", "dev", name, "type", "bridge"])
        else:
            run([*_OVS, "--if-exists", "del-br", name])


def _in_ovs(name: str) -> bool:
    """Whether the database has the bridge, which has no device once Open vSwitch was stopped.
    False when the database does not answer."""
    if not OVS_SOCKET.exists():
        return False
    try:
        return name in run([*_OVS, "list-br"]).split()
    except WriteError:
        return False


def _create_ovs(name: str, lower: str) -> None:
    setup = f"--may-exist add-br {name} -- set-fail-mode {name} standalone"
    setup += f" -- --may-exist add-port {name} {lower}"
    run([*_OVS, "--", *setup.split()])
    # A port that could not be opened is no failure to ovs-vsctl.
    if run([*_OVS, "get", "Interface", lower, "ofport"]) == "-1":
        reason = run([*_OVS, "get", "Interface", lower, "error"])
        run([*_OVS, "--if-exists", "del-br", name])
        raise WriteError(f"Open vSwitch cannot use {lower}: {reason}", where=name)
    _quiet(name)
    run(["ip", "link", "set", "dev", name, "up"])


def _quiet(name: str) -> None:
    """Prevent router solicitations and the like, which would be counted as traffic."""
    switch = Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6")
    if switch.exists():
        switch.write_text("1\n")


def _retry(attempt: Callable[[], object]) -> None:
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            attempt()
            return
        except WriteError as error:
            if "busy" not in str(error).lower() or time.monotonic() > end:
                raise
        time.sleep(_PAUSE)


_UNTOUCHED = Configuration("as it was")


def drives(wanted: Configuration) -> bool:
    """Whether a configuration asks for another driver than the guests' interfaces have."""
    driver = (wanted.vhost, wanted.queues, wanted.ring, wanted.mergeable)
    return any(value is not None for value in driver)


def asks(wanted: Configuration) -> bool:
    """Whether a configuration asks for other interfaces than the guests have."""
    return wanted.attachment is not BenchAttachment.AS_IS or drives(wanted)


def switchable(found: DomainNic, wanted: Configuration) -> str:
    """Why ``found`` cannot be attached as ``wanted``, "" when it can."""
    as_is = wanted.attachment is BenchAttachment.AS_IS
    if not as_is and (found.kind != "direct" or not found.lower):
        return f"its type is {found.kind}, and only macvtap ones (direct) can be moved"
    if drives(wanted) and not found.model.startswith("virtio"):
        return (
            f"its model is {found.model or 'unset'}, and vhost, queues, ring and mergeable "
            "are virtio's"
        )
    return ""


def rewritten(original: DomainNic, wanted: Configuration, bridge: str) -> str:
    """The XML that attaches ``original`` as ``wanted``, on ``bridge`` for kinds that have one."""
    bridged = wanted.attachment in PREFIXES
    element = without_back_end(original) if bridged else parse(original.xml)
    if bridged:
        element.set("type", "bridge")
        ET.SubElement(element, "source", {"bridge": bridge})
        if wanted.attachment is BenchAttachment.OPENVSWITCH:
            port = ET.SubElement(element, "virtualport", {"type": "openvswitch"})
            # Without an id libvirt makes one up, and the interface is not as asked.
            port_id = uuid.uuid5(uuid.NAMESPACE_OID, f"{bridge} {original.mac}")
            ET.SubElement(port, "parameters", {"interfaceid": str(port_id)})
    if drives(wanted):
        _drive(_child(element, "driver"), original, wanted)
    return ET.tostring(element, encoding="unicode")


def _drive(driver: ET.Element, original: DomainNic, wanted: Configuration) -> None:
    """Set the attributes of the driver that are asked for."""
    if wanted.vhost is not None:
        driver.set("name", "vhost" if wanted.vhost else "qemu")
    elif driver.get("name") is None and original.model.startswith("virtio"):
        # The name that libvirt assumes when there is none; the other attributes need a name.
        driver.set("name", "vhost")
    if wanted.queues is not None:
        driver.attrib.pop("queues", None)
        if wanted.queues > 1:
            driver.set("queues", str(wanted.queues))
    if wanted.ring is not None:
        driver.set("rx_queue_size", str(wanted.ring))
    if wanted.mergeable is not None:
        _child(driver, "host").set("mrg_rxbuf", "on" if wanted.mergeable else "off")
        if not wanted.mergeable:
            # A guest that may receive segments of 64 KiB reserves as much for every slot
            # of the ring, and a small guest runs out of memory. From QEMU 8.2 on there is
            # USO as well, which libvirt cannot turn off.
            guest = _child(driver, "guest")
            for offload in ("tso4", "tso6", "ecn", "ufo"):
                guest.set(offload, "off")


def _child(element: ET.Element, name: str) -> ET.Element:
    found = element.find(name)
    return ET.SubElement(element, name) if found is None else found


class Attachments:
    """The interfaces of the routers that are libvirt guests, as a layer of the Configurator.
    Every method may raise VsrtuneError."""

    kind = "attachment"

    def __init__(self, routers: Sequence[Router], uri: str) -> None:
        self._routers = [r for r in routers if not r.native]
        self._uri = uri
        self._cards: tuple[Card, ...] = ()

    def check(self, wanted: Configuration) -> None:
        if not asks(wanted):
            return
        if not self._routers:
            raise VsrtuneError(
                "no router is a guest, there is nothing to attach",
                where=wanted.name,
                hint="leave out attachment, vhost, queues, ring and mergeable",
            )
        for card in self._originals():
            reason = switchable(nic(card.xml), wanted)
            if reason:
                raise VsrtuneError(reason, where=card.where)
        if wanted.attachment is BenchAttachment.NAPI_MACVTAP:
            with opened(self._uri) as (_, host):
                for lower in _lowers(self._originals()):
                    _planned(self._originals(), lower, Attachment.NAPI_MACVLAN, host)
        if wanted.attachment not in PREFIXES:
            return
        own = {nic(card.xml).device for card in self._originals()}
        with opened(self._uri) as (_, host):
            lowers = _lowers(self._originals())
            conflicts = [obstacle(lower, own, host) for lower in lowers]
        if wanted.attachment is BenchAttachment.OPENVSWITCH:
            conflicts.insert(0, ovs_obstacle())
        for what, hint in filter(None, conflicts):
            raise VsrtuneError(what, where=f"attachment {wanted.attachment}", hint=hint)

    def state(self, wanted: Configuration) -> tuple[bool, tuple[Card, ...]] | None:
        if not asks(wanted):
            return None
        state = (wanted.attachment is BenchAttachment.NAPI_MACVTAP, self._rewritten(wanted))
        return None if state == (False, self._rewritten(_UNTOUCHED)) else state

    def record(self) -> dict[str, Any]:
        cards: list[Any] = [encode(card) for card in self._originals()]
        return {"uri": self._uri, "cards": cards, "bridges": self._bridges()}

    def switch(self, wanted: Configuration) -> None:
        originals, cards = self._originals(), self._rewritten(wanted)
        lowers = _lowers(originals) if wanted.attachment in PREFIXES else []
        _to_kind(self._uri, originals, Attachment.MACVTAP)
        with opened(self._uri) as (switcher, host):
            _move(switcher, host, cards, self._bridges(), wanted.attachment, lowers)
        if wanted.attachment is BenchAttachment.NAPI_MACVTAP:
            _to_kind(self._uri, originals, Attachment.NAPI_MACVLAN)

    def _originals(self) -> tuple[Card, ...]:
        """The interfaces as they were at the first call, before anything moved."""
        if not self._cards:
            with opened(self._uri) as (_, host):
                self._cards = tuple(card for r in self._routers for card in _cards(r, host))
        return self._cards

    def _rewritten(self, wanted: Configuration) -> tuple[Card, ...]:
        """The interfaces to plug in."""
        found = []
        for card in self._originals():
            old = nic(card.xml)
            bridge = name_for(wanted.attachment, old.lower) if old.lower else ""
            found.append(replace(card, xml=rewritten(old, wanted, bridge), queue=None))
        return tuple(found)

    def _bridges(self) -> list[str]:
        """All bridges that this may ever make."""
        return [name_for(kind, lower) for lower in _lowers(self._originals()) for kind in PREFIXES]


def put_back(data: Mapping[str, Any]) -> None:
    """Give every guest its original interfaces, and remove the bridges. Guests that do
    not run any more need nothing: their definition was never changed. Raises VsrtuneError when
    something is not as it was in the end."""
    cards = [decode(Card, card) for card in data["cards"]]
    _to_kind(data["uri"], cards, Attachment.MACVTAP)
    with opened(data["uri"]) as (switcher, host):
        running = {guest.uuid for guest in host.guests if guest.live is not None}
        there = tuple(card for card in cards if card.uuid in running)
        _move(switcher, host, there, data["bridges"])
        # A device of the module may be left that could not be removed before.
        if failed := switcher.sweep().failed:
            raise failed[0]


def _lowers(cards: Sequence[Card]) -> list[str]:
    """The lower devices of macvtap interfaces."""
    found = (nic(card.xml) for card in cards)
    return sorted({n.lower for n in found if n.kind == "direct"})


def _to_kind(uri: str, originals: Sequence[Card], kind: Attachment) -> None:
    """Move what stands on the lower devices of the originals to ``kind``, unless it is there: one
    switch for each lower device. Bridged interfaces stand on none, and stay."""
    for lower in _lowers(originals):
        with opened(uri) as (switcher, host):
            switch = _planned(originals, lower, kind, host)
            if switch is not None:
                carry_out(switcher, switch)


def _planned(
    originals: Sequence[Card], lower: str, kind: Attachment, host: AttachHostState
) -> Switch | None:
    """The product's switch of the running guests' interfaces on ``lower``, None when none is to
    move. Raises VsrtuneError with what is in the way, such as another guest there."""
    macs = {(card.uuid, card.mac) for card in originals}
    guests = [
        guest.name
        for guest in host.guests
        for found in guest.live or ()
        if (guest.uuid, found.mac) in macs
        and host.lower(found) == lower
        and host.on_napi(found) is (kind is Attachment.MACVTAP)
    ]
    if not guests:
        return None
    return plan(SwitchRequest(kind, tuple(dict.fromkeys(guests)), lower, config=False), host)


def _cards(router: Router, host: AttachHostState) -> list[Card]:
    """The interfaces of a guest: those of the legs when both MACs are known, otherwise all."""
    guest = host.guest(router.name)
    if guest.live is None:
        raise VsrtuneError(
            "the guest does not run", where=router.name, hint=f"virsh start {router.name}"
        )
    found = guest.live
    if router.back is not None and router.forth.mac and router.back.mac:
        legs = {router.forth.mac.lower(), router.back.mac.lower()}
        found = tuple(n for n in found if n.mac in legs)
    if not found:
        raise VsrtuneError("none of its interfaces is under test", where=router.name)
    return [_card(guest.name, guest.uuid, n, host) for n in found]


def _card(name: str, domain: str, found: DomainNic, host: AttachHostState) -> Card:
    """A present interface, with the length of its queue, which a new device does not inherit."""
    link = host.links.get(found.device)
    return Card(name, domain, found.mac, found.xml, None if link is None else link.queue)


def _move(
    switcher: Switcher,
    host: AttachHostState,
    cards: Sequence[Card],
    old_bridges: Collection[str],
    attachment: BenchAttachment = BenchAttachment.AS_IS,
    lowers: Sequence[str] = (),
) -> None:
    """Give running guests these interfaces in the place of those with the same MACs, unless they
    have them already.

    All interfaces are unplugged before any is plugged in: libvirt numbers them in order of
    arrival. While none is plugged in, ``old_bridges`` go, and each of ``lowers`` gets a bridge.
    This ends one switch and begins another, because a bridge holds the lower device that a
    macvtap needs. Where there is no bridge, both halves are one switch: a device that only the
    running guest names must not be swept away between them.
    """
    macs = {(card.uuid, card.mac) for card in cards}
    present = [
        _card(guest.name, guest.uuid, found, host)
        for guest in host.guests
        for found in guest.live or ()
        if (guest.uuid, found.mac) in macs
    ]
    unplug, plug = Plug(tuple(present), on=False), Plug(tuple(cards))
    if not lowers and not existing(old_bridges):
        if not _same(cards, present):
            _carry_out(switcher, unplug, plug)
        return
    _carry_out(switcher, unplug)
    remove(old_bridges)
    for lower in lowers:
        create(attachment, lower)
    _carry_out(switcher, plug)


def _same(cards: Sequence[Card], present: Sequence[Card]) -> bool:
    """Whether each guest's present interfaces are as these cards say, in their order; a queue of
    None says nothing."""
    asked, found = (sorted(some, key=lambda card: card.uuid) for some in (cards, present))
    return len(asked) == len(found) and all(
        card.mac == there.mac
        and not differences(card.xml, there.xml)
        and card.queue in (None, there.queue)
        for card, there in zip(asked, found, strict=True)
    )


def _carry_out(switcher: Switcher, *steps: Plug) -> None:
    carry_out(switcher, Switch(Attachment.MACVTAP, (), tuple(s for s in steps if s.cards)))
