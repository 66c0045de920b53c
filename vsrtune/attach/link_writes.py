"""Makes and removes devices, and brings them up and down."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from vsrtune.host.ethtool import control, ioctl, private_flags
from vsrtune.host.netlink import request


def make(
    kind: str, name: str, lower: int, mac: str, mode: int, mtu: int, queue: int, vlan: int = 0
) -> None:
    """Make a device of ``kind`` (the kernel loads its module), down, on the device of index
    ``lower``, 0 for none. ``mode`` as in host.MODES, 0 for kinds without. ``queue`` is its
    txqueuelen, ``vlan`` the id of a device of kind vlan. Raises OSError."""
    optional = {"link": lower, "macvlan_mode": mode, "vlan_id": vlan}
    request(
        "add",
        kind=kind,
        ifname=name,
        address=mac,
        mtu=mtu,
        txqlen=queue,
        **{key: value for key, value in optional.items() if value},
    )


def remove(index: int) -> None:
    """Remove the device of that index. Raises OSError: ENODEV when there is none."""
    request("del", index=index)


def set_up(index: int, up: bool) -> None:
    """Bring the device of that index up or down. Raises OSError."""
    request("set", index=index, state="up" if up else "down")


def set_queue(index: int, queue: int) -> None:
    """Set txqueuelen, in frames; the rings of a macvtap follow at once. Raises OSError."""
    request("set", index=index, txqlen=queue)


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
