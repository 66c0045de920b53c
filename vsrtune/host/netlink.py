"""Network links of this host's kernel over route netlink, through pyroute2 0.7.

pyroute2 takes 130 ms and 12 MiB to import. The functions import it themselves, so that whoever
reads no link does without it. Its errors leave this module as OSError.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from vsrtune.core.closing import Closing
from vsrtune.model.host import Link

# Of include/uapi/linux/if_link.h: their IFLA_INFO_DATA are the attributes of macvlan. pyroute2
# knows the kinds of our module no more than other kinds out of the kernel's tree.
_MACVLAN_KINDS = ("macvlan", "macvtap", "napi_macvlan", "napi_macvtap")
_ETHERNET = 1  # ARPHRD_ETHER
_IFF_UP = 1
_LONGEST_NAME = 15

_DONE, _NEWLINK, _DELLINK = 3, 16, 17
_NEWS = (_NEWLINK, _DELLINK)
_HEADER = 16
_MULTI, _ACK, _DUMP_INTERRUPTED = 0x2, 0x4, 0x10
_ATTEMPTS = 8
_SECONDS = 10.0


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
    """Send one request, ``IPRoute.link`` of pyroute2, have it acknowledged, and return the links
    of the answer. The mode of every macvlan kind is ``macvlan_mode``.

    Raises OSError with the kernel's errno, and the kernel's own words in the text; ETIMEDOUT when
    no answer comes, EAGAIN when a dump was interrupted, EBADMSG when the answer makes no sense.
    """
    with _os_errors():
        from pyroute2.iproute import IPRoute

        register_kinds()
        # A generator: a thousand links at once are 200,000 objects.
        with IPRoute(ext_ack=True, nlm_generator=True) as sock:
            sock.settimeout(_SECONDS)
            sock.nlm_request = partial(_exchange, sock)
            answer = sock.link(command, **attributes)
            return tuple(parse_link(m) for m in answer if m["header"]["type"] == _NEWLINK)


@cache
def register_kinds() -> None:
    """Tell pyroute2 what the attributes of the macvlan kinds are."""
    from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg, macvx_data

    ifinfmsg.ifinfo.register_link_kind(module=dict.fromkeys(_MACVLAN_KINDS, macvx_data))


def _exchange(sock: Any, message: Any, msg_type: int, msg_flags: int) -> Iterator[Any]:
    """One request and the messages of its answer, in place of IPRoute.nlm_request. That sleeps
    and sends again for nine seconds when the kernel answers EBUSY, for which our callers have
    times of their own. It also takes an answer for complete that ends too early, or whose last
    message alone says that the dump was interrupted."""
    from pyroute2.netlink.exceptions import NetlinkDumpInterrupted, NetlinkError

    complete = False

    def check(part: Any) -> None:
        """``get`` calls this with every message of the answer, the last one included."""
        nonlocal complete
        flags, last = part["header"]["flags"], part["header"]["type"] == _DONE
        if flags & _DUMP_INTERRUPTED:
            raise NetlinkDumpInterrupted
        if last:
            (code,) = struct.unpack_from("=i", part.data, part.offset + _HEADER)
            if code < 0:
                raise NetlinkError(-code)
        complete = last or not flags & _MULTI

    number = sock.addr_pool.alloc()
    sock.put(message, msg_type, msg_flags, msg_seq=number)
    try:
        yield from sock.get(msg_seq=number, terminate=check)
    except NetlinkError as error:
        # 0.7.2 raises the warning that comes with an acknowledgement, error 0.
        if error.code != 0 or not msg_flags & _ACK:
            raise
    else:
        if not complete:
            raise TimeoutError


class LinkMonitor(Closing):
    """The kernel's notifications about the links of this network namespace (RTNLGRP_LINK), from
    when it is made until ``close``. ``buffer`` is the size of the socket's buffer in bytes, None
    for pyroute2's, 1 MiB as far as net.core.rmem_max lets it. Raises OSError."""

    def __init__(self, buffer: int | None = None) -> None:
        with _os_errors():
            from pyroute2.iproute import IPRoute
            from pyroute2.netlink.rtnl import RTMGRP_LINK

            register_kinds()
            self._sock = IPRoute() if buffer is None else IPRoute(rcvbuf=buffer)
            try:
                self._sock.bind(groups=RTMGRP_LINK)
                self._sock.setblocking(False)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Listen no more."""
        self._sock.close()

    def fileno(self) -> int:
        """For select."""
        return int(self._sock.fileno())

    def read(self) -> list[tuple[Link, bool]]:
        """The links of the next notifications, and whether each still exists; empty when there
        is none. Raises OSError: ENOBUFS when the buffer overflowed, so that notifications were
        lost."""
        with _os_errors():
            try:
                heard = self._sock.get()
            except BlockingIOError:
                return []
            news = []
            for message in heard:
                header = message["header"]
                if header["error"] is not None:
                    raise header["error"]
                # Bridges report their ports in this group, too, with a family and incompletely.
                if header["type"] in _NEWS and message["family"] == socket.AF_UNSPEC:
                    news.append((parse_link(message), header["type"] == _NEWLINK))
            return news


def parse_link(message: Any) -> Link:
    """Convert an ``ifinfmsg`` of pyroute2. Raises OSError when an attribute makes no sense."""
    info = _attribute(message, "IFLA_LINKINFO", dict)
    kind = _text(_attribute(info, "IFLA_INFO_KIND", (str, bytes)))
    data = _attribute(info, "IFLA_INFO_DATA", dict) if kind in _MACVLAN_KINDS else None
    elsewhere = _attribute(message, "IFLA_LINK_NETNSID", int) is not None
    # pyroute2 takes every address for one of six bytes.
    ethernet = message["ifi_type"] == _ETHERNET
    return Link(
        index=message["index"],
        name=_text(_attribute(message, "IFLA_IFNAME", (str, bytes))),
        kind=kind,
        lower=0 if elsewhere else _attribute(message, "IFLA_LINK", int) or 0,
        master=_attribute(message, "IFLA_MASTER", int) or 0,
        mode=_mode(_attribute(data, "IFLA_MACVLAN_MODE", (int, str))),
        mac=_text(_attribute(message, "IFLA_ADDRESS", str)) if ethernet else "",
        mtu=_attribute(message, "IFLA_MTU", int) or 0,
        queue=_attribute(message, "IFLA_TXQLEN", int) or 0,
        up=bool(message["flags"] & _IFF_UP),
    )


def _attribute(message: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """The attribute, or None. pyroute2 returns the bytes of one that it cannot decode."""
    value = message.get_attr(name) if message is not None else None
    if value is not None and not isinstance(value, kind):
        raise OSError(errno.EBADMSG, f"route netlink answered with a malformed {name}")
    return value


def _text(value: str | bytes | None) -> str:
    """pyroute2 leaves what is not UTF-8 as it is."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value or ""


def _mode(value: int | str | None) -> int:
    """The number of a mode, for which pyroute2 has names."""
    from pyroute2.netlink.rtnl.ifinfmsg import macvx_data

    if value is None or isinstance(value, int):
        return value or 0
    return next(number for number, name in macvx_data.mode.value_map.items() if name == value)


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise errors of pyroute2 and timeouts as OSError with an errno."""
    from pyroute2.netlink.exceptions import (
        NetlinkDecodeError,
        NetlinkDumpInterrupted,
        NetlinkError,
    )

    try:
        yield
    except TimeoutError as error:
        text = f"the kernel did not answer a request of route netlink in {_SECONDS:g} s"
        raise OSError(errno.ETIMEDOUT, text) from error
    except NetlinkDumpInterrupted as error:
        text = "network devices came or went while the kernel listed them"
        raise OSError(errno.EAGAIN, text) from error
    except NetlinkError as error:
        # Its second argument is the kernel's message, or else what strerror says.
        text, words = os.strerror(error.code), error.args[1]
        text = text if words == text else f"{text} ({_text(words)})"
        raise OSError(error.code, text) from error
    except (NetlinkDecodeError, KeyError, struct.error) as error:
        raise OSError(errno.EBADMSG, f"an answer of route netlink is malformed: {error}") from error
