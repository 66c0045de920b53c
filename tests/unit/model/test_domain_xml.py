"""Interfaces put on a device of ours and back, and a definition changed in one place."""

from __future__ import annotations

import pytest

from vsrtune.core.errors import VsrtuneError
from vsrtune.model.domain_xml import (
    added,
    another,
    as_direct,
    differences,
    mode,
    nic,
    nics,
    on_device,
    replaced,
)

DIRECT = """\
<interface type='direct' trustGuestRxFilters='yes'>
      <mac address='02:76:72:00:01:AA'/>
      <source dev='p0' mode='vepa'/>
      <target dev='macvtap0'/>
      <model type='virtio'/>
      <driver name='vhost' queues='2' rx_queue_size='1024'/>
      <link state='down'/>
      <mtu size='1400'/>
      <boot order='1'/>
      <alias name='net0'/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x0'/>
    </interface>"""
DOMAIN = f"""\
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>a &lt;interface &gt;</name>
  <metadata><x:y xmlns:x='urn:x'>kept</x:y></metadata>
  <devices>
    {DIRECT}
    <interface type='user'>
      <mac address='02:76:72:00:01:bb'/>
    </interface>
  </devices>
  <qemu:commandline><qemu:arg value='-x'/></qemu:commandline>
</domain>"""


def test_what_the_guest_sees_stays() -> None:
    text = on_device(nic(DIRECT), "nvt1")
    made = nic(text)
    assert (made.kind, made.device, made.lower) == ("ethernet", "nvt1", "")
    changed = differences(DIRECT, text)
    assert {line.split(":")[0] for line in changed} == {
        "/interface/@trustGuestRxFilters",
        "/interface/@type",
        "/interface/source",
        "/interface/source/@dev",
        "/interface/source/@mode",
        "/interface/target/@dev",
        "/interface/target/@managed",
    }


def test_back_on_macvtap() -> None:
    there = nic(on_device(nic(DIRECT), "nvt1"))
    back = as_direct(there, "p0", "vepa")
    assert mode(nic(back)) == "vepa"
    assert {line.split(":")[0] for line in differences(DIRECT, back)} == {
        "/interface/@trustGuestRxFilters",
    }


def test_a_definition_is_changed_in_one_place_only() -> None:
    new = on_device(nic(DIRECT), "nvt1")
    changed = replaced(DOMAIN, "02:76:72:00:01:aa", new)
    assert changed == DOMAIN.replace(DIRECT, new)
    assert [n.kind for n in nics(changed)] == ["ethernet", "user"]


def test_a_mac_must_be_there_once() -> None:
    with pytest.raises(VsrtuneError, match="0 interfaces"):
        replaced(DOMAIN, "02:00:00:00:00:00", "x")
    with pytest.raises(VsrtuneError, match="2 interfaces"):
        replaced(DOMAIN.replace("01:bb", "01:aa"), "02:76:72:00:01:aa", "x")


def test_names_that_libvirt_made_up_do_not_count() -> None:
    other = DIRECT.replace("macvtap0", "macvtap12").replace("'net0'", "'net7'")
    assert differences(DIRECT, other) == ()
    # A definition has none of them, only what an operator wrote.
    config = DIRECT.replace("<target dev='macvtap0'/>", "").replace("<alias name='net0'/>", "")
    assert differences(config, other) == differences(other, config) == ()
    own = config.replace("<link", "<alias name='ua-in'/><link")
    assert len(differences(own, other)) == 1
    assert differences(DIRECT, DIRECT.replace("'net0'", "'ua-mine'")) != ()


def test_one_interface_more_and_none_again() -> None:
    made = nic(another(nic(DIRECT), "02:00:00:00:00:01", "edge-1b"))
    assert (made.kind, made.mac, made.device) == ("ethernet", "02:00:00:00:00:01", "edge-1b")
    # Of what it is like, only what every interface of a guest has in common.
    assert "rx_queue_size" in made.xml
    assert "<mtu" in made.xml
    for part in ("queues", "<source", "<boot", "<address", "<alias", "<link", "trustGuest"):
        assert part not in made.xml
    text = added(DOMAIN, made.xml)
    assert [one.mac for one in nics(text)][-1] == made.mac
    assert len(nics(text)) == 3
    assert replaced(text, made.mac, "") == DOMAIN
    bare = "<domain><devices></devices></domain>"
    assert added(bare, made.xml) == f"<domain><devices>{made.xml}</devices></domain>"


def test_what_libvirt_chooses_for_one_more_is_no_difference() -> None:
    made = another(nic(DIRECT), "02:00:00:00:00:01", "edge-1b")
    end = "<alias name='net2'/><address type='pci' slot='0x07'/></interface>"
    chosen = made.replace("</interface>", end)
    assert differences(made, chosen) == ()
    # The address alone; the alias is one that libvirt made up.
    assert len(differences(chosen, made)) == 3
    assert differences(made, chosen.replace("edge-1b", "edge-2b"))
    moved = chosen.replace("0x07", "0x08")
    assert len(differences(chosen, moved)) == 1
