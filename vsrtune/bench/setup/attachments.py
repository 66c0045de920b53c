"""Moves the routers' interfaces between macvtap, bridge and Open vSwitch, and back.

The interfaces are unplugged from the running guests and plugged in again: same MAC, same
PCI address, another back end. All routers on a lower device move together, because a
device that carries a macvtap cannot be a bridge's port.

The ledger's entry, written before the first move, holds everything that ``put_back`` needs,
whatever the bench was doing when it was killed.
"""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vsrtune.attach.libvirt_hotplug import LiveDomains
from vsrtune.bench.setup import bridges
from vsrtune.bench.spec.model import BenchAttachment, Configuration, Router
from vsrtune.core.errors import VanishedError, VsrtuneError, WriteError
from vsrtune.model.domain_xml import DomainNic, differences, nic

# The elements that say on which part of the host an interface stands; rewritten for each
# attachment.
_BACK_END = ("source", "target", "virtualport")


@dataclass(frozen=True, slots=True)
class Driver:
    """The requested driver of an interface; None: as it was. ``ring`` counts slots of
    a receive ring; without ``mergeable`` buffers there is no receive offload either."""

    vhost: bool | None = None
    queues: int | None = None
    ring: int | None = None
    mergeable: bool | None = None


UNASKED = Driver()


@dataclass(frozen=True, slots=True)
class Back:
    """The back end of an interface: the kind, the bridge for kinds that have one, and the
    driver."""

    attachment: BenchAttachment
    bridge: str = ""
    driver: Driver = UNASKED


def rewritten(original: DomainNic, back: Back) -> str:
    """The XML that attaches ``original`` again on ``back``.

    Raises VsrtuneError for a back end that the interface cannot have.
    """
    element = ET.fromstring(original.xml)
    if back.attachment in (BenchAttachment.BRIDGE, BenchAttachment.OPENVSWITCH):
        for name in _BACK_END:
            for old in element.findall(name):
                element.remove(old)
        element.set("type", "bridge")
        ET.SubElement(element, "source", {"bridge": back.bridge})
        if back.attachment is BenchAttachment.OPENVSWITCH:
            ET.SubElement(element, "virtualport", {"type": "openvswitch"})
    elif back.attachment is BenchAttachment.NAPI_MACVTAP:
        raise VsrtuneError(
            "this version of vsrtune has no napi-macvtap attachment",
            where=f"interface {original.mac}",
            hint="use macvtap, bridge or openvswitch",
        )
    _drive(element, original, back.driver)
    return ET.tostring(element, encoding="unicode")


def switchable(found: DomainNic, back: Back) -> str:
    """Why ``found`` cannot be attached on ``back``, "" when it can."""
    if back.attachment is not BenchAttachment.AS_IS and (found.kind != "direct" or not found.lower):
        return f"its type is {found.kind}, and only macvtap ones (direct) can be moved"
    if back.driver != UNASKED and not found.model.startswith("virtio"):
        return (
            f"its model is {found.model or 'unset'}, and vhost, queues, ring and mergeable "
            "are virtio's"
        )
    return ""


def _drive(element: ET.Element, original: DomainNic, back: Driver) -> None:
    if back == UNASKED:
        return
    driver = element.find("driver")
    if driver is None:
        driver = ET.SubElement(element, "driver")
    if back.vhost is not None:
        driver.set("name", "vhost" if back.vhost else "qemu")
    elif driver.get("name") is None and original.model.startswith("virtio"):
        # The name that libvirt assumes when there is none; the other attributes need a name.
        driver.set("name", "vhost")
    if back.queues is not None:
        driver.attrib.pop("queues", None)
        if back.queues > 1:
            driver.set("queues", str(back.queues))
    if back.ring is not None:
        driver.set("rx_queue_size", str(back.ring))
    if back.mergeable is not None:
        _child(driver, "host").set("mrg_rxbuf", "on" if back.mergeable else "off")
        if not back.mergeable:
            # A guest that may receive segments of 64 KiB reserves as much for every slot
            # of the ring, and a small guest runs out of memory. From QEMU 8.2 on there is
            # USO as well, which libvirt cannot turn off.
            guest = _child(driver, "guest")
            for offload in ("tso4", "tso6", "ecn", "ufo"):
                guest.set(offload, "off")


def _child(element: ET.Element, name: str) -> ET.Element:
    found = element.find(name)
    return ET.SubElement(element, name) if found is None else found


KIND = "attachment"
_TRIES = 3
_PAUSE = 2.0
_BRIDGED = (BenchAttachment.BRIDGE, BenchAttachment.OPENVSWITCH)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The interfaces that a configuration asks for."""

    attachment: BenchAttachment = BenchAttachment.AS_IS
    driver: Driver = UNASKED

    @classmethod
    def of(cls, configuration: Configuration) -> Wanted:
        """What ``configuration`` asks for interfaces."""
        c = configuration
        return cls(c.attachment, Driver(c.vhost, c.queues, c.ring, c.mergeable))

    def back(self, lower: str) -> Back:
        """The back end for an interface on ``lower``."""
        bridge = bridges.name_for(self.attachment, lower) if lower else ""
        return Back(self.attachment, bridge, self.driver)


@dataclass(frozen=True, slots=True)
class _Domain:
    name: str
    uuid: str
    nics: tuple[DomainNic, ...]


class Attachments:
    """The interfaces of the routers that are libvirt guests. Every method may raise
    VsrtuneError."""

    def __init__(self, routers: Sequence[Router], uri: str) -> None:
        self._routers = [r for r in routers if not r.native]
        self._uri = uri
        self._live = LiveDomains(uri)
        self._domains: tuple[_Domain, ...] | None = None
        # None during a switch, and after one that failed.
        self._present: Wanted | None = Wanted()

    def check(self, wanted: Wanted) -> None:
        """Refuse what these guests or this host cannot have. Changes nothing; call it before
        anything was switched."""
        if wanted == Wanted():
            return
        where = "configuration"
        if not self._routers:
            hint = "leave out attachment, vhost, queues, ring and mergeable"
            raise VsrtuneError("no router is a guest, there is nothing to attach", where=where,
                               hint=hint)  # fmt: skip
        domains = self._originals()
        for domain in domains:
            for found in domain.nics:
                reason = switchable(found, wanted.back(""))
                if reason:
                    raise VsrtuneError(reason, where=f"{domain.name}: interface {found.mac}")
        self._texts(wanted)
        if wanted.attachment not in _BRIDGED:
            return
        own = {n.device for d in domains for n in d.nics}
        conflicts = [bridges.obstacle(lower, own) for lower in self._lowers()]
        if wanted.attachment is BenchAttachment.OPENVSWITCH:
            conflicts.insert(0, bridges.ovs_obstacle())
        for what, hint in filter(None, conflicts):
            raise VsrtuneError(what, where=f"attachment {wanted.attachment}", hint=hint)

    def differ(self, wanted: Wanted) -> bool:
        """Whether ``switch`` would do anything."""
        if wanted == self._present:
            return False
        return self._present is None or self._texts(wanted) != self._texts(self._present)

    def original(self, wanted: Wanted) -> bool:
        """Whether ``wanted`` is how the routers were at first."""
        return wanted == Wanted() or self._texts(wanted) == self._texts(Wanted())

    def record(self) -> dict[str, Any]:
        """The ledger's data: the originals, and the names of bridges that may be made."""
        domains = [
            {
                "name": domain.name,
                "uuid": domain.uuid,
                "nics": [{"xml": n.xml, "queue": _queue(n.device)} for n in domain.nics],
            }
            for domain in self._originals()
        ]
        return {"uri": self._uri, "domains": domains, "bridges": self._bridges()}

    def switch(self, wanted: Wanted) -> None:
        """Attach every interface as ``wanted``; the ledger must hold ``record`` by now."""
        domains = self._originals()
        texts = self._texts(wanted)
        self._present = None
        for domain in domains:
            for found in domain.nics:
                self._live.detach(domain.uuid, found.mac)
        bridges.remove(self._bridges())
        if wanted.attachment in _BRIDGED:
            for lower in self._lowers():
                bridges.create(wanted.attachment, lower)
        for domain in domains:
            for found in domain.nics:
                self._live.attach(domain.uuid, texts[found.mac], found.mac)
        self._present = wanted

    def back_to_original(self) -> None:
        """Note that ``put_back`` has been called."""
        self._present = Wanted()

    def close(self) -> None:
        """Close the connection to libvirt."""
        self._live.close()

    def _originals(self) -> tuple[_Domain, ...]:
        """The guests as they were at the first call, before anything moved."""
        if self._domains is None:
            self._domains = tuple(self._domain(router) for router in self._routers)
        return self._domains

    def _domain(self, router: Router) -> _Domain:
        """The guest's interfaces: those of the legs when both MACs are known, otherwise all."""
        uuid = self._live.uuid(router.name)
        found = self._live.nics(uuid)
        if router.back is not None and router.forth.mac and router.back.mac:
            legs = {router.forth.mac.lower(), router.back.mac.lower()}
            found = tuple(n for n in found if n.mac in legs)
        if not found:
            raise VsrtuneError("none of its interfaces is under test", where=router.name)
        return _Domain(router.name, uuid, found)

    def _texts(self, wanted: Wanted) -> dict[str, str]:
        """The XML to attach for each MAC."""
        return {
            n.mac: rewritten(n, wanted.back(n.lower)) for d in self._originals() for n in d.nics
        }

    def _lowers(self) -> list[str]:
        return sorted({n.lower for d in self._originals() for n in d.nics if n.kind == "direct"})

    def _bridges(self) -> list[str]:
        """All bridges that this may ever make."""
        return [bridges.name_for(kind, lower) for lower in self._lowers() for kind in _BRIDGED]


def put_back(data: Mapping[str, Any]) -> None:
    """Give every guest its original interfaces, and remove the bridges. Guests that do
    not run any more need nothing: their definition was never changed.

    Every interface is plugged in anew, even one that looks right: a killed bench may
    have asked for an unplug that the guest has yet to carry out. libvirt may also still be
    plugging one in, hence the retries. Raises WriteError when something is not as it was in
    the end.
    """
    live = LiveDomains(data["uri"])
    try:
        for attempt in range(1, _TRIES + 1):
            failures = _try_to_put_back(live, data)
            if not failures:
                return
            if attempt < _TRIES:
                time.sleep(_PAUSE)
    finally:
        live.close()
    raise WriteError(
        "; ".join(str(failure) for failure in failures),
        where="interfaces of the routers",
        hint="`vsrtune bench clean` tries again; a guest that is shut down and started has its own",
    )


def _try_to_put_back(live: LiveDomains, data: Mapping[str, Any]) -> list[VsrtuneError]:
    failures: list[VsrtuneError] = []

    def attempt(work: Callable[[], None]) -> None:
        try:
            work()
        except VanishedError:
            return
        except VsrtuneError as error:
            failures.append(error)

    for domain in data["domains"]:
        attempt(partial(_unplug, live, domain))
    attempt(partial(bridges.remove, data["bridges"]))
    for domain in data["domains"]:
        attempt(partial(_plug, live, domain))
    return failures


def _unplug(live: LiveDomains, domain: Mapping[str, Any]) -> None:
    """Unplug all before any is plugged in: libvirt numbers interfaces in order of arrival."""
    for entry in domain["nics"]:
        live.detach(domain["uuid"], nic(entry["xml"]).mac)


def _plug(live: LiveDomains, domain: Mapping[str, Any]) -> None:
    uuid = domain["uuid"]
    originals = [(nic(entry["xml"]), entry["queue"]) for entry in domain["nics"]]
    for original, _ in originals:
        live.attach(uuid, original.xml, original.mac)
    present = {n.mac: n for n in live.nics(uuid)}
    for original, queue in originals:
        now = present.get(original.mac)
        where = f"{domain['name']}: interface {original.mac}"
        if now is None:
            raise WriteError("is gone again", where=where)
        if queue is not None and _queue(now.device) != queue:
            (bridges.NET / now.device / "tx_queue_len").write_text(f"{queue}\n")
        other = differences(original.xml, now.xml)
        if other:
            raise WriteError(f"is not exactly as it was: {'; '.join(other)}", where=where)


def _queue(device: str) -> int | None:
    """Length of the host device's queue, which a new device does not inherit."""
    try:
        return int(Path(bridges.NET / device / "tx_queue_len").read_text()) if device else None
    except OSError:
        return None
