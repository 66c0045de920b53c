#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Frames and links for netns.sh: what the shell and iproute2 cannot do.

    frames.py mode DEVICE MODE        set the mode of a device that exists (1 2 4 8)
    frames.py with KIND NAME LOWER ATTRIBUTE  make a device with a 4-byte attribute of macvlan
    frames.py add KIND NAME LOWER MODE  make a device with a mode
    frames.py set DEVICE every-queue|uplink 0|1  set an attribute of a napi_macvtap
    frames.py get DEVICE every-queue|uplink|thread  prints an attribute; exit 3 without it
    frames.py send ADDRESS PORT COUNT [broadcast]   UDP datagrams
    frames.py burst ADDRESS PORT COUNT SIZE   the same of a size, without a pause: says that
                                  it is ready, and begins when a line arrives on stdin
    frames.py flood ADDRESS PORT      the same until killed; errors are ignored
    frames.py count PORT COUNT SECONDS  prints how many came, after COUNT or SECONDS
    frames.py tap DEVICE COUNT SECONDS  prints how many frames /dev/tapN gave
    frames.py write DEVICE COUNT      frames from the guest's side, by write(); prints
                                  this task's id and waits to be killed
    frames.py hold DEVICE QUEUES      opens /dev/tapN that often and waits to be killed
    frames.py drain DEVICE QUEUES     the same, and reads what comes
    frames.py resize DEVICE SECONDS   ring lengths of 0, 1 and 500, at random
    frames.py largest DEVICE NAME SECONDS  reads a statistic over and over; the largest value
    frames.py rtnl DEVICE             holds the RTNL lock: prints when, until a line arrives on
                                  stdin. Not of ours: statistics of ours look for queues.
    frames.py starve DEVICE SECONDS   keeps the NAPI thread from its CPU, which is made CPU 0
    frames.py unthread DEVICE         the same, and ends the thread by netlink, for a device under
                                  flood; prints whether its id was told meanwhile. Exit 3 when
                                  this kernel cannot do it.
    frames.py busypoll DEVICE         has its NAPI polled by a thread without a pause. Exit 3 when
                                  this kernel cannot do it.
    frames.py stamps DEVICE           sets hardware timestamps, to off
    frames.py queues DEVICE           prints its queues and their NAPI instances, as queue-get of
                                  generic netlink tells. Exit 3 when this kernel cannot tell.
    frames.py qstats DEVICE           the same for its statistics, of qstats-get
    frames.py log                     number of the last line of the kernel's log
    frames.py complaints NUMBER       lines since in which the kernel complains of itself

Exit 1 and a line on stderr when the kernel refuses.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import random
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

RTM_NEWLINK, NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 16, 1, 4, 0x200, 0x400
IFLA_IFNAME, IFLA_LINK, IFLA_LINKINFO, IFLA_INFO_KIND, IFLA_INFO_DATA = 3, 5, 18, 1, 2
IFLA_MACVLAN_MODE = 1
RTM_GETLINK = 18
ATTRIBUTES = {"every-queue": 24, "uplink": 25, "thread": 26}  # linux/napi_macvlan.h
SO_RCVBUFFORCE = 33  # Python has no name for it
VNET_HEADER = 10  # bytes before each frame of /dev/tapN
SIOCETHTOOL, ETHTOOL_GSTRINGS, ETHTOOL_GSTATS, ETHTOOL_GSSET_INFO = 0x8946, 0x1B, 0x1D, 0x37
ETH_SS_STATS, NAME_LENGTH = 1, 32
NETDEV_CMD_QUEUE_GET, NETDEV_CMD_NAPI_GET, NETDEV_CMD_NAPI_SET = 10, 11, 14
NAPI_IFINDEX, NAPI_ID, NAPI_THREADED = 1, 2, 8
NETDEV_NAPI_THREADED_BUSY_POLL = 2
QUEUE_ID, QUEUE_IFINDEX, QUEUE_TYPE, QUEUE_NAPI_ID = 1, 2, 3, 4
NETDEV_CMD_QSTATS_GET = 12
QSTATS_IFINDEX = 1
QSTATS = {
    "rx_packets": 8,
    "rx_bytes": 9,
    "tx_packets": 10,
    "tx_bytes": 11,
    "rx_hw_drops": 13,
    "rx_hw_drop_overruns": 14,
    "tx_hw_drops": 24,
}
NLM_F_DUMP, NLMSG_ERROR, NLMSG_DONE = 0x300, 2, 3


def attribute(kind: int, data: bytes) -> bytes:
    """One netlink attribute, padded to 4 bytes."""
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def link_request(
    kind: int,
    flags: int,
    index: int,
    attributes: bytes,
    state: tuple[int, int] = (0, 0),
    during: contextlib.AbstractContextManager[None] | None = None,
) -> None:
    """Send one message about a link of this process's namespace; OSError when the kernel says no.
    ``state`` is the flags of the link and the mask of those that change. The kernel handles the
    message within ``during``."""
    body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, *state) + attributes
    flags |= NLM_F_REQUEST | NLM_F_ACK
    message = struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        with during or contextlib.nullcontext():
            netlink.send(message)
        (error,) = struct.unpack_from("=i", netlink.recv(65536), 16)
    if error:
        raise OSError(-error, os.strerror(-error))


def info(kind: str, value: int, of: int = IFLA_MACVLAN_MODE) -> bytes:
    data = attribute(IFLA_INFO_DATA, attribute(of, struct.pack("=I", value)))
    return attribute(IFLA_LINKINFO, attribute(IFLA_INFO_KIND, kind.encode()) + data)


def kind_of(device: str) -> str:
    taps = os.path.isdir(f"/sys/class/net/{device}/napi_macvtap")
    return "napi_macvtap" if taps else "napi_macvlan"


def mode(device: str, number: str) -> None:
    link_request(RTM_NEWLINK, 0, socket.if_nametoindex(device), info(kind_of(device), int(number)))


def make(name: str, lower: str, data: bytes) -> None:
    link = attribute(IFLA_LINK, struct.pack("=I", socket.if_nametoindex(lower)))
    name_attribute = attribute(IFLA_IFNAME, name.encode() + b"\0")
    link_request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, 0, name_attribute + link + data)


def add(kind: str, name: str, lower: str, number: str) -> None:
    make(name, lower, info(kind, int(number)))


def add_with(kind: str, name: str, lower: str, number: str) -> None:
    make(name, lower, info(kind, 0, int(number)))


def set_attribute(device: str, name: str, value: str) -> None:
    data = attribute(IFLA_INFO_DATA, attribute(ATTRIBUTES[name], struct.pack("=B", int(value))))
    kind = attribute(IFLA_INFO_KIND, b"napi_macvtap")
    link_request(
        RTM_NEWLINK, 0, socket.if_nametoindex(device), attribute(IFLA_LINKINFO, kind + data)
    )


def get_attribute(device: str, name: str) -> int | None:
    body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, socket.if_nametoindex(device), 0, 0)
    message = struct.pack("=IHHII", 16 + len(body), RTM_GETLINK, NLM_F_REQUEST, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(message)
        link = attributes(netlink.recv(1 << 16)[32:])
    value = attributes(attributes(link[IFLA_LINKINFO])[IFLA_INFO_DATA]).get(ATTRIBUTES[name])
    return None if value is None else int.from_bytes(value, sys.byteorder)


def show_attribute(device: str, name: str) -> None:
    value = get_attribute(device, name)
    if value is None:
        sys.exit(3)
    print(value)


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


def burst(address: str, port: str, count: str, size: str) -> None:
    with datagrams() as udp:
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        print("ready", flush=True)
        os.read(0, 1)  # one byte: the next line may be for another process
        for _ in range(int(count)):
            udp.sendto(bytes(int(size)), (address, int(port)))


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
        time.sleep(0.01)  # the first makes the queue known, the next are counted for it
    print(os.getpid(), flush=True)
    time.sleep(3600)


def hold(device: str, queues: str) -> None:
    fds = [open_tap(device) for _ in range(int(queues))]
    print(len(fds), flush=True)
    time.sleep(3600)


def drain(device: str, queues: str) -> None:
    fds = [open_tap(device) for _ in range(int(queues))]
    print(len(fds), flush=True)
    while True:
        for fd in select.select(fds, [], [])[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    os.read(fd, 65536)


def resize(device: str, seconds: str) -> None:
    seed = time.time_ns()
    choice, end, times = random.Random(seed), time.monotonic() + float(seconds), 0
    with open(f"/sys/class/net/{device}/tx_queue_len", "w", encoding="ascii") as length:
        while time.monotonic() < end:
            length.write(choice.choice(("0", "1", "500")))
            length.flush()
            times += 1
            time.sleep(choice.choice((0, 0, 0.001, 0.01)))
    print(f"{times} times, seed {seed}")


def ethtool(sock: socket.socket, device: str, data: ctypes.Array[ctypes.c_char]) -> None:
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(data))
    fcntl.ioctl(sock, SIOCETHTOOL, request)


def statistic_names(sock: socket.socket, device: str) -> list[str]:
    data = ctypes.create_string_buffer(
        struct.pack("=IIQI", ETHTOOL_GSSET_INFO, 0, 1 << ETH_SS_STATS, 0)
    )
    ethtool(sock, device, data)
    (number,) = struct.unpack_from("=I", data.raw, 16)
    data = ctypes.create_string_buffer(
        struct.pack("=III", ETHTOOL_GSTRINGS, ETH_SS_STATS, number), 12 + number * NAME_LENGTH
    )
    ethtool(sock, device, data)
    names = data.raw[12:]
    each = (names[at : at + NAME_LENGTH] for at in range(0, len(names), NAME_LENGTH))
    return [name.split(b"\0")[0].decode() for name in each]


def statistics_buffer(names: list[str]) -> ctypes.Array[ctypes.c_char]:
    head = struct.pack("=II", ETHTOOL_GSTATS, len(names))
    return ctypes.create_string_buffer(head, 8 + 8 * len(names))


def largest(device: str, name: str, seconds: str) -> None:
    found, reads, end = 0, 0, time.monotonic() + float(seconds)
    with datagrams() as sock:
        names = statistic_names(sock, device)
        data = statistics_buffer(names)
        while time.monotonic() < end:
            ethtool(sock, device, data)
            found = max(found, struct.unpack_from("=Q", data, 8 + 8 * names.index(name))[0])
            reads += 1
    print(f"frames.py: {reads} reads of {name} of {device}", file=sys.stderr)
    print(found)


def rtnl(device: str) -> None:
    """Where statistics are to be written is memory that userfaultfd(2) withholds: the kernel
    waits for it with the lock in its hand."""
    sys_userfaultfd, api, register, zeropage = 323, 0xC018AA3F, 0xC020AA00, 0xC020AA04
    libc = ctypes.CDLL(None, use_errno=True)
    fault = libc.syscall(sys_userfaultfd, os.O_CLOEXEC)
    if fault < 0:
        raise OSError(ctypes.get_errno(), "userfaultfd")
    fcntl.ioctl(fault, api, struct.pack("=QQQ", 0xAA, 0, 0))
    page = mmap.mmap(-1, 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    with datagrams() as sock:
        names = statistic_names(sock, device)
        # The head is in the first page, which is there; the values are in the second.
        head = mmap.PAGESIZE - 8
        page[head : head + 8] = struct.pack("=II", ETHTOOL_GSTATS, len(names))
        second = struct.pack("=QQ", start + mmap.PAGESIZE, mmap.PAGESIZE)
        fcntl.ioctl(fault, register, second + struct.pack("=QQ", 1, 0))
        request = struct.pack("16sP16x", device.encode(), start + head)
        reader = threading.Thread(target=fcntl.ioctl, args=(sock, SIOCETHTOOL, request))
        reader.start()
        select.select([fault], [], [])
        print("held", flush=True)
        os.read(0, 1)
        fcntl.ioctl(fault, zeropage, second + struct.pack("=Qq", 0, 0))
        reader.join()


def stamps(device: str) -> None:
    siocshwtstamp = 0x89B0
    config = ctypes.create_string_buffer(struct.pack("=iii", 0, 0, 0), 12)
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(config))
    with datagrams() as sock:
        fcntl.ioctl(sock, siocshwtstamp, request)


def generic(sock: socket.socket, family: int, command: int, flags: int, data: bytes) -> list[bytes]:
    """One request of generic netlink; the attributes of each answer."""
    body = struct.pack("=BBH", command, 1, 0) + data
    sock.send(struct.pack("=IHHII", 16 + len(body), family, flags | NLM_F_REQUEST, 1, 0) + body)
    answers = []
    while True:
        packet = sock.recv(1 << 16)
        while packet:
            length, kind = struct.unpack_from("=IH", packet)
            if kind == NLMSG_ERROR:
                (error,) = struct.unpack_from("=i", packet, 16)
                if error:
                    raise OSError(-error, os.strerror(-error))
                return answers
            if kind == NLMSG_DONE:
                return answers
            answers.append(packet[20:length])
            packet = packet[(length + 3) & ~3 :]
            # Not every dump marks its parts as such.
            if not flags & (NLM_F_ACK | NLM_F_DUMP):
                return answers


def attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        found[kind & 0x3FFF] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found


def away(device: str, seconds: float) -> int:
    """A process that keeps the device's NAPI thread from running; its id. Kernels let such a
    thread run again after most of a second."""
    thread = get_attribute(device, "thread")
    assert thread, f"{device} has no thread"
    os.sched_setaffinity(thread, {0})
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {0})
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, {0})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        os._exit(0)
    while os.sched_getscheduler(child) != os.SCHED_FIFO:
        time.sleep(0.001)
    return child


def starve(device: str, seconds: str) -> None:
    child = away(device, float(seconds))
    print("away", flush=True)
    os.waitpid(child, 0)


def netdev_family(sock: socket.socket) -> int:
    """The number of the family netdev; exits with 3 when this kernel has none."""
    controller, get_family, family_name = 16, 3, 2
    try:
        (about,) = generic(sock, controller, get_family, 0, attribute(family_name, b"netdev\0"))
    except OSError:
        sys.exit(3)
    return int.from_bytes(attributes(about)[1], sys.byteorder)


def number(of: dict[int, bytes], name: int) -> int:
    """0 without that attribute."""
    return int.from_bytes(of.get(name, b""), sys.byteorder)


def dumped(device: str, command: int, ifindex: int) -> list[dict[int, bytes]]:
    """What the netdev family tells of a device; ends the process with 3 where it cannot."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16) as sock:
        family = netdev_family(sock)
        index = attribute(ifindex, struct.pack("=I", socket.if_nametoindex(device)))
        try:
            return list(map(attributes, generic(sock, family, command, NLM_F_DUMP, index)))
        except OSError:
            sys.exit(3)


def queues(device: str) -> None:
    for queue in dumped(device, NETDEV_CMD_QUEUE_GET, QUEUE_IFINDEX):
        kind = ("rx", "tx")[number(queue, QUEUE_TYPE)]
        print(f"{kind} {number(queue, QUEUE_ID)} napi {number(queue, QUEUE_NAPI_ID)}")


def qstats(device: str) -> None:
    for values in dumped(device, NETDEV_CMD_QSTATS_GET, QSTATS_IFINDEX):
        for name, attribute_of in QSTATS.items():
            if attribute_of in values:
                print(name, number(values, attribute_of))


def threaded(sock: socket.socket, family: int, device: str, how: int) -> bytes:
    """The request that gives the device's NAPI this kind of thread; ends the process with 3 where
    the kernel has none."""
    index = attribute(NAPI_IFINDEX, struct.pack("=I", socket.if_nametoindex(device)))
    (napi,) = generic(sock, family, NETDEV_CMD_NAPI_GET, NLM_F_DUMP, index)
    if NAPI_THREADED not in attributes(napi):
        sys.exit(3)
    chosen = attribute(NAPI_ID, attributes(napi)[NAPI_ID])
    return chosen + attribute(NAPI_THREADED, struct.pack("=I", how))


def busypoll(device: str) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16) as sock:
        family = netdev_family(sock)
        request = threaded(sock, family, device, NETDEV_NAPI_THREADED_BUSY_POLL)
        try:
            generic(sock, family, NETDEV_CMD_NAPI_SET, NLM_F_ACK, request)
        except OSError:
            sys.exit(3)


def unthread(device: str) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16) as sock:
        family = netdev_family(sock)
        off = threaded(sock, family, device, 0)
        away(device, 0.8)
        time.sleep(0.1)  # the thread has work by now
        request = (sock, family, NETDEV_CMD_NAPI_SET, NLM_F_ACK, off)
        ending = threading.Thread(target=generic, args=request)
        ending.start()
        time.sleep(0.1)
        if not ending.is_alive():
            print("the thread ended at once")
            return
        told = get_attribute(device, "thread")
        print("told" if told is not None and ending.is_alive() else "left out")
        ending.join()


def records() -> Iterator[tuple[int, str]]:
    """The lines that the kernel's log still has, with their numbers."""
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                line = os.read(log, 8192).decode(errors="replace")
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # overwritten meanwhile; the next read goes on behind that
            head, _, text = line.partition(";")
            yield int(head.split(",")[1]), text.splitlines()[0]
    finally:
        os.close(log)


def last_line() -> None:
    print(max((number for number, _ in records()), default=-1))


def complaints(since: str) -> None:
    here = Path(__file__).resolve().parent
    # In a lab it lies beside this file.
    sys.path += [str(here), str(here.parents[1] / "tests/lab/labtool")]
    from serial_log import complains

    expected = int(since) + 1
    for number, text in records():
        if number < expected:
            continue
        if number > expected:
            print(
                f"the kernel's log lost lines {expected} to {number - 1}: boot with log_buf_len=4M"
            )
        expected = number + 1
        if complains(text):
            print(text)


COMMANDS = {
    "mode": mode,
    "with": add_with,
    "burst": burst,
    "drain": drain,
    "resize": resize,
    "largest": largest,
    "rtnl": rtnl,
    "busypoll": busypoll,
    "unthread": unthread,
    "starve": starve,
    "log": last_line,
    "complaints": complaints,
    "add": add,
    "stamps": stamps,
    "queues": queues,
    "qstats": qstats,
    "set": set_attribute,
    "get": show_attribute,
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
