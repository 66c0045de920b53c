"""Definitions of templates, as libvirt writes them."""

from __future__ import annotations

DISK = """\
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' discard='unmap'/>
      <source file='/var/lib/libvirt/images/router.qcow2'/>
      <target dev='vda' bus='virtio'/>
      <serial>root</serial>
      <boot order='1'/>
      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>
    </disk>"""
CDROM = """\
    <disk type='file' device='cdrom'>
      <driver name='qemu' type='raw'/>
      <source file='/srv/iso/seed.iso'/>
      <target dev='sda' bus='sata'/>
      <readonly/>
    </disk>"""


def nic(mac: str, lower: str, slot: int) -> str:
    return f"""\
    <interface type='direct'>
      <mac address='{mac}'/>
      <source dev='{lower}' mode='bridge'/>
      <model type='virtio'/>
      <driver name='vhost'/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x{slot:02x}' function='0x0'/>
    </interface>"""


MACS = ("52:54:00:00:00:0a", "52:54:00:00:00:0b")
NICS = "\n".join(
    nic(mac, lower, n) for n, (mac, lower) in enumerate(zip(MACS, ("p0", "p1"), strict=True), 2)
)
UUID = "0a5e4f0e-7f2c-4b1c-9c65-3c6d2f2c8f01"
MACHINE = "4d2f8f3a6d1b4f0c9a7e5b3c1d2e3f40"


def definition(
    devices: str = DISK + NICS, more: str = "", os: str = "", name: str = "router"
) -> str:
    return f"""\
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <uuid>{UUID}</uuid>
  <metadata>
    <libosinfo:libosinfo xmlns:libosinfo="http://libosinfo.org/xmlns/libvirt/domain/1.0">
      <libosinfo:os id="http://debian.org/debian/13"/>
    </libosinfo:libosinfo>
  </metadata>
  <memory unit='KiB'>1048576</memory>
  <vcpu placement='static'>1</vcpu>
  <os>
    <type arch='x86_64' machine='pc-q35-10.0'>hvm</type>{os}
  </os>
  <features><acpi/><apic/></features>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
{devices}
  </devices>{more}
</domain>
"""
