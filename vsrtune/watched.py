"""Which devices and files of a host matter to its guests, from the last snapshot, and what
a changed network device means."""

from __future__ import annotations

from dataclasses import dataclass

from vsrtune.look import FULL, NOTHING, Look
from vsrtune.model.guest import Guest, NicKind
from vsrtune.model.host import Link
from vsrtune.model.snapshot import Snapshot

# Kinds of links that QEMU opens.
GUEST_KINDS = ("macvtap", "napi_macvtap", "tun")


@dataclass(frozen=True, slots=True)
class Devices:
    """``owners``: index of a guest's device to whom to look at; ``lowers``: names of what
    these stand on, and of the hardware."""

    owners: dict[int, Look]
    lowers: frozenset[str]


def devices(snapshot: Snapshot | None) -> Devices:
    """The devices of a snapshot; none before the first."""
    if snapshot is None:
        return Devices({}, frozenset())
    owners: dict[int, Look] = {}
    lowers = {nic.name for nic in snapshot.host.nics}
    for guest in snapshot.guests:
        for interface in guest.interfaces:
            owners[interface.ifindex] = owners.get(interface.ifindex, NOTHING).merge(whose(guest))
            lowers.update(interface.lower)
    return Devices(owners, frozenset(lowers))


def whose(guest: Guest) -> Look:
    """How to look at a guest again; plain QEMU is found by looking at everything."""
    return Look.of(guest.name) if guest.source == "libvirt" else FULL


def concerned(known: Devices, old: Link | None, new: Link | None) -> Look:
    """Whom the change of a device from ``old`` to ``new`` concerns; None is a device that
    does not exist. A device that has only now appeared is nobody's (see ``unclaimed``)."""
    look = NOTHING
    for link in (old, new):
        if link is not None:
            if link.name in known.lowers:
                return FULL
            look = look.merge(known.owners.get(link.index, NOTHING))
    return look if old != new else NOTHING


def unclaimed(known: Devices, link: Link) -> bool:
    """Whether a device that appeared some time ago may be that of a guest which no
    snapshot shows. (libvirt makes a guest's devices first, and announces it then.)"""
    return link.kind in GUEST_KINDS and link.index not in known.owners


def settings(snapshot: Snapshot | None) -> tuple[str, ...]:
    """Files of settings for which the kernel has no events, of the guests' devices and of
    what is below them."""
    if snapshot is None or not snapshot.guests:
        return ()
    interfaces = [i for guest in snapshot.guests for i in guest.interfaces]
    below = {name for i in interfaces for name in i.lower}
    kernel = ("sched_rt_runtime_us", "sched_rr_timeslice_ms")
    files = [f"/proc/sys/kernel/{name}" for name in kernel] if below else []
    for nic in snapshot.host.nics:
        if nic.name in below:
            files.append(f"/sys/class/net/{nic.name}/threaded")
            for irq in nic.irqs:
                # The first is what was asked for; the second follows when the interrupt fires.
                files.append(f"/proc/irq/{irq.number}/smp_affinity_list")
                files.append(f"/proc/irq/{irq.number}/effective_affinity_list")
    napi = sorted({i.target for i in interfaces if i.kind is NicKind.NAPI_MACVTAP})
    files += [f"/sys/class/net/{name}/threaded" for name in napi]
    return tuple(files)
