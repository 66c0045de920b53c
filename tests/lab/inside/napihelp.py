"""Puts a router's second NIC on a device of the kernel module, and back.

    vr1 eth0 - macvtap - p0          n1 ===== n0 -+- nvt0 (napi_macvtap) - vr1 eth1
                                                  '- nvl0 (napi_macvlan), the sibling

nvt0 has the MAC of eth1, so the router takes it for the NIC that was unplugged.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hoststate
import labhelp
from labhelp import LabGuest

DEVICE = "nvt0"
SIBLING = "nvl0"
ETHERNET = """<interface type='ethernet'><mac address='{mac}'/>
<target dev='{device}' managed='no'/><model type='virtio'/>{address}</interface>"""
BROADCAST = "ff:ff:ff:ff:ff:ff"


def interface(guest: LabGuest) -> ET.Element | None:
    """Its second NIC, as libvirt describes it; None while it is unplugged."""
    domain = ET.fromstring(hoststate.virsh("dumpxml", guest.name))
    for element in domain.iterfind("./devices/interface"):
        mac = element.find("mac")
        if mac is not None and mac.get("address") == guest.macs[1]:
            return element
    return None


def unplug(guest: LabGuest) -> None:
    """Take the second NIC away; returns when libvirt and QEMU have let it go."""
    found = interface(guest)
    assert found is not None, f"{guest.name} has no NIC {guest.macs[1]}"
    workers = len(guest.workers())
    words = ("detach-interface", guest.name, found.get("type", ""), "--mac", guest.macs[1])
    labhelp.sh("virsh", *words, "--live")
    labhelp.wait_for(lambda: len(guest.workers()) < workers, "the NIC is unplugged", 120)
    labhelp.wait_for(lambda: interface(guest) is None, "libvirt knows that it is gone")


def plug(guest: LabGuest, xml: str, place: Path) -> None:
    """Give it a second NIC; returns when the guest drives it."""
    workers = len(guest.workers())
    place.write_text(xml)
    labhelp.sh("virsh", "attach-device", guest.name, str(place), "--live")
    labhelp.wait_for(lambda: len(guest.workers()) > workers, "the guest drives its NIC", 120)


@contextmanager
def on_the_module(guest: LabGuest, place: Path) -> Iterator[None]:
    """The topology above, for as long as the context lasts. ``place`` is a scratch file."""
    labhelp.sh("modprobe", "napi_macvlan")
    original = interface(guest)
    assert original is not None, f"{guest.name} has no NIC {guest.macs[1]}"
    for name in ("target", "alias"):
        for element in original.findall(name):
            original.remove(element)
    slot = original.find("address")
    address = "" if slot is None else ET.tostring(slot, encoding="unicode")
    unplug(guest)
    try:
        labhelp.sh("ip", "link", "add", "n0", "type", "veth", "peer", "name", "n1")
        mac = ("address", guest.macs[1])
        labhelp.sh("ip", "link", "add", DEVICE, "link", "n0", *mac, "type", "napi_macvtap")
        labhelp.sh("ip", "link", "add", SIBLING, "link", "n0", "type", "napi_macvlan")
        for device in ("n0", "n1", SIBLING, DEVICE):
            labhelp.sh("ip", "link", "set", device, "up")
        ifindex = labhelp.text(f"/sys/class/net/{DEVICE}/ifindex")
        labhelp.wait_for(Path(f"/dev/tap{ifindex}").exists, "its character device is there")
        plug(guest, ETHERNET.format(mac=guest.macs[1], device=DEVICE, address=address), place)
        yield
        labhelp.reset()
        unplug(guest)
    finally:
        labhelp.sh("ip", "link", "del", "n0", check=False)
        if interface(guest) is None:
            plug(guest, ET.tostring(original, encoding="unicode"), place)
            labhelp.sh("lab-wait-forward", guest.name)


def forward(guest: LabGuest) -> None:
    """Frames that the router sends out of its second NIC; there nobody counts them."""
    labhelp.sh("lab-traffic", "--guest", guest.name, "--rate", "500", "--seconds", "1")


def broadcast(count: int) -> None:
    """Frames from the sibling, for which every device of the port has its own queue."""
    labhelp.sh("python3", "-c", labhelp.SENDER, SIBLING, BROADCAST, str(count))
