"""In lab 1, at the generator: FLOWS flows of EACH datagrams to the echo in lab 2, at RATE in
all. Prints how many of each flow came back, as JSON."""

from __future__ import annotations

import json
import select
import socket
import sys
import time

OWN, ECHO = "10.31.0.1", ("10.30.0.1", 7777)
FIRST_PORT, AFTER = 20000, 3.0

flows, each, rate = map(int, sys.argv[1:4])
sockets = []
for number in range(flows):
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind((OWN, FIRST_PORT + number))
    one.setblocking(False)
    sockets.append(one)
back: dict[int, set[bytes]] = {FIRST_PORT + number: set() for number in range(flows)}


def receive(until: float) -> None:
    while True:
        left = max(until - time.monotonic(), 0)
        for ready in select.select(sockets, [], [], left)[0]:
            back[ready.getsockname()[1]].add(ready.recv(2048))
        if not left:
            return


begin = time.monotonic()
for number in range(flows * each):
    sockets[number % flows].sendto(b"%06d" % number, ECHO)
    receive(begin + (number + 1) / rate)
receive(time.monotonic() + AFTER)
print(json.dumps({port: len(seen) for port, seen in back.items()}))
