# SPDX-License-Identifier: GPL-2.0-or-later
"""The primitive calls with which a switch reads and changes this host, one each.

They are separate from the rules (transaction.py), so that tests can run these against an imitated
host, and fail or kill them at every call.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

from vsrtune.attach import overlays
from vsrtune.attach.libvirt_hotplug import LiveDomains
from vsrtune.attach.plan.clone_model import File
from vsrtune.attach.plan.steps import EVERY_QUEUE, NAPI_KIND, UPLINK, MadeDevice
from vsrtune.host import netlink
from vsrtune.host.filesystem import device_number
from vsrtune.host.libvirt import DEFAULT_URI
from vsrtune.model.host import Link

# The persistent definitions of qemu:///system.
_DEFINITIONS = Path("/etc/libvirt/qemu")
# The attributes that are flags (docs/kmod.md), by name.
_ATTRIBUTES = {EVERY_QUEUE: "every_queue", UPLINK: "uplink"}


class LiveHost(LiveDomains):
    """This host. Calls for links raise the OSError of the system call. Without ``files`` this
    process does not see the host's files as they are."""

    def __init__(self, uri: str = DEFAULT_URI, *, files: bool = True) -> None:
        super().__init__(uri)
        self._files = files

    def definitions(self) -> tuple[str, ...] | None:
        """The persistent definitions, secrets included, as libvirt keeps them on disk. None when
        they are not there to be read."""
        try:
            names = [name for name in os.listdir(_DEFINITIONS) if name.endswith(".xml")]
            return tuple((_DEFINITIONS / name).read_text(errors="replace") for name in names)
        except OSError:
            return None

    def links(self) -> dict[str, Link]:
        """Every device by name."""
        return {link.name: link for link in netlink.links()}

    def link(self, name: str) -> Link | None:
        """The device of that name, or None."""
        return netlink.link(name)

    def has_cdev(self, link: Link) -> bool:
        """Whether /dev/tap<index> is there and leads to this device. It is the first device's of
        that index in any network namespace, and a user may choose the indexes in his own."""
        try:
            found = os.stat(f"/dev/tap{link.index}")
            own = Path(f"/sys/class/net/{link.name}/tap{link.index}/dev").read_text().strip()
            return stat.S_ISCHR(found.st_mode) and device_number(found.st_rdev) == own
        except OSError:
            return False

    def make(self, device: MadeDevice, lower: int) -> None:
        """Make a device, down (the kernel loads the module of its kind); ``lower`` is the index
        of its lower device, 0 for none."""
        d = device
        given = {"link": lower, "macvlan_mode": d.mode, "vlan_id": d.vlan}
        optional = {key: value for key, value in given.items() if value}
        netlink.request(
            "add", kind=d.kind, ifname=d.name, address=d.mac, mtu=d.mtu, txqlen=d.queue, **optional
        )

    def remove(self, index: int) -> None:
        """Remove a device; ENODEV when there is none."""
        netlink.request("del", index=index)

    def set_up(self, index: int, up: bool) -> None:
        """Bring a device up or down."""
        netlink.request("set", index=index, state="up" if up else "down")

    def set_queue(self, index: int, queue: int) -> None:
        """Set txqueuelen, in frames; the rings of a macvtap follow at once."""
        netlink.request("set", index=index, txqlen=queue)

    def set_mtu(self, index: int, mtu: int) -> None:
        """Set the MTU; EINVAL when it is more than the lower device's."""
        netlink.request("set", index=index, mtu=mtu)

    def flag(self, name: str, flag: str) -> bool:
        """Whether a flag of a device of ours is on."""
        return bool(self._flag(name, flag))

    def set_flag(self, name: str, flag: str) -> None:
        """Set a flag of a device of ours. Raises OSError: EOPNOTSUPP when the loaded module does
        not have it, and nothing was asked of it."""
        if self._flag(name, flag) is None:
            code = errno.EOPNOTSUPP
            raise OSError(code, os.strerror(code), f"attribute {flag} of {name}")
        given = {f"napi_macvlan_{_ATTRIBUTES[flag]}": 1}
        netlink.request("set", ifname=name, kind=NAPI_KIND, **given)

    def _flag(self, name: str, flag: str) -> bool | None:
        """None when the loaded module does not tell: it is older, and ignores what it does not
        know."""
        link = netlink.link(name)
        return getattr(link, _ATTRIBUTES[flag]) if link is not None else None

    def file_there(self, path: str) -> bool:
        """Whether there is a file of that name."""
        self._reach(path)
        return os.path.lexists(path)

    def make_file(self, file: File) -> None:
        """Make a clone's file."""
        self._reach(file.path)
        overlays.make(file)

    def remove_file(self, file: File) -> str:
        """Remove a clone's file, if it is there. Returns why it was left, "" when it is gone."""
        self._reach(file.path)
        return overlays.remove(file)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def clock(self) -> float:
        """Seconds, monotonic."""
        return time.monotonic()

    def _reach(self, path: str) -> None:
        if not self._files:
            raise overlays.OutOfReachError(
                "it was made for a guest that is no more, and the daemon may not remove it",
                where=path,
                hint="vsrtune attach --recover",
            )
