"""Interfaces of a domain, rewritten for another attachment."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from vsrtune.bench.setup.attachments import Back, Driver, rewritten, switchable
from vsrtune.bench.spec.model import BenchAttachment
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.domain_xml import DomainNic, differences, nic, nics

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


def rewrite(text: str, back: Back) -> ET.Element:
    return ET.fromstring(rewritten(nic(text), back))


def test_reads_a_domain() -> None:
    domain = f"<domain><name>a</name><devices>{DIRECT}{BARE}</devices></domain>"
    first, second = nics(domain)
    assert first == DomainNic(
        "02:76:72:00:01:aa", "direct", "macvtap0", "p0", "virtio", first.xml
    )  # fmt: skip
    assert (second.kind, second.device, second.lower) == ("network", "", "")
    assert nic(first.xml) == first
    with pytest.raises(VsrtuneError, match="cannot be read"):
        nics("<domain>")


@pytest.mark.parametrize("kind", [BenchAttachment.BRIDGE, BenchAttachment.OPENVSWITCH])
def test_onto_a_bridge_keeps_what_the_guest_sees(kind: BenchAttachment) -> None:
    made = rewrite(DIRECT, Back(kind, "vsrb7"))
    old = ET.fromstring(DIRECT)
    assert made.get("type") == "bridge"
    assert [s.attrib for s in made.findall("source")] == [{"bridge": "vsrb7"}]
    assert made.find("target") is None
    port = made.find("virtualport")
    assert (port is not None and port.get("type")) == (
        "openvswitch" if kind is BenchAttachment.OPENVSWITCH else False
    )
    for kept in ("mac", "model", "driver", "alias", "rom", "address"):
        before, after = old.find(kept), made.find(kept)
        assert before is not None
        assert after is not None
        assert before.attrib == after.attrib


@pytest.mark.parametrize("kind", [BenchAttachment.AS_IS, BenchAttachment.MACVTAP])
def test_as_it_was(kind: BenchAttachment) -> None:
    assert differences(DIRECT, rewritten(nic(DIRECT), Back(kind))) == ()


@pytest.mark.parametrize(
    ("asked", "driver"),
    [
        (Driver(), {"name": "vhost", "queues": "2", "rx_queue_size": "1024"}),
        (Driver(vhost=False), {"name": "qemu", "queues": "2", "rx_queue_size": "1024"}),
        (Driver(queues=1), {"name": "vhost", "rx_queue_size": "1024"}),
        (Driver(queues=4), {"name": "vhost", "queues": "4", "rx_queue_size": "1024"}),
        (Driver(vhost=False, queues=1), {"name": "qemu", "rx_queue_size": "1024"}),
        (Driver(ring=512), {"name": "vhost", "queues": "2", "rx_queue_size": "512"}),
    ],
)
def test_drivers(asked: Driver, driver: dict[str, str]) -> None:
    made = rewrite(DIRECT, Back(BenchAttachment.AS_IS, "", asked)).find("driver")
    assert made is not None
    assert made.attrib == driver


@pytest.mark.parametrize(("mergeable", "word"), [(True, "on"), (False, "off")])
def test_mergeable_buffers(mergeable: bool, word: str) -> None:
    made = rewrite(DIRECT, Back(BenchAttachment.AS_IS, "", Driver(mergeable=mergeable)))
    host = made.find("driver/host")
    assert host is not None
    assert host.attrib == {"mrg_rxbuf": word}
    guest = made.find("driver/guest")
    assert (guest is not None) is (not mergeable)
    if guest is not None:
        assert {guest.get(name) for name in ("tso4", "tso6", "ecn", "ufo")} == {"off"}


def test_a_driver_where_there_was_none() -> None:
    made = rewrite(BARE, Back(BenchAttachment.AS_IS, "", Driver(queues=2))).find("driver")
    assert made is not None
    assert made.attrib == {"name": "vhost", "queues": "2"}
    assert rewrite(BARE, Back(BenchAttachment.AS_IS)).find("driver") is None


def test_what_cannot_be_switched() -> None:
    assert (
        switchable(nic(DIRECT), Back(BenchAttachment.BRIDGE, "b", Driver(vhost=False, queues=2)))
        == ""
    )
    assert "network" in switchable(nic(BARE), Back(BenchAttachment.BRIDGE))
    assert switchable(nic(BARE), Back(BenchAttachment.AS_IS, "", Driver(vhost=False))) == ""
    assert "e1000" in switchable(nic(EMULATED), Back(BenchAttachment.AS_IS, "", Driver(queues=2)))
    assert switchable(nic(EMULATED), Back(BenchAttachment.BRIDGE, "b")) == ""
    with pytest.raises(VsrtuneError, match="napi-macvtap"):
        rewritten(nic(DIRECT), Back(BenchAttachment.NAPI_MACVTAP))


def test_differences_name_the_path() -> None:
    assert differences(DIRECT, DIRECT.replace("macvtap0", "macvtap3")) == ()
    other = DIRECT.replace("macvtap0", "uplink").replace("<rom enabled='no'/>", "")
    assert differences(DIRECT, other) == (
        "/interface/rom: was '', is 'absent'",
        "/interface/rom/@enabled: was 'no', is 'absent'",
        "/interface/target/@dev: was 'macvtap0', is 'uplink'",
    )
