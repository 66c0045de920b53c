"""In lab 2, in the sink: sends every datagram back, and says of each flow how many came and
from which router's MAC, once none has come for a while."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections import defaultdict

ADDRESS = ("10.30.0.1", 7777)
FIRST, IDLE = 60.0, 8.0

echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
echo.bind(ADDRESS)
frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
frames.bind(("s0", 0x0800))
print("ready", flush=True)

counts: dict[int, int] = defaultdict(int)
routers: dict[int, set[str]] = defaultdict(set)
end = time.monotonic() + FIRST
while (left := end - time.monotonic()) > 0:
    for ready in select.select([echo, frames], [], [], left)[0]:
        if ready is echo:
            data, sender = echo.recvfrom(2048)
            echo.sendto(data, sender)
            counts[sender[1]] += 1
            end = time.monotonic() + IDLE
        else:
            frame = frames.recv(2048)
            # UDP in IPv4 without options, to our port.
            if (
                frame[14] == 0x45
                and frame[23] == 17
                and frame[36:38] == struct.pack("!H", ADDRESS[1])
            ):
                routers[int.from_bytes(frame[34:36], "big")].add(frame[6:12].hex(":"))
print(
    json.dumps({port: {"came": n, "routers": sorted(routers[port])} for port, n in counts.items()})
)
