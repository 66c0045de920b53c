# SPDX-License-Identifier: GPL-2.0-or-later
"""Domain XML: a guest's interfaces, its pins with vsrtune's notes on them, and its files.

An interface that is put on another device keeps what the guest sees (MAC, model, PCI address, boot
order); the part that concerns the host is replaced.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError, VsrtuneError
from vsrtune.core.untrusted import xml_element
from vsrtune.model.guest import CarriedPin, ThreadKey

_DEVICE = "/interface/target/@dev"
_ALIAS = "/interface/alias/@name"
# Names that libvirt generates. It gives none of them a second time, even on request, and drops
# such a device name from XML that it reads (virDomainNetDefParseXML).
_GENERATED = {
    _DEVICE: re.compile(r"(macvtap|macvlan|vnet|vif)\d+"),
    _ALIAS: re.compile(r"net\d+"),
}

# Elements that libvirt adds to an interface without them.
_CHOSEN = ("/interface/address", "/interface/alias")

# libvirt indents, escapes every < in text and attributes, and never nests interfaces.
_INTERFACE = re.compile(r"<interface [^>]*>.*?</interface>", re.DOTALL)


# A domain's XML, or the root that ``parse`` made of it.
Domain = str | ET.Element


@dataclass(frozen=True, slots=True)
class DomainNic:
    """One ``<interface>`` of a domain; ``xml`` is its text, "" where nobody needs it. ``kind`` is
    its type attribute (direct, bridge, ...), ``device`` its host device, ``lower`` the device
    below a direct interface, ``driver`` the back end that it requests, ``backend`` the program
    behind one of type user; "" when there is none."""

    mac: str
    kind: str
    device: str
    lower: str
    model: str
    driver: str
    alias: str
    xml: str
    backend: str = ""

    @property
    def on_host(self) -> bool:
        """Whether it has a device of the host: vhost-user, user-mode and passed-through ones have
        none."""
        return bool(self.device) and self.kind != "vhostuser"

    @property
    def vhost(self) -> bool:
        """Whether the XML requests vhost, libvirt's default for virtio. QEMU's command line says
        what the guest got."""
        return self.model.startswith("virtio") and self.driver != "qemu"

    @property
    def netdev(self) -> str:
        """The id of its back end on QEMU's command line (``qemuBuildHostNetProps``)."""
        return f"host{self.alias}"


def parse(xml: Domain) -> ET.Element:
    """The root of libvirt's XML. Raises ObserveError when it is not XML."""
    if not isinstance(xml, str):
        return xml
    try:
        return xml_element(xml)
    except ValueError as error:
        raise ObserveError(f"domain XML cannot be read: {error}") from error


def nics(domain: Domain, *, texts: bool = True) -> tuple[DomainNic, ...]:
    """The interfaces of a domain, in its order, with their ``texts`` or without. Raises
    ObserveError when it is not XML."""
    found = parse(domain).iterfind("./devices/interface")
    return tuple(_nic(element, text=texts) for element in found)


def nic(xml: str) -> DomainNic:
    """The interface of this text. Raises ObserveError when it is not XML."""
    return _nic(parse(xml))


def mode(found: DomainNic) -> str:
    """The mode attribute of a direct interface's source (libvirt's default: vepa)."""
    return _attribute(parse(found.xml), "source", "mode") or "vepa"


def without_back_end(original: DomainNic) -> ET.Element:
    """A copy of the interface without the elements that say on which part of the host it stands."""
    element = parse(original.xml)
    for name in ("source", "target", "virtualport"):
        for old in element.findall(name):
            element.remove(old)
    return element


def on_device(original: DomainNic, device: str) -> str:
    """The XML that attaches ``original`` to an existing host device, which libvirt leaves alone
    (``managed='no'``)."""
    element = without_back_end(original)
    # The attribute applies to libvirt's own macvtaps only.
    element.attrib.pop("trustGuestRxFilters", None)
    element.set("type", "ethernet")
    ET.SubElement(element, "target", {"dev": device, "managed": "no"})
    return ET.tostring(element, encoding="unicode")


def another(like: DomainNic, mac: str, device: str) -> str:
    """The XML that gives the guest of ``like`` one more interface, with one queue, on an existing
    device. libvirt chooses its PCI address."""
    element = ET.Element("interface", {"type": "ethernet"})
    ET.SubElement(element, "mac", {"address": mac})
    ET.SubElement(element, "target", {"dev": device, "managed": "no"})
    for name in ("model", "driver", "mtu"):
        for part in parse(like.xml).findall(name):
            part.attrib.pop("queues", None)
            part.tail = None
            element.append(part)
    return ET.tostring(element, encoding="unicode")


def with_mac(xml: str, mac: str) -> str:
    """The same interface with another MAC."""
    element = parse(xml)
    for old in element.findall("mac"):
        old.set("address", mac)
    return ET.tostring(element, encoding="unicode")


def queues(found: DomainNic) -> int:
    """The number of queue pairs that the interface requests (libvirt's default: 1)."""
    text = _attribute(parse(found.xml), "driver", "queues")
    return int(text) if text.isdecimal() else 1


def unsupported(found: DomainNic) -> str:
    """Why a direct interface cannot move to a device of our kernel module, "" when it can."""
    element = parse(found.xml)
    network = _attribute(element, "source", "network")
    if found.kind != "direct" or not found.lower:
        return f"its type is {found.kind}, and only macvtap ones (direct) can be moved"
    if network:
        return f"libvirt's network {network} gives it its device"
    if not found.model.startswith("virtio"):
        return f"its model is {found.model or 'unset'}, and vhost-net needs virtio"
    for name in ("virtualport", "vlan", "filterref"):
        if element.find(name) is not None:
            return f"its <{name}> has no meaning on a device that libvirt does not make"
    if element.find("bandwidth") is not None:
        # libvirt takes an ethernet for a tap, which receives what the guest sends.
        return (
            "libvirt would apply its <bandwidth> the wrong way round on a device that it does not "
            "make"
        )
    return ""


def lost(found: DomainNic) -> tuple[str, ...]:
    """The settings of a direct interface that have no effect on a device of our kernel module, as
    messages."""
    if parse(found.xml).get("trustGuestRxFilters") == "yes":
        return (
            "trustGuestRxFilters: libvirt follows the guest's filters on its own macvtaps only",
        )
    return ()


def as_direct(found: DomainNic, lower: str, mode: str) -> str:
    """The XML that attaches ``found``, which is on a device of our kernel module, as libvirt's own
    macvtap on ``lower``."""
    element = parse(found.xml)
    for old in element.findall("target"):
        element.remove(old)
    element.set("type", "direct")
    ET.SubElement(element, "source", {"dev": lower, "mode": mode})
    return ET.tostring(element, encoding="unicode")


def added(domain: str, interface: str) -> str:
    """A domain's XML with one more interface after the others; the rest of the text stays as it
    was."""
    found = list(_INTERFACE.finditer(domain))
    at = found[-1].end() if found else domain.rindex("</devices>")
    return f"{domain[:at]}{interface}{domain[at:]}"


def replaced(domain: str, mac: str, interface: str) -> str:
    """A domain's XML with ``interface`` ("" for none) in the place of the one with that MAC; the
    rest of the text stays as it was. Raises VsrtuneError unless exactly one interface has that
    MAC."""
    found = [match for match in _INTERFACE.finditer(domain) if nic(match.group()).mac == mac]
    if len(found) != 1:
        raise VsrtuneError(
            f"the definition has {len(found)} interfaces of that MAC, not one",
            where=f"interface {mac}",
            hint="give every interface its own MAC (virsh edit)",
        )
    start, end = found[0].span()
    return f"{domain[:start]}{interface}{domain[end:]}"


def differences(before: str, after: str) -> tuple[str, ...]:
    """The paths at which the XML of two interfaces differs, with both values, as messages.

    A device name or alias that libvirt generated is no difference: libvirt counts on and gives no
    such name a second time, even on request, and a definition has none. An address or alias that
    libvirt chose because ``before`` has none is no difference either.
    """
    old, new = _flat(parse(before)), _flat(parse(after))
    for chosen in _CHOSEN:
        if not any(_within(path, chosen) for path in old):
            new = {path: value for path, value in new.items() if not _within(path, chosen)}
    for path, generated in _GENERATED.items():
        made_up = [generated.fullmatch(found.get(path, "")) is not None for found in (old, new)]
        if all(made_up):
            new[path] = old[path]
        for found, other, own in ((old, new, made_up[0]), (new, old, made_up[1])):
            element = path.rpartition("/")[0]
            if own and element not in other:
                del found[path], found[element]
    return tuple(
        f"{path}: was {old.get(path, 'absent')!r}, is {new.get(path, 'absent')!r}"
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    )


def _nic(element: ET.Element, *, text: bool = True) -> DomainNic:
    return DomainNic(
        mac=_attribute(element, "mac", "address").lower(),
        kind=element.get("type", ""),
        device=_attribute(element, "target", "dev"),
        lower=_attribute(element, "source", "dev"),
        model=_attribute(element, "model", "type"),
        driver=_attribute(element, "driver", "name"),
        alias=_attribute(element, "alias", "name"),
        xml=ET.tostring(element, encoding="unicode").strip() if text else "",
        backend=_attribute(element, "backend", "type"),
    )


def _attribute(element: ET.Element, child: str, name: str) -> str:
    found = element.find(child)
    return found.get(name, "") if found is not None else ""


def _within(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}/")


def _flat(element: ET.Element, path: str = "") -> dict[str, str]:
    """Every attribute and text by its path."""
    path = f"{path}/{element.tag}"
    found = {f"{path}/@{name}": value for name, value in element.attrib.items()}
    found[path] = (element.text or "").strip()
    for child in element:
        found |= _flat(child, path)
    return found


def own_files(definition: str) -> frozenset[str]:
    """The files of a definition's disks and of its NVRAM, as far as the definition names them.
    Raises ObserveError when it is not XML."""
    root = parse(definition)
    nvrams = root.findall("os/nvram")
    holders = [*root.iterfind("devices/disk"), *nvrams]
    found = {source.get("file", "") for holder in holders for source in holder.iter("source")}
    return frozenset(found | {(nvram.text or "").strip() for nvram in nvrams}) - {""}


NAMESPACE = "urn:vsrtune:originals:1"
PREFIX = "vsrtune"

# A vcpu's number, None for the emulator.
Which = int | None


@dataclass(frozen=True, slots=True)
class Note:
    """``original`` is the pin before vsrtune's, None when there was none; ``pinned`` are vsrtune's
    pins. ``thread`` is the one that vsrtune pinned, None in a note of a version that did not name
    it."""

    original: CpuSet | None
    pinned: tuple[CpuSet, ...]
    thread: ThreadKey | None = None


@dataclass(frozen=True, slots=True)
class Cputune:
    """The pins in a live domain XML: libvirt's own (``pins``), the CPUs of threads without one
    (``general``, from ``<vcpu cpuset=>``), and vsrtune's ``notes``. ``problem`` says why the notes
    cannot be read, "" when they can."""

    pins: Mapping[Which, CpuSet]
    general: CpuSet | None
    notes: Mapping[Which, Note]
    problem: str = ""

    def carried(self) -> tuple[CarriedPin, ...]:
        """The pins in force that vsrtune made, according to the notes."""
        found = []
        for which, note in self.notes.items():
            now = self.pins.get(which)
            if now is not None and now in note.pinned:
                original = self.general if note.original is None else note.original
                found.append(CarriedPin(which, now, original, note.thread))
        return tuple(found)

    def ahead(
        self,
        which: Which,
        cpus: CpuSet,
        was: CpuSet | None = None,
        thread: ThreadKey | None = None,
    ) -> dict[Which, Note]:
        """The notes to write before a pin of ``thread`` to ``cpus``. ``was`` is the original in the
        journal, empty for no pin; None takes the original from the domain itself."""
        notes, now = dict(self.notes), self.pins.get(which)
        known = notes.pop(which, None)
        kept = now is not None and known is not None and now in known.pinned
        original = known.original if kept and known is not None else now
        if was is not None:
            original = was or None
        pinned = (now, cpus) if kept and now is not None and now != cpus else (cpus,)
        if kept or original != cpus:
            notes[which] = Note(original, pinned, thread)
        return notes


def behind(notes: Mapping[Which, Note], which: Which, cpus: CpuSet) -> dict[Which, Note]:
    """The notes to write after a pin to ``cpus``. A pin that is back at its original needs none."""
    left = dict(notes)
    note = left.pop(which, None)
    if note is not None and note.original != cpus:
        left[which] = replace(note, pinned=(cpus,))
    return left


def parse_cputune(domain: Domain) -> Cputune:
    """Read a live domain XML. Raises ValueError or VsrtuneError when it cannot be read. Unreadable
    notes count as none and set ``problem``."""
    tree = parse(domain)
    pins: dict[Which, CpuSet] = {}
    for pin in tree.iterfind("./cputune/vcpupin"):
        pins[int(pin.get("vcpu", ""))] = CpuSet.parse(pin.get("cpuset", ""))
    emulator = tree.find("./cputune/emulatorpin")
    if emulator is not None:
        pins[None] = CpuSet.parse(emulator.get("cpuset", ""))
    vcpu = tree.find("./vcpu")
    general = CpuSet.parse(vcpu.get("cpuset", "")) if vcpu is not None else CpuSet()
    try:
        notes, problem = _notes(tree), ""
    except (ValueError, VsrtuneError) as error:
        notes, problem = {}, f"vsrtune's notes in its metadata make no sense, ignored: {error}"
    return Cputune(pins, general or None, notes, problem)


def metadata_in(tree: ET.Element) -> list[ET.Element]:
    """vsrtune's elements in a domain's metadata."""
    return [e for e in tree.iterfind("./metadata/*") if e.tag.startswith(f"{{{NAMESPACE}}}")]


def _notes(tree: ET.Element) -> dict[Which, Note]:
    found: dict[Which, Note] = {}
    space = f"{{{NAMESPACE}}}"
    elements = metadata_in(tree)
    if any(e.tag != f"{space}originals" for e in elements):
        raise ValueError("they are not <originals>")
    for element in (child for parent in elements for child in parent):
        kind = element.tag.rpartition("}")[2]
        if kind not in ("vcpu", "emulator"):
            raise ValueError(f"<{kind[:30]}> is not known")
        which = int(element.get("id", "")) if kind == "vcpu" else None
        original = CpuSet.parse(element.get("original", ""))
        pinned = tuple(CpuSet.parse(notes_xml) for notes_xml in element.get("ours", "").split())
        if which in found or not pinned or not all(pinned):
            raise ValueError(f"<{kind}> stands there twice, or says no pin of ours")
        found[which] = Note(original or None, pinned, _thread(element.get("thread")))
    return found


def _thread(text: str | None) -> ThreadKey | None:
    if text is None:
        return None
    pid, tid, start_time = map(int, text.split())
    return ThreadKey(pid, tid, start_time)


def notes_xml(notes: Mapping[Which, Note]) -> str:
    """The element for ``virDomainSetMetadata``, which adds the namespace."""
    root = ET.Element("originals")
    for which, note in notes.items():
        element = ET.SubElement(root, "emulator" if which is None else "vcpu")
        if which is not None:
            element.set("id", str(which))
        if note.original is not None:
            element.set("original", str(note.original))
        element.set("ours", " ".join(map(str, note.pinned)))
        if note.thread is not None:
            key = note.thread
            element.set("thread", f"{key.pid} {key.tid} {key.start_time}")
    return ET.tostring(root, encoding="unicode")


def parse_vcpus(domain: Domain) -> int:
    """The maximum number of vcpus of a domain. Raises ObserveError when it is not XML."""
    text = (parse(domain).findtext("vcpu") or "").strip()
    return int(text) if text.isdecimal() and len(text) <= 5 else 1
