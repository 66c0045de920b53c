"""What `vsrtune bench` sees of the order of frames, beside a rule that drops what it counts."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest
from nethelp import ip

from vsrtune.bench.spec.model import Leg
from vsrtune.bench.traffic.agent import ETH_P_ALL, order
from vsrtune.bench.traffic.probe import ProbeSocket, udp_frame

LEG = Leg("02:00:00:00:00:01", "10.10.1.2", "10.20.1.100")
RULES = """table netdev sink {
 chain in {
  type filter hook ingress device "v1" priority -400;
  udp dport 20000 counter drop
 }
}
"""


def test_frames_that_the_sink_drops_are_looked_at(namespace: None) -> None:
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed")
    ip("link", "add", "v0", "type", "veth", "peer", "name", "v1")
    # The sender last: it finds its carrier then, and sends at once. A carrier that comes later lets it
    # send when linkwatch has time, up to a second later; until then frames are dropped.
    for device in ("v1", "v0"):
        Path(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6").write_text("1")
        ip("link", "set", "dev", device, "up")
    done = subprocess.run(
        ["nft", "-f", "-"], input=RULES, text=True, capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this machine cannot count at the ingress: {done.stderr}")
    with ProbeSocket("v1", ETH_P_ALL) as all_, ProbeSocket("v1") as later, ProbeSocket("v0") as out:
        for port, number in ((1024, 1), (1025, 5), (1024, 3), (1024, 2), (1025, 6)):
            data = struct.pack("!II", 0xBE9BE955, number) + bytes(10)
            out.socket.send(udp_frame(bytes(6), LEG, port, 20000, data))
        # A busy machine takes them to ksoftirqd, which comes later. The rule is behind the sockets.
        listing = ["nft", "list", "table", "netdev", "sink"]
        ends = time.monotonic() + 10
        while b"packets 5 " not in subprocess.check_output(listing) and time.monotonic() < ends:
            time.sleep(0.01)
        assert order(all_) == (5, 1)
        with pytest.raises(BlockingIOError):
            later.socket.recv(64, socket.MSG_DONTWAIT)
