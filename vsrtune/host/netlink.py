# SPDX-License-Identifier: GPL-2.0-or-later
"""Network links of this host's kernel over route netlink, through pyroute2 0.7.

pyroute2 takes 130 ms and 12 MiB to import, and its import runs uname(1) and file(1). The functions
import it themselves, so that a command that reads no link runs without it; ``_load`` comes before
every other import of it. Its errors leave this module as OSError.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from vsrtune.core.closing import Closing
from vsrtune.model.host import Link

# Of include/uapi/linux/if_link.h: their IFLA_INFO_DATA are the attributes of macvlan. pyroute2
# knows no kinds out of the kernel's tree, and calls the attributes of macvtap by other names.
_MACVLAN_KINDS = ("macvlan", "macvtap", "napi_macvlan", "napi_macvtap")
# Of kmod/include/uapi/linux/napi_macvlan.h, from number 24 on.
_FIRST_OF_OURS = 24
_OURS = (
    ("IFLA_NAPI_MACVLAN_EVERY_QUEUE", "uint8"),
    ("IFLA_NAPI_MACVLAN_UPLINK", "uint8"),
    ("IFLA_NAPI_MACVLAN_THREAD", "uint32"),
)
_ETHERNET = 1  # ARPHRD_ETHER
_IFF_UP = 1
_LONGEST_NAME = 15
_ATTEMPTS = 8
_SECONDS = 10.0
_LOADING = threading.Lock()


def links() -> tuple[Link, ...]:
    """Every device of this network namespace.

    The kernel marks a list during which devices came or went, because devices may be missing in
    it; such a list is read again. Raises OSError: EAGAIN when that happened eight times in a row.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return request("dump")
        except BlockingIOError:
            continue
    return request("dump")


def link(name: str) -> Link | None:
    """The device of that name in this network namespace, or None. Raises OSError."""
    if not 0 < len(os.fsencode(name)) <= _LONGEST_NAME:
        return None
    try:
        found = request("get", ifname=name)
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        return None
    # The kernel also finds a device by its alternative names.
    return next((one for one in found if one.name == name), None)


def request(command: str, **attributes: Any) -> tuple[Link, ...]:
    """Send one request, a ``command`` of pyroute2's ``IPRoute.link``, and return the links of the
    answer. The mode of every macvlan kind is ``macvlan_mode``; the attributes of our module begin
    with ``napi_macvlan_``.

    Raises OSError with the kernel's errno, and the kernel's own words in the text; EAGAIN when
    devices came or went during a dump.
    """
    found: list[Link] = []
    with _os_errors(), _route()(ext_ack=True, nlm_generator=True) as sock:
        sock.settimeout(_SECONDS)
        answer = sock.link(command, **attributes)
        found.extend(parse_link(m) for m in answer if m.get("event") == "RTM_NEWLINK")
    return tuple(found)


def _load() -> None:
    """Import pyroute2, one thread at a time. Its modules import each other, so two threads that
    begin with different ones end in a deadlock, which Python solves with an ImportError."""
    with _LOADING:
        import pyroute2.iproute  # noqa: F401


@cache
def _route() -> Any:
    """The class of the sockets for requests; the kinds of ``_MACVLAN_KINDS`` are registered."""
    from pyroute2.iproute import IPRoute
    from pyroute2.netlink import NLM_F_ACK, nla
    from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

    # pyroute2 finds what a request names only in a map without gaps.
    between = ((f"IFLA_MACVLAN_{number}", "hex") for number in range(2, _FIRST_OF_OURS))
    names = ("IFLA_MACVLAN_UNSPEC", "none"), ("IFLA_MACVLAN_MODE", "uint32"), *between, *_OURS
    data = type("macvlan_data", (nla,), {"prefix": "IFLA_", "nla_map": names})
    ifinfmsg.ifinfo.register_link_kind(module=dict.fromkeys(_MACVLAN_KINDS, data))

    class Route(IPRoute):  # type: ignore[misc]
        def nlm_request(self, msg: Any, msg_type: int, msg_flags: int) -> Iterator[Any]:
            """Send once. IPRoute repeats a request for nine seconds that the kernel answers
            with EBUSY; who sends it here waits, or tells the operator at once."""
            # 0.7.2 asks for no acknowledgement of "get", and then no answer is awaited.
            msg["header"].update(type=msg_type, flags=msg_flags | NLM_F_ACK)
            yield from self.nlm_request_batch([msg])

    return Route


class LinkMonitor(Closing):
    """The kernel's notifications about the links of this network namespace (RTNLGRP_LINK), from
    when it is made until ``close``. ``buffer`` is the size of the socket's buffer in bytes.
    Raises OSError."""

    def __init__(self, buffer: int) -> None:
        _load()
        from pyroute2.netlink.rtnl import RTMGRP_LINK

        self._sock = _route()(rcvbuf=buffer)
        try:
            self._sock.bind(groups=RTMGRP_LINK)
        except KeyError as error:
            # pyroute2 has tried 1,024 addresses, whatever the kernel's reason was.
            self.close()
            raise OSError(errno.EADDRINUSE, "no address for route netlink is free") from error

    def close(self) -> None:
        """Listen no more."""
        self._sock.close()

    def fileno(self) -> int:
        """For select."""
        return int(self._sock.fileno())

    def read(self) -> list[tuple[Link, bool]]:
        """Wait for notifications. Return their links, and whether each still exists. Raises
        OSError: ENOBUFS when the buffer overflowed, so that notifications were lost."""
        with _os_errors():
            # Bridges report their ports in this group, too, with a family and incompletely.
            return [
                (parse_link(message), message["event"] == "RTM_NEWLINK")
                for message in self._sock.get()
                if message.get("event") in ("RTM_NEWLINK", "RTM_DELLINK")
                and message["family"] == socket.AF_UNSPEC
            ]


def parse_link(message: Any) -> Link:
    """Convert an ``ifinfmsg`` of pyroute2."""
    info = message.get_attr("IFLA_LINKINFO")
    kind = _text(info.get_attr("IFLA_INFO_KIND")) if info else ""
    data = info.get_attr("IFLA_INFO_DATA") if kind in _MACVLAN_KINDS else None
    elsewhere = message.get_attr("IFLA_LINK_NETNSID") is not None
    # pyroute2 takes every address for one of six bytes.
    ethernet = message["ifi_type"] == _ETHERNET
    return Link(
        index=message["index"],
        name=_text(message.get_attr("IFLA_IFNAME")),
        kind=kind,
        lower=0 if elsewhere else message.get_attr("IFLA_LINK", 0),
        master=message.get_attr("IFLA_MASTER", 0),
        mode=data.get_attr("IFLA_MACVLAN_MODE", 0) if data else 0,
        mac=message.get_attr("IFLA_ADDRESS", "") if ethernet else "",
        mtu=message.get_attr("IFLA_MTU", 0),
        queue=message.get_attr("IFLA_TXQLEN", 0),
        up=bool(message["flags"] & _IFF_UP),
        every_queue=_flag(data, "IFLA_NAPI_MACVLAN_EVERY_QUEUE"),
        uplink=_flag(data, "IFLA_NAPI_MACVLAN_UPLINK"),
        napi_thread=data.get_attr("IFLA_NAPI_MACVLAN_THREAD") if data else None,
    )


def _flag(data: Any, name: str) -> bool | None:
    value = data.get_attr(name) if data else None
    return None if value is None else bool(value)


def _text(value: str | bytes | None) -> str:
    """pyroute2 leaves what is not UTF-8 as it is."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value or ""


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise errors of pyroute2 as OSError with an errno."""
    _load()
    from pyroute2.netlink.exceptions import (
        NetlinkDecodeError,
        NetlinkDumpInterrupted,
        NetlinkError,
    )

    try:
        yield
    except NetlinkDumpInterrupted as error:
        text = "network devices came or went while the kernel listed them"
        raise OSError(errno.EAGAIN, text) from error
    except NetlinkError as error:
        # 0.7.2 raises the warning that comes with an acknowledgement as error 0.
        if error.code != 0:
            # Its second argument is the kernel's message, or else what strerror says.
            text, words = os.strerror(error.code), error.args[1]
            text = text if words == text else f"{text} ({_text(words)})"
            raise OSError(error.code, text) from error
    except (NetlinkDecodeError, KeyError, struct.error) as error:
        text = f"pyroute2 cannot read an answer of route netlink: {error!r}"
        raise OSError(errno.EBADMSG, text) from error
