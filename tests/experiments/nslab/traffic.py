"""pktgen with one stream for each NIC, all on one CPU, in the generator's namespace."""

from __future__ import annotations

import os
import re
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from .spaces import GENERATOR, Failure, inside, read, write

CPU = 0
_DIRECTORY = "/proc/net/pktgen"
_THREAD = f"{_DIRECTORY}/kpktgend_{CPU}"
# pktgen sleeps this long between being told to start and starting.
_START_DELAY = 0.125
_SOFAR = re.compile(r"pkts-sofar: (\d+)\s+errors: (\d+)")
_RESULT = re.compile(r"Result: OK: (\d+)\(")


@dataclass(frozen=True)
class Stream:
    """Frames of 60 bytes (64 on a wire) to ``macs`` consecutive addresses from ``mac`` on
    and ``addresses`` from ``destination`` on, one step of both for each frame."""

    name: str
    wire: str
    mac: str
    destination: str = "10.9.0.1"
    macs: int = 1
    addresses: int = 1


@dataclass(frozen=True)
class Sent:
    """Frames handed to the wire in so many seconds; what its ring refused counts too."""

    frames: int
    seconds: float


def run(streams: Sequence[Stream], rates: Mapping[str, float], seconds: float) -> dict[str, Sent]:
    """Send each stream that has a rate (frames per second) for so long."""
    chosen = [s for s in streams if rates.get(s.name, 0) > 0]
    with inside(GENERATOR):
        write(_THREAD, "rem_device_all")
        try:
            for stream in chosen:
                write(_THREAD, f"add_device {stream.wire}")
                for text in _commands(stream, rates[stream.name], seconds):
                    write(f"{_DIRECTORY}/{stream.wire}", text)
            if chosen:
                _generate(seconds)
            return {s.name: _sent(s) for s in chosen}
        finally:
            write(_THREAD, "rem_device_all")


def last_address(first: str, count: int) -> str:
    return str(IPv4Address(first) + count - 1)


def _commands(stream: Stream, pps: float, seconds: float) -> list[str]:
    return [
        f"count {max(1, round(pps * seconds))}",
        f"delay {round(1e9 / pps)}",
        "pkt_size 60",
        "clone_skb 0",
        "burst 1",
        f"dst_mac {stream.mac}",
        f"dst_mac_count {stream.macs if stream.macs > 1 else 0}",
        "src_min 10.7.0.2",
        "src_max 10.7.0.2",
        f"dst_min {stream.destination}",
        f"dst_max {last_address(stream.destination, stream.addresses)}",
        "udp_src_min 1024",
        "udp_src_max 1024",
        "udp_dst_min 9",
        "udp_dst_max 9",
    ]


def _generate(seconds: float) -> None:
    """A child writes "start", which returns when pktgen has stopped, and ends with us: the
    kernel stops pktgen when that write is interrupted."""
    writer = os.fork()
    if writer == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            write(f"{_DIRECTORY}/pgctrl", "start")
        finally:
            os._exit(0)
    ended = os.pidfd_open(writer)
    try:
        select.select([ended], [], [], _START_DELAY + seconds)
    finally:
        # A stop that comes before the threads have begun is lost.
        while not select.select([ended], [], [], 0)[0]:
            write(f"{_DIRECTORY}/pgctrl", "stop")
            select.select([ended], [], [], 0.1)
        os.close(ended)
        os.waitpid(writer, 0)


def _sent(stream: Stream) -> Sent:
    return parse(stream.name, read(f"{_DIRECTORY}/{stream.wire}"))


def parse(name: str, text: str) -> Sent:
    """Read a stream's file after a run. Raises Failure when it did not run."""
    sofar, spent = _SOFAR.search(text), _RESULT.search(text)
    if sofar is None or spent is None:
        raise Failure(f"pktgen did not run {name}:\n{text}")
    return Sent(int(sofar[1]) + int(sofar[2]), int(spent[1]) / 1e6)
