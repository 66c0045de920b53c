# SPDX-License-Identifier: GPL-2.0-or-later
"""Which CPUs serve the interrupts of the NICs below a guest (``cpus.irq``).

A guest thread there competes with the SoftIRQ that feeds it (Abeni et al., section 3.2), so
plans keep these CPUs free of vcpu and vhost threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import digits

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Interface, Irq
from vsrtune.model.host import Host, Nic, NicThread
from vsrtune.policy.model import IRQ_KEYS, Policy, irq_lists
from vsrtune.policy.yaml_reader import KeyPath

# What an operator can do about an interrupt that the kernel manages.
MANAGED_HINT = (
    "name its CPU in cpus.irq too, which keeps guests off it, or give the device fewer queues "
    "(ethtool -L)"
)
# What an operator can do about a bridge or an Open vSwitch that no NIC is a port of.
BRIDGE_HINT = (
    "if the host routes frames to it, write the interrupt CPUs of the NIC where they come in "
    "(/proc/interrupts): cpus: {irq: {BRIDGE: LIST}}"
)

# Drivers use these names for the vector of links, commands and errors, which fires now and then
# and carries no frame. Some add the vector's number (mlx5) and @pci: with its address (mlx5, ENA).
# Others use the device's bare name.
_CONTROL_SUFFIXES = (
    "-config", "misc", "-other", "-ctrl", "-async", "_async", "-mgmnt", "adminq", "-lsc",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class IrqChoice:
    """The CPUs, and a note for each list of the policy and each device that was asked. ``listed``
    are the devices for which the policy has a list."""

    cpus: CpuSet
    notes: tuple[str, ...]
    listed: frozenset[str] = frozenset()


def interrupt_cpus(host: Host, guest: Guest, policy: Policy | None = None) -> IrqChoice:
    """The lists of the policy, and the union over the guest's lower devices for which it has
    none; empty when there is neither.

    For each such device, the first rule that yields CPUs applies:

    1. the effective CPUs of its interrupts, without those for control only, together with its
       RPS CPUs and those to which its NAPI threads are confined
    2. its RPS CPUs and those to which its NAPI threads are confined
    3. the CPUs on which its receive SoftIRQ was observed
    4. the lowest online CPU
    """
    cpus = CpuSet()
    notes: list[str] = []
    listed = irqs_of(host, guest, policy).keys() if policy is not None else ()
    told = set(listed)
    if policy is not None:
        for keys, found in irq_lists(policy):
            cpus |= found
            whose = "".join(f" of {key}" for key in keys[len(IRQ_KEYS) :])
            notes.append(f"{guest.ref}: interrupt CPUs {found}{whose} from {policy.at(*keys)}")
    for interface in guest.interfaces:
        for device in serving(host, interface):
            if device in told:
                continue
            told.add(device)
            found, rule = device_cpus(host, host.nic(device))
            cpus |= found
            notes.append(f"{guest.ref}: interrupt CPUs {found} from {device}: {rule}")
    if not notes:
        why = "its devices are its pod's" if guest.source == "kubevirt" else "no lower device"
        notes.append(f"{guest.ref}: {why}, so no interrupt CPUs")
    return IrqChoice(cpus, tuple(notes), frozenset(listed))


def below(host: Host, guest: Guest) -> dict[str, str]:
    """The devices below the guest, nearest first, each with its NUMA node as policies write it;
    "" for one without, such as a VLAN, a bond or a bridge."""
    nics = {name: host.nic(name) for i in guest.interfaces for name in i.lower}
    return {
        name: f"node{nic.node}" if nic is not None and nic.node >= 0 else ""
        for name, nic in nics.items()
    }


def irqs_of(host: Host, guest: Guest, policy: Policy) -> dict[str, tuple[KeyPath, CpuSet]]:
    """The CPUs that the policy lists for each device below its guest, with the key. A device's own
    key wins over that of its node. Devices for which it lists none are left out."""
    lists = dict(irq_lists(policy))
    devices = below(host, guest) if lists else {}
    found: dict[str, tuple[KeyPath, CpuSet]] = {}
    for name, node in devices.items():
        # A key that is a device's name does not mean a node.
        words = (name,) if node in devices else (name, node)
        for keys in (*((*IRQ_KEYS, word) for word in words), IRQ_KEYS):
            if keys in lists:
                found.setdefault(name, (keys, lists[keys]))
    return found


def lower_nics(host: Host, guest: Guest) -> tuple[Nic, ...]:
    """The observed lower devices of the guest, each once, nearest first."""
    names = dict.fromkeys(name for i in guest.interfaces for name in i.lower)
    return tuple(nic for nic in map(host.nic, names) if nic is not None)


def inner_links(host: Host, guest: Guest) -> frozenset[str]:
    """Devices over which the guest hands frames to other guests only."""
    ends = ((i.lower[0], host.nic(i.lower[-1])) for i in guest.interfaces if i.lower)
    return frozenset(name for name, end in ends if end is not None and end.inner)


def queue_irqs(nic: Nic) -> tuple[Irq, ...]:
    """The interrupts that carry frames: all except those for control by their name, or all if no
    others remain."""
    queues = tuple(
        irq
        for irq in nic.irqs
        if irq.name != nic.name
        and not irq.name.lower().partition("@")[0].rstrip(digits).endswith(_CONTROL_SUFFIXES)
    )
    return queues or nic.irqs


def serving(host: Host, interface: Interface) -> tuple[str, ...]:
    """The devices below the interface on whose CPUs frames are received, lowest first: those
    with interrupts (several below a bond), RPS or confined NAPI threads, and the lowest one if
    none has interrupts. Empty when there is no device below."""
    nics = [nic for nic in map(host.nic, reversed(interface.lower)) if nic is not None]
    found = [n.name for n in nics if n.irqs or n.rps_cpus or confined(host, n)]
    lowest = interface.lower[-1:]
    if any(n.irqs for n in nics) or lowest == tuple(found[:1]):
        return tuple(found)
    return (*lowest, *found)


def napi_threads(nic: Nic) -> tuple[NicThread, ...]:
    """The threads of the device's threaded NAPI. Empty when more threads have its name than it
    has queues, because its own ones are then unknown."""
    known = nic.threaded_napi and len(nic.napi) <= len(nic.queues)
    return nic.napi if known else ()


def confined(host: Host, nic: Nic) -> CpuSet:
    """The CPUs to which NAPI threads of a device are confined."""
    threads = (t.affinity for t in napi_threads(nic) if not host.everywhere <= t.affinity)
    return CpuSet.union(threads) & host.online


def device_cpus(host: Host, nic: Nic | None) -> tuple[CpuSet, str]:
    """The interrupt CPUs of one device, and the rule of ``interrupt_cpus`` that gave them."""
    online = host.online
    fallback = CpuSet([online.first()]) if online else CpuSet()
    if nic is None:
        return fallback, "the device was not observed, the first online CPU is taken"
    rps = nic.rps_cpus & online
    also = f" and its RPS CPUs {rps}" if rps else ""
    napi = confined(host, nic)
    if napi:
        also += f" and the CPUs {napi} of its NAPI threads"
    queues = queue_irqs(nic)
    served = CpuSet.union(irq.effective for irq in queues) & online
    if served:
        numbers = ", ".join(str(irq.number) for irq in queues)
        rest = ", ".join(str(irq.number) for irq in nic.irqs if irq not in queues)
        without = f" ({rest} carries no frames)" if rest else ""
        return served | rps | napi, f"where its interrupts ({numbers}) are served{without}{also}"
    threaded = ", its threaded NAPI may run elsewhere" if nic.threaded_napi else ""
    if napi:
        return rps | napi, f"it has no interrupts{also}"
    if rps:
        return rps, f"it has no interrupts, its RPS CPUs{threaded}"
    if nic.bridge:
        return fallback, f"it has no port to a NIC, the first online CPU is taken; {BRIDGE_HINT}"
    found = (nic.rx_cpus or CpuSet()) & online
    if found:
        return found, f"it has no interrupts, where its receive SoftIRQ was seen{threaded}"
    return fallback, f"it has no interrupts, the first online CPU is taken{threaded}"
