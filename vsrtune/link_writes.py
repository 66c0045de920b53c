"""Makes and removes macvlan-like devices, and brings devices up and down."""

from __future__ import annotations

import struct

from vsrtune import rtnl
from vsrtune.rtnl import attribute, link_message, nested, request


def make(kind: str, name: str, lower: int, mac: str, mode: int, mtu: int, queue: int) -> None:
    """A device of ``kind`` (its module is loaded by the kernel) on the device of index
    ``lower``, down. ``mode`` as in rtnl_model.MODES, ``queue`` its txqueuelen. Raises
    OSError."""
    data = nested(rtnl.INFO_DATA, attribute(rtnl.MACVLAN_MODE, _u32(mode)))
    parts = (
        attribute(rtnl.IFNAME, name.encode() + b"\0"),
        attribute(rtnl.LINK, _u32(lower)),
        attribute(rtnl.ADDRESS, bytes.fromhex(mac.replace(":", ""))),
        attribute(rtnl.MTU, _u32(mtu)),
        attribute(rtnl.TXQLEN, _u32(queue)),
        nested(rtnl.LINKINFO, attribute(rtnl.INFO_KIND, kind.encode() + b"\0"), data),
    )
    request(rtnl.NEWLINK, rtnl.CREATE | rtnl.EXCL, link_message() + b"".join(parts))


def remove(index: int) -> None:
    """The device of that index. Raises OSError: ENODEV when there is none."""
    request(rtnl.DELLINK, 0, link_message(index=index))


def set_up(index: int, up: bool) -> None:
    """Bring the device of that index up or down. Raises OSError."""
    flags = rtnl.IFF_UP if up else 0
    request(rtnl.NEWLINK, 0, link_message(index=index, flags=flags, change=rtnl.IFF_UP))


def set_queue(index: int, queue: int) -> None:
    """txqueuelen, in frames; the rings of a macvtap follow at once. Raises OSError."""
    body = attribute(rtnl.TXQLEN, _u32(queue))
    request(rtnl.NEWLINK, 0, link_message(index=index) + body)


def _u32(number: int) -> bytes:
    return struct.pack("=I", number)
