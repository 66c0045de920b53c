"""Interfaces of a domain that no vhost-net worker serves: each is named, with what becomes of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hosttree import HostTree
from test_observer import FakeVirt

from vsrtune.core.codec import decode
from vsrtune.core.cpuset import CpuSet
from vsrtune.doctor import guest_checks
from vsrtune.doctor.model import Case, Facts, Severity
from vsrtune.host.libvirt import DomainText
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.observer import Observer
from vsrtune.observe.recording import prune_xml
from vsrtune.plan.planner import plan
from vsrtune.policy.matching import Assignment
from vsrtune.policy.parser import parse
from vsrtune.views.tables import guest_tables, plan_tables

MAC = "02:00:00:00:00:09"
OWN = f"<mac address='{MAC}'/><model type='virtio'/>"
VHOST_USER = "threads of another process (a switch in user space) move its frames; vsrtune never "
VDPA = "its vDPA device moves its frames, without a vhost-net worker; vsrtune tunes the vcpus alone"
PASSED = "the guest drives the device itself, without a vhost-net worker; vsrtune tunes the vcpus, "
USER = "QEMU or a process beside it moves its frames in user space, too slowly for a router; "

# As libvirt describes them in a running domain, whose networks it has resolved.
KINDS = {
    "vhost-user": (
        (f"<interface type='vhostuser'>{OWN}<source type='unix' path='/run/vhu0' mode='server'/>"
        "<target dev='vhu0'/><alias name='net1'/></interface>"),
        "vhostuser", VHOST_USER,
    ),
    "vDPA": (
        f"<interface type='vdpa'>{OWN}<source dev='/dev/vhost-vdpa-0'/></interface>",
        "vdpa", VDPA,
    ),
    "SR-IOV": (
        (f"<interface type='hostdev' managed='yes'><mac address='{MAC}'/><driver name='vfio'/>"
        "<source><address type='pci' domain='0x0000' bus='0x01' slot='0x10' function='0x0'/>"
        "</source><alias name='hostdev0'/></interface>"),
        "hostdev", PASSED,
    ),
    "a network of virtual functions": (
        (f"<interface type='hostdev' managed='yes'><mac address='{MAC}'/><source network='vfs'>"
        "<address type='pci' domain='0x0000' bus='0x01' slot='0x10' function='0x1'/></source>"
        "</interface>"),
        "hostdev", PASSED,
    ),
    "slirp": (f"<interface type='user'>{OWN}</interface>", "user", USER),
    "passt": (
        f"<interface type='user'>{OWN}<backend type='passt'/><source dev='p0'/></interface>",
        "user (passt)", USER,
    ),
    "a socket": (
        f"<interface type='mcast'>{OWN}<source address='230.0.0.1' port='5558'/></interface>",
        "mcast", "it has no tap on this host; not tuned",
    ),
    "a device that was moved away": (
        f"<interface type='bridge'>{OWN}<source bridge='br0'/><target dev='vnet7'/></interface>",
        "bridge", "its device vnet7 is not in this network namespace; not tuned",
    ),
}  # fmt: skip

MACVTAP = (
    "<interface type='direct'><mac address='02:00:00:00:00:01'/><target dev='macvtap0'/>"
    "<model type='virtio'/><driver name='vhost'/><alias name='net0'/></interface>"
)
EMULATED = (
    "<interface type='bridge'><mac address='02:00:00:00:00:02'/><target dev='vnet0'/>"
    "<model type='virtio'/><driver name='qemu'/><alias name='net0'/></interface>"
)
UUID = "c0ffee00-0000-4000-8000-000000000001"
TEXT = "guest: vr1\ncpus: {irq: 3, vcpu: auto, vhost: auto, emulator: auto}\nprofile: none\n"
POLICY = parse(TEXT, "p.yaml")


def observed(*interfaces: str) -> Snapshot:
    """A host with vr1, which has these interfaces."""
    tree = HostTree().host()
    secret = ("-object", "secret,id=masterKey0")
    tree.qemu(50, "-name", "guest=vr1,debug-threads=on", *secret)
    tree.thread(50, 52, "CPU 0/KVM", start=102)
    if MACVTAP in interfaces:
        tree.thread(50, 51, "vhost-50", start=101)
        tree.fd(50, 32, "/dev/tap8").fd(50, 33, "/dev/vhost-net")
    tree.device("macvtap0", 8, has="macvtap lower_p0").device("p0", 4)
    tree.device("vnet0", 9, has="tun_flags brport")
    # Recordings keep what tells.
    xml = prune_xml(f"<domain><vcpu>1</vcpu><devices>{''.join(interfaces)}</devices></domain>")
    told = DomainText("vr1", UUID, xml, (CpuSet([0]),), CpuSet([0]))
    return Observer(tree.root(), FakeVirt(told)).observe()


def left(snapshot: Snapshot) -> list[tuple[str, str]]:
    """What a plan for vr1 leaves as it is, without what is as it should be."""
    skipped = plan(snapshot, [POLICY]).skipped
    return [(s.subject, s.reason) for s in skipped if not s.reason.startswith("already")]


@pytest.mark.parametrize(("interface", "kind", "why"), KINDS.values(), ids=KINDS)
def test_named_everywhere(interface: str, kind: str, why: str) -> None:
    snapshot = observed(MACVTAP, interface)
    (guest,) = snapshot.guests
    assert guest.problems == ()
    assert [i.target for i in guest.interfaces] == ["macvtap0"]
    (nic,) = guest.other_nics
    assert (nic.label, nic.mac) == (kind, MAC)
    assert nic.why.startswith(why)
    assert decode(Snapshot, json.loads(snapshot.to_json())) == snapshot

    (shown,) = [t for t in guest_tables(guest, ()) if t.title == "Interfaces of vr1 without a tap"]
    assert shown.rows == [(kind, nic.model or "-", MAC, nic.why)]

    assert left(snapshot) == [(f"interface {MAC} ({kind})", nic.why)]

    (found,) = guest_checks.vhost(Case(snapshot, Facts()))
    assert found.level is (Severity.WARNING if nic.kind == "user" else Severity.INFO)
    assert f"{MAC} ({kind}): {why}" in found.what


def test_a_tap_without_vhost() -> None:
    snapshot = observed(EMULATED)
    (guest,) = snapshot.guests
    assert [(i.target, i.vhost) for i in guest.interfaces] == [("vnet0", False)]
    assert guest.other_nics == ()
    why = "no vhost-net: a thread of QEMU moves its frames, on the emulator's CPUs"
    assert left(snapshot) == [("interface vnet0", why)]
    (found,) = guest_checks.vhost(Case(snapshot, Facts()))
    assert "vnet0 without vhost-net" in found.what


def test_a_router_with_passed_through_nics_alone() -> None:
    """Its vcpu and the emulator are placed, and it is not said to be left alone."""
    snapshot = observed(KINDS["SR-IOV"][0])
    made = plan(snapshot, [POLICY])
    assert made.refusals == ()
    assert sorted(type(a.target).__name__ for a in made.actions) == ["EmulatorPin", "VcpuPin"]
    settled = replace(made, actions=())
    (row,) = plan_tables(settled, Assignment([(snapshot.guests[0], POLICY)]))[0].rows
    assert row == ("vr1", "0", "as its policy says")
