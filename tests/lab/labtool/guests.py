"""The guests of a lab: addresses, libvirt domains, the plain QEMU unit."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from .linked import HOSTS
from .options import Options


def gen_mac(host: int) -> str:
    return f"02:76:72:ff:{host - 1:02x}:00"


def sink_mac(host: int) -> str:
    return f"02:76:72:ff:{host - 1:02x}:01"


def nic_mac(host: int, number: int) -> str:
    """Of g0, p0, p1, s0 when they are NICs; p0 and p1 always have it."""
    return f"52:54:00:1a:b{host - 1:x}:{number:02x}"


def port_macs(host: int) -> tuple[str, str]:
    return nic_mac(host, 1), nic_mac(host, 2)


# This host, as a router beside the guests.
NATIVE_INDEX = 250
# The plain one comes after any libvirt guest.
_PLAIN_INDEX = 200
# Balancers are no routers, and in no list of these.
_BALANCERS = 220
MAX_GUESTS = 100
MEMORY_MIB = 256
FRR_MEMORY_MIB = 512
# Of the firewall of a router with FRR; every frame is compared with each.
_RULES = 1000

_KERNEL = "/boot/router-vmlinux"
_INITRD = "/run/lab/router.cpio"
# Made in the lab by the first balancer that starts (bin/lab-balancer).
BALANCER_INITRD = "/run/lab/balancer.cpio"
# The host's end of the port through which a balancer takes its rules, and its name inside.
BALANCER_PORT = "lab.rules"
# The port of the QEMU guest agent; libvirt chooses the host's end.
AGENT_PORT = "org.qemu.guest_agent.0"

# What makes an emulated boot short.
_QUICK = (
    "console=ttyS0 quiet panic=-1 mitigations=off audit=0 apparmor=0"
    " tsc=reliable no_timer_check nokaslr net.ifnames=0 8250.nr_uarts=1"
    " i8042.noaux i8042.nokbd random.trust_cpu=on cryptomgr.notests"
)


@dataclass(frozen=True)
class Guest:
    """Router `index`: 10.10.index.0/24 on eth0, 10.20.index.0/24 on eth1."""

    index: int
    name: str
    kind: str  # libvirt | qemu
    vcpus: int
    queues: int
    host: int = 1
    linked: bool = False
    # Processes that spin in it, as a routing daemon that converges does.
    busy: int = 0
    ipv6: bool = False
    frr: bool = False
    # Its eth0 is a virtual function of p0.
    vf: bool = False

    def mac(self, nic: int) -> str:
        return _mac(self.index, nic)

    @property
    def kernel_arguments(self) -> str:
        """Addresses of both NICs, and what makes an emulated boot short.

        The addresses from .96 to .127 are those measured traffic goes to: behind the
        sink and the generator, where no host answers, so nothing comes back.
        """
        i = self.index
        gen, sink = gen_mac(self.host), sink_mac(self.host)
        return (
            f"nic={self.mac(0)},10.10.{i}.1/24,{gen},10.10.{i}.2,10.10.{i}.96/27"
            f" nic={self.mac(1)},10.20.{i}.1/24,{sink},10.20.{i}.2,10.20.{i}.96/27"
            f"{self._shared_roles} busy={self.busy} ipv6.disable={int(not self.ipv6)} {_QUICK}"
            + (f" rdinit=/frr-init rules={_RULES}" if self.frr else "")
        )

    @property
    def _shared_roles(self) -> str:
        """What every router of linked labs does besides, as one of several (linked.py)."""
        if not self.linked:
            return ""
        i, gen, sink = self.index, gen_mac(1), sink_mac(HOSTS)
        return (
            f" nic={self.mac(0)},10.41.0.{i}/24,{gen},10.41.0.254,10.31.0.0/16"
            f" nic={self.mac(1)},10.42.0.{i}/24,{sink},10.42.0.254,10.30.0.0/16"
        )

    def row(self) -> str:
        """A line of /run/lab/guests; the name is last, for it may hold anything."""
        return "\t".join((str(self.index), self.kind, self.mac(0), self.mac(1), self.name))


def of(options: Options) -> list[Guest]:
    count = max(options.guests, len(options.guest_names))
    first = 1 + (options.host - 1) * count
    names = list(options.guest_names)
    names += [f"vr{index}" for index in range(first + len(names), first + count)]
    linked = options.member is not None
    guests = [
        Guest(
            index,
            name,
            "libvirt",
            options.vcpus,
            options.queues,
            options.host,
            linked,
            options.busy,
            options.ipv6,
            options.frr,
            options.nic == "igb",
        )
        for index, name in enumerate(names, start=first)
    ]
    if options.plain_qemu:
        plain = Guest(_PLAIN_INDEX, "pq1", "qemu", options.vcpus, options.queues)
        guests.append(replace(plain, busy=options.busy, ipv6=options.ipv6))
    return guests


def of_all(options: Options) -> list[Guest]:
    """The routers of all linked labs."""
    assert options.member is not None
    members = [replace(options.member, number=number) for number in range(1, HOSTS + 1)]
    return [guest for member in members for guest in of(replace(options, member=member))]


def bench_spec(guests: list[Guest]) -> str:
    """A specification for `vsrtune bench` with these routers."""
    routers = "".join(
        _bench_router(f"guest: {_quoted(guest)}", guest.index, guest.mac(0), guest.mac(1))
        for guest in guests
    )
    return _BENCH_HEAD + routers


def _quoted(guest: Guest) -> str:
    """As vsrtune calls it, quoted as JSON and so as YAML."""
    name = f"qemu:{guest.name}" if guest.kind == "qemu" else guest.name
    return json.dumps(name, ensure_ascii=False)


def native_bench_spec(host: int) -> str:
    """The same for this host as the router."""
    return _BENCH_HEAD + _bench_router("native: lab", NATIVE_INDEX, *port_macs(host))


_BENCH_HEAD = """\
left: {device: g0, namespace: gen, cpu: 0}
right: {device: s0, namespace: sink, cpu: 0}
traffic: {size: 60, flows: 1}
method: {kind: sweep, rates: [1000, 4000], seconds: 2}
limits: {pps: 200000, seconds: 60}
configuration: {tuning: untuned}
routers:
"""


def _bench_router(who: str, i: int, left_mac: str, right_mac: str) -> str:
    # Quoted, because YAML 1.1 takes a MAC of digits for a number to the base of 60.
    return f"""\
  - {who}
    forth: {{mac: "{left_mac}", source: 10.10.{i}.2, destination: 10.20.{i}.100}}
    back: {{mac: "{right_mac}", source: 10.20.{i}.2, destination: 10.10.{i}.100}}
"""


def _mac(index: int, nic: int) -> str:
    return f"02:76:72:00:{index:02x}:{nic:02x}"


def domain(guest: Guest) -> str:
    queues = f" queues='{guest.queues}'" if guest.queues > 1 else ""
    # OSPF's multicasts come through a macvtap whose filter follows the guest's.
    trust = " trustGuestRxFilters='yes'" if guest.frr else ""
    interfaces = [_interface(guest.mac(nic), nic, queues, trust) for nic in (0, 1)]
    if guest.vf:
        interfaces[0] = _passed(guest)
    return _domain(
        guest.name, guest.index, guest.vcpus, _INITRD, guest.kernel_arguments, "\n".join(interfaces),
        FRR_MEMORY_MIB if guest.frr else MEMORY_MIB,
    )  # fmt: skip


def balancer(number: int, nics: tuple[int, ...], agent: bool) -> str:
    """Balancer lb`number`, with a macvtap on each of these lower devices and no address."""
    index = _BALANCERS + number
    devices = [_interface(_mac(index, nic), nic) for nic in nics]
    devices.append(f"""\
    <channel type='unix'>
      <source mode='bind' path='/run/lab/lb{number}.rules'/>
      <target type='virtio' name='{BALANCER_PORT}'/>
    </channel>""")
    if agent:
        devices.append(f"""\
    <channel type='unix'>
      <target type='virtio' name='{AGENT_PORT}'/>
    </channel>""")
    arguments = f"ipv6.disable=1 {_QUICK}"
    return _domain(f"lb{number}", index, 1, BALANCER_INITRD, arguments, "\n".join(devices))


def _interface(mac: str, nic: int, queues: str = "", trust: str = "") -> str:
    return f"""\
    <interface type='direct'{trust}>
      <mac address='{mac}'/>
      <source dev='p{nic}' mode='bridge'/>
      <model type='virtio'/>
      <driver name='vhost'{queues}/>
      <rom enabled='no'/>
    </interface>"""


def _passed(guest: Guest) -> str:
    # An 82576 numbers its virtual functions so. Its bus is the one below machine._nics's.
    slot, function = divmod(0x80 + 2 * (guest.index - 1), 8)
    return f"""\
    <interface type='hostdev' managed='yes'>
      <mac address='{guest.mac(0)}'/>
      <source><address type='pci' domain='0' bus='65' slot='{slot}' function='{function}'/></source>
      <rom enabled='no'/>
    </interface>"""


def _domain(
    name: str,
    index: int,
    vcpus: int,
    initrd: str,
    arguments: str,
    devices: str,
    memory: int = MEMORY_MIB,
) -> str:
    return f"""\
<domain type='kvm'>
  <name>{escape(name)}</name>
  <memory unit='MiB'>{memory}</memory>
  <vcpu>{vcpus}</vcpu>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    <kernel>{_KERNEL}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>{escape(arguments)}</cmdline>
  </os>
  <features><acpi/><apic/></features>
  <cpu mode='host-passthrough'/>
  <on_crash>destroy</on_crash>
  <devices>
    <controller type='usb' model='none'/>
{devices}
    <serial type='file'><source path='/var/log/libvirt/qemu/router{index}.log'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
"""


def plain_launcher(guest: Guest) -> str:
    """A script that makes two macvtaps and becomes QEMU, as a user would by hand."""
    lines = ["#!/bin/bash", "set -eu"]
    for nic in (0, 1):
        device = f"{guest.name}-{nic}"
        lines += [
            f"ip link del {device} 2>/dev/null || true",
            f"ip link add link p{nic} name {device} address {guest.mac(nic)} type macvtap mode bridge",
            f"ip link set {device} up",
            f"read -r index </sys/class/net/{device}/ifindex",
            'until [ -c "/dev/tap$index" ]; do sleep 0.1; done',
        ]
        lines += [f'exec {fd}<>"/dev/tap$index"' for fd in _descriptors(guest, nic)]
    command = ["qemu-system-x86_64", "-accel", "kvm", "-name", guest.name, "-machine", "pc"]
    command += ["-cpu", "host", "-m", str(MEMORY_MIB), "-smp", str(guest.vcpus)]
    command += ["-nodefaults", "-display", "none", "-serial", f"file:/run/lab/log/{guest.name}"]
    command += ["-qmp", f"unix:/run/{guest.name}.qmp,server=on,wait=off"]
    command += ["-kernel", _KERNEL, "-initrd", _INITRD, "-append", guest.kernel_arguments]
    for nic in (0, 1):
        fds = ":".join(map(str, _descriptors(guest, nic)))
        which = f"fds={fds}" if guest.queues > 1 else f"fd={fds}"
        command += ["-netdev", f"tap,id=net{nic},vhost=on,{which}"]
        device = f"virtio-net-pci,netdev=net{nic},mac={guest.mac(nic)},romfile="
        if guest.queues > 1:
            device += f",mq=on,vectors={2 * guest.queues + 2}"
        command += ["-device", device]
    lines.append("exec " + shlex.join(command))
    return "\n".join(lines) + "\n"


def _descriptors(guest: Guest, nic: int) -> range:
    """Where the launcher opens the queues of a NIC."""
    first = 10 + nic * guest.queues
    return range(first, first + guest.queues)


def plain_unit(guest: Guest) -> str:
    return f"""\
[Unit]
Description=Router {guest.name}, started without libvirt

[Service]
ExecStart=/bin/bash /run/lab/{guest.name}-launcher
ExecStopPost=-/bin/sh -c 'ip link del {guest.name}-0; ip link del {guest.name}-1'
"""
