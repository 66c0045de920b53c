"""What a guest carries along of our pins: originals, in its domain's metadata.

libvirt keeps live pins (``<vcpupin>``, ``<emulatorpin>``) when it saves, migrates or reverts
a domain, so they come back, or come to another host, as the guest's own. The journal knows
the originals, but it is of one host and one boot. So the originals stand beside the pins, in
``<metadata>``, which libvirt saves, migrates and reverts with them::

    <vsrtune:originals xmlns:vsrtune="urn:vsrtune:originals:1">
      <vsrtune:vcpu id="0" original="0-3" ours="1"/>
      <vsrtune:emulator ours="0"/>
    </vsrtune:originals>

``original`` is what libvirt pinned to before us; without it there was no pin. ``ours`` is
what we pinned to. It is written ahead of the pin, and names the pin before that as well until
the new one is made: a crash in between leaves either. Any other pin is somebody else's,
whatever the metadata says.

libvirt has no call that takes a pin away. Undo can only pin to all CPUs where there was no
pin, and libvirt then carries that pin along. So its note stays until the guest stops.

Whoever may edit the domain may write the metadata, and may pin as well: it is checked for
form and trusted.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass

from vsrtune.bounded import xml_element
from vsrtune.cpuset import CpuSet
from vsrtune.errors import VsrtuneError
from vsrtune.model import CarriedPin

NAMESPACE = "urn:vsrtune:originals:1"
PREFIX = "vsrtune"

# A vcpu's number, None for the emulator.
Which = int | None


@dataclass(frozen=True, slots=True)
class Note:
    """``original``: the pin ahead of ours, None when there was none. ``ours``: our pins."""

    original: CpuSet | None
    ours: tuple[CpuSet, ...]


@dataclass(frozen=True, slots=True)
class Cputune:
    """What a live domain XML says of pins: libvirt's own (``pins``), what threads without one
    get (``general``, of ``<vcpu cpuset=>``), and our notes. ``problem``: why our notes
    cannot be read, "" when they can."""

    pins: Mapping[Which, CpuSet]
    general: CpuSet | None
    notes: Mapping[Which, Note]
    problem: str = ""

    def carried(self) -> tuple[CarriedPin, ...]:
        """Pins in force that are ours by the notes."""
        found = []
        for which, note in self.notes.items():
            now = self.pins.get(which)
            if now is not None and now in note.ours:
                original = self.general if note.original is None else note.original
                found.append(CarriedPin(which, now, original))
        return tuple(found)

    def ahead(self, which: Which, cpus: CpuSet, was: CpuSet | None = None) -> dict[Which, Note]:
        """The notes to write ahead of a pin to ``cpus``. ``was`` is the original as the
        journal has it, empty for no pin; None: what the domain itself says."""
        notes, now = dict(self.notes), self.pins.get(which)
        known = notes.pop(which, None)
        kept = now is not None and known is not None and now in known.ours
        original = known.original if kept and known is not None else now
        if was is not None:
            original = was or None
        ours = (now, cpus) if kept and now is not None and now != cpus else (cpus,)
        if kept or original != cpus:
            notes[which] = Note(original, ours)
        return notes


def behind(notes: Mapping[Which, Note], which: Which, cpus: CpuSet) -> dict[Which, Note]:
    """The notes to write behind a pin to ``cpus``: one that is back needs none."""
    left = dict(notes)
    note = left.pop(which, None)
    if note is not None and note.original != cpus:
        left[which] = Note(note.original, (cpus,))
    return left


def parse(xml: str) -> Cputune:
    """Read a live domain XML. Raises ValueError or VsrtuneError when that cannot be read;
    notes that cannot be are none, and a ``problem``."""
    tree = xml_element(xml)
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


def ours_in(tree: ET.Element) -> list[ET.Element]:
    """Our elements in a domain's metadata."""
    return [e for e in tree.iterfind("./metadata/*") if e.tag.startswith(f"{{{NAMESPACE}}}")]


def _notes(tree: ET.Element) -> dict[Which, Note]:
    found: dict[Which, Note] = {}
    space = f"{{{NAMESPACE}}}"
    ours = ours_in(tree)
    if any(e.tag != f"{space}originals" for e in ours):
        raise ValueError("they are not <originals>")
    for element in (child for parent in ours for child in parent):
        kind = element.tag.rpartition("}")[2]
        if kind not in ("vcpu", "emulator"):
            raise ValueError(f"<{kind[:30]}> is not known")
        which = int(element.get("id", "")) if kind == "vcpu" else None
        original = CpuSet.parse(element.get("original", ""))
        pinned = tuple(CpuSet.parse(text) for text in element.get("ours", "").split())
        if which in found or not pinned or not all(pinned):
            raise ValueError(f"<{kind}> stands there twice, or says no pin of ours")
        found[which] = Note(original or None, pinned)
    return found


def text(notes: Mapping[Which, Note]) -> str:
    """The element for ``virDomainSetMetadata``, which adds the namespace."""
    root = ET.Element("originals")
    for which, note in notes.items():
        element = ET.SubElement(root, "emulator" if which is None else "vcpu")
        if which is not None:
            element.set("id", str(which))
        if note.original is not None:
            element.set("original", str(note.original))
        element.set("ours", " ".join(map(str, note.ours)))
    return ET.tostring(root, encoding="unicode")
