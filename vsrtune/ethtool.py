"""``ethtool -S`` of this host: a driver's own statistics by name.

Three ioctls of include/uapi/linux/ethtool.h. pyroute2 has none of them for statistics
in the releases that Debian ships.
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
# The kernel writes as many values as the driver has when asked, however small the buffer
# is. Devices of our module gain six with each tap queue that is opened, 256 at most.
_SLACK = 256 * 6
_ATTEMPTS = 5


def parse_statistics(names: bytes, values: bytes) -> dict[str, int]:
    """Names of 32 bytes each, ended by NUL, and as many native 64-bit values."""
    found = {}
    for number, (value,) in enumerate(struct.iter_unpack("=Q", values)):
        raw = names[number * _STRING : (number + 1) * _STRING]
        found[raw.partition(b"\0")[0].decode("utf-8", "backslashreplace").strip()] = value
    return found


def statistics(device: str) -> dict[str, int]:
    """The device's statistics, empty when its driver has none. Raises OSError: ENODEV
    when there is no such device, EAGAIN when it changed at every attempt."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        for _ in range(_ATTEMPTS):
            count = _count(channel, device)
            if not count:
                return {}
            room = count + _SLACK
            named, names = _ask(channel, device, (_GSTRINGS, _SS_STATS), room * _STRING)
            valued, values = _ask(channel, device, (_GSTATS,), room * _VALUE)
            # Queues were opened or closed in between when the two do not agree.
            if named == valued == count:
                return parse_statistics(names[: named * _STRING], values[: valued * _VALUE])
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), f"statistics of {device}")


def _count(channel: socket.socket, device: str) -> int:
    """How many statistics there are."""
    request = ctypes.create_string_buffer(
        struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SS_STATS, 0), 20
    )
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
    """One ioctl whose request is ``head`` and a count, which the kernel sets, before the
    data: the count and the data."""
    start = struct.pack(f"={len(head) + 1}I", *head, 0)
    request = ctypes.create_string_buffer(start, len(start) + room)
    _ioctl(channel, device, request)
    return int(struct.unpack_from("=I", request.raw, len(start) - 4)[0]), request.raw[len(start) :]


def _ioctl(channel: socket.socket, device: str, request: ctypes.Array[ctypes.c_char]) -> None:
    name = os.fsencode(device)
    if len(name) > 15:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), device)
    # struct ifreq: the name, and the address of the request.
    ifreq = struct.pack("16sP16x", name, ctypes.addressof(request))
    try:
        fcntl.ioctl(channel.fileno(), _SIOCETHTOOL, ifreq)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"statistics of {device}") from None
