"""Interrupt names and affinities."""

from __future__ import annotations

from hosttree import HostTree

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.interrupts import parse_interrupts, read_irqs
from vsrtune.model.guest import Irq

INTERRUPTS = """\
           CPU0       CPU1       CPU2
  0:         34          0          0   IO-APIC   2-edge      timer
  9:          0          0          0   IO-APIC   9-fasteoi   acpi, i801 smbus
 24:          0       9123          0   PCI-MSI 49152-edge      p0-rx-0
 25:          1          0         12   PCI-MSIX-0000:00:05.0   1-edge      mlx5_comp0@pci:0000:01:00.0
 26:          5          0          0  IR-PCI-MSI 524289-edge
 27:         10         11         12     GICv3  27 Level     arch_timer
NMI:          0          0          0   Non-maskable interrupts
ERR:          0
"""


def test_names() -> None:
    assert parse_interrupts(INTERRUPTS) == {
        0: "timer",
        9: "acpi, i801 smbus",
        24: "p0-rx-0",
        25: "mlx5_comp0@pci:0000:01:00.0",
        26: "",
        27: "arch_timer",
    }


def test_irqs_of_a_card() -> None:
    tree = HostTree()
    tree.file("/proc/irq/24/smp_affinity_list", "0-2\n")
    tree.file("/proc/irq/24/effective_affinity_list", "1\n")
    tree.file("/proc/irq/25/smp_affinity_list", "2\n")
    names = {24: "p0-rx-0", 25: "p0-tx-0", 26: "", 28: "vanished"}
    assert read_irqs(tree.root(), [28, 26, 25, 24], names) == (
        Irq(24, "p0-rx-0", CpuSet([0, 1, 2]), CpuSet([1])),
        Irq(25, "p0-tx-0", CpuSet([2]), CpuSet([2])),
    )


def test_an_interrupt_that_never_started_has_no_effective_cpu() -> None:
    tree = HostTree()
    tree.file("/proc/irq/24/smp_affinity_list", "0-2\n")
    tree.file("/proc/irq/24/effective_affinity_list", "\n")
    assert read_irqs(tree.root(), [24], {24: "p0"})[0].effective == CpuSet()
