"""The primitive calls with which a switch reads and changes a host, one each.

They are separate from the rules (transaction.py), so that tests can run these against an imitated
host, and fail or kill them at every call.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import Protocol

from vsrtune.attach import link_writes, overlays
from vsrtune.attach.libvirt_hotplug import LiveDomains
from vsrtune.attach.link_writes import set_private_flag
from vsrtune.attach.plan.clone_model import File
from vsrtune.attach.plan.model import GuestNics
from vsrtune.attach.plan.steps import MadeDevice
from vsrtune.host import netlink
from vsrtune.host.ethtool import private_flags
from vsrtune.model.domain_xml import DomainNic, nics
from vsrtune.model.host import Link


class AttachHost(Protocol):
    """Calls for links raise the OSError of the system call, calls for domains the errors of
    LiveDomains."""

    def links(self) -> dict[str, Link]:
        """Every device by name."""
        ...

    def link(self, name: str) -> Link | None:
        """The device of that name, or None."""
        ...

    def has_cdev(self, index: int) -> bool:
        """Whether /dev/tap<index> is there, a character device."""
        ...

    def make(self, device: MadeDevice, lower: int) -> None:
        """Make a device, down; ``lower`` is the index of its lower device, 0 for none."""
        ...

    def remove(self, index: int) -> None:
        """Remove a device."""
        ...

    def set_up(self, index: int, up: bool) -> None:
        """Bring a device up or down."""
        ...

    def set_queue(self, index: int, queue: int) -> None:
        """Set txqueuelen."""
        ...

    def flag(self, name: str, flag: str) -> bool:
        """Whether a private flag of a device is on."""
        ...

    def set_flag(self, name: str, flag: str) -> None:
        """Set a private flag; EOPNOTSUPP when the loaded module does not have it."""
        ...

    def guests(self) -> tuple[GuestNics, ...]:
        """Every libvirt guest."""
        ...

    def nics(self, uuid: str) -> tuple[DomainNic, ...]:
        """Interfaces of a running guest."""
        ...

    def request_unplug(self, uuid: str, found: DomainNic) -> None:
        """Ask a guest to release an interface."""
        ...

    def plug(self, uuid: str, xml: str, mac: str) -> None:
        """Give a running guest an interface."""
        ...

    def definition(self, uuid: str) -> str:
        """The XML of the persistent definition."""
        ...

    def define(self, xml: str, where: str) -> None:
        """Replace a persistent definition, or define a new guest."""
        ...

    def undefine_guest(self, uuid: str) -> None:
        """Remove a persistent definition, if it is there."""
        ...

    def start_guest(self, uuid: str) -> None:
        """Start a guest, unless it runs."""
        ...

    def stop_guest(self, uuid: str) -> None:
        """End a guest at once, if it runs."""
        ...

    def file_there(self, path: str) -> bool:
        """Whether there is a file of that name."""
        ...

    def make_file(self, file: File) -> None:
        """Make a clone's file."""
        ...

    def remove_file(self, file: File) -> str:
        """Remove a clone's file, if it is there. Returns why it was left, "" when it is gone."""
        ...

    def start_ended(self, uuid: str) -> bool:
        """Start a guest if libvirt itself has ended it. Returns whether it had."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def clock(self) -> float:
        """Seconds, monotonic."""
        ...


class LiveHost:
    """AttachHost on this machine."""

    def __init__(
        self,
        uri: str = "qemu:///system",
        pulse: Callable[[], None] = lambda: None,
        *,
        files: bool = True,
    ) -> None:
        """``pulse`` is called at every wait. Without ``files`` this process does not see the
        host's files as they are."""
        self._files = files
        self._pulse = pulse
        self._domains = LiveDomains(uri)

    def links(self) -> dict[str, Link]:
        return {link.name: link for link in netlink.links()}

    def link(self, name: str) -> Link | None:
        return netlink.link(name)

    def has_cdev(self, index: int) -> bool:
        try:
            return stat.S_ISCHR(os.stat(f"/dev/tap{index}").st_mode)
        except OSError:
            return False

    def make(self, device: MadeDevice, lower: int) -> None:
        d = device
        link_writes.make(d.kind, d.name, lower, d.mac, d.mode, d.mtu, d.queue, d.vlan)

    def remove(self, index: int) -> None:
        link_writes.remove(index)

    def set_up(self, index: int, up: bool) -> None:
        link_writes.set_up(index, up)

    def set_queue(self, index: int, queue: int) -> None:
        link_writes.set_queue(index, queue)

    def flag(self, name: str, flag: str) -> bool:
        return private_flags(name).get(flag, False)

    def set_flag(self, name: str, flag: str) -> None:
        set_private_flag(name, flag, on=True)

    def guests(self) -> tuple[GuestNics, ...]:
        return tuple(
            GuestNics(
                d.name,
                d.uuid,
                nics(d.live) if d.live else None,
                nics(d.config) if d.config else None,
            )
            for d in self._domains.all()
        )

    def nics(self, uuid: str) -> tuple[DomainNic, ...]:
        return self._domains.nics(uuid)

    def request_unplug(self, uuid: str, found: DomainNic) -> None:
        self._domains.request_unplug(uuid, found)

    def plug(self, uuid: str, xml: str, mac: str) -> None:
        self._domains.attach(uuid, xml, mac)

    def definition(self, uuid: str) -> str:
        return self._domains.definition(uuid)

    def define(self, xml: str, where: str) -> None:
        self._domains.define(xml, where)

    def start_ended(self, uuid: str) -> bool:
        return self._domains.start_ended(uuid)

    def undefine_guest(self, uuid: str) -> None:
        self._domains.undefine(uuid)

    def start_guest(self, uuid: str) -> None:
        self._domains.start(uuid)

    def stop_guest(self, uuid: str) -> None:
        self._domains.stop(uuid)

    def saved(self, uuid: str) -> bool:
        """Whether libvirt keeps the memory of a guest that does not run."""
        return self._domains.saved(uuid)

    def file_there(self, path: str) -> bool:
        self._reach(path)
        return overlays.there(path)

    def make_file(self, file: File) -> None:
        self._reach(file.path)
        overlays.make(file)

    def remove_file(self, file: File) -> str:
        self._reach(file.path)
        return overlays.remove(file)

    def sleep(self, seconds: float) -> None:
        self._pulse()
        time.sleep(seconds)

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Close the connection to libvirt."""
        self._domains.close()

    def _reach(self, path: str) -> None:
        if not self._files:
            raise overlays.OutOfReachError(
                "it was made for a guest that is no more, and the daemon may not remove it",
                where=path,
                hint="vsrtune attach --recover",
            )
