"""Devices below a guest's interface, and what is read of them."""

from __future__ import annotations

from hosttree import HostTree

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.netdev import Device, NetReader, parse_uevent
from vsrtune.model.guest import NicKind
from vsrtune.model.host import Nic

PCI = "pci0000:00/0000:00:05.0"


def reader(tree: HostTree) -> NetReader:
    return NetReader(tree.root())


def device(net: NetReader, name: str) -> Device:
    found = net.device(name)
    assert found is not None
    return found


def nic_of(tree: HostTree, name: str) -> Nic:
    """The lower device, of which no trace has a result."""
    nic = reader(tree).nic(name, lambda _name, _index: None)
    assert nic is not None
    return nic


def test_uevent() -> None:
    text = "DEVTYPE=macvtap\nINTERFACE=macvtap0\nIFINDEX=7\n\n"
    assert parse_uevent(text) == {
        "DEVTYPE": "macvtap",
        "INTERFACE": "macvtap0",
        "IFINDEX": "7",
    }


def test_macvtap_over_vlan_over_bond() -> None:
    tree = HostTree()
    tree.device("macvtap0", 9, has="macvtap lower_bond0.7")
    tree.device("bond0.7", 8, devtype="vlan", has="lower_bond0 upper_macvtap0")
    tree.device("bond0", 7, devtype="bond", has="lower_eth0 lower_eth1 upper_bond0.7")
    tree.device("eth0", 2, pci=PCI, has="master")
    tree.device("eth1", 3, pci="pci0000:00/0000:00:06.0", has="master")
    net = reader(tree)
    assert net.lower_chain("macvtap0") == ("bond0.7", "bond0", "eth0", "eth1")
    found = device(net, "macvtap0")
    assert (found.kind, net.ring_drops(found)) == (NicKind.MACVTAP, 7)
    assert net.numbers(found)["txqueuelen"] == 500
    assert net.by_ifindex(3) == "eth1"
    assert net.by_ifindex(99) is None
    assert net.hardware_names() == ["eth0", "eth1"]


def test_tap_in_a_bridge_leads_to_its_hardware_port_only() -> None:
    tree = HostTree()
    for name, index in (("vnet0", 9), ("vnet1", 10)):
        tree.device(name, index, has="tun_flags brport upper_br0")
        tree.link(f"/sys/devices/virtual/net/{name}/master", "../br0")
    tree.device("br0", 8, devtype="bridge", has="bridge lower_eth0 lower_vnet0 lower_vnet1")
    tree.device("eth0", 2, pci=PCI, has="brport")
    tree.link(f"/sys/devices/{PCI}/net/eth0/master", "../../br0")
    net = reader(tree)
    assert net.lower_chain("vnet0") == ("br0", "eth0")
    found = device(net, "vnet0")
    assert (found.kind, net.ring_drops(found)) == (NicKind.TAP, 9)


def test_tap_in_open_vswitch() -> None:
    tree = HostTree()
    tree.device("vnet0", 9, has="tun_flags upper_ovs-system")
    tree.link("/sys/devices/virtual/net/vnet0/master", "../ovs-system")
    tree.device("ovs-system", 4, has="lower_eth0 lower_vnet0")
    tree.device("eth0", 2, pci=PCI)
    net = reader(tree)
    assert net.lower_chain("vnet0") == ("ovs-system", "eth0")
    assert device(net, "vnet0").kind is NicKind.TAP


def test_a_routed_tap_stands_on_nothing() -> None:
    tree = HostTree()
    tree.device("tap0", 9, has="tun_flags upper_vrf1")
    tree.link("/sys/devices/virtual/net/tap0/master", "../vrf1")
    tree.device("vrf1", 4, devtype="vrf", has="lower_eth0 lower_tap0")
    assert reader(tree).lower_chain("tap0") == ()


def test_veth_whose_peer_is_in_another_namespace_ends_the_chain() -> None:
    tree = HostTree()
    tree.device("macvtap0", 9, has="macvtap lower_p0")
    tree.device("p0", 5, has="upper_macvtap0")
    tree.file("/sys/devices/virtual/net/p0/iflink", "2\n")
    # Index 2 of this namespace is another device, which does not point back.
    tree.device("eth0", 2, pci=PCI)
    tree.device("veth2", 3)
    assert reader(tree).lower_chain("macvtap0") == ("p0",)


def test_veth_whose_peer_is_a_port_of_a_bridge_here() -> None:
    tree = HostTree()
    tree.device("macvtap0", 9, has="macvtap lower_va")
    tree.device("va", 5, has="upper_macvtap0")
    tree.device("vb", 6, has="brport")
    tree.file("/sys/devices/virtual/net/va/iflink", "6\n")
    tree.file("/sys/devices/virtual/net/vb/iflink", "5\n")
    tree.link("/sys/devices/virtual/net/vb/master", "../br0")
    tree.device("br0", 7, devtype="bridge", has="bridge lower_vb lower_eth0")
    tree.device("eth0", 2, pci=PCI, has="brport")
    assert reader(tree).lower_chain("macvtap0") == ("va", "vb", "br0", "eth0")


def test_no_such_device() -> None:
    net = reader(HostTree().host())
    assert net.device("x") is None
    assert net.lower_chain("x") == ()
    assert net.nic("x", lambda _name, _index: None) is None


def test_nic_with_interrupts() -> None:
    tree = HostTree()
    tree.device("p0", 2, pci=PCI)
    tree.link(f"/sys/devices/{PCI}/driver", "../../../bus/pci/drivers/e1000e")
    tree.file(f"/sys/devices/{PCI}/numa_node", "1\n")
    for number, name in ((24, "p0-rx-0"), (25, "p0-tx-0")):
        tree.file(f"/sys/kernel/irq/{number}/actions", f"{name}\n")
        tree.file(f"/sys/devices/{PCI}/msi_irqs/{number}", "msix\n")
        tree.file(f"/proc/irq/{number}/smp_affinity_list", "0-3\n")
        tree.file(f"/proc/irq/{number}/effective_affinity_list", "2\n")
    tree.file(f"/sys/devices/{PCI}/net/p0/threaded", "1\n")
    tree.file(f"/sys/devices/{PCI}/net/p0/queues/rx-1/rps_cpus", "00000000,00000006\n")
    nic = nic_of(tree, "p0")
    assert (nic.name, nic.ifindex, nic.driver, nic.node) == ("p0", 2, "e1000e", 1)
    assert nic.threaded_napi
    assert nic.rps_cpus == CpuSet([1, 2])
    assert [(i.number, i.name, str(i.effective)) for i in nic.irqs] == [
        (24, "p0-rx-0", "2"),
        (25, "p0-tx-0", "2"),
    ]
    assert nic.rx_cpus is None


def test_virtio_nic_has_the_interrupts_of_its_pci_parent() -> None:
    tree = HostTree()
    tree.device("eth0", 2, pci=f"{PCI}/virtio1")
    tree.file(f"/sys/devices/{PCI}/msi_irqs/31", "msix\n")
    tree.file(f"/sys/devices/{PCI}/numa_node", "0\n")
    tree.file("/proc/irq/31/smp_affinity_list", "0-3\n")
    tree.file("/sys/kernel/irq/31/actions", "virtio1-input.0\n")
    nic = nic_of(tree, "eth0")
    assert [i.name for i in nic.irqs] == ["virtio1-input.0"]
    assert nic.node == 0


def test_card_with_a_pin_interrupt() -> None:
    tree = HostTree()
    tree.device("eth0", 2, pci=PCI)
    tree.file(f"/sys/devices/{PCI}/irq", "11\n")
    tree.file("/proc/irq/11/smp_affinity_list", "0\n")
    tree.file("/sys/kernel/irq/11/actions", "eth0\n")
    nic = nic_of(tree, "eth0")
    assert [i.number for i in nic.irqs] == [11]


def test_virtual_lower_device_has_no_interrupts_but_may_have_been_seen() -> None:
    tree = HostTree()
    tree.device("p0", 5)
    nic = reader(tree).nic("p0", lambda name, index: CpuSet([len(name), index]))
    assert nic is not None
    assert (nic.irqs, nic.driver, nic.node, nic.threaded_napi) == ((), "", -1, False)
    assert nic.rx_cpus == CpuSet([2, 5])


def test_a_dummy_has_nothing_behind_it() -> None:
    tree = HostTree()
    tree.device("d0", 3)
    tree.device("p0", 5)
    tree.device("d0.101", 6, devtype="vlan", has="lower_d0")
    tree.device("eth0", 2, pci=PCI)
    for name, link in (("d0", 3), ("p0", 2), ("d0.101", 3)):
        tree.file(f"/sys/devices/virtual/net/{name}/iflink", f"{link}\n")
    found = {name: nic_of(tree, name).inner for name in ("d0", "p0", "d0.101", "eth0")}
    assert found == {"d0": True, "p0": False, "d0.101": False, "eth0": False}
