#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Frames and links for netns.sh: what the shell and iproute2 cannot do.

    frames.py mode DEVICE MODE        set the mode of a device that exists (1 2 4 8)
    frames.py add KIND NAME LOWER MODE  make a device with a mode
    frames.py send ADDRESS PORT COUNT [broadcast]   UDP datagrams
    frames.py flood ADDRESS PORT      the same until killed; errors are ignored
    frames.py count PORT COUNT SECONDS  prints how many came, after COUNT or SECONDS
    frames.py tap DEVICE COUNT SECONDS  prints how many frames /dev/tapN gave
    frames.py write DEVICE COUNT      frames from the guest's side, by write(), and this task's id
    frames.py hold DEVICE QUEUES      opens /dev/tapN that often and waits to be killed

Exit 1 and a line on stderr when the kernel refuses.
"""

import contextlib
import os
import select
import socket
import struct
import sys
import time

RTM_NEWLINK, NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 16, 1, 4, 0x200, 0x400
IFLA_IFNAME, IFLA_LINK, IFLA_LINKINFO, IFLA_INFO_KIND, IFLA_INFO_DATA = 3, 5, 18, 1, 2
IFLA_MACVLAN_MODE = 1
SO_RCVBUFFORCE = 33  # Python has no name for it
VNET_HEADER = 10  # bytes before each frame of /dev/tapN


def attribute(kind: int, data: bytes) -> bytes:
    """One netlink attribute, padded to 4 bytes."""
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def newlink(flags: int, index: int, attributes: bytes) -> None:
    """Send one RTM_NEWLINK; OSError when the kernel says no."""
    body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, 0, 0) + attributes
    flags |= NLM_F_REQUEST | NLM_F_ACK
    message = struct.pack("=IHHII", 16 + len(body), RTM_NEWLINK, flags, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(message)
        (error,) = struct.unpack_from("=i", netlink.recv(65536), 16)
    if error:
        raise OSError(-error, os.strerror(-error))


def info(kind: str, mode: int) -> bytes:
    data = attribute(IFLA_INFO_DATA, attribute(IFLA_MACVLAN_MODE, struct.pack("=I", mode)))
    return attribute(IFLA_LINKINFO, attribute(IFLA_INFO_KIND, kind.encode()) + data)


def kind_of(device: str) -> str:
    taps = os.path.isdir(f"/sys/class/net/{device}/napi_macvtap")
    return "napi_macvtap" if taps else "napi_macvlan"


def mode(device: str, number: str) -> None:
    newlink(0, socket.if_nametoindex(device), info(kind_of(device), int(number)))


def add(kind: str, name: str, lower: str, number: str) -> None:
    link = attribute(IFLA_LINK, struct.pack("=I", socket.if_nametoindex(lower)))
    name_attribute = attribute(IFLA_IFNAME, name.encode() + b"\0")
    newlink(NLM_F_CREATE | NLM_F_EXCL, 0, name_attribute + link + info(kind, int(number)))


def datagrams() -> socket.socket:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    return udp


def send(address: str, port: str, count: str, *_: str) -> None:
    with datagrams() as udp:
        for number in range(int(count)):
            udp.sendto(b"%d" % number, (address, int(port)))
            if number % 50 == 49:
                time.sleep(0.002)  # the receiver's socket buffer is not what is tested


def flood(address: str, port: str) -> None:
    with datagrams() as udp:
        while True:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    udp.sendto(b"x" * 64, (address, int(port)))
            time.sleep(0.005)


def count(port: str, wanted: str, seconds: str) -> None:
    got, end = 0, time.monotonic() + float(seconds)
    with datagrams() as udp:
        udp.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 22)
        udp.bind(("", int(port)))
        while got < int(wanted) and (left := end - time.monotonic()) > 0:
            udp.settimeout(left)
            with contextlib.suppress(TimeoutError):
                udp.recv(2048)
                got += 1
    print(got)


def open_tap(device: str) -> int:
    return os.open(f"/dev/tap{socket.if_nametoindex(device)}", os.O_RDWR | os.O_NONBLOCK)


def tap(device: str, wanted: str, seconds: str) -> None:
    got, end, fd = 0, time.monotonic() + float(seconds), open_tap(device)
    while got < int(wanted) and (left := end - time.monotonic()) > 0:
        if select.select([fd], [], [], left)[0]:
            os.read(fd, 65536)
            got += 1
    print(got)


def write(device: str, frames: str) -> None:
    """Frames of a protocol for experiments, to everybody, from the device's own address."""
    with open(f"/sys/class/net/{device}/address", encoding="ascii") as text:
        source = bytes.fromhex(text.read().strip().replace(":", ""))
    fd = open_tap(device)
    frame = b"\xff" * 6 + source + b"\x88\xb5" + b"n" * 46
    for _ in range(int(frames)):
        os.write(fd, b"\0" * VNET_HEADER + frame)
    print(os.getpid(), flush=True)
    sys.stdin.read()


def hold(device: str, queues: str) -> None:
    fds = [open_tap(device) for _ in range(int(queues))]
    print(len(fds), flush=True)
    time.sleep(3600)


COMMANDS = {
    "mode": mode,
    "add": add,
    "send": send,
    "flood": flood,
    "count": count,
    "tap": tap,
    "write": write,
    "hold": hold,
}

if __name__ == "__main__":
    try:
        COMMANDS[sys.argv[1]](*sys.argv[2:])
    except OSError as error:
        sys.exit(f"frames.py {' '.join(sys.argv[1:])}: {error.strerror}")
