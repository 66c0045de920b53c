"""Flows between many neighbours on both sides of a router, each datagram known by its number."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

import labhelp

# Neighbours of a side are the addresses from this one on; each is one to resolve.
FIRST = 10
PORT = 7777

# Sends COUNT datagrams at RATE: each between two random neighbours, from a random port. A
# line for each: number, seconds, destination. Sockets are made before, so that rates hold.
SENDER = """
import random, resource, socket, struct, sys, time
net, far, first, many, port, count, rate, seed = sys.argv[1:9]
first, many, port, count, rate = map(int, (first, many, port, count, rate))
rng = random.Random(int(seed))
flows = []
# So many of each neighbour that none of a few members has none of them.
most = max(400, 25 * many)
resource.setrlimit(resource.RLIMIT_NOFILE, (most + 100,) * 2)
ports = rng.sample(range(20000, 60000), most)
for number in range(min(count, most)):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    # Every neighbour has its turn on either side; the ports are random.
    sock.bind((f"{net}.{first + number % many}", ports[number]))
    to = (number + 5 * (number // many)) % many
    flows.append((sock, f"{far}.{first + to}"))
begin = time.monotonic()
out = []
for number in range(count):
    sock, to = flows[number % len(flows)]
    wait = begin + number / rate - time.monotonic()
    if wait > 0:
        time.sleep(wait)
    sock.sendto(struct.pack("=I", number) + bytes(14), (to, port))
    out.append(f"{number} {time.monotonic():.4f} {to}")
print("\\n".join(out))
"""

# Prints the number of every datagram that arrives, until SIGTERM.
RECEIVER = """
import signal, socket, struct, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)
sock.bind(("0.0.0.0", int(sys.argv[1])))
found = []
def end(*_):
    print("\\n".join(map(str, found)))
    sys.stdout.flush()
    raise SystemExit
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    found.append(struct.unpack("=I", sock.recv(64)[:4])[0])
"""


@dataclass(frozen=True)
class Result:
    """What became of the datagrams of one direction: when each was sent, in seconds of the
    monotonic clock, and to whom, and how often it came."""

    sent: dict[int, tuple[float, str]]
    received: dict[int, int]

    @property
    def lost(self) -> list[int]:
        return sorted(set(self.sent) - set(self.received))

    @property
    def doubled(self) -> list[int]:
        return sorted(n for n, times in self.received.items() if times > 1)

    @property
    def strange(self) -> list[int]:
        return sorted(set(self.received) - set(self.sent))

    def lost_between(self) -> float:
        """Seconds from the first lost datagram's sending to the last one's."""
        times = [self.sent[n][0] for n in self.lost]
        return max(times) - min(times) if times else 0.0

    def __str__(self) -> str:
        told = f"{len(self.sent)} sent, {len(self.lost)} lost within {self.lost_between():.2f} s"
        begin = min(at for at, _ in self.sent.values())
        few = [f"{n} to {self.sent[n][1]} at {self.sent[n][0] - begin:.2f} s" for n in self.lost]
        return f"{told} ({', '.join(few)})" if 0 < len(few) < 6 else told


def few_lost(result: Result) -> bool:
    """Whether all neighbours were found. A Linux router may lose a frame at the moment at
    which it resolves one, also alone and on a macvtap; a neighbour that a member does not
    find costs dozens."""
    lost = Counter(result.sent[n][1] for n in result.lost)
    return max(lost.values(), default=0) <= 2


def space(name: str) -> tuple[str, ...]:
    return ("nsenter", f"--net=/run/netns/{name}")


def add_neighbours(index: int, many: int) -> None:
    """Addresses on both sides of router ``index``; they answer ARP and know the router's
    MAC by themselves, as all in this lab."""
    for name, net, device in (("gen", "10.10", "g0"), ("sink", "10.20", "s0")):
        for number in range(FIRST, FIRST + many):
            labhelp.sh("ip", "-n", name, "addr", "add", f"{net}.{index}.{number}/24", "dev", device)


def drop_neighbours(index: int, many: int) -> None:
    for name, net, device in (("gen", "10.10", "g0"), ("sink", "10.20", "s0")):
        for number in range(FIRST, FIRST + many):
            address = f"{net}.{index}.{number}/24"
            labhelp.sh("ip", "-n", name, "addr", "del", address, "dev", device, check=False)


class Flows:
    """Flows from one side to the other; ``wait`` for their end."""

    def __init__(
        self,
        index: int,
        many: int,
        *,
        count: int,
        rate: int,
        seed: int,
        back: bool = False,
        first: int = FIRST,
    ) -> None:
        here, there = ("sink", "gen") if back else ("gen", "sink")
        near, far = ("10.20", "10.10") if back else ("10.10", "10.20")
        self._receiver = subprocess.Popen(
            [*space(there), sys.executable, "-c", RECEIVER, str(PORT)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._receiver.stdout is not None
        assert self._receiver.stdout.readline() == "ready\n"
        words = (f"{near}.{index}", f"{far}.{index}", first, many, PORT, count, rate, seed)
        self._sender = subprocess.Popen(
            [*space(here), sys.executable, "-c", SENDER, *map(str, words)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait(self) -> Result:
        try:
            out, _ = self._sender.communicate(timeout=300)
            time.sleep(2)  # what is on its way arrives
        finally:
            self._receiver.send_signal(signal.SIGTERM)
            came, _ = self._receiver.communicate(timeout=60)
        assert self._sender.returncode == 0
        sent = {}
        for line in out.splitlines():
            number, at, to = line.split()
            sent[int(number)] = (float(at), to)
        received: dict[int, int] = {}
        for line in came.split():  # none, when nothing came
            received[int(line)] = received.get(int(line), 0) + 1
        return Result(sent, received)


def both_ways(index: int, many: int, *, count: int, rate: int, seed: int) -> tuple[Result, Result]:
    """Flows from left to right, and others from right to left, at the same time."""
    flows = [
        Flows(index, many, count=count, rate=rate, seed=seed + back, back=bool(back))
        for back in (0, 1)
    ]
    left, right = (f.wait() for f in flows)
    return left, right


# Sends COUNT datagrams from one address and port to another, from a socket that is not
# connected: the kernel writes no hash of its own into their frames.
ONE_FLOW = """
import socket, sys, time
here, near, there, far, count = sys.argv[1:6]
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((here, int(near)))
for _ in range(int(count)):
    sock.sendto(bytes(18), (there, int(far)))
    time.sleep(0.005)
"""


def one_flow(name: str, here: tuple[str, int], there: tuple[str, int], count: int) -> None:
    words = (*here, *there, count)
    labhelp.sh(*space(name), sys.executable, "-c", ONE_FLOW, *map(str, words))


def all_forward(index: int) -> bool:
    """Whether every member forwards between the lab's own peers, whom they know without
    asking: 60 flows by hash leave none of a few members out."""
    return not Flows(index, 1, count=60, rate=200, seed=7, first=2).wait().lost


def places() -> list[dict[str, object]]:
    """``vsrtune group status --json``."""
    found: list[dict[str, object]] = json.loads(labhelp.vsrtune("group", "status", "--json").stdout)
    return found
