"""Lays out parallel virtual routers (PVR): members that share one device on each side. Pure.

All members stand on the same device of each side, one queue each: with a second queue a member
would hear every broadcast twice.
"""

from __future__ import annotations

from collections.abc import Collection

from vsrtune.attach.plan.model import AttachHostState, GuestNics
from vsrtune.attach.plan.planner import device_like, no_others
from vsrtune.core.errors import VsrtuneError
from vsrtune.group import clone_plan
from vsrtune.group.clone_plan import Made
from vsrtune.group.members import Layout, moved, on_lower, running
from vsrtune.group.parser import Group
from vsrtune.model.domain_xml import DomainNic


def layout(group: Group, host: AttachHostState) -> tuple[Layout, Made]:
    """The shared devices of a group with running guests on them, and clones in place of missing
    ones. Raises VsrtuneError with the obstacle."""
    absent = clone_plan.missing(group, host)
    like = clone_plan.source(group, host) if absent else None
    guests: list[GuestNics] = []
    for number, name in enumerate(group.members):
        if like is not None and name in absent:
            guests.append(clone_plan.stand_in(group, name, like, host))
        else:
            guests.append(running(name, group.at_member(number), host))
    # If the first member is a clone, the group is the router that the template would be.
    first = like if like is not None and guests[0].name in absent else guests[0]
    models = [g for g in (like, first) if g is not None]
    found = {
        (guest.uuid, side): on_lower(group.name, guest, lower, host)
        for guest in (*models, *guests)
        for side, lower in group.lowers
    }
    _alone(group, guests, host)
    devices = {}
    for side, lower in group.lowers:
        nic = found[first.uuid, side]
        link = host.links.get(nic.device)
        if first is like:
            _nobodys(nic, like, host)
        devices[side] = device_like(
            host, group.device(side), nic, host.links[lower], link, every_queue=True
        )
    made = Layout(group, host)
    clones: list[clone_plan.Member] = []
    for guest in guests:
        interfaces = {}
        for side, _ in group.lowers:
            nic, device = found[guest.uuid, side], devices[side]
            if guest.name in absent:
                interfaces[nic.mac] = moved(nic, device)
                made.add(device, guest, before=(nic.xml, nic.xml))
            else:
                made.adopt(guest, nic, device)
        if guest.name in absent:
            clones.append((guest, interfaces))
    return made, clone_plan.make(group, like, clones, host) if like is not None else Made()


def _alone(group: Group, guests: Collection[GuestNics], host: AttachHostState) -> None:
    """Refuse if anything but the members stands on the lower devices."""
    members = {g.uuid for g in guests}
    lowers = {lower for _, lower in group.lowers}
    no_others(host, lowers, forth=True)
    for guest in host.guests:
        for nic in guest.live or ():
            if guest.uuid not in members and nic.kind == "direct" and nic.lower in lowers:
                raise VsrtuneError(
                    f"{guest.name} has a macvtap on it and is no member of {group.name}, and a "
                    "device serves macvtap or NAPI-macvlan, never both",
                    where=nic.lower,
                    hint=f"vsrtune attach --to napi-macvlan {guest.name} once the group is "
                    "there; until then unplug it, or make it a member",
                )


def _nobodys(nic: DomainNic, template: GuestNics, host: AttachHostState) -> None:
    """Refuse to use a template's MAC a second time."""
    for link in host.links.values():
        if link.mac == nic.mac:
            raise VsrtuneError(
                f"{link.name} has the MAC {nic.mac}, which would be the group's",
                where=template.name,
                hint="another template, or another MAC in this one (virsh edit)",
            )
