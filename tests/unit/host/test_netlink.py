"""Route netlink, from the bytes the kernel sent."""

from __future__ import annotations

import struct

import pytest

from vsrtune.host import netlink
from vsrtune.host.netlink import attribute, attributes, link_message, messages, nested, parse_link
from vsrtune.model.host import Link


def body(*parts: bytes, index: int = 7, flags: int = 1) -> bytes:
    return link_message(index=index, flags=flags) + b"".join(parts)


def u32(number: int) -> bytes:
    return struct.pack("=I", number)


def test_attributes_are_padded_and_read_back() -> None:
    for size in range(9):
        data = attribute(5, bytes(size)) + attribute(6, b"x")
        assert len(data) % 4 == 0
        assert attributes(data) == {5: bytes(size), 6: b"x"}
    assert attributes(nested(18, attribute(1, b"a\0"))) == {18: attribute(1, b"a\0")}


def test_a_link_of_our_kind() -> None:
    info = nested(
        netlink.LINKINFO,
        attribute(netlink.INFO_KIND, b"napi_macvtap\0"),
        nested(netlink.INFO_DATA, attribute(netlink.MACVLAN_MODE, u32(4))),
    )
    found = parse_link(
        body(
            attribute(netlink.IFNAME, b"nvt1\0"),
            attribute(netlink.LINK, u32(2)),
            attribute(netlink.MTU, u32(1500)),
            attribute(netlink.TXQLEN, u32(500)),
            attribute(netlink.ADDRESS, bytes.fromhex("0200000000aa")),
            info,
        )
    )
    assert found == Link(7, "nvt1", "napi_macvtap", 2, 0, 4, "02:00:00:00:00:aa", 1500, 500, True)


def test_a_lower_device_of_another_namespace_is_none_of_ours() -> None:
    parts = (attribute(netlink.LINK, u32(2)), attribute(netlink.LINK_NETNSID, u32(0)))
    assert parse_link(body(*parts, flags=0)) == Link(7, "")


@pytest.mark.parametrize("cut", range(0, 60, 3))
def test_what_is_cut_short_is_no_error(cut: int) -> None:
    whole = attribute(3, b"eth0\0") + attribute(4, u32(9)) + nested(18, attribute(1, b"veth\0"))
    assert set(attributes(whole[:cut])) <= {3, 4, 18}
    datagram = struct.pack("=IHHII", 16 + len(whole), 16, 0, 1, 0) + whole
    for _kind, _flags, content in messages(datagram[:cut]):
        assert len(content) <= len(whole)
