# SPDX-License-Identifier: GPL-2.0-or-later
"""Makes and removes vsrtune's devices for guests, and keeps them apart from others' devices.

Every method first checks what exists, so all of them may be repeated. They raise WriteError, and
OSError as the kernel answers.
"""

from __future__ import annotations

import errno
from dataclasses import replace

from vsrtune.attach.host import LiveHost
from vsrtune.attach.plan.steps import EVERY_QUEUE, NAPI_KIND, UPLINK, MadeDevice
from vsrtune.core.errors import WriteError
from vsrtune.model.host import Link

_CDEV_SECONDS = 10.0
# libvirt removes a macvtap an instant after it forgets the interface.
_BUSY_SECONDS = 5.0
_PAUSE = 0.05

# The modules whose name is not that of the kind.
_MODULES = {"vlan": "8021q"}
# The consequence of a missing flag.
_WITHOUT = {
    EVERY_QUEUE: "guests that share a device do not all find their neighbours",
    UPLINK: "a balancer does not hear what routers send to their neighbours",
}
_FLAG_ERRORS = {
    errno.EOPNOTSUPP: (
        "the loaded module napi_macvlan has no flag {flag}, without which {why}",
        "load the module of this version: `vsrtune doctor` says which is loaded",
    ),
    errno.EBUSY: (
        "another device on the same lower device has the flag {flag}, and one can have it",
        "docs/kmod.md, Attributes, says how to find and clear it",
    ),
}


class Devices:
    """Our devices on a host."""

    def __init__(self, host: LiveHost) -> None:
        self._host = host

    def make(self, device: MadeDevice) -> None:
        """Make a device, down, and wait for its /dev/tapN if it has one."""
        link = self.find(device)
        if link is None:
            self._make(device)
            link = self.find(device)
        if link is None:
            raise WriteError("is gone again", where=device.name)
        self.flag(device)
        end = self._host.clock() + _CDEV_SECONDS
        while device.kind == NAPI_KIND and not self._host.has_cdev(link):
            if self._host.clock() > end:
                raise WriteError(
                    f"no /dev/tap{link.index} of its own appeared in {_CDEV_SECONDS:g} s",
                    where=device.name,
                    hint="if the file is there, a device in another network namespace has that "
                    "index: repeat the command. Otherwise see: systemctl status systemd-udevd; "
                    "mount -t devtmpfs",
                )
            self._host.sleep(_PAUSE)

    def _make(self, device: MadeDevice) -> None:
        lower = self._host.link(device.lower)
        if device.lower and lower is None:
            raise WriteError(
                f"there is no device {device.lower} for it", where=device.name, hint="see: ip link"
            )
        if lower is not None:
            # That of the lower device may have been lowered, and the kernel takes no more.
            device = replace(device, mtu=min(device.mtu, lower.mtu))
        try:
            self._host.make(device, lower.index if lower is not None else 0)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP or device.kind == NAPI_KIND:
                raise
            raise WriteError(
                f"this kernel has no devices of kind {device.kind}", where=device.name,
                hint=f"modprobe {_MODULES.get(device.kind, device.kind)}",
            ) from error  # fmt: skip

    def flag(self, device: MadeDevice) -> tuple[str, ...]:
        """Set the flags that a device must have. Returns those that were not set."""
        missing = [f for f in device.flags if not self._host.flag(device.name, f)]
        for name in missing:
            try:
                self._host.set_flag(device.name, name)
            except OSError as error:
                if error.errno not in _FLAG_ERRORS:
                    raise
                what, hint = _FLAG_ERRORS[error.errno]
                raise WriteError(
                    what.format(flag=name, why=_WITHOUT[name]), where=device.name, hint=hint
                ) from error
        return tuple(missing)

    def remove(self, device: MadeDevice) -> None:
        """Remove a device, if it is there."""
        link = self.find(device)
        if link is not None:
            self._host.remove(link.index)

    def set_up(self, device: MadeDevice) -> None:
        """Bring a device up; wait while another is about to leave its lower device."""
        link = self.find(device)
        if link is None:
            raise WriteError("is gone", where=device.name, hint="try again")
        self.raise_lower(device)
        end = self._host.clock() + _BUSY_SECONDS
        while True:
            try:
                self._host.set_up(link.index, True)
                return
            except OSError as error:
                if error.errno != errno.EBUSY or self._host.clock() > end:
                    raise
            self._host.sleep(_PAUSE)

    def raise_lower(self, device: MadeDevice) -> None:
        """Bring the lower device up, as libvirt does below a macvtap: a NIC that serves guests
        alone may have nobody else who does (virNetDevSetOnline)."""
        lower = self._host.link(device.lower) if device.lower else None
        if lower is not None and not lower.up:
            self._host.set_up(lower.index, True)

    def set_down(self, device: MadeDevice) -> None:
        """Bring a device down, if it is there."""
        link = self.find(device)
        if link is not None:
            self._host.set_up(link.index, False)

    def find(self, device: MadeDevice) -> Link | None:
        """The link of the device's name; None when there is none. Raises WriteError when the link
        is another's."""
        link = self._host.link(device.name)
        if link is None:
            return None
        # The lower device may have another name by now.
        lower = self._host.link(device.lower) if device.lower else None
        elsewhere = lower is not None and link.lower != lower.index
        if elsewhere or (link.kind, link.mac) != (device.kind, device.mac):
            on = f" on {device.lower}" if device.lower else ""
            other = " on another device" if elsewhere else ""
            raise WriteError(
                f"is not the {device.kind} with MAC {device.mac}{on} that vsrtune made, but a "
                f"{link.kind or 'device'} with MAC {link.mac}{other}",
                where=device.name,
                hint=f"if nothing needs it: ip link delete {device.name}",
            )
        return link
