"""Latency: single frames, timed from before they are sent until they leave the router.

The sender runs on the routers' CPU and the NIC's SoftIRQ runs when it sends, so a frame
finds its CPU awake: what is measured is the way through the router, with the system
call that sends it, which is the same for all kinds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time

from vsrtune.bench.spec.model import Leg
from vsrtune.bench.traffic.probe import rank, udp_frame

from .beds import Bed
from .spaces import GENERATOR, inside

_MAGIC = b"nslabprb"
_MAC = b"\x02\x76\x72\xfe\x00\x03"
_INTERVAL = 0.002
_SO_RCVBUFFORCE = 33
_SO_TIMESTAMPNS = 35
_ETH_P_ALL = 3
_ROOM = 8 << 20


def frame(mac: str, destination: str, number: int, stamp: int) -> bytes:
    """A probe, with a number and a time (ns) in it."""
    data = _MAGIC + struct.pack("!HQ", number, stamp)
    return udp_frame(_MAC, Leg(mac, "10.7.0.2", destination), 1023, 9, data)


def stamp_of(data: bytes) -> int | None:
    """When a probe was sent; None for what is none."""
    at = data.find(_MAGIC)
    if at < 0 or len(data) < at + len(_MAGIC) + 10:
        return None
    return int(struct.unpack_from("!HQ", data, at + len(_MAGIC))[1])


def latencies(bed: Bed, cpu: int, seconds: float) -> dict[str, float]:
    """Microseconds through the first stream's routers: percentiles, and how many probes
    were sent and came out."""
    stream = bed.streams[0]
    place = bed.ends[stream.name]
    with contextlib.ExitStack() as stack:
        with inside(place.space):
            receiver = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
        receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM)
        receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        receiver.bind((place.device, _ETH_P_ALL))
        receiver.setblocking(False)
        with inside(GENERATOR):
            sender = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
        sender.bind((stream.wire, 0))
        count = _send(sender, stream.mac, stream.destination, cpu, seconds)
        time.sleep(0.1)
        found = sorted(round(time, 2) for time in _received(receiver))
    if not found:
        return {"sent": count, "received": 0}
    return {
        "sent": count,
        "received": len(found),
        "p50": rank(found, 0.5),
        "p90": rank(found, 0.9),
        "p99": rank(found, 0.99),
    }


def _send(sender: socket.socket, mac: str, destination: str, cpu: int, seconds: float) -> int:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        count = max(1, round(seconds / _INTERVAL))
        for number in range(count):
            time.sleep(_INTERVAL)
            sender.send(frame(mac, destination, number, time.time_ns()))
        return count
    finally:
        os.sched_setaffinity(0, before)


def _received(receiver: socket.socket) -> list[float]:
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            data, notes, _, _ = receiver.recvmsg(2048, 512)
            sent = stamp_of(data)
            for level, kind, value in notes:
                if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS) and sent is not None:
                    whole, parts = struct.unpack_from("qq", value)
                    found.append((whole * 1_000_000_000 + parts - sent) / 1000)
    return found
