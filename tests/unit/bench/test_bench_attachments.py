"""Interfaces of the routers, rewritten for another attachment, and plugged in anew and back."""

from __future__ import annotations

import socket
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_samples as samples
import pytest
from attach_host import FakeAttachHost, Killed

from vsrtune.attach.libvirt_hotplug import RefusedError
from vsrtune.attach.plan.model import AttachHostState
from vsrtune.bench.cleanup.cleaners import CLEANERS, BenchLedger
from vsrtune.bench.setup import attachments
from vsrtune.bench.setup.attachments import rewritten, switchable
from vsrtune.bench.setup.configurator import Configurator
from vsrtune.bench.spec.model import BenchAttachment, Configuration
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.domain_xml import DomainNic, differences, nic, nics
from vsrtune.model.host import Link

DIRECT = """\
<interface type='direct' trustGuestRxFilters='yes'>
  <mac address='02:76:72:00:01:AA'/>
  <source dev='p0' mode='bridge'/>
  <target dev='macvtap0'/>
  <model type='virtio'/>
  <driver name='vhost' queues='2' rx_queue_size='1024'/>
  <alias name='net0'/>
  <rom enabled='no'/>
  <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x0'/>
</interface>"""
EMULATED = """\
<interface type='direct'>
  <mac address='02:76:72:00:01:00'/>
  <source dev='p0' mode='bridge'/>
  <model type='e1000'/>
</interface>"""
BARE = "<interface type='network'><mac address='02:00:00:00:00:01'/><source network='x'/>\
<model type='virtio'/></interface>"


AS_IS = Configuration("as is")
BRIDGE = Configuration("bridge", attachment=BenchAttachment.BRIDGE)
OVS = Configuration("openvswitch", attachment=BenchAttachment.OPENVSWITCH)
MACVTAP = Configuration("macvtap", attachment=BenchAttachment.MACVTAP)
MODULE = Configuration("module", attachment=BenchAttachment.NAPI_MACVTAP)


def rewrite(text: str, wanted: Configuration, bridge: str = "") -> ET.Element:
    return ET.fromstring(rewritten(nic(text), wanted, bridge))


def test_reads_a_domain() -> None:
    domain = f"<domain><name>a</name><devices>{DIRECT}{BARE}</devices></domain>"
    first, second = nics(domain)
    assert first == DomainNic(
        "02:76:72:00:01:aa", "direct", "macvtap0", "p0", "virtio", "vhost", "net0", first.xml
    )  # fmt: skip
    assert (second.kind, second.device, second.lower) == ("network", "", "")
    assert nic(first.xml) == first


@pytest.mark.parametrize("wanted", [BRIDGE, OVS])
def test_onto_a_bridge_keeps_what_the_guest_sees(wanted: Configuration) -> None:
    made = rewrite(DIRECT, wanted, "vsrb7")
    old = ET.fromstring(DIRECT)
    assert made.get("type") == "bridge"
    assert [s.attrib for s in made.findall("source")] == [{"bridge": "vsrb7"}]
    assert made.find("target") is None
    port = made.find("virtualport")
    assert (port is not None) == (wanted is OVS)
    for kept in ("mac", "model", "driver", "alias", "rom", "address"):
        before, after = old.find(kept), made.find(kept)
        assert before is not None
        assert after is not None
        assert before.attrib == after.attrib


def test_a_port_of_open_vswitch_has_an_id_of_its_own() -> None:
    """libvirt makes one up otherwise, and then the interface is not as it was asked for."""
    ids = [
        rewrite(DIRECT, OVS, bridge).find("virtualport/parameters") for bridge in ("a", "b", "a")
    ]
    found = [one.get("interfaceid") for one in ids if one is not None]
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("wanted", [AS_IS, MACVTAP])
def test_as_it_was(wanted: Configuration) -> None:
    assert differences(DIRECT, rewritten(nic(DIRECT), wanted, "")) == ()


@pytest.mark.parametrize(
    ("asked", "driver"),
    [
        ({}, {"name": "vhost", "queues": "2", "rx_queue_size": "1024"}),
        ({"vhost": False}, {"name": "qemu", "queues": "2", "rx_queue_size": "1024"}),
        ({"queues": 1}, {"name": "vhost", "rx_queue_size": "1024"}),
        ({"queues": 4}, {"name": "vhost", "queues": "4", "rx_queue_size": "1024"}),
        ({"vhost": False, "queues": 1}, {"name": "qemu", "rx_queue_size": "1024"}),
        ({"ring": 512}, {"name": "vhost", "queues": "2", "rx_queue_size": "512"}),
    ],
)
def test_drivers(asked: dict[str, Any], driver: dict[str, str]) -> None:
    made = rewrite(DIRECT, replace(AS_IS, **asked)).find("driver")
    assert made is not None
    assert made.attrib == driver


@pytest.mark.parametrize(("mergeable", "word"), [(True, "on"), (False, "off")])
def test_mergeable_buffers(mergeable: bool, word: str) -> None:
    made = rewrite(DIRECT, replace(AS_IS, mergeable=mergeable))
    host = made.find("driver/host")
    assert host is not None
    assert host.attrib == {"mrg_rxbuf": word}
    guest = made.find("driver/guest")
    assert (guest is not None) is (not mergeable)
    if guest is not None:
        assert {guest.get(name) for name in ("tso4", "tso6", "ecn", "ufo")} == {"off"}


def test_a_driver_where_there_was_none() -> None:
    made = rewrite(BARE, replace(AS_IS, queues=2)).find("driver")
    assert made is not None
    assert made.attrib == {"name": "vhost", "queues": "2"}
    assert rewrite(BARE, AS_IS).find("driver") is None


def test_what_cannot_be_switched() -> None:
    assert switchable(nic(DIRECT), replace(BRIDGE, vhost=False, queues=2)) == ""
    assert "network" in switchable(nic(BARE), BRIDGE)
    assert switchable(nic(BARE), replace(AS_IS, vhost=False)) == ""
    assert "e1000" in switchable(nic(EMULATED), replace(AS_IS, queues=2))
    assert switchable(nic(EMULATED), BRIDGE) == ""


def test_differences_name_the_path() -> None:
    assert differences(DIRECT, DIRECT.replace("macvtap0", "macvtap3")) == ()
    other = DIRECT.replace("macvtap0", "uplink").replace("<rom enabled='no'/>", "")
    assert differences(DIRECT, other) == (
        "/interface/rom: was '', is 'absent'",
        "/interface/rom/@enabled: was 'no', is 'absent'",
        "/interface/target/@dev: was 'macvtap0', is 'uplink'",
    )


MACS = ("02:00:00:00:0a:00", "02:00:00:00:0a:01")
EMULATED_BACK_END = replace(AS_IS, name="emulated", vhost=False)
WAYS = {
    "another driver": (EMULATED_BACK_END,),
    "a bridge": (BRIDGE,),
    "a bridge, and another driver on it": (BRIDGE, replace(BRIDGE, name="two", queues=4)),
    "a bridge, then a macvtap": (BRIDGE, EMULATED_BACK_END),
    "the module": (MODULE,),
    "a bridge, then the module": (BRIDGE, MODULE),
    "the module, another driver on it, then a bridge": (
        MODULE,
        replace(MODULE, name="two", queues=4),
        BRIDGE,
    ),
}
KINDS = {BenchAttachment.BRIDGE: "bridge", BenchAttachment.NAPI_MACVTAP: "ethernet"}


class Bench:
    """A router with two interfaces on the imitated host, and a bench of it."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place.mkdir()
        self.place = place
        self.host = FakeAttachHost()
        self.guest = self.host.add("vr1", (MACS[0], "p0"), (MACS[1], "p1"))
        self.host.set_queue(self.host.index("macvtap1"), 123)
        self.host.changes = 0
        monkeypatch.setattr(FakeAttachHost, "close", lambda _: None, raising=False)
        monkeypatch.setattr(attachments, "LiveHost", lambda _: self.host)
        monkeypatch.setattr(attachments, "LEDGER", place / "attach.jsonl")
        monkeypatch.setattr(attachments, "JOURNAL", place / "journal")
        monkeypatch.setattr(attachments, "name_for", self._name)
        monkeypatch.setattr(attachments, "existing", self._existing)
        monkeypatch.setattr(attachments, "create", self._create)
        monkeypatch.setattr(attachments, "remove", self._remove)

    def ledger(self) -> BenchLedger:
        return BenchLedger.open(self.place / "bench.jsonl")

    def configurator(self, ledger: BenchLedger) -> Configurator:
        return Configurator(
            samples.SPEC, ledger, uri="test:///", journal=self.place / "journal"
        )  # fmt: skip

    def _name(self, kind: BenchAttachment, lower: str) -> str:
        return {BenchAttachment.BRIDGE: f"vsrb-{lower}"}.get(kind, "")

    def _existing(self, names: Collection[str]) -> list[str]:
        return [name for name in names if name.rpartition("-")[2] in self.host.bridged]

    def _create(self, kind: BenchAttachment, lower: str) -> None:
        self.host.bridge(lower, True)

    def _remove(self, names: Collection[str]) -> None:
        for name in self._existing(names):
            self.host.bridge(name.rpartition("-")[2], False)


def apply(configurator: Configurator, *way: Configuration) -> None:
    """Apply these configurations one after another."""
    for configuration in way:
        configurator.apply(configuration)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Bench]:
    """Makes a bench on a host of its own."""
    return lambda name: Bench(tmp_path / name, monkeypatch)


@pytest.mark.parametrize("way", WAYS)
def test_there_and_back(bench: Callable[[str], Bench], way: str) -> None:
    made = bench("a")
    before = made.host.picture()
    with made.ledger() as ledger, made.configurator(ledger) as configurator:
        for configuration in WAYS[way]:
            configurator.apply(configuration)
            found = [nic(text) for text in made.guest.live or ()]
            assert [n.mac for n in found] == list(MACS)
            bridged = configuration.attachment is BenchAttachment.BRIDGE
            assert {n.kind for n in found} == {KINDS.get(configuration.attachment, "direct")}
            assert made.host.bridged == ({"p0", "p1"} if bridged else set())
        assert [entry.kind for entry in ledger.pending()] == ["attachment"]
        changes = made.host.changes
        configurator.apply(replace(WAYS[way][-1], name="the same interfaces"))
        assert made.host.changes == changes
        configurator.apply(AS_IS)
        assert made.host.picture() == before
        assert ledger.pending() == []


@pytest.mark.parametrize("way", WAYS)
def test_a_bench_that_is_killed_anywhere_leaves_nothing(
    bench: Callable[[str], Bench], way: str
) -> None:
    whole = bench("whole")
    with whole.ledger() as ledger, whole.configurator(ledger) as configurator:
        apply(configurator, *WAYS[way], AS_IS)
    for number in range(1, whole.host.changes + 1):
        made = bench(f"{number}")
        before = made.host.picture()

        def kill(n: int, number: int = number) -> None:
            if n == number:
                raise Killed

        made.host.after = kill
        with made.ledger() as ledger:
            # A killed process does not leave its context.
            configurator = made.configurator(ledger).__enter__()
            with pytest.raises(Killed):
                apply(configurator, *WAYS[way], AS_IS)
        made.host.after = lambda n: None
        with made.ledger() as ledger:
            assert ledger.resolve(CLEANERS) == [], made.host.log
        assert made.host.picture() == before, made.host.log
        assert made.host.bridged == set()


@pytest.mark.parametrize("way", WAYS)
def test_what_libvirt_refuses_is_taken_back(bench: Callable[[str], Bench], way: str) -> None:
    whole = bench("whole")
    with whole.ledger() as ledger, whole.configurator(ledger) as configurator:
        apply(configurator, *WAYS[way])
        changes = whole.host.changes
    for number in range(1, changes + 1):
        made = bench(f"{number}")
        before = made.host.picture()

        def refuse(n: int, number: int = number) -> None:
            if n == number:
                raise RefusedError("refused")

        made.host.before = refuse
        with made.ledger() as ledger:
            with made.configurator(ledger) as one, pytest.raises(VsrtuneError, match="refused"):
                apply(one, *WAYS[way])
            assert ledger.pending() == []
        assert made.host.picture() == before, made.host.log


def test_a_guest_that_ended_needs_nothing(bench: Callable[[str], Bench]) -> None:
    made = bench("a")
    with made.ledger() as ledger, made.configurator(ledger) as configurator:
        configurator.apply(BRIDGE)
        made.host.stop(made.guest)
        configurator.restore()
        assert ledger.pending() == []
    assert made.host.bridged == set()
    with (
        made.ledger() as ledger,
        made.configurator(ledger) as configurator,
        pytest.raises(VsrtuneError, match="does not run"),
    ):
        configurator.check([BRIDGE])


@pytest.mark.parametrize(
    ("links", "addresses", "own", "why"),
    [
        ([], ["fe80::1%p0", "169.254.3.4"], (), ""),
        ([Link(9, "macvtap3", "macvtap", lower=2)], [], ("macvtap3",), ""),
        ([Link(9, "macvtap3", "macvtap", lower=2)], [], (), "macvtap3 is on p0"),
        ([Link(9, "veth7", "veth", lower=2)], [], (), ""),
        ([], ["192.0.2.1"], (), "has the address 192.0.2.1"),
        ([], ["fe80::1%p0", "2001:db8::1"], (), "has the address 2001:db8::1"),
    ],
)
def test_what_keeps_a_device_out_of_a_bridge(
    monkeypatch: pytest.MonkeyPatch,
    links: list[Link],
    addresses: list[str],
    own: tuple[str, ...],
    why: str,
) -> None:
    family = {True: socket.AF_INET6, False: socket.AF_INET}
    found = [SimpleNamespace(family=family[":" in a], address=a) for a in addresses]
    monkeypatch.setattr(attachments.psutil, "net_if_addrs", lambda: {"p0": found})
    host = AttachHostState((), [Link(2, "p0"), *links], ())
    what = attachments.obstacle("p0", own, host)
    assert (what is None) == (why == "")
    assert why in (what or ("",))[0]


def test_a_port_of_a_bridge_is_not_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments.psutil, "net_if_addrs", dict)
    host = AttachHostState((), [Link(2, "p0", master=5), Link(5, "br0", "bridge")], ())
    assert attachments.obstacle("p0", (), host) == (
        "p0 is a port of br0 already", "take it out of there",
    )  # fmt: skip
    with pytest.raises(VsrtuneError, match="no such device"):
        attachments.obstacle("p9", (), host)
