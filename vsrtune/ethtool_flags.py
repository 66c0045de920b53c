"""Sets a device's private flags (``ethtool --set-priv-flags``)."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from vsrtune.host.ethtool import control, ioctl, private_flags

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
