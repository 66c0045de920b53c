"""Devices a bench must not flood, from what `ip -j -d` prints and who is connected."""

from __future__ import annotations

import socket
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from vsrtune.bench.measure.tester import MEMBER_PROBES
from vsrtune.bench.spec.model import MAX_MEMBERS, Leg
from vsrtune.bench.spec.streams import FIRST_DESTINATION_PORT
from vsrtune.bench.traffic.agent import order, own_addresses, refusal
from vsrtune.bench.traffic.probe import frame, latency, number_of

UP = ["BROADCAST", "MULTICAST", "UP", "LOWER_UP"]
VETH = {"info_kind": "veth"}
OVS = {"info_kind": "openvswitch"}


def link(name: str, *addresses: str, flags: list[str] = UP, **more: Any) -> dict[str, Any]:
    info = [{"family": "inet", "local": address} for address in addresses]
    return {"ifname": name, "flags": flags, "addr_info": info, **more}


LINKS = [
    link("lo", "127.0.0.1", flags=["LOOPBACK", "UP", "LOWER_UP"]),
    link("br0", "192.0.2.10"),
    link("eno1", master="br0"),
    link("eno2", "198.51.100.5"),
    link("vlan7", "203.0.113.9", link="eno3"),
    link("eno3"),
    link("eno4"),
    link("down0", flags=["BROADCAST"]),
    link("dark0", flags=["BROADCAST", "UP"]),
    link("veth0", "10.9.0.1", link="veth1", linkinfo=VETH),
    link("veth1", link="veth0", linkinfo=VETH),
]
ROUTES = [{"dst": "default", "gateway": "192.0.2.1", "dev": "br0"}]


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("eno4", None),
        ("veth0", None),
        ("eno9", "there is no such device"),
        ("lo", "it is the loopback device"),
        ("down0", "it is not up"),
        ("dark0", "it has no carrier"),
        ("br0", "it carries the default route"),
        ("eno1", "it carries the default route"),
        ("eno2", "it carries an ssh connection to this machine"),
        ("vlan7", "it carries an ssh connection to this machine"),
        ("eno3", "it carries an ssh connection to this machine"),
    ],
)
def test_what_is_refused(device: str, why: str | None) -> None:
    assert refusal(device, LINKS, ROUTES, {"198.51.100.5", "203.0.113.9"}) == why


def test_the_peer_of_a_veth_is_not_below_it() -> None:
    assert refusal("veth0", LINKS, ROUTES, {"10.9.0.1"}) is not None
    assert refusal("veth1", LINKS, ROUTES, {"10.9.0.1"}) is None


def test_a_port_of_open_vswitch_is_below_its_internal_ports() -> None:
    links = [
        *LINKS,
        link("ovs-system", flags=["BROADCAST"], linkinfo=OVS),
        link("ovsbr0", "10.8.0.1", linkinfo=OVS),
        link("vlan9", "10.7.0.1", link="ovsbr0"),
        link("bond0", master="ovs-system"),
        link("eno5", master="bond0"),
    ]
    for address in ("10.8.0.1", "10.7.0.1"):
        for device in ("bond0", "eno5"):
            why = refusal(device, links, ROUTES, {address})
            assert why == "it carries an ssh connection to this machine"
    assert refusal("eno5", links, ROUTES, {"198.51.100.5"}) is None


def test_every_hop_of_a_default_route_counts() -> None:
    routes = [{"dst": "default", "nexthops": [{"dev": "eno4"}, {"dev": "eno3"}]}]
    assert refusal("eno4", LINKS, routes, ()) == "it carries the default route"


def test_addresses_of_ssh_connections() -> None:
    local = [
        ("192.0.2.10", 22), ("::ffff:203.0.113.9", 22), ("192.0.2.99", 443), ("2001:db8::1", 22),
    ]  # fmt: skip
    assert own_addresses(local, "") == {"192.0.2.10", "203.0.113.9", "2001:db8::1"}
    assert own_addresses([], "198.51.100.77 51234 198.51.100.5 2222") == {"198.51.100.5"}


LEG = Leg("52:54:00:00:00:01", "10.10.1.2", "10.20.1.100")


def test_a_probe_is_a_whole_frame_and_known_again() -> None:
    data = frame(bytes.fromhex("020000000001"), LEG, 0xFFFFFFFF, 7)
    assert len(data) == 60
    assert data[:14].hex() == "525400000001" + "020000000001" + "0800"
    # The header's sum, its check included, is all ones.
    total = sum(int.from_bytes(data[14 + at : 16 + at]) for at in range(0, 20, 2))
    assert (total & 0xFFFF) + (total >> 16) == 0xFFFF
    assert number_of(data, 0xFFFFFFFF) == 7
    assert number_of(data, 1) is None
    assert number_of(data[:50], 0xFFFFFFFF) is None
    assert number_of(b"x" * 60, 1) is None


def test_the_largest_router_has_a_flow_of_its_own_for_each_probe() -> None:
    flows = range(MEMBER_PROBES * MAX_MEMBERS)
    ports = [struct.unpack("!HH", frame(bytes(6), LEG, 1, n, n)[34:38]) for n in flows]
    assert len({source for source, _ in ports}) == len(flows) == 4096
    # The sink counts by destination ports.
    assert all(destination < FIRST_DESTINATION_PORT for _, destination in ports)


def test_percentiles_are_those_of_the_probes_that_came() -> None:
    sent = dict.fromkeys(range(110), 1000000)
    received = {n: 1_000_000 + (n + 1) * 1000 for n in range(100)}
    found = latency(sent, received)
    assert found is not None
    assert (found.sent, found.lost) == (110, 10)
    assert (found.p50, found.p90, found.p99) == pytest.approx((50e-6, 90e-6, 99e-6))
    # The fastest took a microsecond; 100 of them say nothing of one in a thousand.
    assert (found.p999, found.jitter) == (None, pytest.approx(98e-6))
    many = latency(dict.fromkeys(range(1000), 0), {n: (n + 1) * 1000 for n in range(1000)})
    assert many is not None and many.p999 == pytest.approx(999e-6)
    assert latency({}, {}) is None
    lost = latency({1: 5}, {})
    assert lost is not None and lost.lost == 1
    assert (lost.p50, lost.p90, lost.p99, lost.jitter) == (None, None, None, None)


def test_frames_behind_a_later_one_of_their_flow_came_out_of_order() -> None:
    (source, target) = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with source, target:
        target.setblocking(False)
        for port, number in ((1, 1), (2, 7), (1, 3), (1, 2), (2, 6), (1, 3), (1, 4), (2, 8)):
            head = bytes(26) + bytes(8) + struct.pack("!HH", port, 9) + bytes(4)
            source.send(head + bytes.fromhex("be9be955") + struct.pack("!I", number) + bytes(10))
        source.send(bytes(60))
        source.send(b"short")
        # 2 after 3 of flow 1, and 6 after 7 of flow 2; a second 3 is not late.
        assert order(SimpleNamespace(socket=target)) == (8, 2)
        assert order(SimpleNamespace(socket=target)) == (0, 0)
