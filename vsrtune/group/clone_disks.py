# SPDX-License-Identifier: GPL-2.0-or-later
"""A disk of a template, and its overlay to which a clone writes instead. Pure."""

from __future__ import annotations

import posixpath
import xml.etree.ElementTree as ET

from vsrtune.attach.plan.clone_model import File

# For templates on block devices, beside which no file can be.
IMAGES = "/var/lib/libvirt/images"
# The attribute of <source> that names the file or block device, by type of disk.
_NAMES = {"file": "file", "block": "dev"}
_FORMATS = ("raw", "qcow2")
# The elements of a <source> or <disk> that our overlay would not have.
_ENTANGLED = {
    "encryption": "it is encrypted by QEMU, and an overlay needs the secret too",
    "reservations": "it has SCSI reservations",
    "slices": "it is a slice of a file",
    "dataStore": "its data is in a file beside it",
    "mirror": "it is being copied",
}


def target(disk: ET.Element) -> str:
    """The disk's name in the guest, such as vda."""
    found = disk.find("target")
    return found.get("dev", "") if found is not None else ""


def stays(disk: ET.Element) -> bool:
    """Whether clones may have this very disk: it is read only, or empty."""
    if disk.find("readonly") is not None or disk.get("device") == "cdrom":
        return True
    return disk.find("source") is None and disk.get("device") == "floppy"


def obstacle(disk: ET.Element) -> str:
    """Why there can be no overlay of a disk, "" when there can."""
    kind, device = disk.get("type", ""), disk.get("device", "disk")
    source = disk.find("source")
    if kind not in _NAMES:
        return f"its type is {kind}; only files and block devices can be below an overlay"
    if source is None or not source.get(_NAMES[kind]):
        return "it names no file"
    if not posixpath.isabs(base(disk)):
        return f"{base(disk)} is no absolute path"
    if not target(disk).isalnum():
        return "its target is no name that a file can have"
    if device not in ("disk", "floppy"):
        return f"it is a {device}, which passes the guest's commands on to the device"
    if disk.find("shareable") is not None:
        return "it is shareable, so others may write to it"
    for name, reason in _ENTANGLED.items():
        if disk.find(name) is not None or source.find(name) is not None:
            return reason
    if _format(disk) not in _FORMATS:
        return f"its format is {_format(disk)}; vsrtune makes overlays of {' and '.join(_FORMATS)}"
    return ""


def base(disk: ET.Element) -> str:
    """The file or block device that the disk is on."""
    source = disk.find("source")
    assert source is not None
    return source.get(_NAMES[disk.get("type", "")], "")


def overlay(disk: ET.Element, guest: str, directory: str) -> File:
    """The overlay that a clone of that name gets: in the directory, or beside the disk."""
    if not directory:
        directory = posixpath.dirname(base(disk)) if disk.get("type") == "file" else IMAGES
    # virt-aa-helper, which tells AppArmor what a guest may open, reads files of this ending
    # wherever they are.
    path = posixpath.join(directory, f"{guest}-{target(disk)}.qcow2")
    return File(path, base(disk), _format(disk))


def put_on(disk: ET.Element, file: File) -> None:
    """Change the disk to stand on its overlay."""
    kind, under = disk.get("type", ""), disk.find("backingStore")
    for name in ("source", "backingStore"):
        for old in disk.findall(name):
            disk.remove(old)
    disk.set("type", "file")
    # libvirt's schema accepts any order; this is the order in which libvirt writes.
    at = next((n + 1 for n, child in enumerate(disk) if child.tag == "driver"), 0)
    disk.insert(at, ET.Element("source", {"file": file.path}))
    if under is not None:
        # The definition names the file below, so libvirt does not probe the files.
        below = ET.Element("backingStore", {"type": kind})
        ET.SubElement(below, "format", {"type": file.format})
        ET.SubElement(below, "source", {_NAMES[kind]: file.base})
        below.append(under)
        disk.insert(at + 1, below)
    driver = disk.find("driver")
    if driver is None:
        driver = ET.Element("driver", {"name": "qemu"})
        disk.insert(0, driver)
    driver.set("type", "qcow2")


def _format(disk: ET.Element) -> str:
    driver = disk.find("driver")
    # libvirt does not probe either: a guest may have written the header of its file.
    return (driver.get("type") if driver is not None else None) or "raw"
