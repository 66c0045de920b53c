"""The rules of a balancer carry real flows through this machine's nftables, in namespaces.

gen   g0 = ext_in [lb] int_in_1  = in  [r1] out = int_out_1 [lb] ext_out = s0   sink
10.1.0.10..13          int_in_2  = in  [r2] out = int_out_2              10.2.0.10..13

The routers are 10.1.0.1 and 10.2.0.1, both of them. Each = is a veth pair: hubs. With
bridges the pairs of a side end in a Linux bridge, which learns, as a lower device with an
uplink need not.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from vsrtune.group.msr_rules import Rulebook, Side

NEAR, FAR = "10.1.0", "10.2.0"
EXTERNAL = {"in": "02:00:00:00:01:00", "out": "02:00:00:00:02:00"}
PORT = 5000
ROUTERS = ("r1", "r2")
PACKET_OUTGOING = 4
ETH_P_IP = 0x0800

_libc = ctypes.CDLL(None, use_errno=True)

Flow = tuple[str, int, str, int]


def mac(side: str, router: str) -> str:
    return f"02:00:00:00:0{1 + (side == 'out')}:1{router[1]}"


@dataclass
class Space:
    """A network namespace, as long as its process lives."""

    name: str
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(["unshare", "-n", "sleep", "600"])
        here = os.readlink("/proc/self/ns/net")
        end = time.monotonic() + 10
        while os.readlink(f"/proc/{self.process.pid}/ns/net") == here:
            assert time.monotonic() < end
            time.sleep(0.01)

    def run(self, *words: str, given: str = "") -> str:
        command = ["nsenter", "-n", "-t", str(self.process.pid), *words]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.name}: {words}\n{given}\n{done.stderr}"
        return done.stdout

    def ip(self, words: str) -> str:
        return self.run("ip", *words.split())

    def socket(self, *kind: int) -> socket.socket:
        """One that was opened in the namespace."""
        made: list[socket.socket] = []

        def open_it() -> None:
            entry = os.open(f"/proc/{self.process.pid}/ns/net", os.O_RDONLY)
            assert _libc.setns(entry, 0) == 0
            os.close(entry)
            made.append(socket.socket(*kind))

        thread = threading.Thread(target=open_it)
        thread.start()
        thread.join()
        return made[0]


class Topology:
    def __init__(self, links: str) -> None:
        self.links = links
        names = ("gen", "sink", "lb", "host", *ROUTERS)
        self.spaces = {name: Space(name) for name in names}
        for name, device, net, side in (
            ("gen", "g0", NEAR, "in"), ("sink", "s0", FAR, "out"),
        ):  # fmt: skip
            self.pair((name, device, ""), ("lb", f"ext_{side}", EXTERNAL[side]))
            for number in range(10, 14):
                self[name].ip(f"addr add {net}.{number}/24 dev {device}")
            other = FAR if net == NEAR else NEAR
            self[name].ip(f"route add {other}.0/24 via {net}.1")
        for side, net in (("in", NEAR), ("out", FAR)):
            self.inside(side)
            for name in ROUTERS:
                self[name].ip(f"addr add {net}.1/24 dev {side}")
        for name in ROUTERS:
            self[name].run("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")

    def inside(self, side: str) -> None:
        if self.links == "bridge":
            self["host"].ip(f"link add {side} up type bridge")
            self.pair(("host", f"{side}_b", ""), ("lb", f"int_{side}", f"02:00:00:00:03:{side}"))
            self["host"].ip(f"link set {side}_b master {side}")
        for name in ROUTERS:
            end = ("lb", f"int_{side}_{name[1]}", "")
            if self.links == "bridge":
                end = ("host", f"{side}_{name}", "")
            self.pair(end, (name, side, mac(side, name)))
            if self.links == "bridge":
                self["host"].ip(f"link set {side}_{name} master {side}")

    def __getitem__(self, name: str) -> Space:
        return self.spaces[name]

    def pair(self, *ends: tuple[str, str, str]) -> None:
        """A veth pair: where, the device's name, its MAC."""
        first, second = (self[space].process.pid for space, _, _ in ends)
        self["host"].ip(
            f"link add {ends[0][1]} netns {first} type veth peer {ends[1][1]} netns {second}"
        )
        for space, device, address in ends:
            proc = f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6"
            self[space].run("sh", "-c", f"[ ! -e {proc} ] || echo 1 >{proc}")
            if re.fullmatch("([0-9a-f]{2}:){5}[0-9a-f]{2}", address):
                self[space].ip(f"link set {device} address {address}")
            self[space].ip(f"link set {device} up")

    def load(self, use: Sequence[str]) -> None:
        """Rules for these routers; the names at their head are put right, as an operator
        does."""
        each = self.links != "bridge"
        sides = [
            Side(
                side, side, "lb", EXTERNAL[side], (("00:00:00:00:00:00", side),) * (2 if each else 1),
                each, tuple(mac(side, name) for name in ROUTERS),
            )
            for side in ("in", "out")
        ]  # fmt: skip
        book = Rulebook("edge", tuple(sides), ROUTERS, tuple(use))
        rules = re.sub(r"(?m)^define (\w+) = \w+", r"define \1 = \1", book.text("lb"))
        self["lb"].run("nft", "-f", "/dev/stdin", given=rules)

    def close(self) -> None:
        for space in self.spaces.values():
            space.process.kill()
            space.process.wait()


@pytest.fixture(params=["hub", "bridge"])
def router(request: pytest.FixtureRequest) -> Iterator[Topology]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make namespaces")
    if shutil.which("nft") is None:
        pytest.skip("needs nft (nftables)")
    made = Topology(request.param)
    try:
        made.load(ROUTERS)
        yield made
    finally:
        made.close()


def frames(sniffer: socket.socket) -> Iterator[tuple[Flow, int]]:
    """Addresses and ports of the UDP datagrams that came in, first fragments included, and
    the place of each fragment of them."""
    while True:
        try:
            data, address = sniffer.recvfrom(2048, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if address[2] == PACKET_OUTGOING or data[9] != socket.IPPROTO_UDP:
            continue
        (place,) = struct.unpack("!H", data[6:8])
        ports = struct.unpack("!HH", data[20:24]) if not place & 0x1FFF else (0, 0)
        ends = (socket.inet_ntoa(data[12:16]), socket.inet_ntoa(data[16:20]))
        yield (ends[0], ports[0], ends[1], ports[1]), place & 0x1FFF


def exchange(router: Topology, count: int, size: int) -> list[Flow]:
    """So many flows of one datagram each way; those whose answer came."""
    here = []
    for number in range(count):
        one = router["gen"].socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.bind((f"{NEAR}.{10 + number % 4}", 20000 + 7 * number))
        one.settimeout(3)
        here.append(one)
    there = {}
    for number in range(10, 14):
        address = f"{FAR}.{number}"
        there[address] = router["sink"].socket(socket.AF_INET, socket.SOCK_DGRAM)
        there[address].bind((address, PORT))
        there[address].settimeout(3)
    answered = []
    for number, one in enumerate(here):
        to = f"{FAR}.{10 + number // 4 % 4}"
        one.sendto(bytes(size), (to, PORT))
        data, sender = there[to].recvfrom(65536)
        assert (len(data), sender) == (size, one.getsockname())
        there[to].sendto(data, sender)
        assert one.recvfrom(65536) == (data, (to, PORT))
        answered.append((*sender, to, PORT))
    for one in (*here, *there.values()):
        one.close()
    return answered


def sniff(router: Topology) -> dict[str, socket.socket]:
    return {
        name: router[name].socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
        for name in ROUTERS
    }


def taken(sniffers: dict[str, socket.socket]) -> dict[Flow, set[str]]:
    """Which routers each flow came to."""
    found: dict[Flow, set[str]] = {}
    for name, sniffer in sniffers.items():
        for flow, _ in frames(sniffer):
            found.setdefault(flow, set()).add(name)
        sniffer.close()
    return found


def test_flows_and_their_replies_take_one_router(router: Topology) -> None:
    sniffers = sniff(router)
    flows = exchange(router, 32, 18)
    assert len(set(flows)) == 32
    came = taken(sniffers)
    ways = {}
    for flow in flows:
        back = (flow[2], flow[3], flow[0], flow[1])
        assert len(came[flow]) == 1
        assert came[back] == came[flow], "the answer takes the way of what it answers"
        ways[flow] = next(iter(came[flow]))
    assert set(ways.values()) == set(ROUTERS)
    # Outside one router with one MAC is seen.
    for name, device, address, side in (
        ("gen", "g0", f"{NEAR}.1", "in"), ("sink", "s0", f"{FAR}.1", "out"),
    ):  # fmt: skip
        assert f"lladdr {EXTERNAL[side]} " in router[name].ip(f"neigh show {address} dev {device}")
    # Routers know their neighbours by their own MACs, and believe the answers.
    own = router["sink"].ip("-br link show s0").split()[2]
    states = []
    for name in set(ways.values()):
        for line in router[name].ip("neigh show dev out").splitlines():
            assert f"lladdr {own} " in line, line
            states.append(line.split()[-1])
    assert "REACHABLE" in states


def test_a_router_that_is_left_out_gets_nothing(router: Topology) -> None:
    exchange(router, 8, 18)
    router.load(["r1"])
    sniffers = sniff(router)
    flows = exchange(router, 32, 18)
    came = taken(sniffers)
    assert all(came[flow] == {"r1"} for flow in flows)
    router.load(ROUTERS)
    sniffers = sniff(router)
    exchange(router, 32, 18)
    assert {name for names in taken(sniffers).values() for name in names} == set(ROUTERS)


def test_fragments_of_a_datagram_take_one_router(router: Topology) -> None:
    exchange(router, 16, 18)
    sniffers = sniff(router)
    exchange(router, 16, 4000)
    every = []
    for sniffer in sniffers.values():
        places = [place for _, place in frames(sniffer)]
        sniffer.close()
        # Three of each datagram: as many of one place as of any other.
        assert len({places.count(place) for place in places}) <= 1, places
        every += places
    assert len(every) == 2 * 16 * 3
    assert len(set(every)) == 3


def test_nothing_reaches_the_balancers_own_stack(router: Topology) -> None:
    router["lb"].ip("addr add 10.1.0.77/24 dev ext_in")
    one = router["lb"].socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind(("0.0.0.0", PORT))
    one.settimeout(0.5)
    gen = router["gen"]
    gen.ip(f"neigh replace 10.1.0.77 lladdr {EXTERNAL['in']} dev g0")
    sender = gen.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.sendto(b"x", ("10.1.0.77", PORT))
    with pytest.raises(TimeoutError):
        one.recv(10)
    exchange(router, 8, 18)
