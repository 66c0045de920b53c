"""Judges which devices of a guest a second guest can have too, and adapts them. Pure.

Unknown devices are refused, because a device that names something of the host may work for one
guest at a time only.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable

# These name nothing of the host, or libvirt makes what they need for each guest.
_PLAIN = {
    "audio", "controller", "crypto", "emulator", "hub", "iommu", "memballoon", "nvram", "panic",
    "sound", "video", "watchdog",
}  # fmt: skip
_CHARACTER = {"channel", "console", "parallel", "redirdev", "serial"}
# The types of a character device that each guest has of its own.
_OWN = {"dbus", "null", "pty", "qemu-vdagent", "spiceport", "spicevmc", "stdio", "vc"}
_WIRES = {"bridge", "direct", "ethernet", "network", "null", "user"}


def obstacle(device: ET.Element) -> str:
    """Why two guests cannot have this device, "" when they can. Disks are for clone_disks."""
    kind = device.tag
    if kind in _PLAIN:
        return ""
    if kind in _CHARACTER:
        return _character(device, device.get("type", ""))
    judge = _JUDGES.get(kind)
    return judge(device) if judge is not None else "vsrtune does not know what it takes of the host"


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


def _character(device: ET.Element, kind: str) -> str:
    if device.find("log") is not None:
        return "its <log> is one file"
    source = device.find("source")
    given = dict(source.attrib) if source is not None else {}
    if kind in _OWN:
        return ""
    if kind == "unix" and not given.get("path"):
        return ""  # libvirt makes one for each guest
    if kind == "tcp" and given.get("mode") == "connect":
        return ""
    ends = (given.get("path"), given.get("host"), given.get("service"))
    on = ":".join(filter(None, ends)) or "something of the host"
    return f"it is of type {kind} on {on}, which only one guest can use"


def _graphics(device: ET.Element) -> str:
    if device.get("autoport") != "yes":
        for name in ("port", "tlsPort"):
            if device.get(name, "-1") != "-1":
                return f"its {name} {device.get(name)} is fixed (autoport='no')"
    if device.get("websocket", "-1") != "-1":
        return f"its websocket port {device.get('websocket')} is fixed"
    listens = (one.get("socket") for one in device.findall("listen"))
    socket = next(filter(None, (device.get("socket"), *listens)), "")
    if socket:
        return f"its socket {socket} is fixed"
    return f"its address {device.get('address')} is fixed" if device.get("address") else ""


def _interface(device: ET.Element) -> str:
    kind = device.get("type", "")
    source, name = device.find("source"), device.find("target")
    if kind not in _WIRES:
        return f"its type is {kind}, whose other end only one guest can use"
    if kind == "direct" and source is not None and source.get("mode") == "passthrough":
        return f"its mode passthrough wants {source.get('dev')} for one guest alone"
    if name is not None and name.get("managed") == "no":
        return f"it is on {name.get('dev')}, which libvirt does not make"
    if device.find("portForward") is not None:
        return "it forwards ports of the host"
    return ""


def _memory(device: ET.Element) -> str:
    path = device.findtext("source/path")
    return f"it is the file {path}" if path else ""


def _tpm(device: ET.Element) -> str:
    backend = device.find("backend")
    kind = backend.get("type", "") if backend is not None else ""
    if kind != "emulator":
        return f"its backend is of type {kind}, which only one guest can use"
    found = backend is not None and backend.find("source") is not None
    return "its backend names a place for its state" if found else ""


def _rng(device: ET.Element) -> str:
    backend = device.find("backend")
    if backend is None or backend.get("model") != "egd":
        return ""
    return _character(backend, backend.get("type", ""))


def _input(device: ET.Element) -> str:
    kind = device.get("type", "")
    return f"its type is {kind}: one device of the host" if kind in ("evdev", "passthrough") else ""


def _smartcard(device: ET.Element) -> str:
    if device.get("mode") != "passthrough":
        return "it is the host's"
    return _character(device, device.get("type", ""))


def _filesystem(device: ET.Element) -> str:
    source = device.find("source")
    socket = source.get("socket") if source is not None else None
    return f"the process behind {socket} serves one guest" if socket else ""


_JUDGES: dict[str, Callable[[ET.Element], str]] = {
    "filesystem": _filesystem,
    "graphics": _graphics,
    "hostdev": lambda _device: "it is one device of the host",
    "input": _input,
    "interface": _interface,
    "lease": lambda _device: "one guest holds it at a time",
    "memory": _memory,
    "pstore": lambda _device: "it is one file",
    "rng": _rng,
    "shmem": lambda _device: "it is memory that is shared by name",
    "smartcard": _smartcard,
    "tpm": _tpm,
    "vsock": lambda _device: "",
}
