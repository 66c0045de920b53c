# SPDX-License-Identifier: GPL-2.0-or-later
"""PCI devices that a guest drives itself, through VFIO, and their interrupts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from vsrtune.host.filesystem import HostRoot, device_number, text_of
from vsrtune.host.interrupts import read_irqs
from vsrtune.host.procfs import is_open
from vsrtune.model.guest import PassedDevice

GROUP_FD = re.compile(r"/dev/vfio/(\d{1,9})", re.ASCII)
# The kernel's name of an interrupt (vfio_msi_set_vector_signal).
_VECTOR = re.compile(r"vfio-msix?\[(\d{1,4})\]\((.+)\)", re.ASCII)


def passed_devices(root: HostRoot, pid: int, links: Mapping[int, str]) -> tuple[PassedDevice, ...]:
    """The devices of the IOMMU groups that a process holds open; ``links`` are its descriptors.

    The kernel lets only one process open a group (vfio_group_fops_open), so its devices are that
    process's. In a mount namespace of its own a process may give any file the name of a group; the
    number of the device node is the group's own.
    """
    found: list[PassedDevice] = []
    groups: set[str] = set()
    for number, link in links.items():
        match = GROUP_FD.fullmatch(link)
        if match is None or match[1] in groups:
            continue
        with suppress(OSError):
            group = _is_group(root, f"/proc/{pid}/fd/{number}", match[1])
            if group and is_open(root, pid, number):
                groups.add(match[1])
                names = root.listdir(f"/sys/kernel/iommu_groups/{match[1]}/devices")
                found += [passed_device(root, name) for name in names if _by_vfio(root, name)]
    return tuple(sorted(found, key=lambda device: device.address))


def passed_device(root: HostRoot, address: str) -> PassedDevice:
    """The device at a PCI address as it is now; without interrupts when it is gone."""
    path = f"/sys/bus/pci/devices/{address}"
    listed: list[str] = []
    with suppress(OSError):
        listed = root.listdir(f"{path}/msi_irqs")
    vectors = {
        int(match[1]): irq
        for irq in read_irqs(root, map(int, listed))
        if (match := _VECTOR.fullmatch(irq.name)) is not None and match[2] == address
    }
    irqs = tuple(vectors[number] for number in sorted(vectors))
    return PassedDevice(address, int(text_of(root, f"{path}/numa_node") or -1), irqs)


def _is_group(root: HostRoot, path: str, group: str) -> bool:
    node = root.stat(path).rdev
    return device_number(node) == text_of(root, f"/sys/class/vfio/{group}/dev")


def _by_vfio(root: HostRoot, address: str) -> bool:
    """Whether a driver of VFIO has the device. A group may hold bridges too."""
    return "vfio" in root.readlink(f"/sys/bus/pci/devices/{address}/driver").rpartition("/")[2]
