"""Network links of this host's kernel over route netlink.

This is raw netlink without a library, because the kinds of devices that matter here are our
module's, and no library knows their IFLA_INFO_DATA. Values are in host byte order
(include/uapi/linux/netlink.h, rtnetlink.h, if_link.h).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

from vsrtune.model.host import Link

NEWLINK, DELLINK, GETLINK = 16, 17, 18
REQUEST, MULTI, ACK, DUMP, CREATE, EXCL = 0x1, 0x2, 0x4, 0x300, 0x400, 0x200
IFF_UP = 1

ADDRESS, IFNAME, MTU, LINK, MASTER, TXQLEN, LINKINFO = 1, 3, 4, 5, 10, 13, 18
LINK_NETNSID = 37
INFO_KIND, INFO_DATA = 1, 2
MACVLAN_MODE = VLAN_ID = 1

_ERROR, _DONE = 2, 3
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
ACK_TLVS = 0x200
_HEADER = struct.Struct("=IHHII")
_IFINFO = struct.Struct("=BxHiII")
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF
_NESTED = 0x8000
_BUFFER = 1 << 18
_SECONDS = 10.0


def attribute(number: int, content: bytes) -> bytes:
    """One attribute, padded."""
    size = _ATTRIBUTE.size + len(content)
    return _ATTRIBUTE.pack(size, number) + content + bytes(-size % 4)


def nested(number: int, *attributes: bytes) -> bytes:
    """One attribute that contains others."""
    return attribute(number | _NESTED, b"".join(attributes))


def attributes(data: bytes) -> dict[int, bytes]:
    """The attributes in ``data`` by number; the last one wins. One that is cut short at the end is
    left out."""
    found: dict[int, bytes] = {}
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, number = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size or at + size > len(data):
            break
        found[number & _TYPE_MASK] = data[at + _ATTRIBUTE.size : at + size]
        at += size + -size % 4
    return found


def link_message(*, index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    """``struct ifinfomsg``; the flags in ``change`` are set to those in ``flags``."""
    return _IFINFO.pack(socket.AF_UNSPEC, 0, index, flags, change)


def parse_link(body: bytes) -> Link:
    """Read an RTM_NEWLINK message without its header. Raises OSError when it is cut short."""
    if len(body) < _IFINFO.size:
        raise _cut_short()
    _, _, index, flags, _ = _IFINFO.unpack_from(body)
    found = attributes(body[_IFINFO.size :])
    info = attributes(found.get(LINKINFO, b""))
    kind = _text(info.get(INFO_KIND, b""))
    mode = 0
    if "macv" in kind:
        mode = _number(attributes(info.get(INFO_DATA, b"")).get(MACVLAN_MODE))
    return Link(
        index=index,
        name=_text(found.get(IFNAME, b"")),
        kind=kind,
        lower=0 if LINK_NETNSID in found else _number(found.get(LINK)),
        master=_number(found.get(MASTER)),
        mode=mode,
        mac=found.get(ADDRESS, b"").hex(":"),
        mtu=_number(found.get(MTU)),
        queue=_number(found.get(TXQLEN)),
        up=bool(flags & IFF_UP),
    )


def links() -> tuple[Link, ...]:
    """Every device of this network namespace. Raises OSError."""
    return tuple(parse_link(body) for body in request(GETLINK, DUMP, link_message()))


def request(kind: int, flags: int, body: bytes) -> list[bytes]:
    """Send one request to the kernel, have it acknowledged, and return the messages of the answer.

    Raises OSError with the kernel's errno; the text includes the kernel's own message.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(_SECONDS)
        sock.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)
        sock.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        size = _HEADER.size + len(body)
        sock.send(_HEADER.pack(size, kind, flags | REQUEST | ACK, 1, 0) + body)
        answer: list[bytes] = []
        while True:
            for type_, message_flags, content in messages(sock.recv(_BUFFER)):
                if type_ == _ERROR:
                    acknowledged(message_flags, content)
                    return answer
                if type_ == _DONE:
                    return answer
                answer.append(content)


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and content of each message in a datagram."""
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind, flags, _, _ = _HEADER.unpack_from(data, at)
        if size < _HEADER.size:
            return
        yield kind, flags, data[at + _HEADER.size : at + size]
        at += size + -size % 4


def acknowledged(flags: int, content: bytes) -> None:
    """Raise OSError unless the acknowledgement (struct nlmsgerr) reports success. With
    NETLINK_CAP_ACK, only the header of the request precedes the kernel's message."""
    if len(content) < 4:
        raise _cut_short()
    (code,) = struct.unpack_from("=i", content)
    if code == 0:
        return
    words = ""
    if flags & ACK_TLVS:
        words = _text(attributes(content[4 + _HEADER.size :]).get(1, b""))
    # Error numbers end at 4095 (MAX_ERRNO).
    text = os.strerror(min(-code, 4095))
    raise OSError(-code, f"{text} ({words})" if words else text)


def _cut_short() -> OSError:
    return OSError(errno.EBADMSG, "an answer of route netlink is cut short")


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="backslashreplace")


def _number(content: bytes | None) -> int:
    return struct.unpack("=I", content)[0] if content is not None and len(content) == 4 else 0
