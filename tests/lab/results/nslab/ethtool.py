"""A device's own counters, as `ethtool -S` shows them, without a process for each."""

from __future__ import annotations

import array
import fcntl
import socket
import struct

_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37
_SS_STATS = 1
_NAME_SIZE = 32
# struct ifreq: a name and a union, of which a pointer is used.
_IFREQ = "16sP16x"


def statistics(device: str) -> dict[str, int]:
    """In the caller's namespace. Raises OSError for a device that has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        info = _ask(control, device, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SS_STATS, 0))
        count = struct.unpack_from("=I", info, 16)[0]
        request = struct.pack("=III", _GSTRINGS, _SS_STATS, count)
        text = _ask(control, device, request + bytes(count * _NAME_SIZE))[12:]
        request = struct.pack("=II", _GSTATS, count)
        values = struct.unpack_from(
            f"={count}Q", _ask(control, device, request + bytes(8 * count)), 8
        )
    names = [text[i : i + _NAME_SIZE] for i in range(0, count * _NAME_SIZE, _NAME_SIZE)]
    return {n.split(b"\0")[0].decode(): v for n, v in zip(names, values, strict=True)}


def _ask(control: socket.socket, device: str, request: bytes) -> bytes:
    """What the kernel makes of the request, in whose place it writes."""
    block = array.array("B", request)
    fcntl.ioctl(control, _SIOCETHTOOL, struct.pack(_IFREQ, device.encode(), block.buffer_info()[0]))
    return block.tobytes()
