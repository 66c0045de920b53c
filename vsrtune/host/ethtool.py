# SPDX-License-Identifier: GPL-2.0-or-later
"""``ethtool -S`` of this host: a driver's own statistics by name.

Ioctls of include/uapi/linux/ethtool.h. pyroute2 has none of them for statistics in the releases
that Debian ships.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct

_SIOCETHTOOL = 0x8946
_GSTRINGS = 0x1B
_GSTATS = 0x1D
_GSSET_INFO = 0x37
_SS_STATS = 1

_STRING = 32
_VALUE = 8
# Debian's kernels before 6.1.162 and 6.12.69 write as many values as the driver has at that moment,
# however small the buffer is. Devices of older versions of our module gain seven with each tap
# queue that is opened, 256 at most.
_SLACK = 256 * 7
_ATTEMPTS = 5


def _control() -> socket.socket:
    """A socket for requests about devices. Any kind will do (net/socket.c, sock_do_ioctl); for
    AF_UNIX our units need no further address family."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def parse_statistics(names: bytes, values: bytes) -> dict[str, int]:
    """The statistics in names of 32 bytes each, ended by NUL, and as many native 64-bit values."""
    found = {}
    for number, (value,) in enumerate(struct.iter_unpack("=Q", values)):
        raw = names[number * _STRING : (number + 1) * _STRING]
        found[raw.partition(b"\0")[0].decode("utf-8", "backslashreplace").strip()] = value
    return found


def statistics(device: str) -> dict[str, int]:
    """The device's statistics, empty when its driver has none. Raises OSError: ENODEV
    when there is no such device, EAGAIN when it changed at every attempt."""
    with _control() as channel:
        for _ in range(_ATTEMPTS):
            count = _count(channel, device, _SS_STATS)
            if not count:
                return {}
            room = count + _SLACK
            strings, stats = (_GSTRINGS, _SS_STATS, count), (_GSTATS, count)
            named, names = _ask(channel, device, strings, room * _STRING)
            valued, values = _ask(channel, device, stats, room * _VALUE)
            # A mismatch means that queues were opened or closed in between.
            if named == valued == count:
                return parse_statistics(names[: named * _STRING], values[: valued * _VALUE])
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), f"statistics of {device}")


def _count(channel: socket.socket, device: str, strings: int) -> int:
    """The number of strings in a set."""
    request = ctypes.create_string_buffer(struct.pack("=IIQI", _GSSET_INFO, 0, 1 << strings, 0), 20)
    try:
        _ioctl(channel, device, request)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return 0
        raise
    # The mask comes back without the sets that the driver does not have.
    mask, count = struct.unpack_from("=QI", request.raw, 8)
    return int(count) if mask else 0


def _ask(
    channel: socket.socket, device: str, head: tuple[int, ...], room: int
) -> tuple[int, bytes]:
    """One ioctl. The request is ``head``, whose last number is a count, and room for the data.
    Returns the count that the kernel wrote and the data."""
    start = struct.pack(f"={len(head)}I", *head)
    request = ctypes.create_string_buffer(start, len(start) + room)
    _ioctl(channel, device, request)
    return int(struct.unpack_from("=I", request.raw, len(start) - 4)[0]), request.raw[len(start) :]


def _ioctl(channel: socket.socket, device: str, request: ctypes.Array[ctypes.c_char]) -> None:
    """One request of SIOCETHTOOL, which the kernel answers in place. Raises OSError."""
    name = os.fsencode(device)
    if len(name) > 15:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), device)
    # struct ifreq: the name, and the address of the request.
    ifreq = struct.pack("16sP16x", name, ctypes.addressof(request))
    try:
        fcntl.ioctl(channel.fileno(), _SIOCETHTOOL, ifreq)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"ethtool of {device}") from None
