"""An imitated host for switches: links, libvirt guests, and their rules.

A macvtap and a napi_macvtap that is up never share a lower device, nor do two napi_macvtap that are
up and have one MAC, or mode passthrough; a plugged interface needs its PCI address free; a guest takes
a moment to release an interface, and its macvtap then goes. Every change can fail, be the last of the
process, or find libvirt gone.
"""

from __future__ import annotations

import errno
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from vsrtune.attach.libvirt_hotplug import AwayError, RefusedError
from vsrtune.attach.overlays import OutOfReachError
from vsrtune.attach.plan.clone_model import File
from vsrtune.attach.plan.model import GuestNics
from vsrtune.attach.plan.steps import NAPI_KIND, UPLINK, MadeDevice
from vsrtune.core.errors import VanishedError
from vsrtune.model.domain_xml import DomainNic, nic, nics
from vsrtune.model.host import MODES, Link

RELEASE = 0.3
BOOT = "boot-1"


class Killed(BaseException):
    """The process was killed: nothing of it runs any more."""


def interface(
    mac: str, lower: str, slot: int, target: str = "", more: str = "", queues: int = 2
) -> str:
    """A macvtap interface as libvirt writes it."""
    dev = f"\n      <target dev='{target}'/>" if target else ""
    alias = f"\n      <alias name='net{slot}'/>" if target else ""
    return f"""<interface type='direct'>
      <mac address='{mac}'/>
      <source dev='{lower}' mode='bridge'/>{dev}
      <model type='virtio'/>
      <driver name='vhost' queues='{queues}'/>{alias}{more}
      <address type='pci' domain='0x0000' bus='0x00' slot='0x0{slot}' function='0x0'/>
    </interface>"""


class FakeGuest:
    """One libvirt guest; ``live`` is None while it does not run, ``saved`` unless libvirt keeps
    its memory."""

    def __init__(self, name: str, uuid: str, live: list[str] | None, config: str) -> None:
        self.name = name
        self.uuid = uuid
        self.live = live
        self.config = config
        self.saved: list[str] | None = None
        self.run = 0


class FakeAttachHost:
    """AttachHost in memory. ``before`` and ``after`` are called around the nth change,
    n counting from 1."""

    def __init__(self, uri: str = "qemu:///system") -> None:
        self.uri = uri
        self.now = 0.0
        self.table: dict[int, Link] = {
            2: Link(2, "p0", "veth", mtu=1500, queue=1000, up=True),
            3: Link(3, "p1", "veth", mtu=9000, queue=1000, up=True),
        }
        self.fakes: dict[str, FakeGuest] = {}
        self.releasing: dict[tuple[str, str], float] = {}
        self.flagged: set[tuple[int, str]] = set()
        # Devices that are the port of a bridge.
        self.bridged: set[str] = set()
        self.ended: set[str] = set()
        self.files: dict[str, File] = {}
        self.files_hidden = False
        self.old_module = False
        self.stubborn = False
        self.hung: set[str] = set()
        self.no_cdev = False
        self.away_until = -1.0
        self.changes = 0
        self.log: list[str] = []
        self.before: Callable[[int], None] = lambda n: None
        self.after: Callable[[int], None] = lambda n: None

    def add(
        self, name: str, *cards: tuple[str, str], running: bool = True, queues: int = 2
    ) -> FakeGuest:
        """A guest with macvtap interfaces (MAC, lower device) from slot 2 on."""
        uuid = f"uuid-{name}"
        texts = [
            interface(mac, lower, slot, queues=queues) for slot, (mac, lower) in enumerate(cards, 2)
        ]
        config = "".join(texts)
        guest = FakeGuest(name, uuid, None, _domain(name, config))
        self.fakes[uuid] = guest
        if running:
            guest.live = []
            for text in texts:
                self._attach(guest, text)
        return guest

    def close(self) -> None:
        """As a host with connections has."""

    def index(self, name: str) -> int:
        return next(i for i, link in self.table.items() if link.name == name)

    def problems(self) -> list[str]:
        """What keeps a running guest from forwarding; empty when all do."""
        found = []
        for guest in self.fakes.values():
            wanted = sorted(n.mac for n in nics(guest.config))
            have = sorted(nic(x).mac for x in guest.live or ())
            if guest.live is not None and have != wanted:
                found.append(f"{guest.name} has {have}, its definition {wanted}")
            for text in guest.live or ():
                card = nic(text)
                link = self.links().get(card.device)
                below = self.table.get(link.lower) if link is not None else None
                if link is None or not link.up or link.mac != card.mac or not (below and below.up):
                    found.append(f"{guest.name} {card.mac}: its device is {link}")
        for lower in {link.lower for link in self.table.values()} - {0}:
            kinds = {k.kind for k in self.table.values() if k.lower == lower and k.up}
            if len(kinds) > 1:
                found.append(f"{lower} carries {kinds}")
        if self.releasing:
            found.append(f"unplugs under way: {self.releasing}")
        return found

    def picture(self) -> object:
        """Everything but the numbers that count on."""
        guests = {
            g.uuid: (
                None if g.live is None else [_plain(x) for x in g.live],
                [_plain(n.xml) for n in nics(g.config)],
            )
            for g in self.fakes.values()
        }
        links = sorted(
            (k.kind, k.mac, k.lower, k.mode, k.mtu, k.queue, k.up) for k in self.table.values()
        )
        return guests, links, dict(self.files)

    # -- links

    def links(self) -> dict[str, Link]:
        return {link.name: link for link in self.table.values()}

    def link(self, name: str) -> Link | None:
        return self.links().get(name)

    def has_cdev(self, link: Link) -> bool:
        return not self.no_cdev and link.index in self.table

    def make(self, device: MadeDevice, lower: int) -> None:
        with self._change(f"make {device.name}"):
            if device.name in self.links():
                raise _os(errno.EEXIST)
            if lower and device.mtu > self.table[lower].mtu:
                raise _os(errno.EINVAL)
            d = device
            self._add(Link(0, d.name, d.kind, lower, 0, d.mode, d.mac, d.mtu, d.queue))

    def remove(self, index: int) -> None:
        with self._change(f"remove {index}"):
            if index not in self.table:
                raise _os(errno.ENODEV)
            self._forget(index)

    def set_up(self, index: int, up: bool) -> None:
        with self._change(f"set {index} {'up' if up else 'down'}"):
            if index not in self.table:
                raise _os(errno.ENODEV)
            lower = self.table[index].lower
            if up and self._on(lower, "macvtap"):
                raise _os(errno.EBUSY)
            if up and lower and not self.table[lower].up:
                raise _os(errno.ENETDOWN)
            if up and self.table[index].kind == NAPI_KIND and not self.table[index].up:
                self._join(self.table[index])
            self.table[index] = replace(self.table[index], up=up)

    def set_queue(self, index: int, queue: int) -> None:
        with self._change(f"queue {index} {queue}"):
            self.table[index] = replace(self.table[index], queue=queue)

    def set_mtu(self, index: int, mtu: int) -> None:
        with self._change(f"set {index} mtu {mtu}"):
            if mtu > self.table[self.table[index].lower].mtu:
                raise _os(errno.EINVAL)
            self.table[index] = replace(self.table[index], mtu=mtu)

    def bridge(self, name: str, there: bool) -> None:
        """Make or remove a bridge with that port."""
        with self._change(f"{'make' if there else 'remove'} bridge on {name}"):
            if there and any(k.lower == self.index(name) for k in self.table.values()):
                raise _os(errno.EBUSY)
            (self.bridged.add if there else self.bridged.discard)(name)

    def flag(self, name: str, flag: str) -> bool:
        return (self.index(name), flag) in self.flagged

    def set_flag(self, name: str, flag: str) -> None:
        with self._change(f"{flag} {name}"):
            if self.old_module:
                raise _os(errno.EOPNOTSUPP)
            lower = self.links()[name].lower
            others = {i for i, other in self.flagged if other == flag == UPLINK}
            if any(self.table[i].lower == lower for i in others):
                raise _os(errno.EBUSY)
            self.flagged.add((self.index(name), flag))

    # -- libvirt

    def guests(self) -> tuple[GuestNics, ...]:
        self._answer()
        return tuple(
            GuestNics(
                g.name,
                g.uuid,
                None if g.live is None else tuple(nic(x) for x in g.live),
                nics(g.config),
                None if g.saved is None else tuple(nic(x) for x in g.saved),
            )
            for g in self.fakes.values()
        )

    def definitions(self) -> tuple[str, ...] | None:
        return tuple(g.config for g in self.fakes.values())

    def nics(self, uuid: str) -> tuple[DomainNic, ...]:
        self._answer()
        return tuple(nic(x) for x in self._running(uuid))

    def run(self, uuid: str) -> int:
        self._answer()
        self._running(uuid)
        return self.fakes[uuid].run

    def request_unplug(self, uuid: str, found: DomainNic) -> None:
        self._answer()
        with self._change(f"unplug {found.mac}"):
            self._answer()
            self._running(uuid)
            self.releasing.setdefault((uuid, found.mac), self.now + RELEASE)

    def plug(self, uuid: str, xml: str, mac: str) -> None:
        self._answer()
        with self._change(f"plug {mac}"):
            self._answer()
            self._running(uuid)
            self._attach(self.fakes[uuid], xml)

    def definition(self, uuid: str) -> str:
        self._answer()
        if uuid not in self.fakes or not self.fakes[uuid].config:
            raise VanishedError("there is no such definition", where=uuid)
        return self.fakes[uuid].config

    def define(self, xml: str, where: str) -> None:
        self._answer()
        with self._change("define"):
            self._answer()
            root = ET.fromstring(xml)
            name, uuid = root.findtext("name", ""), root.findtext("uuid", "")
            found = [g for g in self.fakes.values() if g.name == name]
            used = {_slot(n.xml) for n in nics(xml)}
            for element in root.iterfind("./devices/interface"):
                _place(element, used)
            xml = ET.tostring(root, encoding="unicode")
            if not found:
                self.fakes[uuid] = FakeGuest(name, uuid, None, xml)
            elif uuid not in ("", found[0].uuid):
                raise RefusedError(f"{name} is defined with another UUID")
            else:
                found[0].config = xml

    def undefine_guest(self, uuid: str) -> None:
        self._answer()
        with self._change(f"undefine {uuid}"):
            self._answer()
            if uuid in self.fakes:
                assert self.fakes[uuid].live is None
                del self.fakes[uuid]

    def start_guest(self, uuid: str) -> None:
        self._answer()
        with self._change(f"start {uuid}"):
            self._answer()
            if uuid not in self.fakes:
                raise VanishedError("the guest is gone", where=uuid)
            if self.fakes[uuid].live is None:
                self.start(self.fakes[uuid])

    def stop_guest(self, uuid: str) -> None:
        self._answer()
        with self._change(f"stop {uuid}"):
            self._answer()
            if uuid in self.fakes:
                self.stop(self.fakes[uuid])

    def start_ended(self, uuid: str) -> bool:
        self._answer()
        if uuid not in self.ended:
            return False
        self.ended.discard(uuid)
        self.start(self.fakes[uuid])
        return True

    # -- files

    def file_there(self, path: str) -> bool:
        self._reach(path)
        return path in self.files

    def make_file(self, file: File) -> None:
        self._reach(file.path)
        with self._change(f"file {file.path}"):
            assert file.path not in self.files
            self.files[file.path] = file

    def remove_file(self, file: File) -> str:
        self._reach(file.path)
        with self._change(f"remove {file.path}"):
            if self.files.get(file.path, file) != file:
                return f"left {file.path}"
            self.files.pop(file.path, None)
            return ""

    # -- time

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.stubborn:
            return
        for key, at in list(self.releasing.items()):
            if at <= self.now and key[0] not in self.hung:
                del self.releasing[key]
                self._detach(*key)

    def clock(self) -> float:
        return self.now

    # -- what others do

    def stop(self, guest: FakeGuest) -> None:
        for text in list(guest.live or ()):
            self._detach(guest.uuid, nic(text).mac)
        guest.live = None
        self.releasing.clear()

    def save(self, guest: FakeGuest) -> None:
        """As `virsh managedsave` does."""
        saved = guest.live
        assert saved is not None
        guest.saved = list(saved)
        self.stop(guest)

    def start(self, guest: FakeGuest) -> None:
        """A saved guest comes back as it was. Raises RefusedError as libvirt would."""
        guest.live = []
        guest.run += 1
        texts = guest.saved
        for text in texts if texts is not None else [card.xml for card in nics(guest.config)]:
            self._attach(guest, text)
        guest.saved = None

    def reboot(self) -> None:
        """Guests and devices are gone, definitions stay."""
        for guest in self.fakes.values():
            guest.live = None
        self.releasing.clear()
        self.table = {i: k for i, k in self.table.items() if k.kind == "veth"}
        self.flagged.clear()

    # -- inside

    def _reach(self, path: str) -> None:
        if self.files_hidden:
            raise OutOfReachError("not by the daemon", where=path)

    def _running(self, uuid: str) -> list[str]:
        live = self.fakes[uuid].live
        if live is None:
            raise VanishedError("the guest does not run", where=uuid)
        return live

    def _answer(self) -> None:
        if self.now < self.away_until:
            raise AwayError("libvirt does not answer")

    def _attach(self, guest: FakeGuest, xml: str) -> None:
        live = guest.live
        assert live is not None
        card = nic(xml)
        element = ET.fromstring(xml)
        used = {_slot(x) for x in live}
        if _slot(xml) in used:
            raise RefusedError(f"PCI slot {_slot(xml)} is in use")
        _place(element, used)
        if card.kind == "ethernet":
            link = self.links().get(card.device)
            if link is None or not self.has_cdev(link) or link.mac != card.mac:
                raise RefusedError(f"no usable device {card.device}")
        elif card.kind == "bridge":
            ET.SubElement(element, "target", {"dev": f"vnet{self.changes}"})
        else:
            lower = self.index(card.lower)
            if card.lower in self.bridged:
                raise RefusedError(f"{card.lower} is busy")
            if any(k.up for k in self.table.values() if k.lower == lower and k.kind == NAPI_KIND):
                raise RefusedError(f"{card.lower} is busy")
            taken = set(self.links())
            name = next(n for n in (f"macvtap{i}" for i in range(99)) if n not in taken)
            mtu = self.table[lower].mtu
            self._add(Link(0, name, "macvtap", lower, 0, 4, card.mac, mtu, 500, True))
            for old in element.findall("target"):
                element.remove(old)
            ET.SubElement(element, "target", {"dev": name})
        for old in element.findall("alias"):
            element.remove(old)
        ET.SubElement(element, "alias", {"name": f"net{len(live) + 4}"})
        live.append(ET.tostring(element, encoding="unicode"))

    def _detach(self, uuid: str, mac: str) -> None:
        live = self.fakes[uuid].live or []
        for text in [x for x in live if nic(x).mac == mac]:
            live.remove(text)
            if nic(text).kind == "direct":
                del self.table[self.index(nic(text).device)]

    def _forget(self, index: int) -> None:
        """What stands on a device goes with it."""
        self.table.pop(index, None)
        self.flagged = {one for one in self.flagged if one[0] != index}
        for upper in [i for i, link in self.table.items() if link.lower == index]:
            self._forget(upper)

    def _join(self, link: Link) -> None:
        """As nmv_port_join of the module."""
        for beside in self.table.values():
            if not beside.up or (beside.lower, beside.kind) != (link.lower, NAPI_KIND):
                continue
            if MODES["passthrough"] in (link.mode, beside.mode):
                raise _os(errno.EBUSY)
            if link.mac == beside.mac:
                raise _os(errno.EADDRINUSE)

    def _on(self, lower: int, kind: str) -> bool:
        return any(k.lower == lower and k.kind == kind for k in self.table.values())

    def _add(self, link: Link) -> None:
        index = max(self.table, default=1) + 1
        self.table[index] = replace(link, index=index)

    @contextmanager
    def _change(self, what: str) -> Iterator[None]:
        self.changes += 1
        number = self.changes
        self.log.append(what)
        self.before(number)
        yield
        self.after(number)


def _domain(name: str, interfaces: str) -> str:
    return f"<domain><name>{name}</name><devices>{interfaces}</devices></domain>"


def _slot(xml: str) -> str | None:
    address = ET.fromstring(xml).find("address")
    return address.get("slot") if address is not None else None


def _place(element: ET.Element, used: set[str | None]) -> None:
    """Give an interface that has no PCI address a free one."""
    if element.find("address") is None:
        slot = next(s for s in (f"0x{n:02x}" for n in range(2, 32)) if s not in used)
        used.add(slot)
        words = {"type": "pci", "domain": "0x0000", "bus": "0x00", "slot": slot, "function": "0x0"}
        ET.SubElement(element, "address", words)


def _plain(xml: str) -> tuple[str, ...]:
    """What it says, whatever the order and the quotes, without the names made up."""
    found = []
    for one in ET.fromstring(xml):
        made_up = one.tag == "alias" or one.get("dev", "").startswith("macvtap")
        if not made_up:
            found.append(f"{one.tag} {sorted(one.attrib.items())}")
    return (*sorted(found), str(sorted(ET.fromstring(xml).attrib.items())))


def _os(code: int) -> OSError:
    return OSError(code, os.strerror(code))
