#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Everything that may happen to devices of napi_macvlan, at random and at once, under a flood.

    churn.py SECONDS SEED

Processes make, change, move between namespaces and delete devices, read and write /dev/tapN, and
change the lower devices, each by its own sequence of random numbers, which SEED begins. Others send
to all of them. Now and then all stops, the module is unloaded and loaded again. For kernels
with detectors (kasan, lockdep, kcsan) above all: what a frame's content is, netns.sh asks.

Prints how often each operation was done and refused; exit 1 when one never succeeded, when the
module cannot be unloaded, or when the kernel complained. Needs root; touches nothing outside the
namespaces churn-*, except that it loads and unloads the module.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import frames

MODULE = "napi_macvlan"
KINDS = (MODULE, "napi_macvtap")
SPACES = ("churn-0", "churn-1", "churn-2")
# Few names, so that operations meet. Indexes are fixed, since /dev/tapN is one for all namespaces.
NAMES = {f"n{number}": 7800 + number for number in range(10)}
LOWERS = ("l0", "l1")
MACS = [bytes((2, 0x4E, 0x55, 0, 0, number)) for number in range(12)]
GROUPS = (b"\xff" * 6, b"\x01\x00\x5e\x00\x00\x05", b"\x33\x33\x00\x00\x00\x01")
RTM_DELLINK, IFF_UP = 17, 1
IFLA_ADDRESS, IFLA_MTU, IFLA_TXQLEN, IFLA_NET_NS_FD = 1, 4, 13, 28
IFLA_MACVLAN_BC_QUEUE_LEN = 7
IFLA_NAPI_MACVLAN_EVERY_QUEUE, IFLA_NAPI_MACVLAN_UPLINK = 24, 25
TUNSETIFF, TUNSETOFFLOAD, TUNSETQUEUE = 0x400454CA, 0x400454D0, 0x400454D9
IFF_TAP, IFF_NO_PI, IFF_MULTI_QUEUE, IFF_VNET_HDR = 0x2, 0x1000, 0x100, 0x4000
IFF_ATTACH_QUEUE, IFF_DETACH_QUEUE = 0x200, 0x400
CLONE_NEWNS, CLONE_NEWNET, MS_REC_PRIVATE = 0x20000, 0x40000000, 0x44000
ETHERTYPE = b"\x88\xb5"
# Seconds between two unloads of the module, but a quarter of the time at most.
TURN = 120.0
# What may be refused because of what another process did a moment ago.
REFUSED = frozenset(
    (
        errno.ENODEV, errno.ENOENT, errno.EBUSY, errno.EEXIST, errno.EINVAL, errno.EADDRINUSE,
        errno.EADDRNOTAVAIL, errno.EOPNOTSUPP, errno.ENETDOWN, errno.ENXIO, errno.EAGAIN,
        errno.EBADFD, errno.EIO, errno.ENOBUFS, errno.ENOLINK, errno.EMSGSIZE, errno.ERANGE,
        errno.E2BIG, errno.ENOMEM, errno.EFAULT,
    )
)  # fmt: skip
# Set by main().
CAN_FAIL = False
LIBC = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def request(
    kind: int, flags: int, index: int, up: int | None, attributes: bytes, without: int = 0
) -> None:
    """One message about a link. With ``without``, that allocation of memory fails while the kernel
    handles it."""
    state = (0, 0) if up is None else (up, IFF_UP)
    frames.link_request(kind, flags, index, attributes, state, failing(without))


@contextlib.contextmanager
def failing(nth: int) -> Iterator[None]:
    """Documentation/fault-injection: the nth allocation from here on fails, for this task alone."""
    if not nth:
        yield
        return
    task = os.open("/proc/thread-self/fail-nth", os.O_RDWR)
    os.write(task, b"%d" % nth)
    try:
        yield
    finally:
        os.pwrite(task, b"0", 0)
        os.close(task)


def prepare_failures() -> bool:
    """Whether this kernel can refuse memory; then also where it may wait for some, and without a
    word."""
    failslab = Path("/sys/kernel/debug/failslab")
    if not failslab.is_dir():
        return False
    (failslab / "ignore-gfp-wait").write_text("N")
    (failslab / "verbose").write_text("0")
    return True


def u32(kind: int, value: int) -> bytes:
    return frames.attribute(kind, struct.pack("=I", value))


class World:
    """What one process does; its namespaces and its random numbers."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.spaces = [os.open(f"/run/netns/{name}", os.O_RDONLY) for name in SPACES]
        self.queues: list[int] = []
        # A sysfs for each namespace: one shows the devices of whoever mounted it.
        checked(LIBC.unshare(CLONE_NEWNS))
        checked(LIBC.mount(b"none", b"/", None, MS_REC_PRIVATE, None))
        self.trees = []
        for number in range(len(SPACES)):
            self.enter(number)
            tree = tempfile.mkdtemp(prefix="churn-")
            checked(LIBC.mount(b"sysfs", tree.encode(), b"sysfs", 0, None))
            self.trees.append(Path(tree) / "class/net")
        self.at = 0

    def enter(self, number: int) -> None:
        checked(LIBC.setns(self.spaces[number], CLONE_NEWNET))
        self.at = number

    def anywhere(self) -> None:
        self.enter(self.random.randrange(len(SPACES)))

    def name(self) -> str:
        """A device, mostly one that is here."""
        here = [name for name in os.listdir(self.trees[self.at]) if name in NAMES]
        return self.random.choice(here if here and self.random.random() < 0.9 else list(NAMES))

    def index(self, name: str) -> int:
        try:
            return socket.if_nametoindex(name)
        except OSError as missing:  # which has no errno
            raise OSError(errno.ENODEV, name) from missing

    def do(self, operation: Callable[[World], None]) -> None:
        """One operation in some namespace; how it ended is counted."""
        name = operation.__name__
        try:
            self.anywhere()
            operation(self)
        except OSError as refused:
            if refused.errno not in REFUSED:
                raise
            self.counts[name, "refused"] += 1
        else:
            self.counts[name, "done"] += 1


def make(w: World) -> None:
    """A device of either kind on a lower one, which is in the first namespace."""
    w.enter(0)
    name, kind = w.random.choice(list(NAMES)), w.random.choice(KINDS)
    mode = w.random.choice((4, 4, 4, 4, 2, 1, 8))
    data = u32(frames.IFLA_MACVLAN_MODE, mode)
    if w.random.random() < 0.3:
        data += u32(IFLA_MACVLAN_BC_QUEUE_LEN, w.random.choice((1, 2, 100, 32767)))
    info = frames.attribute(frames.IFLA_INFO_KIND, kind.encode())
    info += frames.attribute(frames.IFLA_INFO_DATA, data)
    attributes = frames.attribute(frames.IFLA_IFNAME, name.encode() + b"\0")
    attributes += u32(frames.IFLA_LINK, w.index(w.random.choice(LOWERS)))
    attributes += frames.attribute(IFLA_ADDRESS, w.random.choice(MACS))
    attributes += frames.attribute(frames.IFLA_LINKINFO, info)
    flags = frames.NLM_F_CREATE | frames.NLM_F_EXCL
    up = int(w.random.random() < 0.7)
    without = w.random.randrange(1, 100) if CAN_FAIL and w.random.random() < 0.4 else 0
    request(frames.RTM_NEWLINK, flags, NAMES[name], up, attributes, without)


def delete(w: World) -> None:
    request(RTM_DELLINK, 0, w.index(w.name()), None, b"")


def bring_up(w: World) -> None:
    request(frames.RTM_NEWLINK, 0, w.index(w.name()), IFF_UP, b"")


def bring_down(w: World) -> None:
    request(frames.RTM_NEWLINK, 0, w.index(w.name()), 0, b"")


def move(w: World) -> None:
    """To another namespace."""
    space = w.random.choice(w.spaces)
    request(frames.RTM_NEWLINK, 0, w.index(w.name()), None, u32(IFLA_NET_NS_FD, space))


def address(w: World) -> None:
    mac = frames.attribute(IFLA_ADDRESS, w.random.choice(MACS))
    request(frames.RTM_NEWLINK, 0, w.index(w.name()), None, mac)


def mtu(w: World) -> None:
    value = u32(IFLA_MTU, w.random.choice((68, 576, 1280, 1500)))
    request(frames.RTM_NEWLINK, 0, w.index(w.name()), None, value)


def ring_length(w: World) -> None:
    value = u32(IFLA_TXQLEN, w.random.choice((0, 1, 2, 31, 64, 500, 4096)))
    request(frames.RTM_NEWLINK, 0, w.index(w.name()), None, value)


def change(w: World) -> None:
    """Mode and length of the own queue, live."""
    name = w.name()
    kind = "napi_macvtap" if (w.trees[w.at] / name / "napi_macvtap").exists() else MODULE
    data = u32(frames.IFLA_MACVLAN_MODE, w.random.choice((1, 2, 4, 8)))
    data += u32(IFLA_MACVLAN_BC_QUEUE_LEN, w.random.choice((1, 50, 1000)))
    info = frames.attribute(frames.IFLA_INFO_KIND, kind.encode())
    info += frames.attribute(frames.IFLA_INFO_DATA, data)
    attributes = frames.attribute(frames.IFLA_LINKINFO, info)
    request(frames.RTM_NEWLINK, 0, w.index(name), None, attributes)


def threaded(w: World) -> None:
    (w.trees[w.at] / w.name() / "threaded").write_text(w.random.choice("01"))


def statistics(w: World) -> None:
    with frames.datagrams() as sock:
        name = w.name()
        frames.ethtool(sock, name, frames.statistics_buffer(frames.statistic_names(sock, name)))


def flags(w: World) -> None:
    """Every queue, or the uplink, on or off."""
    flag = w.random.choice((IFLA_NAPI_MACVLAN_EVERY_QUEUE, IFLA_NAPI_MACVLAN_UPLINK))
    data = frames.attribute(flag, bytes((w.random.randrange(2),)))
    info = frames.attribute(frames.IFLA_INFO_KIND, b"napi_macvtap")
    info += frames.attribute(frames.IFLA_INFO_DATA, data)
    attributes = frames.attribute(frames.IFLA_LINKINFO, info)
    request(frames.RTM_NEWLINK, 0, w.index(w.name()), None, attributes)


def open_queue(w: World) -> None:
    number = w.random.choice(list(NAMES.values()))
    queue = os.open(f"/dev/tap{number}", os.O_RDWR | os.O_NONBLOCK)
    w.queues.append(queue)
    name = next(name for name, index in NAMES.items() if index == number)
    how = IFF_TAP | IFF_NO_PI | w.random.choice((0, IFF_MULTI_QUEUE))
    how |= w.random.choice((IFF_VNET_HDR, IFF_VNET_HDR, 0))
    fcntl.ioctl(queue, TUNSETIFF, struct.pack("16sH22x", name.encode(), how))
    fcntl.ioctl(queue, TUNSETOFFLOAD, w.random.choice((0, 0x1, 0x7, 0x1F)))


def a_queue(w: World) -> int:
    if not w.queues:
        raise OSError(errno.ENOENT, "no queue is open")
    return w.random.choice(w.queues)


def close_queue(w: World) -> None:
    queue = a_queue(w)
    w.queues.remove(queue)
    os.close(queue)


def park_queue(w: World) -> None:
    how = w.random.choice((IFF_ATTACH_QUEUE, IFF_DETACH_QUEUE))
    fcntl.ioctl(a_queue(w), TUNSETQUEUE, struct.pack("16sH22x", b"", how))


def read_queue(w: World) -> None:
    queue = a_queue(w)
    for _ in range(w.random.choice((1, 16, 64))):
        os.read(queue, 65536)


def write_queue(w: World) -> None:
    """As a guest: single frames, and large ones for the host to cut."""
    queue = a_queue(w)
    for _ in range(w.random.choice((1, 8))):
        os.write(queue, bytes(10) + a_frame(w))
    if w.random.random() < 0.3:
        os.write(queue, large(w))


def lower_down_up(w: World) -> None:
    w.enter(0)
    index = w.index(w.random.choice(LOWERS))
    request(frames.RTM_NEWLINK, 0, index, 0, b"")
    request(frames.RTM_NEWLINK, 0, index, IFF_UP, b"")


def lower_address(w: World) -> None:
    w.enter(0)
    mac = frames.attribute(IFLA_ADDRESS, bytes((2, 0x4E, 0x56, 0, 0, w.random.randrange(9))))
    request(frames.RTM_NEWLINK, 0, w.index(w.random.choice(LOWERS)), None, mac)


def lower_mtu(w: World) -> None:
    w.enter(0)
    value = u32(IFLA_MTU, w.random.choice((1280, 1500, 9000)))
    request(frames.RTM_NEWLINK, 0, w.index(w.random.choice(LOWERS)), None, value)


def lower_goes(w: World) -> None:
    """It is deleted with all on it, and comes back."""
    w.enter(0)
    name = w.random.choice(LOWERS)
    with contextlib.suppress(OSError):
        request(RTM_DELLINK, 0, w.index(name), None, b"")
    make_lower(name)


def rival(w: World) -> None:
    """A macvlan of the kernel's own: it and ours take turns on a lower device."""
    w.enter(0)
    attributes = frames.attribute(frames.IFLA_IFNAME, b"rival\0")
    attributes += u32(frames.IFLA_LINK, w.index(w.random.choice(LOWERS)))
    attributes += frames.attribute(
        frames.IFLA_LINKINFO, frames.attribute(frames.IFLA_INFO_KIND, b"macvlan")
    )
    flags = frames.NLM_F_CREATE | frames.NLM_F_EXCL
    request(frames.RTM_NEWLINK, flags, 0, IFF_UP, attributes)
    request(RTM_DELLINK, 0, w.index("rival"), None, b"")


# How often each is chosen.
LINKS = {
    make: 30, delete: 12, bring_up: 14, bring_down: 6, move: 8, address: 6, mtu: 4, ring_length: 10,
    change: 8, threaded: 6, statistics: 10, flags: 4, lower_down_up: 3, lower_address: 2,
    lower_mtu: 2, lower_goes: 1, rival: 5,
}  # fmt: skip
QUEUES = {
    open_queue: 10, close_queue: 5, park_queue: 4, read_queue: 40, write_queue: 30, ring_length: 6,
    statistics: 5,
}  # fmt: skip


def a_frame(w: World) -> bytes:
    """To a device, a group or nobody, now and then with a VLAN tag."""
    to = w.random.choice((*MACS, *GROUPS, b"\x02\x4e\x57\0\0\1"))
    tag = b"\x81\0\0\7" if w.random.random() < 0.2 else b""
    kind = w.random.choice((ETHERTYPE, b"\x08\x06", b"\x86\xdd"))
    return to + w.random.choice(MACS) + tag + kind + bytes(w.random.choice((46, 200, 1480)))


def large(w: World) -> bytes:
    """A TCP segment of several frames, with the virtio header that says so."""
    data = bytes(w.random.choice((3000, 20000)))
    tcp = struct.pack("!HHIIBBHHH", 1, 2, 0, 0, 0x50, 0x10, 1024, 0, 0)
    size = 20 + len(tcp) + len(data)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, size, 0, 0, 64, 6, 0, bytes(4), bytes(4))
    ethernet = w.random.choice(MACS) + w.random.choice(MACS) + b"\x08\0"
    header = struct.pack("=BBHHHH", 1, 1, 54, 1448, 34, 16)
    return header + ethernet + ip + tcp + data


def make_lower(name: str) -> None:
    """l0 has its far end in the last namespace, l1 has none."""
    kind = ["veth", "peer", "name", "e0", "netns", SPACES[2]] if name == "l0" else ["dummy"]
    for words in (["add", name, "type", *kind], ["set", name, "up"]):
        subprocess.run(["ip", "-n", SPACES[0], "link", *words], capture_output=True, check=False)
    if name == "l0":
        words = ["ip", "-n", SPACES[2], "link", "set", "e0", "up"]
        subprocess.run(words, capture_output=True, check=False)


def operate(w: World, chosen: dict[Callable[[World], None], int]) -> None:
    names, weights = list(chosen), list(chosen.values())
    while not STOP.is_set():
        w.do(w.random.choices(names, weights)[0])


def flood(w: World, _: object) -> None:
    """From the far end of l0, and from whatever device is there."""
    while not STOP.is_set():
        w.enter(w.random.choice((2, 2, 0, 1)))
        device = "e0" if w.at == 2 and w.random.random() < 0.7 else w.name()
        sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        with sender as sock, contextlib.suppress(OSError):
            sock.bind((device, 0))
            for _ in range(32):
                sock.send(a_frame(w))
                w.counts["flood", "done"] += 1
        time.sleep(0.05)  # the CPUs are for the operations


class Stop:
    """Set by SIGTERM, so that a process ends between two operations."""

    def __init__(self) -> None:
        self._set = False

    def set(self, *_: object) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


STOP = Stop()
PROCESSES = (
    (operate, LINKS), (operate, LINKS), (operate, LINKS), (operate, QUEUES), (operate, QUEUES),
    (flood, {}),
)  # fmt: skip


def child(number: int, seed: str) -> tuple[int, int]:
    """Start one of PROCESSES; its id and where it writes its counts."""
    work, chosen = PROCESSES[number]
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    status = 1
    try:
        signal.signal(signal.SIGTERM, STOP.set)
        world = World(f"{seed} {number}")
        work(world, chosen)
        lines = (f"{name} {end} {count}\n" for (name, end), count in world.counts.items())
        os.write(writer, "".join(lines).encode())
        status = 0
    except BaseException as failed:
        print(f"churn.py: process {number}: {failed!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


@contextlib.contextmanager
def spaces() -> Iterator[None]:
    for space in SPACES:
        subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "add", space], check=True)
    try:
        for name in LOWERS:
            make_lower(name)
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False)


def reload() -> None:
    """Unload and load the module; nothing uses it any more. AssertionError when it stays."""
    end = time.monotonic() + 120
    while subprocess.run(["rmmod", MODULE], capture_output=True, check=False).returncode != 0:
        assert time.monotonic() < end, "the module does not unload: see its references in lsmod"
        time.sleep(0.2)
    subprocess.run(["modprobe", MODULE], check=True)


def turn(seconds: float, seed: str) -> Counter[tuple[str, str]]:
    """All processes for so long, in namespaces that go with what is left in them."""
    counts: Counter[tuple[str, str]] = Counter()
    with spaces():
        children = [child(number, seed) for number in range(len(PROCESSES))]
        time.sleep(seconds)
        for pid, _ in children:
            os.kill(pid, signal.SIGTERM)
        failed = 0
        for pid, reader in children:
            with os.fdopen(reader) as told:
                for line in told:
                    name, ended, count = line.split()
                    counts[name, ended] += int(count)
            failed += os.waitpid(pid, 0)[1] != 0
        assert not failed, f"{failed} of {len(children)} processes failed, above"
    reload()
    return counts


def main(seconds: str, seed: str) -> None:
    global CAN_FAIL
    CAN_FAIL = prepare_failures()
    subprocess.run(["modprobe", MODULE], check=True)
    total: Counter[tuple[str, str]] = Counter()
    end, turns = time.monotonic() + float(seconds), 0
    while turns == 0 or time.monotonic() < end:
        total += turn(min(TURN, float(seconds) / 4), f"{seed} {turns}")
        turns += 1
        # A kernel under test may end any moment: what was done until then is worth knowing.
        done = sum(count for (_, ended), count in total.items() if ended == "done")
        print(f"churn.py: turn {turns}, {done} operations done", flush=True)
    operations = [*dict.fromkeys((*LINKS, *QUEUES)), flood]
    for name in (operation.__name__ for operation in operations):
        print(f"{name:15} {total[name, 'done']:9} done {total[name, 'refused']:9} refused")
    never = [o.__name__ for o in operations if not total[o.__name__, "done"]]
    assert not never, f"never succeeded: {', '.join(never)}"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except AssertionError as wrong:
        sys.exit(f"churn.py: {wrong}")
