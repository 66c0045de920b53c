# SPDX-License-Identifier: GPL-2.0-or-later
"""Latency probes: single frames with a number in them, timed by the kernel at both ends.

Packet sockets send and receive them, so the ends need no addresses or routes. The driver
times sending as it hands the frame over (SO_TIMESTAMPING); the kernel times receiving as the
frame enters the stack. The receiver is read after the traffic, so that the only work while it
flows is a few sends and reading their times. The sink drops counted frames before these sockets
get them, so the sockets do not slow measured frames; probes pass the sink.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from vsrtune.bench.spec.model import Latency, Leg
from vsrtune.core.closing import Closing
from vsrtune.core.errors import VsrtuneError

PORT = 19999
# Of the first flow: there is room for those of MAX_MEMBERS guests. The sink goes by PORT.
_SOURCE_PORT = 10000
_MAGIC = b"vsrtune\0"
_SIZE = 60
_ETH_P_IP = 0x0800

# asm-generic/socket.h and linux/net_tstamp.h; the socket module lacks them.
_SO_RCVBUFFORCE = 33
_SO_TIMESTAMPNS = 35
_SO_TIMESTAMPING = 37
_TX_SOFTWARE = 1 << 1
_REPORT_SOFTWARE = 1 << 4
_ROOM = 16 << 20
# Fewer say nothing of one in a thousand.
ENOUGH = 1000


def frame(own_mac: bytes, leg: Leg, run: int, number: int, flow: int = 0) -> bytes:
    """A probe, with our mark, the run and the number. Flows differ in their source ports."""
    data = _MAGIC + struct.pack("!II", run, number)
    data = data.ljust(_SIZE - 14 - 20 - 8, b"\0")
    return udp_frame(own_mac, leg, _SOURCE_PORT + flow, PORT, data)


def udp_frame(
    own_mac: bytes, leg: Leg, source_port: int, destination_port: int, data: bytes
) -> bytes:
    """Ethernet, IPv4 and UDP without its checksum."""
    udp = struct.pack("!HHHH", source_port, destination_port, 8 + len(data), 0)
    head = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 28 + len(data), 0, 0, 64, socket.IPPROTO_UDP, 0,
        ipaddress.IPv4Address(leg.source).packed, ipaddress.IPv4Address(leg.destination).packed,
    )  # fmt: skip
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    head = head[:10] + struct.pack("!H", ~total & 0xFFFF) + head[12:]
    mac = bytes.fromhex(leg.mac.replace(":", ""))
    return mac + own_mac + struct.pack("!H", _ETH_P_IP) + head + udp + data


def number_of(data: bytes, run: int) -> int | None:
    """The number of a probe of this run; None for any other frame."""
    at = data.find(_MAGIC)
    if at < 0 or len(data) < at + len(_MAGIC) + 8:
        return None
    (its_run, number) = struct.unpack_from("!II", data, at + len(_MAGIC))
    return int(number) if its_run == run else None


class ProbeSocket(Closing):
    """A packet socket of one device, whose probes carry time stamps. By default it collects
    probes that arrive, from its creation on. Raises VsrtuneError."""

    def __init__(
        self,
        device: str,
        protocol: int = _ETH_P_IP,
        option: int = _SO_TIMESTAMPNS,
        value: int = 1,
    ) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM)
            self.socket.bind((device, protocol))
        except OSError as error:
            self.socket.close()
            raise VsrtuneError(f"cannot probe: {error.strerror}", where=device) from error
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, option, value)

    def stamps(self, run: int, flags: int = 0) -> dict[int, int]:
        """Numbers of the probes of this run that were read since the last call, and their times
        (nanoseconds of the realtime clock)."""
        found: dict[int, int] = {}
        with contextlib.suppress(BlockingIOError):
            while True:
                (data, notes, _, _) = self.socket.recvmsg(2048, 512, flags)
                number = number_of(data, run)
                stamp = _stamp(notes)
                if number is not None and stamp is not None:
                    found[number] = stamp
        return found

    def close(self) -> None:
        self.socket.close()


def send_at_rate(
    device: str,
    legs: Sequence[Leg],
    run: int,
    rate: float,
    count: int,
    flows: int = 1,
    stop: threading.Event | None = None,
    delay: float = 0.0,
) -> dict[int, int]:
    """Send ``count`` probes over the legs in turn, of ``flows`` flows in turn, ``rate`` a
    second, after ``delay`` seconds and until ``stop`` is set. Return when each left, in
    nanoseconds. Raises VsrtuneError."""
    stop = stop or threading.Event()
    times: dict[int, int] = {}
    begin = time.monotonic() + delay
    # Protocol 0 receives nothing. The error queue says when the driver took a probe.
    with ProbeSocket(device, 0, _SO_TIMESTAMPING, _TX_SOFTWARE | _REPORT_SOFTWARE) as sender:
        mac: bytes = sender.socket.getsockname()[4]
        for number in range(count):
            if stop.wait(max(0.0, begin + number / rate - time.monotonic())):
                break
            data = frame(mac, legs[number % len(legs)], run, number, number % flows)
            # The time just before counts for drivers without time stamps.
            now = time.clock_gettime_ns(time.CLOCK_REALTIME)
            # A device may not take it.
            with contextlib.suppress(OSError):
                sender.socket.send(data)
                times[number] = now
            times.update(sender.stamps(run, socket.MSG_ERRQUEUE))
        times.update(sender.stamps(run, socket.MSG_ERRQUEUE))
    return times


def latency(sent: Mapping[int, int], received: Mapping[int, int]) -> Latency | None:
    """Percentiles (nearest rank) of the probes that arrived; None when none was sent. P99.9 needs
    ENOUGH of them.

    When none arrived, the percentiles are None, and ``lost`` equals ``sent``.
    """
    if not sent:
        return None
    times = sorted((received[n] - sent[n]) / 1e9 for n in sent if n in received)
    lost = len(sent) - len(times)
    (p50, p90, p99) = (rank(times, share) for share in (0.50, 0.90, 0.99))
    p999 = rank(times, 0.999) if len(times) >= ENOUGH else None
    jitter = None if p99 is None else p99 - times[0]
    return Latency(len(sent), lost, p50, p90, p99, p999, jitter)


def rank(times: Sequence[float], share: float) -> float | None:
    """That percentile, ``share`` of 1, of ascending values: the nearest rank. None of none."""
    return times[max(0, math.ceil(share * len(times)) - 1)] if times else None


def _stamp(notes: Iterable[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in notes:
        stamps = (_SO_TIMESTAMPNS, _SO_TIMESTAMPING)
        if level == socket.SOL_SOCKET and kind in stamps and len(data) >= 16:
            (seconds, nanoseconds) = struct.unpack_from("@ll", data)
            if seconds:
                return int(seconds * 1_000_000_000 + nanoseconds)
    return None
