"""Makes and removes devices, and brings them up and down."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from vsrtune.host import netlink
from vsrtune.host.ethtool import control, ioctl, private_flags
from vsrtune.host.netlink import attribute, link_message, nested, request


def make(
    kind: str, name: str, lower: int, mac: str, mode: int, mtu: int, queue: int, vlan: int = 0
) -> None:
    """Make a device of ``kind`` (the kernel loads its module), down, on the device of index
    ``lower``, 0 for none. ``mode`` as in host.MODES, 0 for kinds without. ``queue`` is its
    txqueuelen, ``vlan`` the id of a device of kind vlan. Raises OSError."""
    parts = [
        attribute(netlink.IFNAME, name.encode() + b"\0"),
        attribute(netlink.ADDRESS, bytes.fromhex(mac.replace(":", ""))),
        attribute(netlink.MTU, _u32(mtu)),
        attribute(netlink.TXQLEN, _u32(queue)),
    ]
    if lower:
        parts.append(attribute(netlink.LINK, _u32(lower)))
    info = [attribute(netlink.INFO_KIND, kind.encode() + b"\0")]
    if mode:
        info.append(nested(netlink.INFO_DATA, attribute(netlink.MACVLAN_MODE, _u32(mode))))
    elif vlan:
        info.append(nested(netlink.INFO_DATA, attribute(netlink.VLAN_ID, struct.pack("=H", vlan))))
    parts.append(nested(netlink.LINKINFO, *info))
    request(netlink.NEWLINK, netlink.CREATE | netlink.EXCL, link_message() + b"".join(parts))


def remove(index: int) -> None:
    """Remove the device of that index. Raises OSError: ENODEV when there is none."""
    request(netlink.DELLINK, 0, link_message(index=index))


def set_up(index: int, up: bool) -> None:
    """Bring the device of that index up or down. Raises OSError."""
    flags = netlink.IFF_UP if up else 0
    request(netlink.NEWLINK, 0, link_message(index=index, flags=flags, change=netlink.IFF_UP))


def set_queue(index: int, queue: int) -> None:
    """Set txqueuelen, in frames; the rings of a macvtap follow at once. Raises OSError."""
    body = attribute(netlink.TXQLEN, _u32(queue))
    request(netlink.NEWLINK, 0, link_message(index=index) + body)


def _u32(number: int) -> bytes:
    return struct.pack("=I", number)


_SPFLAGS = 0x28


def set_private_flag(device: str, name: str, *, on: bool) -> None:
    """Set one flag and leave the others. Raises OSError: ENODEV without such a device,
    EOPNOTSUPP when its driver has no flag of that name."""
    flags = private_flags(device)
    if name not in flags:
        code = errno.EOPNOTSUPP
        raise OSError(code, os.strerror(code), f"private flag {name} of {device}")
    flags[name] = on
    bits = sum(value << bit for bit, value in enumerate(flags.values()))
    request = ctypes.create_string_buffer(struct.pack("=II", _SPFLAGS, bits), 8)
    with control() as channel:
        ioctl(channel, device, request)
