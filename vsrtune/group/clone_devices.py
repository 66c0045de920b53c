# SPDX-License-Identifier: GPL-2.0-or-later
"""Judges which devices of a guest a second guest can have too, and adapts them. Pure.

Unknown devices are refused, because a device that names something of the host may work for one
guest at a time only. Disks are for clone_disks.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict

# These name nothing of the host, or libvirt makes what they need for each guest, unless a row
# below says otherwise.
_KNOWN = {
    "audio", "controller", "crypto", "emulator", "filesystem", "graphics", "hub", "input",
    "interface", "iommu", "memballoon", "memory", "nvram", "panic", "rng", "smartcard", "sound",
    "tpm", "video", "vsock", "watchdog",
}  # fmt: skip
_CHARACTER = {"channel", "console", "parallel", "redirdev", "serial"}
# The types of a character device that each guest has of its own.
_OWN = {"dbus", "null", "pty", "qemu-vdagent", "spiceport", "spicevmc", "stdio", "vc"}
_WIRES = {"bridge", "direct", "ethernet", "network", "null", "user"}
# What only one guest can have: the device, the element in it that tells, and why, with that
# element's attributes and text.
_OF_ONE_GUEST = (
    ("filesystem", "source[@socket]", "the process behind {socket} serves one guest"),
    ("graphics", "listen[@socket]", "its socket {socket} is fixed"),
    ("hostdev", ".", "it is one device of the host"),
    ("input", ".[@type='evdev']", "its type is {type}: one device of the host"),
    ("input", ".[@type='passthrough']", "its type is {type}: one device of the host"),
    (
        "interface",
        "source[@mode='passthrough']",
        "its mode passthrough wants {dev} for one guest alone",
    ),
    ("interface", "target[@managed='no']", "it is on {dev}, which libvirt does not make"),
    ("interface", "portForward", "it forwards ports of the host"),
    ("lease", ".", "one guest holds it at a time"),
    ("memory", "source/path", "it is the file {text}"),
    ("pstore", ".", "it is one file"),
    ("shmem", ".", "it is memory that is shared by name"),
    ("smartcard", ".[@mode!='passthrough']", "it is the host's"),
    (
        "tpm",
        "backend[@type!='emulator']",
        "its backend is of type {type}, which only one guest can use",
    ),
    ("tpm", "backend/source", "its backend names a place for its state"),
)


def obstacle(device: ET.Element) -> str:
    """Why two guests cannot have this device, "" when they can."""
    kind = device.tag
    for tag, path, why in _OF_ONE_GUEST:
        found = device.find(path) if tag == kind else None
        if found is not None:
            return why.format_map(defaultdict(str, found.attrib, text=found.text or ""))
    match kind:
        case "interface" if device.get("type") not in _WIRES:
            return f"its type is {device.get('type')}, whose other end only one guest can use"
        case "graphics":
            return _graphics(device)
        case "smartcard":
            return _character(device)
        case "rng":
            remote = device.find("backend[@model='egd']")
            return _character(remote) if remote is not None else ""
    if kind in _CHARACTER:
        return _character(device)
    return "" if kind in _KNOWN else "vsrtune does not know what it takes of the host"


def adapt(device: ET.Element) -> None:
    """Remove the settings that belong to one guest alone and that libvirt gives each guest anew."""
    if device.tag in _CHARACTER and device.get("type") == "pty":
        device.attrib.pop("tty", None)
        for source in device.findall("source"):
            device.remove(source)
    if device.tag == "vsock":
        for cid in device.findall("cid"):
            cid.attrib.pop("address", None)
            cid.set("auto", "yes")
    if device.tag == "interface":
        for name in device.findall("target"):
            device.remove(name)
        for parameters in device.iterfind("virtualport/parameters"):
            for own in ("interfaceid", "instanceid"):
                parameters.attrib.pop(own, None)


def note(device: ET.Element) -> str:
    """A note for the operator on a device that the clones have too, "" for most devices."""
    if device.tag != "filesystem" or device.find("readonly") is not None:
        return ""
    source = device.find("source")
    names = source.attrib.values() if source is not None else ()
    return f"the directory {', '.join(names)} is shared with the template and all its clones"


def _character(device: ET.Element) -> str:
    kind, source = device.get("type", ""), device.find("source")
    given = source.attrib if source is not None else {}
    if device.find("log") is not None:
        return "its <log> is one file"
    # libvirt makes a socket without a path for each guest.
    made = kind == "unix" and not given.get("path")
    client = kind == "tcp" and given.get("mode") == "connect"
    if kind in _OWN or made or client:
        return ""
    on = ":".join(filter(None, map(given.get, ("path", "host", "service"))))
    return f"it is of type {kind} on {on or 'something of the host'}, which only one guest can use"


def _graphics(device: ET.Element) -> str:
    ports = () if device.get("autoport") == "yes" else ("port", "tlsPort")
    for name in (*ports, "websocket", "socket", "address"):
        value = device.get(name, "-1")
        if value != "-1":
            return f"its {name} {value} is fixed"
    return ""
