"""The devices that vsrtune makes for guests: made, kept apart from others', removed.

Every method looks first at what is there, so that all of them may be repeated. They raise
WriteError, and OSError as the kernel answers.
"""

from __future__ import annotations

import errno

from vsrtune.attach_host import AttachHost
from vsrtune.attach_steps import Device
from vsrtune.errors import WriteError
from vsrtune.rtnl_model import Link

_CDEV_SECONDS = 10.0
# libvirt removes a macvtap an instant after it forgets the interface.
_BUSY_SECONDS = 5.0
_PAUSE = 0.05


class Devices:
    """Our devices on a host."""

    def __init__(self, host: AttachHost) -> None:
        self._host = host

    def make(self, device: Device) -> None:
        """Make it, down, and wait for its /dev/tapN."""
        link = self.find(device)
        if link is None:
            lower = self._host.links().get(device.lower)
            if lower is None:
                raise WriteError(
                    f"there is no device {device.lower} for it", where=device.name,
                    hint="see: ip link",
                )  # fmt: skip
            self._host.make(device, lower.index)
            link = self.find(device)
        if link is None:
            raise WriteError("is gone again", where=device.name)
        self.share(device)
        end = self._host.clock() + _CDEV_SECONDS
        while not self._host.has_cdev(link.index):
            if self._host.clock() > end:
                raise WriteError(
                    f"its /dev/tap{link.index} did not appear in {_CDEV_SECONDS:g} s",
                    where=device.name,
                    hint="see: systemctl status systemd-udevd; mount -t devtmpfs",
                )
            self._host.sleep(_PAUSE)

    def share(self, device: Device) -> bool:
        """Set the flag of one that several guests share; False when there is nothing to
        set."""
        if not device.every_queue or self._host.every_queue(device.name):
            return False
        try:
            self._host.set_every_queue(device.name)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            raise WriteError(
                "the loaded module napi_macvlan has no flag every-queue, without which guests "
                "that share a device do not all find their neighbours",
                where=device.name,
                hint="load the module of this version: `vsrtune doctor` says which is loaded",
            ) from error
        return True

    def remove(self, device: Device) -> None:
        """Remove it, if it is there."""
        link = self.find(device)
        if link is not None:
            self._host.remove(link.index)

    def set_up(self, device: Device) -> None:
        """Bring it up; what is about to leave its lower device gets the time to do so."""
        link = self.find(device)
        if link is None:
            raise WriteError("is gone", where=device.name, hint="try again")
        end = self._host.clock() + _BUSY_SECONDS
        while True:
            try:
                self._host.set_up(link.index, True)
                return
            except OSError as error:
                if error.errno != errno.EBUSY or self._host.clock() > end:
                    raise
            self._host.sleep(_PAUSE)

    def set_down(self, device: Device) -> None:
        """Bring it down, if it is there."""
        link = self.find(device)
        if link is not None:
            self._host.set_up(link.index, False)

    def find(self, device: Device) -> Link | None:
        """The link of that name; None when there is none. Raises when it is another's."""
        link = self._host.links().get(device.name)
        if link is not None and (link.kind, link.mac) != (device.kind, device.mac):
            raise WriteError(
                f"is not the {device.kind} with MAC {device.mac} that vsrtune made, but a "
                f"{link.kind or 'device'} with MAC {link.mac}",
                where=device.name,
                hint=f"if nothing needs it: ip link delete {device.name}",
            )
        return link
