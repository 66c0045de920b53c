"""The kernel module: what keeps it loaded, what its devices are, and its own script, which does the
rest to them."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
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


def remove_module() -> bool:
    """Whether rmmod was allowed."""
    return labhelp.sh("rmmod", kmodhelp.MODULE, check=False).returncode == 0


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
        # As with macvtap, what is written to a device that is gone is thrown away.
        assert os.write(queue, bytes(74)) == 74
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
