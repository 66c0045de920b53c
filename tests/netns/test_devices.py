"""Threaded NAPI and driver statistics on real devices of this machine's kernel."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from nethelp import ip

from vsrtune.core.errors import Lasting, WriteError
from vsrtune.execute.executor import apply, undo
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.host.ethtool import statistics
from vsrtune.host.filesystem import LiveRoot
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import NapiThreaded
from vsrtune.observe.qemu_processes import ProcessTable

NET = Path("/sys/class/net")
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NAPI, IFF_NO_PI = 0x0002, 0x0010, 0x1000


def target(device: str) -> NapiThreaded:
    return NapiThreaded("g", device, int((NET / device / "ifindex").read_text()))


@pytest.fixture
def napi_tap(namespace: None) -> Iterator[str]:
    """A tap with a NAPI instance, for as long as it is open."""
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"this machine has no /dev/net/tun: {error}")
    try:
        try:
            flags = IFF_TAP | IFF_NAPI | IFF_NO_PI
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"nt0", flags))
        except OSError as error:
            pytest.skip(f"this machine makes no tap with NAPI: {error}")
        ip("link", "set", "nt0", "up")
        yield "nt0"
    finally:
        os.close(tun)


def test_threaded_napi_comes_with_its_thread_and_goes(napi_tap: str, tmp_path: Path) -> None:
    if not (NET / napi_tap / "threaded").exists():
        pytest.skip("this kernel has no threaded NAPI (5.12)")
    ops, device = LiveSysOps(), target(napi_tap)
    assert ops.read(device) == 0
    with Journal.open(tmp_path / "journal.jsonl", "this boot") as journal:
        assert apply(Plan((Action(device, 0, 1, "t"),)), ops, journal).failed == ()
        assert (NET / napi_tap / "threaded").read_text() == "1\n"
        threads = ProcessTable().scan(LiveRoot()).napi.get(napi_tap, ())
        assert threads, "no kernel thread has the device's name"
        assert undo(ops, journal).failed == ()
    assert (NET / napi_tap / "threaded").read_text() == "0\n"


def test_a_device_without_napi_says_so(namespace: None) -> None:
    # A veth has NAPI only with GRO or XDP.
    ip("link", "add", "v0", "type", "veth", "peer", "name", "v1")
    if not (NET / "v0" / "threaded").exists():
        pytest.skip("this kernel has no threaded NAPI (5.12)")
    with pytest.raises(WriteError, match="no NAPI instance") as caught:
        LiveSysOps().write(target("v0"), 1)
    assert caught.value.lasting is Lasting.TRANSIENT


def test_statistics_of_a_real_driver(namespace: None) -> None:
    ip("link", "add", "v0", "type", "veth", "peer", "name", "v1")
    found = statistics("v0")
    assert found["peer_ifindex"] == int((NET / "v1" / "ifindex").read_text())
    assert any(name.startswith("rx_queue_0_") for name in found)
    ip("link", "del", "v0")
    with pytest.raises(OSError, match="v0") as caught:
        statistics("v0")
    assert caught.value.errno == errno.ENODEV
