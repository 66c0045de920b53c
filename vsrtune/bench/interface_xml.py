"""A guest's interfaces rewritten for another attachment, or another driver."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass

from vsrtune.bench.model import Attachment
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.domain_xml import Nic

# Which part of the host an interface stands on; written anew for each attachment.
_BACK_END = ("source", "target", "virtualport")


@dataclass(frozen=True, slots=True)
class Driver:
    """What is asked of an interface's driver; None: as it was. ``ring`` counts slots of
    a receive ring; without ``mergeable`` buffers there is no receive offload either."""

    vhost: bool | None = None
    queues: int | None = None
    ring: int | None = None
    mergeable: bool | None = None


UNASKED = Driver()


@dataclass(frozen=True, slots=True)
class Back:
    """What an interface shall stand on: the kind, the bridge for kinds that have one,
    and its driver."""

    attachment: Attachment
    bridge: str = ""
    driver: Driver = UNASKED


def rewritten(original: Nic, back: Back) -> str:
    """The XML with which to attach ``original`` again on ``back``.

    Raises VsrtuneError when something is asked that the interface cannot have.
    """
    element = ET.fromstring(original.xml)
    if back.attachment in (Attachment.BRIDGE, Attachment.OPENVSWITCH):
        for name in _BACK_END:
            for old in element.findall(name):
                element.remove(old)
        element.set("type", "bridge")
        ET.SubElement(element, "source", {"bridge": back.bridge})
        if back.attachment is Attachment.OPENVSWITCH:
            ET.SubElement(element, "virtualport", {"type": "openvswitch"})
    elif back.attachment is Attachment.NAPI_MACVTAP:
        raise VsrtuneError(
            "this version of vsrtune has no napi-macvtap attachment",
            where=f"interface {original.mac}",
            hint="use macvtap, bridge or openvswitch",
        )
    _drive(element, original, back.driver)
    return ET.tostring(element, encoding="unicode")


def switchable(found: Nic, back: Back) -> str:
    """Why ``found`` cannot be attached as ``back`` asks, "" when it can."""
    if back.attachment is not Attachment.AS_IS and (found.kind != "direct" or not found.lower):
        return f"its type is {found.kind}, and only macvtap ones (direct) can be moved"
    if back.driver != UNASKED and not found.model.startswith("virtio"):
        return (
            f"its model is {found.model or 'unset'}, and vhost, queues, ring and mergeable "
            "are virtio's"
        )
    return ""


def _drive(element: ET.Element, original: Nic, back: Driver) -> None:
    if back == UNASKED:
        return
    driver = element.find("driver")
    if driver is None:
        driver = ET.SubElement(element, "driver")
    if back.vhost is not None:
        driver.set("name", "vhost" if back.vhost else "qemu")
    elif driver.get("name") is None and original.model.startswith("virtio"):
        # What libvirt does without a name, and the others need one.
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
            # A guest that may be sent segments of 64 KiB reserves so much for every slot
            # of the ring, and a small one runs out of memory. From QEMU 8.2 on there is
            # USO as well, which libvirt cannot turn off.
            guest = _child(driver, "guest")
            for offload in ("tso4", "tso6", "ecn", "ufo"):
                guest.set(offload, "off")


def _child(element: ET.Element, name: str) -> ET.Element:
    found = element.find(name)
    return ET.SubElement(element, name) if found is None else found
