"""What the kernel's own tools are told of the module's devices: why a frame is freed, and the
attributes of route netlink."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import kmodhelp
import labhelp
import pytest
from kmodhelp import delete, ip, link, send, settle, up
from test_kmod import lower, silent  # noqa: F401 (fixtures)
from test_kmod_frames import TRACING, tap_queue, wire  # noqa: F401 (fixture)


@contextmanager
def reasons() -> Iterator[Counter[str]]:
    """Why frames that nobody answers are freed meanwhile, by the kernel's name of it."""
    found: Counter[str] = Counter()
    TRACING.mkdir()
    try:
        event = TRACING / "events/skb/kfree_skb"
        (event / "filter").write_text(f"protocol == {int.from_bytes(kmodhelp.ETHERTYPE)}")
        (event / "enable").write_text("1")
        yield found
        (event / "enable").write_text("0")
        lines = (TRACING / "trace").read_text().splitlines()
        found.update(line.rpartition("reason: ")[2] for line in lines if "reason: " in line)
    finally:
        TRACING.rmdir()


def test_what_is_dropped_has_its_reason(wire: tuple[str, str]) -> None:  # noqa: F811
    """The tracepoint skb:kfree_skb names the cause, and so do tools on top of it."""
    (far, near) = wire
    for name, kind in (("na", "napi_macvtap"), ("nt", "napi_macvtap"), ("nv", "napi_macvlan")):
        link(name, near, kind)
        up(name)
    to, sibling = kmodhelp.mac_of("nt"), kmodhelp.mac_of("na")
    with reasons() as found:
        send(far, to, 10)
        send("na", to, 10)
        settle("nt", 20)
    assert found == {"DEV_READY": 20}, "nobody has opened /dev/tapN"
    ip("link", "set", "nt", "txqueuelen", "16")
    with tap_queue("nt"):
        with reasons() as found:
            send(far, to, 20)
            settle("nt", 40)
            send("na", to, 10)
            settle("nt", 50)
        assert found == {"FULL_RING": 4 + 10}, "from the NIC, and from a sibling"
        with reasons() as found:
            ip("link", "set", "nt", "txqueuelen", "6")
        assert found == {"FULL_RING": 10}, "the ring was made shorter"
    link("nv", near, mode=kmodhelp.PRIVATE, change=True)
    with reasons() as found:
        send(far, kmodhelp.mac_of("nv"), 10, source=sibling)
        settle("nv", 10)
    assert found == {"OTHERHOST": 10}, "a private device hears no sibling"
    link("nv", near, mode=kmodhelp.BRIDGE, change=True)
    ip("link", "set", "nv", "mtu", "1000")
    with reasons() as found:
        send("na", "", 10, data=kmodhelp.frame(kmodhelp.mac_of("nv"), sibling, 1400))
        settle("nv", 20)
    assert found == {"PKT_TOO_BIG": 10}


def test_attributes_are_told_and_set_together_or_not_at_all(lower: str) -> None:  # noqa: F811
    link("nt", lower, "napi_macvtap", every_queue=True, uplink=True, queue=77)
    assert kmodhelp.flags("nt") == {"every-queue": True, "uplink": True}
    with pytest.raises(OSError, match="another device") as refused:
        link("nu", lower, "napi_macvtap", uplink=True)
    assert refused.value.errno == errno.EBUSY
    assert not (kmodhelp.NET / "nu").exists()
    link("nu", lower, "napi_macvtap")
    with pytest.raises(OSError, match="another device"):
        link(
            "nu",
            lower,
            "napi_macvtap",
            mode=kmodhelp.PRIVATE,
            every_queue=True,
            uplink=True,
            change=True,
        )
    assert kmodhelp.flags("nu") == {"every-queue": False, "uplink": False}
    assert kmodhelp.told("nu").mode == kmodhelp.BRIDGE
    link("nt", lower, "napi_macvtap", every_queue=False, change=True)
    assert kmodhelp.flags("nt") == {"every-queue": False, "uplink": True}
    delete("nt")
    kmodhelp.set_flag("nu", "uplink", on=True)
    link("nv", lower)
    assert kmodhelp.flags("nv") == {"every-queue": None, "uplink": None}
    with pytest.raises(OSError, match="only a napi_macvtap") as refused:
        link("nv", lower, every_queue=True, change=True)
    assert refused.value.errno == errno.EOPNOTSUPP
    for value in (2, 255):
        with pytest.raises(OSError) as refused:
            kmodhelp.change("nu", napi_macvlan_uplink=value)
        assert refused.value.errno == errno.ERANGE
    with pytest.raises(OSError, match="only be read") as refused:
        kmodhelp.change("nu", napi_macvlan_thread=1)
    assert refused.value.errno == errno.EINVAL


@pytest.mark.parametrize("raised", [True, False])
def test_the_thread_is_told(lower: str, raised: bool) -> None:  # noqa: F811
    """Also of a device that is down: newer kernels end its thread then, too."""
    link("nd0", lower)
    if raised:
        up("nd0")
    assert kmodhelp.napi_thread("nd0") == 0
    (kmodhelp.NET / "nd0" / "threaded").write_text("1")
    thread = labhelp.wait_for(lambda: kmodhelp.napi_thread("nd0"), "it has a thread", 20)
    assert labhelp.text(f"/proc/{thread}/comm").startswith("napi/nd0-")
    (kmodhelp.NET / "nd0" / "threaded").write_text("0")
    labhelp.wait_for(lambda: kmodhelp.napi_thread("nd0") == 0, "it has none", 20)
    assert "napi_thread_tid" not in kmodhelp.counters("nd0")
    assert labhelp.sh("ethtool", "--show-priv-flags", "nd0", check=False).returncode != 0


def frames(*words: str) -> list[list[str]]:
    """The words of each line that the module's helper prints; skips where the kernel cannot."""
    done = labhelp.sh(*kmodhelp.FRAMES, *words, check=False)
    if done.returncode == 3:
        pytest.skip("this kernel's netdev family has no such request")
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_the_receive_queue_has_its_napi(lower: str) -> None:  # noqa: F811
    """queue-get names the NAPI instance whose thread route netlink tells."""
    for name, kind in (("nd0", "napi_macvlan"), ("nt", "napi_macvtap")):
        link(name, lower, kind)
        up(name)
        (kmodhelp.NET / name / "threaded").write_text("1")
        comm = labhelp.text(f"/proc/{kmodhelp.napi_thread(name)}/comm")
        napi = comm.rpartition("-")[2]
        assert frames("queues", name) == [["rx", "0", "napi", napi], ["tx", "0", "napi", "0"]]
        ip("link", "set", name, "down")
        assert frames("queues", name) == []
        up(name)
        assert frames("queues", name)[0][3] == napi


def test_a_device_goes_down_however_busily_it_is_polled(lower: str) -> None:  # noqa: F811
    """A thread that never ends its poll once held RTNL for ever."""
    link("nd0", lower)
    link("nd1", lower)
    up("nd0", "nd1")
    frames("busypoll", "nd0")
    send("nd1", kmodhelp.mac_of("nd0"), 1)
    settle("nd0", 1)
    for state in ("down", "up", "down"):
        ip("link", "set", "nd0", state)


def test_the_kernels_queue_statistics_are_the_counters(wire: tuple[str, str]) -> None:  # noqa: F811
    (far, near) = wire
    # Whatever numbers of queues are asked for, it has one of each direction.
    numbers = ("numtxqueues", "4", "numrxqueues", "4", "address", kmodhelp.new_mac())
    ip("link", "add", "nt", "link", near, *numbers, "type", "napi_macvtap")
    up("nt")
    to = kmodhelp.mac_of("nt")
    send(far, to, 10)
    ip("link", "set", "nt", "txqueuelen", "16")
    with tap_queue("nt"):
        send(far, to, 20)
        settle("nt", 30)
        send("nt", kmodhelp.mac_of(far), 7)
        found = {name: int(value) for name, value in frames("qstats", "nt")}
    assert found == {
        "rx_packets": 16,
        "rx_bytes": 16 * 60,
        "rx_hw_drops": 14,
        "rx_hw_drop_overruns": 4,
        "tx_packets": 7,
        "tx_bytes": 7 * 60,
        "tx_hw_drops": 0,
    }


def test_a_lower_device_knows_its_own_in_every_namespace(lower: str) -> None:  # noqa: F811
    """One uplink, and the MTU and the end of the lower device, for those that were moved too."""
    ip("link", "add", "nl9", "type", "dummy")
    ip("netns", "add", "nk")
    try:
        link("nt", lower, "napi_macvtap", uplink=True)
        link("nu", lower, "napi_macvtap")
        link("nw", "nl9", "napi_macvtap", uplink=True)
        ip("link", "set", "nt", "netns", "nk")
        with pytest.raises(OSError, match="another device") as refused:
            kmodhelp.set_flag("nu", "uplink", on=True)
        assert refused.value.errno == errno.EBUSY
        ip("link", "set", lower, "mtu", "1300")
        assert "mtu 1300 " in ip("-n", "nk", "link", "show", "nt")
        assert "mtu 1500 " in ip("link", "show", "nw"), "another lower device"
        delete(lower)
        assert "nt" not in ip("-n", "nk", "link")
        assert kmodhelp.flags("nw")["uplink"]
    finally:
        ip("netns", "del", "nk")
        delete("nl9")


def test_further_addresses(lower: str) -> None:  # noqa: F811
    """`bridge fdb`: groups in every mode, unicast where the device takes all frames."""
    group, other = "01:00:5e:01:02:03", "02:00:00:00:0d:01"
    link("na", lower)
    link("nd0", lower)
    up("na", "nd0")

    def heard() -> bool:
        before = kmodhelp.counters("nd0")["rx_broadcast"]
        send("na", group, 1)
        return settle("nd0")["rx_broadcast"] > before

    assert not heard()
    labhelp.sh("bridge", "fdb", "add", group, "dev", "nd0", "self")
    labhelp.wait_for(heard, "the device listens to the group", 20)
    assert group in labhelp.sh("bridge", "fdb", "show", "dev", "nd0").stdout
    labhelp.sh("bridge", "fdb", "del", group, "dev", "nd0", "self")
    labhelp.wait_for(lambda: not heard(), "it does so no more", 20)
    refused = labhelp.sh("bridge", "fdb", "add", other, "dev", "nd0", "self", check=False)
    assert refused.returncode != 0
    assert "only a passthru device" in refused.stderr
    delete("na", "nd0")
    link("np", lower, mode=kmodhelp.PASSTHRU)
    up("np")
    labhelp.sh("bridge", "fdb", "add", other, "dev", "np", "self")
    labhelp.sh("bridge", "fdb", "del", other, "dev", "np", "self")
