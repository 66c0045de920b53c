"""Devices of the kernel module napi_macvlan, made and looked at from outside of vsrtune."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import labhelp
from pyroute2.netlink import nla
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from vsrtune.host import netlink
from vsrtune.model.host import Link

MODULE = "napi_macvlan"
# Debian's sources with these are several times slower (make kmod-debug).
DETECTORS = os.uname().release.endswith(("-kasan", "-kcsan"))
NET = Path("/sys/class/net")
PRIVATE, VEPA, BRIDGE, PASSTHRU = 1, 2, 4, 8
BROADCAST = "ff:ff:ff:ff:ff:ff"
# For local experiments (IEEE 802): no protocol of the kernel receives or answers it.
ETHERTYPE = b"\x88\xb5"

# The helper of the module's own suite, for other namespaces.
FRAMES = ("python3", "-B", "/run/lab/kmod-tests/frames.py")

_MACS = itertools.count(1)
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _IFF_MULTI_QUEUE = 0x400454CA, 0x2, 0x1000, 0x100
_IFF_VNET_HDR = 0x4000


@functools.cache
def _register_queue_length() -> None:
    """Tell pyroute2 of the one attribute that vsrtune itself never sets."""
    netlink.links()

    # Not of the registered class: that has compiled its own map by now, which would be inherited.
    class WithQueueLength(nla):
        prefix = "IFLA_"
        nla_map = (
            ("IFLA_MACVLAN_UNSPEC", "none"),
            ("IFLA_MACVLAN_MODE", "uint32"),
            *((f"IFLA_MACVLAN_{number}", "hex") for number in range(2, 7)),
            ("IFLA_MACVLAN_BC_QUEUE_LEN", "uint32"),
            *((f"IFLA_MACVLAN_{number}", "hex") for number in range(8, 24)),
            ("IFLA_NAPI_MACVLAN_EVERY_QUEUE", "uint8"),
            ("IFLA_NAPI_MACVLAN_UPLINK", "uint8"),
            ("IFLA_NAPI_MACVLAN_THREAD", "uint32"),
        )

    kinds = (MODULE, "napi_macvtap", "macvlan", "macvtap")
    ifinfmsg.ifinfo.register_link_kind(module=dict.fromkeys(kinds, WithQueueLength))


def link(
    name: str,
    lower: str,
    kind: str = "napi_macvlan",
    *,
    mode: int | None = None,
    queue: int | None = None,
    mac: str | None = None,
    every_queue: bool | None = None,
    uplink: bool | None = None,
    change: bool = False,
) -> None:
    """Make a device, or ``change`` one, through rtnetlink: iproute2 passes no mode to a kind
    that it does not know. Raises OSError with the kernel's errno."""
    if mac is None and not change and mode != PASSTHRU:
        mac = new_mac()
    _register_queue_length()
    optional = {
        "macvlan_mode": mode,
        "macvlan_bc_queue_len": queue,
        "address": mac,
        "napi_macvlan_every_queue": every_queue,
        "napi_macvlan_uplink": uplink,
    }
    netlink.request(
        "set" if change else "add",
        kind=kind,
        ifname=name,
        link=socket.if_nametoindex(lower),
        **{key: value for key, value in optional.items() if value is not None},
    )


def set_flag(name: str, flag: str, on: bool) -> None:
    """Set an attribute of a napi_macvtap, every-queue or uplink. Raises OSError with the kernel's
    errno."""
    change(name, **{f"napi_macvlan_{flag.replace('-', '_')}": int(on)})


def change(name: str, **attributes: int) -> None:
    """Set attributes of a napi_macvtap, by pyroute2's names. Raises OSError."""
    _register_queue_length()
    netlink.request("set", kind="napi_macvtap", ifname=name, **attributes)


def told(name: str) -> Link:
    """What route netlink says of a device."""
    _register_queue_length()
    found = netlink.link(name)
    assert found is not None, f"there is no {name}"
    return found


def flags(name: str) -> dict[str, bool | None]:
    """Those two attributes."""
    return {"every-queue": told(name).every_queue, "uplink": told(name).uplink}


def napi_thread(name: str) -> int | None:
    """Its NAPI thread, 0 without; None while the kernel makes or ends one."""
    return told(name).napi_thread


def new_mac() -> str:
    """One that nobody has. Devices are made with a MAC, because udev gives one with a random
    MAC another, a moment later."""
    number = next(_MACS)
    return f"02:4e:00:00:{number >> 8:02x}:{number & 0xFF:02x}"


def ip(*words: str) -> str:
    """ip(8)."""
    return labhelp.sh("ip", *words).stdout


def up(*names: str) -> None:
    """Set devices up."""
    for name in names:
        ip("link", "set", name, "up")


def delete(*names: str) -> None:
    """Delete devices that are there."""
    for name in names:
        labhelp.sh("ip", "link", "del", name, check=False)


def mac_of(name: str) -> str:
    return labhelp.text(f"/sys/class/net/{name}/address")


def counters(name: str, space: str | None = None) -> dict[str, int]:
    """``ethtool -S`` of a device, in a network namespace or here."""
    within = ("nsenter", f"--net=/run/netns/{space}") if space else ()
    out = labhelp.sh(*within, "ethtool", "-S", name).stdout
    return {k: int(v) for k, v in re.findall(r"^\s+(\w+): (\d+)$", out, re.MULTILINE)}


def drops(found: dict[str, int]) -> dict[str, int]:
    """Where frames for a device were lost, without the places that lost none."""
    return {k: v for k, v in found.items() if k.startswith("rx_dropped_") and v}


def check_sum(found: dict[str, int]) -> None:
    """Every frame is told once: received = delivered + dropped, by origin too. What a shrink
    discards was in a ring, so it had been delivered."""
    lost = sum(count for place, count in drops(found).items() if place != "rx_dropped_shrink")
    assert found["rx_received"] == found["rx_delivered"] + lost, found
    origins = sum(found[f"rx_{k}"] for k in ("nic", "forwarded", "broadcast", "copied"))
    assert found["rx_received"] == origins, found


def settle(name: str, received: int = 0) -> dict[str, int]:
    """Counters of a device once nothing moves in them any more, and ``received`` frames have
    come: on a busy host ksoftirqd may take its time before the first of them moves."""
    last = counters(name)
    end = time.monotonic() + 20
    while True:
        time.sleep(0.1)
        before, last = last, counters(name)
        if last["rx_received"] >= received and last == before:
            return last
        assert time.monotonic() < end, (
            f"{name} does not rest, or gets fewer than {received}: {last}"
        )


def frame(to: str, source: str, size: int = 60) -> bytes:
    """An Ethernet frame that nobody answers."""
    head = bytes.fromhex((to + source).replace(":", "")) + ETHERTYPE
    return head + bytes(size - len(head))


def send(
    device: str, to: str, count: int, source: str | None = None, data: bytes | None = None
) -> None:
    """Send frames from a device of this namespace: ``data``, or frames that nobody answers."""
    if data is None:
        data = frame(to, source or mac_of(device))
    send_each(device, itertools.repeat(data, count))


def send_each(device: str, frames: Iterable[bytes]) -> None:
    """Send these, past the device's queueing discipline, so that none is lost before the device
    has it."""
    bypass = 20  # PACKET_QDISC_BYPASS, linux/if_packet.h
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.setsockopt(263, bypass, 1)
        sock.bind((device, 0))
        for data in frames:
            sock.send(data)


def open_tap(device: str, *, header: bool = False) -> int:
    """One more queue of /dev/tapN; a descriptor that does not block. Nobody reads it. With
    ``header`` each frame has a struct virtio_net_hdr before it."""
    path = f"/dev/tap{labhelp.text(f'/sys/class/net/{device}/ifindex')}"
    labhelp.wait_for(lambda: os.path.exists(path), f"{path} is there", 20)
    queue = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_MULTI_QUEUE | (_IFF_VNET_HDR if header else 0)
    fcntl.ioctl(queue, _TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
    return queue


def frames_of(queue: int) -> list[bytes]:
    """Frames that waited in the ring of a tap queue."""
    found: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while one := os.read(queue, 1 << 16):
            found.append(one)
    return found


def read_all(queue: int) -> int:
    """How many they are."""
    return len(frames_of(queue))


@contextlib.contextmanager
def kept_from_its_cpu(device: str) -> Iterator[None]:
    """The device's own queue is not served meanwhile: its NAPI is a thread on the last CPU,
    where a thread of a higher class does not let it run."""
    cpu = labhelp.lab_cpus() - 1
    (NET / device / "threaded").write_text("1")
    thread = labhelp.wait_for(lambda: napi_thread(device), "it has a thread", 20)
    os.sched_setaffinity(thread, {cpu})
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        os.sched_setaffinity(0, {cpu})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
        while True:
            pass
    try:
        labhelp.wait_for(lambda: os.sched_getscheduler(pid) == os.SCHED_FIFO, "it is kept away", 20)
        yield
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def kernel_log() -> list[str]:
    """dmesg, with times."""
    return labhelp.sh("dmesg").stdout.splitlines()


def log_end() -> str:
    """Number of the last line of the kernel's log."""
    return _frames("log").strip()


def complaints(since: str) -> list[str]:
    """Lines after that number in which the kernel complains of itself, as the module's own
    suite judges it; lines that the log has lost are one."""
    return _frames("complaints", since).splitlines()


def _frames(*words: str) -> str:
    return labhelp.sh(*FRAMES, *words).stdout
