"""The calls to libvirt that a switch makes, on libvirt's own test driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vsrtune.attach import host
from vsrtune.attach.libvirt_hotplug import AwayError, LiveDomains, RefusedError
from vsrtune.core.errors import VanishedError
from vsrtune.model.domain_xml import nics

URI = "test:///default"
NOBODY = "00000000-0000-4000-8000-000000000001"
MAC = "52:54:00:00:00:01"
DOMAIN = f"""<domain type='test'><name>vr1</name><uuid>00000000-0000-4000-8000-000000000002</uuid>
<memory>1024</memory><os><type>hvm</type></os><devices><interface type='network'>
<mac address='{MAC}'/><source network='default'/></interface></devices></domain>"""


@pytest.fixture
def domain() -> Iterator[Any]:
    libvirt = pytest.importorskip("libvirt")
    # The driver keeps its domains as long as one connection is open.
    connection = libvirt.open(URI)
    yield connection.defineXML(DOMAIN)
    connection.close()


@pytest.fixture
def domains(domain: Any) -> Iterator[LiveDomains]:
    live = LiveDomains(URI)
    yield live
    live.close()


def test_a_guest_starts_and_ends_any_number_of_times(domains: LiveDomains, domain: Any) -> None:
    uuid = domain.UUIDString()
    with pytest.raises(VanishedError, match="does not run"):
        domains.nics(uuid)
    for _ in range(2):
        domains.start_guest(uuid)
    assert [nic.mac for nic in domains.nics(uuid)] == [MAC]
    assert {d.name: bool(d.live) for d in domains.guests()}["vr1"]
    run = domains.run(uuid)
    for _ in range(2):
        domains.stop_guest(uuid)
    assert not domain.isActive()
    domains.start_guest(uuid)
    assert domains.run(uuid) != run
    assert MAC in domains.definition(uuid)


def test_a_definition_is_replaced_and_one_that_is_gone_is_told(
    domains: LiveDomains, domain: Any
) -> None:
    uuid = domain.UUIDString()
    domains.define(DOMAIN.replace("1024", "2048"), "vr1")
    assert "2048" in domains.definition(uuid)
    with pytest.raises(RefusedError, match="vr1: libvirt refused"):
        domains.define("<domain/>", "vr1")
    domain.undefine()  # the driver does not know all flags of ours
    for end in (domains.undefine_guest, domains.stop_guest):
        end(uuid)
    for ask in (domains.definition, domains.nics, domains.start_guest, domains.start_ended):
        with pytest.raises(VanishedError, match=uuid):
            ask(uuid)
    assert uuid not in {d.uuid for d in domains.guests()}


@pytest.mark.parametrize("code", ["OPERATION_FAILED", "SYSTEM_ERROR"])
def test_a_saved_guest_is_read_from_its_image(
    code: str, domains: LiveDomains, domain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test driver reads no image. A damaged or lost one is as if it named nothing."""
    libvirt = pytest.importorskip("libvirt")
    image = DOMAIN.replace(MAC, "52:54:00:00:00:99")

    def damaged(_domain: Any) -> str:
        error = libvirt.libvirtError("")
        number = getattr(libvirt, f"VIR_ERR_{code}")
        error.err = (number, 0, "no header", 0, "", "", "", 0, 0)
        raise error

    domain.create()
    domain.managedSave()
    reads = libvirt.virDomain, "managedSaveGetXMLDesc"
    found = []
    for read in (lambda _domain: image, damaged):
        monkeypatch.setattr(*reads, read)
        guest = next(d for d in domains.guests() if d.name == "vr1")
        assert (guest.live, [nic.mac for nic in guest.config or ()]) == (None, [MAC])
        found.append([nic.mac for nic in guest.saved or ()] if guest.saved is not None else None)
    assert found == [["52:54:00:00:00:99"], []]
    domain.create()
    assert {d.saved for d in domains.guests()} == {None}
    domain.destroy()


def test_a_guest_that_does_not_run_has_no_interface_to_plug(
    domains: LiveDomains, domain: Any
) -> None:
    nic = f"<interface type='user'><mac address='{MAC}'/></interface>"
    with pytest.raises(VanishedError, match="does not run"):
        domains.plug(domain.UUIDString(), nic, MAC)


def test_definitions_on_disk_are_read_without_libvirt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "qemu"
    monkeypatch.setattr(host, "_DEFINITIONS", files)
    live = host.LiveHost("qemu:///nowhere")
    assert live.definitions() is None
    (files / "networks").mkdir(parents=True)
    assert live.definitions() == ()
    (files / "vr1.xml").write_text(f"<!--\nWARNING: THIS IS AUTO-GENERATED\n-->\n{DOMAIN}")
    (files / "vr1.xml.new").write_text("<dom")
    (text,) = live.definitions() or ()
    assert [nic.mac for nic in nics(text)] == [MAC]
    (files / "broken.xml").symlink_to("nothing")
    assert live.definitions() is None


def test_a_libvirt_that_is_not_there_is_away() -> None:
    pytest.importorskip("libvirt")
    away = LiveDomains("qemu+unix:///system?socket=/nonexistent")
    with pytest.raises(AwayError, match="does not answer"):
        away.nics(NOBODY)
