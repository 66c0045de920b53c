# SPDX-License-Identifier: GPL-2.0-or-later
"""Makes the definition of a clone from its template's. Pure.

The guest sees the same machine: addresses of devices, disks, firmware, all settings of CPUs and
memory. Its own are the name, the UUID, the MACs, and every file to which it writes.

Unknown devices are refused, because a device that names something of the host may work for one
guest at a time only. Disks are for clone_disks.
"""

from __future__ import annotations

import posixpath
import uuid
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vsrtune.attach.plan.clone_model import File, Template
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.untrusted import xml_element
from vsrtune.group import clone_disks

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


_QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"
# With these prefixes a clone's definition is written like its template's.
ET.register_namespace("qemu", _QEMU)
ET.register_namespace("libosinfo", "http://libosinfo.org/xmlns/libvirt/domain/1.0")


@dataclass(frozen=True, slots=True)
class Copy:
    """A clone's definition, the files that have to exist before it starts, and notes for the
    operator."""

    xml: str
    files: tuple[File, ...]
    notes: tuple[str, ...] = ()


def own_uuid(template: Template, group: str, guest: str) -> str:
    """The UUID of a clone: always the same on one host, and another on each host."""
    space = uuid.UUID(template.machine)
    return str(uuid.uuid5(space, f"{template.uuid}/{group}/{guest}"))


def copy(
    template: Template,
    guest: str,
    own: str,
    interfaces: Mapping[str, str],
    mac: Callable[[str], str],
    directory: str = "",
) -> Copy:
    """The clone of that name and UUID (``own``). ``interfaces`` is the XML that replaces the
    template's interface of that MAC, ``mac`` gives the other interfaces their MACs, ``directory``
    is that of the overlays, "" for beside the template's disks. Raises VsrtuneError with the
    device that cannot exist twice."""
    try:
        root = xml_element(template.definition)
    except ValueError as error:
        raise VsrtuneError(f"its definition cannot be read: {error}", where=template.name) from None
    _identity(root, guest, own)
    files = _firmware(root, template, guest)
    notes = _warnings(root)
    devices = root.find("devices")
    for number, device in enumerate(list(devices) if devices is not None else ()):
        if device.tag == "disk":
            if not clone_disks.stays(device):
                files.append(_disk(device, template, guest, directory))
            continue
        found = _mac(device)
        if found in interfaces:
            assert devices is not None
            devices[number] = xml_element(interfaces[found])
            continue
        _refuse(obstacle(device), template, _called(device))
        adapt(device)
        for old in device.findall("mac"):
            old.set("address", mac(found))
        notes.append(note(device))
    text = ET.tostring(root, encoding="unicode")
    return Copy(text, tuple(files), tuple(f"{template.name}: {n}" for n in notes if n))


def disks(definition: str) -> tuple[str, ...]:
    """The files of all disks that a definition names."""
    found = xml_element(definition).iterfind("devices/disk/source")
    return tuple(filter(None, (source.get("file") for source in found)))


def _identity(root: ET.Element, guest: str, own: str) -> None:
    for name, text in (("name", guest), ("uuid", own)):
        for element in root.findall(name):
            element.text = text
    for changing in root.findall("genid"):
        changing.text = None  # libvirt makes one
    for system in root.iterfind("sysinfo/system"):
        for entry in system.findall("entry"):
            if entry.get("name") == "uuid":
                system.remove(entry)  # libvirt refuses another than the guest's


def _firmware(root: ET.Element, template: Template, guest: str) -> list[File]:
    """Give the clone a copy of the NVRAM, because that holds what the installed system told the
    firmware to boot."""
    found = root.find("os/nvram")
    if found is None:
        return []
    source = found.find("source")
    path = source.get("file", "") if source is not None else (found.text or "").strip()
    if found.get("type", "file") != "file" or (source is not None and not path):
        _refuse(f"its type is {found.get('type')}, not a file", template, "NVRAM")
    if not path:
        return []  # libvirt chooses one for each guest
    own = posixpath.join(posixpath.dirname(path), f"{guest}_VARS{posixpath.splitext(path)[1]}")
    if source is not None:
        source.set("file", own)
    else:
        found.text = own
    return [File(own, path)]


def _disk(device: ET.Element, template: Template, guest: str, directory: str) -> File:
    _refuse(clone_disks.obstacle(device), template, _called(device))
    file = clone_disks.overlay(device, guest, directory)
    clone_disks.put_on(device, file)
    return file


def _warnings(root: ET.Element) -> list[str]:
    found = []
    if root.find(f"{{{_QEMU}}}commandline") is not None:
        found.append("its <qemu:commandline> is every clone's too, whatever that names of the host")
    if root.find("cputune/vcpupin") is not None or root.find("vcpu[@cpuset]") is not None:
        found.append("its CPUs are every clone's too; a policy can place each guest for itself")
    return found


def _called(device: ET.Element) -> str:
    """The name of a device in messages."""
    if device.tag == "disk":
        return f"disk {clone_disks.target(device)}"
    if device.tag == "interface":
        return f"interface {_mac(device)}"
    kind = device.get("type") or device.get("model") or ""
    return f"{device.tag} {kind}".strip()


def _mac(device: ET.Element) -> str:
    found = device.find("mac") if device.tag == "interface" else None
    return found.get("address", "").lower() if found is not None else ""


def _refuse(reason: str, template: Template, what: str) -> None:
    if reason:
        raise VsrtuneError(
            f"a clone cannot have it: {reason}",
            where=f"{template.name}: {what}",
            hint=f"virsh edit {template.name}, or another template",
        )
