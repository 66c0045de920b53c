"""Route netlink: what becomes of the kernel's answers, from the bytes that it sends."""

from __future__ import annotations

import errno
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyroute2 import config
from pyroute2.netlink.rtnl.marshal import MarshalRtnl

from vsrtune.attach.host import LiveHost
from vsrtune.attach.plan.steps import EVERY_QUEUE, UPLINK, MadeDevice
from vsrtune.host import netlink
from vsrtune.host.netlink import LinkMonitor, parse_link, request
from vsrtune.model.host import Link

ERROR, DONE, NEWLINK, DELLINK = 2, 3, 16, 17
MULTI, INTERRUPTED, WORDS = 0x2, 0x10, 0x200
ADDRESS, IFNAME, MTU, LINK, TXQLEN, LINKINFO, NETNSID = 1, 3, 4, 5, 13, 18, 37
ETHERNET, TUNNEL = 1, 768


def message(kind: int, body: bytes, flags: int = 0) -> bytes:
    """One message; who sends it gives it its number."""
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body


def attribute(number: int, content: bytes) -> bytes:
    size = 4 + len(content)
    return struct.pack("=HH", size, number) + content + bytes(-size % 4)


def u32(number: int) -> bytes:
    return struct.pack("=I", number)


def link(*parts: bytes, device: int = ETHERNET, up: int = 1, family: int = 0) -> bytes:
    """An ifinfomsg of index 7 and its attributes."""
    return struct.pack("=BxHiII", family, device, 7, up, 0) + b"".join(parts)


def parsed(body: bytes) -> Link:
    netlink._route()
    (found,) = MarshalRtnl().parse(message(NEWLINK, body))
    return parse_link(found)


def our_kind(mode: int, *more: bytes) -> bytes:
    data = attribute(2, attribute(1, u32(mode)) + b"".join(more))
    return link(
        attribute(IFNAME, b"nvt1\0"),
        attribute(LINK, u32(2)),
        attribute(MTU, u32(1500)),
        attribute(TXQLEN, u32(500)),
        attribute(ADDRESS, bytes.fromhex("0200000000aa")),
        attribute(LINKINFO, attribute(1, b"napi_macvtap\0") + data),
    )


# 32 is a mode that no kernel has yet.
@pytest.mark.parametrize("mode", [1, 2, 4, 8, 16, 32])
def test_a_link_of_our_kind(mode: int) -> None:
    expected = Link(7, "nvt1", "napi_macvtap", 2, 0, mode, "02:00:00:00:00:aa", 1500, 500, True)
    assert parsed(our_kind(mode)) == expected


def test_attributes_of_our_module() -> None:
    found = parsed(our_kind(4, attribute(24, b"\0"), attribute(25, b"\1"), attribute(26, u32(70))))
    assert (found.every_queue, found.uplink, found.napi_thread) == (False, True, 70)
    older = parsed(our_kind(4))
    assert (older.every_queue, older.uplink, older.napi_thread) == (None, None, None)


def test_numbers_are_those_of_the_header() -> None:
    header = Path(__file__).parents[3] / "kmod/include/uapi/linux/napi_macvlan.h"
    named = re.findall(r"^\t(IFLA_\w+)(?: = (\d+))?,$", header.read_text(), re.MULTILINE)
    assert int(named[0][1]) == netlink._FIRST_OF_OURS
    assert [name for name, _ in named] == [name for name, _ in netlink._OURS]


def test_a_lower_device_of_another_namespace_is_none_of_ours() -> None:
    body = link(attribute(LINK, u32(2)), attribute(NETNSID, u32(0)), up=0)
    assert parsed(body) == Link(7, "")


def test_a_tunnel_has_no_mac() -> None:
    body = link(attribute(ADDRESS, bytes(4)), device=TUNNEL)
    assert parsed(body) == Link(7, "", up=True)


def test_names_are_bytes() -> None:
    assert parsed(link(attribute(IFNAME, b"v\xff1\0"))).name == "v\\xff1"


class Kernel:
    """Stands in for a netlink socket. Each request is answered by the next of ``answers``, its
    datagrams; a datagram that does not come is a timeout."""

    answers: Sequence[Sequence[bytes]]
    requests: list[bytes]

    def __init__(self, *_: object) -> None:
        self.waiting: list[bytes] = []

    def sendto(self, data: bytes, address: tuple[int, int]) -> int:
        numbered = []
        for datagram in type(self).answers[len(self.requests)]:
            whole, at = bytearray(datagram), 0
            while at < len(whole):
                whole[at + 8 : at + 12] = data[8:12]
                at += struct.unpack_from("=I", whole, at)[0]
            numbered.append(bytes(whole))
        self.requests.append(bytes(data))
        self.waiting = numbered
        return len(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        if not self.waiting:
            raise TimeoutError("timed out")
        return self.waiting.pop(0)

    def recvfrom_into(self, data: bytearray, size: int, flags: int) -> tuple[int, None]:
        return (len(self.waiting[0]) if self.waiting else 0), None

    def setsockopt(self, *_: object) -> None: ...
    def settimeout(self, seconds: float) -> None: ...
    def setblocking(self, blocking: bool) -> None: ...
    def bind(self, address: tuple[int, int]) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> type[Kernel]:
    monkeypatch.setattr(config, "SocketBase", Kernel)
    monkeypatch.setattr(Kernel, "requests", [], raising=False)
    monkeypatch.setattr(Kernel, "answers", [], raising=False)
    return Kernel


def refusal(code: int, words: str = "") -> bytes:
    """struct nlmsgerr: the code, the request, and the kernel's words."""
    body = struct.pack("=i", -code) + message(NEWLINK, link())
    if words:
        body += attribute(1, words.encode() + b"\0")
    return message(ERROR, body, WORDS if words else 0)


ACKNOWLEDGED = refusal(0)
PART = message(NEWLINK, our_kind(4), MULTI)
END = message(DONE, struct.pack("=i", 0), MULTI)


def test_a_refusal_is_an_oserror_with_the_kernels_words(kernel: type[Kernel]) -> None:
    kernel.answers = [[refusal(errno.EINVAL, "mode must be 1")], [refusal(errno.ENODEV)]]
    with pytest.raises(OSError) as refused:
        request("add", ifname="x", kind="napi_macvtap", macvlan_mode=3)
    assert (refused.value.errno, refused.value.strerror) == (
        errno.EINVAL,
        "Invalid argument (mode must be 1)",
    )
    with pytest.raises(OSError) as refused:
        request("del", index=7)
    assert (refused.value.errno, refused.value.strerror) == (errno.ENODEV, "No such device")


@pytest.mark.parametrize(
    ("kind", "mode", "vlan", "data"),
    [
        ("napi_macvtap", 4, 0, attribute(2, attribute(1, u32(4)))),
        ("macvtap", 8, 0, attribute(2, attribute(1, u32(8)))),
        ("vlan", 0, 7, attribute(2, attribute(1, struct.pack("=H", 7)))),
        ("bridge", 0, 0, b""),
    ],
)
def test_what_is_asked_of_the_kernel(
    kernel: type[Kernel], kind: str, mode: int, vlan: int, data: bytes
) -> None:
    kernel.answers = [[ACKNOWLEDGED]]
    device = MadeDevice("nvt1", "", "02:00:00:00:00:AA", mode, 1500, 500, kind, vlan=vlan)
    LiveHost().make(device, 2)
    (asked,) = kernel.requests
    assert struct.unpack_from("=IHH", asked) == (len(asked), NEWLINK, 0x605)
    parts = [
        attribute(LINKINFO, attribute(1, kind.encode() + b"\0") + data),
        attribute(IFNAME, b"nvt1\0"),
        attribute(LINK, u32(2)),
        attribute(MTU, u32(1500)),
        attribute(TXQLEN, u32(500)),
        attribute(ADDRESS, bytes.fromhex("0200000000aa")),
    ]
    assert all(part in asked for part in parts)
    assert len(asked) == 32 + sum(map(len, parts))


def test_a_flag_is_set_by_its_attribute(kernel: type[Kernel]) -> None:
    off = message(NEWLINK, our_kind(4, attribute(24, b"\0"), attribute(25, b"\1")))
    kernel.answers = [[off], [off], [off], [ACKNOWLEDGED]]
    host = LiveHost()
    assert (host.flag("nvt1", EVERY_QUEUE), host.flag("nvt1", UPLINK)) == (False, True)
    host.set_flag("nvt1", EVERY_QUEUE)
    data = attribute(2, attribute(24, b"\1"))
    assert attribute(LINKINFO, attribute(1, b"napi_macvtap\0") + data) in kernel.requests[-1]


def test_an_older_module_is_asked_for_nothing(kernel: type[Kernel]) -> None:
    """It ignores attributes that it does not know, and says that all went well."""
    kernel.answers = [[message(NEWLINK, our_kind(4))]]
    with pytest.raises(OSError, match="attribute uplink of nvt1") as refused:
        LiveHost().set_flag("nvt1", UPLINK)
    assert refused.value.errno == errno.EOPNOTSUPP
    assert len(kernel.requests) == 1


def test_a_warning_is_no_error(kernel: type[Kernel]) -> None:
    kernel.answers = [[refusal(0, "this attribute has no effect")]]
    assert request("set", index=7, txqlen=5) == ()


def interrupted(part: bytes) -> bytes:
    """The same message, the first that the kernel wrote after a device had come or gone."""
    flags = struct.unpack_from("=H", part, 6)[0] | INTERRUPTED
    return part[:6] + struct.pack("=H", flags) + part[8:]


def test_an_interrupted_dump_is_repeated(kernel: type[Kernel]) -> None:
    broken = [PART, interrupted(PART), END]
    kernel.answers = [broken, broken, [PART + PART, END]]
    assert len(netlink.links()) == 2
    assert len(kernel.requests) == 3


def test_what_pyroute2_cannot_read_is_an_error(kernel: type[Kernel]) -> None:
    kernel.answers = [[message(NEWLINK, b"\0" * 7)]]
    with pytest.raises(OSError, match="cannot read") as failed:
        netlink.link("nvt1")
    assert failed.value.errno == errno.EBADMSG


def test_one_link_by_its_name(kernel: type[Kernel]) -> None:
    one = message(NEWLINK, our_kind(4))
    kernel.answers = [[one, ACKNOWLEDGED], [one], [refusal(errno.ENODEV)], [refusal(errno.EPERM)]]
    found = netlink.link("nvt1")
    assert found is not None
    assert found.index == 7
    # The kernel finds it by an alternative name.
    assert netlink.link("other") is None
    assert netlink.link("none") is None
    with pytest.raises(PermissionError):
        netlink.link("nvt1")
    assert len(kernel.requests) == 4
    assert netlink.link("") is netlink.link("sixteen-bytes-xx") is None
    assert len(kernel.requests) == 4


FIRST = """
import threading
from vsrtune.host import netlink
both = threading.Barrier(2)
failed = []
def at_once(work):
    both.wait()
    try:
        work()
    except Exception as error:
        failed.append(error)
begun = [threading.Thread(target=at_once, args=(work,))
         for work in (lambda: netlink.link("lo"), lambda: netlink.LinkMonitor(1 << 16).close())]
for thread in begun:
    thread.start()
for thread in begun:
    thread.join()
raise SystemExit(repr(failed) if failed else 0)
"""


def test_two_threads_use_pyroute2_first_at_the_same_time() -> None:
    """One of them had an ImportError: each had begun with another module of pyroute2."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bridge_ports_are_no_news(kernel: type[Kernel]) -> None:
    port = message(NEWLINK, link(attribute(IFNAME, b"p0\0"), family=7))
    gone = message(DELLINK, our_kind(4))
    with LinkMonitor(4096) as monitor:
        monitor._sock._sock.waiting = [port + message(NEWLINK, our_kind(4)), gone]
        (new,), (old,) = monitor.read(), monitor.read()
    assert (new[1], old[1]) == (True, False)
    assert new[0] == old[0] == parsed(our_kind(4))


def test_a_listener_that_the_kernel_refuses_is_an_error(
    kernel: type[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Kernel, address: tuple[int, int]) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(Kernel, "bind", refuse)
    with pytest.raises(OSError, match="no address"):
        LinkMonitor(4096)
