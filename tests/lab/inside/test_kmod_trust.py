"""What the module makes of those who are not trusted: large frames of guests, and containers
that rule a device of theirs but not the one below it."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kmodhelp
import labhelp
import pytest
from kmodhelp import check_sum, drops, ip, link, settle, up
from test_kmod import lower, silent  # noqa: F401 (fixtures)

_NEEDS_CSUM, _TCPV4 = 1, 1
_TUNSETOFFLOAD, _TUN_F_CSUM, _TUN_F_TSO4 = 0x400454D0, 1, 2
_SIOCSIFHWADDR, _ARPHRD_ETHER = 0x8924, 1


def large(to: str, source: str, payload: int, size: int) -> bytes:
    """A TCP segment as a guest gives it to its host, to be cut into ``size`` bytes each."""
    ip4 = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 40 + payload, 1, 0, 64, 6, 0, bytes([10, 0, 0, 1]),
        bytes([10, 0, 0, 2]),
    )  # fmt: skip
    tcp = struct.pack("!HHIIBBHHH", 1024, 1025, 1, 1, 5 << 4, 0x10, 1024, 0, 0)
    ether = bytes.fromhex((to + source).replace(":", "")) + b"\x08\x00"
    header = struct.pack("=BBHHHH", _NEEDS_CSUM, _TCPV4, 54, size, 34, 16)
    return header + ether + ip4 + tcp + bytes(payload)


def test_a_large_frame_finds_room_for_all_its_segments_or_none(lower: str) -> None:  # noqa: F811
    for name in ("na", "nt"):
        link(name, lower, "napi_macvtap")
    ip("link", "set", "nt", "txqueuelen", "4")
    up("na", "nt")
    to, source = kmodhelp.mac_of("nt"), kmodhelp.mac_of("na")
    # It takes no large frames, as a guest does that forwards: tap.ko cuts them.
    sender, queue = kmodhelp.open_tap("na", header=True), kmodhelp.open_tap("nt")
    try:
        os.write(sender, large(to, source, 2700, 1000))
        check_sum(settle("nt", 1))
        assert kmodhelp.read_all(queue) == 3
        os.write(sender, bytes(10) + kmodhelp.frame(to, source))
        os.write(sender, bytes(10) + kmodhelp.frame(to, source))
        settle("nt", 3)
        os.write(sender, large(to, source, 2700, 1000))
        found = settle("nt", 4)
        check_sum(found)
        assert drops(found) == {"rx_dropped_ring_full": 1}
        assert kmodhelp.read_all(queue) == 2
    finally:
        os.close(sender)
        os.close(queue)


def test_nobody_has_the_kernel_make_thousands_of_segments(lower: str) -> None:  # noqa: F811
    """Whether the queue takes them whole, its reader changes at any moment."""
    for name in ("na", "nt"):
        link(name, lower, "napi_macvtap")
    up("na", "nt")
    sender = kmodhelp.open_tap("na", header=True)
    queue = kmodhelp.open_tap("nt", header=True)
    try:
        fcntl.ioctl(queue, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
        to, source = kmodhelp.mac_of("nt"), kmodhelp.mac_of("na")
        os.write(sender, large(to, source, 16_000, 1000))
        settle("nt", 1)
        assert len(kmodhelp.frames_of(queue)) == 1
        os.write(sender, large(to, source, 24_000, 8))
        found = settle("nt", 2)
        check_sum(found)
        assert drops(found) == {"rx_dropped_other": 1}
        assert kmodhelp.frames_of(queue) == []
    finally:
        os.close(sender)
        os.close(queue)


def test_who_has_the_descriptor_does_not_take_anothers_address(lower: str) -> None:  # noqa: F811
    """tap.ko asks for no capability. Root sets it, up and down."""
    link("nt", lower, "napi_macvtap")
    own, other = kmodhelp.mac_of("nt"), kmodhelp.new_mac()
    queue = kmodhelp.open_tap("nt")
    try:
        for state in ("down", "up"):
            ip("link", "set", "nt", state)
            asked = struct.pack(
                "=16sH6s8x", b"nt", _ARPHRD_ETHER, bytes.fromhex(other.replace(":", ""))
            )
            pid = os.fork()
            if pid == 0:
                try:
                    os.setuid(65534)
                    fcntl.ioctl(queue, _SIOCSIFHWADDR, asked)
                except OSError as error:
                    os._exit(error.errno or 0)
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == errno.EPERM
            assert kmodhelp.mac_of("nt") == own
        fcntl.ioctl(queue, _SIOCSIFHWADDR, asked)
        assert kmodhelp.mac_of("nt") == other
        ip("link", "set", "nt", "address", own)
    finally:
        os.close(queue)


@contextmanager
def container(device: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """A container that has the device and rules its namespaces: how to run a command as its root,
    and as this host's in its network namespace."""
    unshare = ["unshare", "--user", "--map-root-user", "--net", "sleep", "60"]
    with subprocess.Popen(unshare) as process:
        try:
            space = Path(f"/proc/{process.pid}/ns/net")
            labhelp.wait_for(
                lambda: space.readlink() != Path("/proc/self/ns/net").readlink(),
                "the container has its namespaces",
                20,
            )
            ip("link", "set", device, "netns", str(process.pid))
            enter = ("nsenter", "-t", str(process.pid))
            yield (*enter, "--user", "--net", "--preserve-credentials"), (*enter, "--net")
        finally:
            process.kill()


def test_only_who_rules_the_lower_device_makes_an_uplink(lower: str) -> None:  # noqa: F811
    link("nt", lower, "napi_macvtap")
    with container("nt") as (inside, outside):
        asked = (*inside, *kmodhelp.FRAMES, "set", "nt")
        labhelp.sh(*asked, "every-queue", "1")
        refused = labhelp.sh(*asked, "uplink", "1", check=False)
        assert refused.returncode != 0
        assert "not permitted" in refused.stderr
        # From outside, for it, it can be made one, and it can cease to be one.
        labhelp.sh(*outside, *kmodhelp.FRAMES, "set", "nt", "uplink", "1")
        labhelp.sh(*asked, "every-queue", "0")
        labhelp.sh(*asked, "uplink", "0")


def test_only_who_rules_the_lower_device_sets_its_timestamps(lower: str) -> None:  # noqa: F811
    if os.uname().release.startswith("6.1."):
        pytest.skip("this kernel has no ndo_hwtstamp_set")
    link("nd0", lower)
    with container("nd0") as (inside, outside):
        for who, said in ((inside, "not permitted"), (outside, "not supported")):
            refused = labhelp.sh(*who, *kmodhelp.FRAMES, "stamps", "nd0", check=False)
            assert refused.returncode != 0
            # The lower one has none; it is asked only for those who may.
            assert said in refused.stderr
