"""The kernel module's life: load and unload, and all that may happen to its devices."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import kmodhelp
import labhelp
import pytest
from kmodhelp import BRIDGE, PASSTHRU, PRIVATE, VEPA, counters, delete, ip, link, send, up

KINDS = ("napi_macvlan", "napi_macvtap")


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """The kernel complains of nothing; nobody sends what the test did not ask for."""
    end = kmodhelp.log_end()
    ipv6 = "net.ipv6.conf.default.disable_ipv6"
    before = labhelp.sh("sysctl", "-n", ipv6).stdout.strip()
    labhelp.sh("sysctl", "-qw", f"{ipv6}=1")
    yield
    labhelp.sh("sysctl", "-qw", f"{ipv6}={before}")
    assert kmodhelp.complaints(end) == []


@pytest.fixture
def lower() -> Iterator[str]:
    """A lower device for siblings, without a wire."""
    ip("link", "add", "nl0", "address", kmodhelp.new_mac(), "type", "dummy")
    up("nl0")
    yield "nl0"
    delete("nl0")


def loaded() -> bool:
    return (Path("/sys/module") / kmodhelp.MODULE).exists()


def references() -> int:
    """How many devices and descriptors keep the module."""
    return int(labhelp.text(f"/sys/module/{kmodhelp.MODULE}/refcnt"))


def remove_module() -> bool:
    """Whether rmmod was allowed."""
    return labhelp.sh("rmmod", kmodhelp.MODULE, check=False).returncode == 0


def test_loads_unloads_and_reloads() -> None:
    labhelp.sh("modprobe", "-r", kmodhelp.MODULE)
    for _ in range(5):
        labhelp.sh("modprobe", kmodhelp.MODULE)
        assert loaded()
        assert remove_module()
        assert not loaded()


@labhelp.core()
def test_its_self_tests_pass() -> None:
    said = len(kmodhelp.kernel_log())
    labhelp.sh("modprobe", "-r", kmodhelp.MODULE)
    labhelp.sh("modprobe", "tap")
    labhelp.sh("insmod", f"/lib/modules/{os.uname().release}/napi_macvlan-selftest.ko")
    assert any("self-tests passed" in line for line in kmodhelp.kernel_log()[said:])
    assert remove_module()


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_loads_the_module_and_keeps_it(lower: str, kind: str) -> None:
    labhelp.sh("modprobe", "-r", kmodhelp.MODULE)
    ip("link", "add", "link", lower, "name", "nd0", "type", kind)
    assert loaded()
    assert not remove_module()
    up("nd0")
    assert not remove_module()
    if kind == "napi_macvtap":
        queue = kmodhelp.open_tap("nd0")
        delete("nd0")
        assert not remove_module(), "a descriptor of /dev/tapN is open"
        os.close(queue)
    delete("nd0")
    labhelp.wait_for(remove_module, "nothing keeps the module any more", 20)


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_it_is(lower: str, kind: str) -> None:
    link("nd0", lower, kind, mode=VEPA, queue=77, mac="02:00:00:00:0a:01")
    net = kmodhelp.NET / "nd0"
    assert labhelp.text(f"{net}/address") == "02:00:00:00:0a:01"
    assert (net / f"lower_{lower}").exists()
    assert labhelp.text(f"{net}/iflink") == labhelp.text(f"/sys/class/net/{lower}/ifindex")
    assert f" {kind} " in ip("-d", "link", "show", "nd0")
    assert labhelp.sh("ethtool", "-i", "nd0").stdout.startswith(f"driver: {kind}\n")
    assert (net / "threaded").read_text() == "0\n"
    length = {"napi_macvlan": "1000", "napi_macvtap": "500"}[kind]
    if kind == "napi_macvtap":
        assert labhelp.text(f"{net}/tx_queue_len") == length


def test_it_takes_a_lower_device_only_while_up(lower: str) -> None:
    """A guest's device is made while macvtap still has the lower one, and refused there."""
    ip("link", "add", "link", lower, "name", "mt0", "type", "macvtap", "mode", "bridge")
    up("mt0")
    for kind in KINDS:
        link("nd0", lower, kind)
        refused = labhelp.sh("ip", "link", "set", "nd0", "up", check=False)
        assert refused.returncode != 0
        assert "busy" in refused.stderr
        delete("mt0")
        up("nd0")
        refused = labhelp.sh(
            "ip", "link", "add", "link", lower, "name", "mt0", "type", "macvtap", check=False
        )
        assert "busy" in refused.stderr, "macvtap got a lower device that is taken"
        ip("link", "set", "nd0", "down")
        ip("link", "add", "link", lower, "name", "mt0", "type", "macvtap", "mode", "bridge")
        up("mt0")
        delete("nd0")


def test_modes(lower: str) -> None:
    """Bridge and bridge hear each other, private and vepa hear no sibling."""
    for name, mode in (("na", BRIDGE), ("nb", BRIDGE), ("nc", PRIVATE), ("nv", VEPA)):
        link(name, lower, mode=mode)
        up(name)
    for name, hears in (("nb", 10), ("nc", 0), ("nv", 0)):
        send("na", kmodhelp.mac_of(name), 10)
        assert kmodhelp.settle(name, hears)["rx_forwarded"] == hears, name
    send("nc", kmodhelp.mac_of("nb"), 10)
    assert kmodhelp.settle("nb", 10)["rx_forwarded"] == 10
    assert counters("nc")["tx_packets_lower"] == 10
    link("nc", lower, mode=BRIDGE, change=True)
    send("na", kmodhelp.mac_of("nc"), 10)
    assert kmodhelp.settle("nc", 10)["rx_forwarded"] == 10
    with pytest.raises(OSError) as refused:
        link("nc", lower, mode=PASSTHRU, change=True)
    assert refused.value.errno == errno.EINVAL
    with pytest.raises(OSError) as refused:
        link("ne", lower, mode=3)
    assert refused.value.errno == errno.EINVAL


def test_passthru_is_alone_and_lends_its_mac(lower: str) -> None:
    before = kmodhelp.mac_of(lower)
    link("np", lower, mode=PASSTHRU)
    link("nb", lower)
    up("np")
    assert labhelp.sh("ip", "link", "set", "nb", "up", check=False).returncode != 0
    ip("link", "set", "np", "address", "02:00:00:00:0a:02")
    assert kmodhelp.mac_of(lower) == "02:00:00:00:0a:02"
    ip("link", "set", "np", "down")
    assert kmodhelp.mac_of(lower) == before
    up("nb")


@pytest.mark.parametrize("kind", KINDS)
def test_addresses_and_mtu(lower: str, kind: str) -> None:
    link("na", lower)
    link("nd0", lower, kind)
    up("na", "nd0")
    for number in range(20):
        mac = f"02:00:00:00:0b:{number:02x}"
        ip("link", "set", "nd0", "address", mac)
        before = counters("nd0")["rx_forwarded"]
        send("na", mac, 3)
        assert kmodhelp.settle("nd0", before + 3)["rx_forwarded"] == before + 3
    taken = ("ip", "link", "set", "nd0", "address", kmodhelp.mac_of("na"))
    assert labhelp.sh(*taken, check=False).returncode != 0
    ip("link", "set", "nd0", "mtu", "1400")
    assert labhelp.sh("ip", "link", "set", "nd0", "mtu", "9000", check=False).returncode != 0
    ip("link", "set", lower, "mtu", "1300")
    assert labhelp.text("/sys/class/net/nd0/mtu") == "1300"
    assert labhelp.text("/sys/class/net/na/mtu") == "1300"


@pytest.mark.parametrize("kind", KINDS)
def test_deletion_of_the_lower_device(kind: str) -> None:
    """Up, down, with an open descriptor, in another namespace: all go with it."""
    ip("netns", "add", "nk")
    try:
        ip("link", "add", "nl0", "type", "dummy")
        up("nl0")
        for name in ("na", "nb", "nc", "nd"):
            link(name, "nl0", kind)
        up("na", "nb")
        if kind == "napi_macvtap":
            queue = kmodhelp.open_tap("na")
        ip("link", "set", "nc", "netns", "nk")
        ip("-n", "nk", "link", "set", "nc", "up")
        ip("link", "del", "nl0")
        left = {path.name for path in kmodhelp.NET.iterdir()}
        assert not left & {"na", "nb", "nc", "nd", "nl0"}
        assert "nc" not in ip("-n", "nk", "link", "show")
        if kind == "napi_macvtap":
            # As with macvtap, what is written to a device that is gone is thrown away.
            assert os.write(queue, bytes(74)) == 74
            os.close(queue)
    finally:
        ip("netns", "del", "nk")


@pytest.mark.parametrize("kind", KINDS)
def test_namespaces(lower: str, kind: str) -> None:
    """A device works in another namespace, comes back, and goes with its namespace."""
    ip("netns", "add", "nk")
    link("na", lower)
    link("nd0", lower, kind)
    up("na")
    mac = kmodhelp.mac_of("nd0")
    for _ in range(5):
        ip("link", "set", "nd0", "netns", "nk")
        ip("-n", "nk", "link", "set", "nd0", "up")
        before = counters("nd0", "nk")["rx_forwarded"]
        send("na", mac, 3)
        labhelp.wait_for(
            lambda before=before: counters("nd0", "nk")["rx_forwarded"] == before + 3, "frames"
        )
        ip("-n", "nk", "link", "set", "nd0", "netns", "1")
    ip("link", "set", "nd0", "netns", "nk")
    ip("-n", "nk", "link", "set", "nd0", "up")
    held = references()
    ip("netns", "del", "nk")
    labhelp.wait_for(lambda: references() < held, "it went with nk", 20)
    # A lower device may go away with its namespace while its uppers are elsewhere.
    ip("netns", "add", "nk")
    ip("-n", "nk", "link", "add", "nl1", "type", "dummy")
    ip("-n", "nk", "link", "set", "nl1", "up")
    ip("-n", "nk", "link", "add", "link", "nl1", "name", "ne0", "type", kind)
    ip("-n", "nk", "link", "set", "ne0", "netns", "1")
    up("ne0")
    ip("netns", "del", "nk")
    labhelp.wait_for(lambda: not (kmodhelp.NET / "ne0").exists(), "ne0 went with nl1", 20)


def test_link_flaps(lower: str) -> None:
    link("na", lower)
    link("nd0", lower, "napi_macvtap")
    up("na", "nd0")
    for _ in range(50):
        ip("link", "set", lower, "down")
        up(lower)
        ip("link", "set", "nd0", "down")
        up("nd0")
    labhelp.wait_for(lambda: labhelp.text("/sys/class/net/nd0/operstate") != "down", "up again")
    before = counters("nd0")["rx_forwarded"]
    send("na", kmodhelp.mac_of("nd0"), 5)
    assert kmodhelp.settle("nd0")["rx_forwarded"] == before + 5


class Traffic(threading.Thread):
    """Unicast to every sibling and broadcast, from a device, until stopped."""

    def __init__(self, device: str, macs: list[str]) -> None:
        super().__init__()
        self._device = device
        self._macs = [*macs, kmodhelp.BROADCAST]
        self.stopping = threading.Event()
        self.rounds = 0

    def run(self) -> None:
        while not self.stopping.is_set():
            for mac in self._macs:
                with suppress(OSError):  # down for a moment
                    send(self._device, mac, 2)
            self.rounds += 1
            # The traffic goes on; it must not be what the emulated CPUs are busy with.
            self.stopping.wait(0.05)


def test_hundreds_of_devices_come_and_go_under_traffic(lower: str) -> None:
    """Fifty at a time, a thousand in all: made, brought up, threaded and not, deleted at once. With a
    detector, under which that takes longer than all other tests together, 150."""
    link("na", lower)
    up("na")
    macs = [f"02:00:00:00:0c:{number:02x}" for number in range(50)]
    traffic = Traffic("na", macs)
    traffic.start()
    try:
        for turn in range(3 if kmodhelp.DETECTORS else 20):
            lines = []
            for number, mac in enumerate(macs):
                kind = KINDS[(turn + number) % 2]
                lines.append(f"link add link {lower} name nk{number} address {mac} type {kind}")
                lines.append(f"link set nk{number} group 7 up")
            batch = "\n".join(lines) + "\n"
            done = subprocess.run(
                ["ip", "-batch", "-"], input=batch, text=True, capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr
            for number in range(0, 50, 10):
                (kmodhelp.NET / f"nk{number}" / "threaded").write_text("1")
            ip("link", "del", "group", "7")
        assert not list(kmodhelp.NET.glob("nk*"))
    finally:
        traffic.stopping.set()
        traffic.join()
    assert traffic.rounds > 0
    kmodhelp.check_sum(kmodhelp.settle("na"))


def test_the_modules_own_script() -> None:
    """kmod/tests/netns.sh, with few of its cycles."""
    environment = {**os.environ, "CYCLES": "20"}
    done = subprocess.run(
        ["bash", "/run/lab/kmod-tests/netns.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
