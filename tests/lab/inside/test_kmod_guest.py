"""Routers on the module's devices forward: namespaces, and a libvirt guest with vhost-net."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hoststate
import kmodhelp
import labhelp
import pytest
from kmodhelp import check_sum, counters, delete, ip, link, settle, up
from labhelp import LabGuest
from test_kmod import silent  # noqa: F401 (fixture)


def ping(space: str, address: str, count: int) -> int:
    """Answers to ``count`` pings from a namespace."""
    done = labhelp.sh(
        "nsenter", f"--net=/run/netns/{space}",
        "busybox", "ping", "-q", "-c", str(count), "-W", "2", "-A", address,
        check=False,
    )  # fmt: skip
    found = re.search(r"(\d+) packets received", done.stdout)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class Routers:
    """A chain of namespaces on two lower devices, addresses by hand:

    k1 [nx0] ===wire=== nl1 - [ra] k2 [rb] - nl2 - [rc] k3 [rd] - nl2 ... [re] k4

    k2 and k3 route. k1 reaches k2 over a wire, so as from a NIC; k2, k3 and k4 are siblings
    on the dummy device nl2.
    """

    names: tuple[str, ...] = ("k1", "k2", "k3", "k4")


@pytest.fixture
def routers() -> Iterator[Routers]:
    chain = Routers()
    for name in chain.names:
        ip("netns", "add", name)
    try:
        ip("link", "add", "nx0", "type", "veth", "peer", "name", "nl1")
        ip("link", "add", "nl2", "type", "dummy")
        up("nl1", "nl2")
        ip("link", "set", "nx0", "netns", "k1")
        for device, lower, space, address in (
            ("ra", "nl1", "k2", "10.90.1.2/24"),
            ("rb", "nl2", "k2", "10.90.2.2/24"),
            ("rc", "nl2", "k3", "10.90.2.3/24"),
            ("rd", "nl2", "k3", "10.90.3.3/24"),
            ("re", "nl2", "k4", "10.90.3.4/24"),
        ):
            link(device, lower)
            ip("link", "set", device, "netns", space)
            ip("-n", space, "addr", "add", address, "dev", device)
            ip("-n", space, "link", "set", device, "up")
        ip("-n", "k1", "addr", "add", "10.90.1.1/24", "dev", "nx0")
        ip("-n", "k1", "link", "set", "nx0", "up")
        for space, gateway in (("k1", "10.90.1.2"), ("k4", "10.90.3.3")):
            ip("-n", space, "route", "add", "default", "via", gateway)
        ip("-n", "k2", "route", "add", "10.90.3.0/24", "via", "10.90.2.3")
        ip("-n", "k3", "route", "add", "10.90.1.0/24", "via", "10.90.2.2")
        for space in ("k2", "k3"):
            labhelp.sh("ip", "netns", "exec", space, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        yield chain
    finally:
        for name in chain.names:
            ip("netns", "del", name)
        delete("nl1", "nl2")


@pytest.mark.parametrize("threaded", ["0", "1"])
def test_namespace_routers_forward(routers: Routers, threaded: str) -> None:
    """Neighbours are found by ARP, so broadcast is needed for a single answer."""
    for space, device in (("k2", "rb"), ("k3", "rc"), ("k3", "rd"), ("k4", "re")):
        path = f"/sys/class/net/{device}/threaded"
        labhelp.sh("ip", "netns", "exec", space, "sh", "-c", f"echo {threaded} >{path}")
    labhelp.wait_for(lambda: ping("k1", "10.90.3.4", 1), "k1 reaches k4 through k2 and k3", 20)
    before = counters("rc", "k3")
    assert ping("k1", "10.90.3.4", 50) == 50
    after = counters("rc", "k3")
    assert after["rx_forwarded"] - before["rx_forwarded"] >= 50
    assert counters("ra", "k2")["rx_nic"] >= 50
    for space, device in (("k2", "ra"), ("k2", "rb"), ("k3", "rc"), ("k3", "rd"), ("k4", "re")):
        found = counters(device, space)
        check_sum(found)
        assert kmodhelp.drops(found) == {}, device


@pytest.fixture
def alone(guests: list[LabGuest]) -> LabGuest:
    """The one guest of this lab: nobody else may hold the lower devices."""
    if [g.kind for g in guests] != ["libvirt"]:
        pytest.skip("needs the lower devices for one libvirt guest alone")
    return guests[0]


@pytest.fixture
def attached(alone: LabGuest, tmp_path: Path) -> Iterator[LabGuest]:
    """The guest on two napi_macvtap, instead of the macvtaps of its definition."""
    definition = labhelp.sh("virsh", "dumpxml", "--inactive", alone.name).stdout
    names = iter(("nvt0", "nvt1"))

    def unmanaged(found: re.Match[str]) -> str:
        mac = re.search(r"<mac [^>]*/>", found[0])
        model = re.search(r"<model [^>]*/>", found[0])
        assert mac is not None and model is not None, found[0]
        target = f"<target dev='{next(names)}' managed='no'/>"
        return f"<interface type='ethernet'>{mac[0]}{target}{model[0]}</interface>"

    changed = re.sub(r"<interface type=.*?</interface>", unmanaged, definition, flags=re.DOTALL)
    assert changed.count("type='ethernet'") == 2
    for name, lower, mac in (("nvt0", "p0", alone.macs[0]), ("nvt1", "p1", alone.macs[1])):
        link(name, lower, "napi_macvtap", mac=mac)
    labhelp.stop_guest(alone)
    path = tmp_path / "domain.xml"
    try:
        up("nvt0", "nvt1")
        path.write_text(changed)
        labhelp.sh("virsh", "define", str(path))
        labhelp.start_guest(alone)
        yield alone
    finally:
        if alone.runs:
            labhelp.stop_guest(alone)
        delete("nvt0", "nvt1")
        path.write_text(definition)
        labhelp.sh("virsh", "define", str(path))
        labhelp.start_guest(alone)


def test_a_libvirt_guest_with_vhost_net_forwards(attached: LabGuest) -> None:
    """Stock libvirt and vhost-net take the device as they take a macvtap; the module knows
    the worker of each queue, and counts what it carries."""
    workers = set(attached.workers())
    assert len(workers) == 2, "vhost-net serves both interfaces"
    before = [settle(name) for name in ("nvt0", "nvt1")]
    words = ("--guest", attached.name, "--rate", "1000", "--seconds", "1")
    sent = json.loads(labhelp.sh("lab-traffic", *words).stdout)
    assert sent["forwarded"] > 900
    (left, right) = (settle(name) for name in ("nvt0", "nvt1"))
    assert left["rx_nic"] - before[0]["rx_nic"] == sent["sent"]
    assert right["tx_packets_lower"] - before[1]["tx_packets_lower"] == sent["forwarded"]
    assert right["tapq0_tx_packets"] - before[1]["tapq0_tx_packets"] == sent["forwarded"]
    for found in (left, right):
        check_sum(found)
    # A ping lets both workers transmit.
    labhelp.sh("lab-wait-forward", attached.name)
    tids = [counters(name)["tapq0_worker_tid"] for name in ("nvt0", "nvt1")]
    assert set(tids) == workers
    assert {hoststate.comm(tid) for tid in tids} == {f"vhost-{attached.pid}"}
    labhelp.sh("ip", "link", "set", "nvt0", "txqueuelen", "40")
    assert labhelp.sh("rmmod", kmodhelp.MODULE, check=False).returncode != 0
    labhelp.sh("lab-wait-forward", attached.name)
