"""In lab 1, at the generator: FLOWS flows of EACH datagrams to the echo in lab 2, no more than
WINDOW on their way, because two emulated hosts on one machine pause when they like, and what
comes too fast for a host is rightly dropped. Prints how many of each flow came back, as JSON."""

from __future__ import annotations

import json
import select
import socket
import sys
import time

OWN, ECHO = "10.31.0.1", ("10.30.0.1", 7777)
FIRST_PORT = 20000
# A datagram that is not back by then is lost.
PATIENCE = 5.0

flows, each, window = map(int, sys.argv[1:4])
sockets = []
for number in range(flows):
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind((OWN, FIRST_PORT + number))
    one.setblocking(False)
    sockets.append(one)
back: dict[int, set[bytes]] = {FIRST_PORT + number: set() for number in range(flows)}
away: dict[bytes, float] = {}


def receive(most: int) -> None:
    """Until no more than this many are on their way."""
    while len(away) > most:
        for ready in select.select(sockets, [], [], PATIENCE)[0]:
            data = ready.recv(2048)
            back[ready.getsockname()[1]].add(data)
            away.pop(data, None)
        now = time.monotonic()
        for data in [data for data, sent in away.items() if now - sent > PATIENCE]:
            del away[data]


for number in range(flows * each):
    data = b"%06d" % number
    away[data] = time.monotonic()
    sockets[number % flows].sendto(data, ECHO)
    receive(window - 1)
receive(0)
print(json.dumps({port: len(seen) for port, seen in back.items()}))
