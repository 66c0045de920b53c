# SPDX-License-Identifier: GPL-2.0-or-later
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
from vsrtune.group.members import Layout, moved, on_lower, running
from vsrtune.group.parser import Group
from vsrtune.model.domain_xml import DomainNic


def layout(group: Group, host: AttachHostState) -> Layout:
    """The shared devices of a group with running guests on them, and clones in place of missing
    ones. Raises VsrtuneError with the obstacle."""
    absent = clone_plan.missing(group, host)
    template = clone_plan.source(group, host) if absent else None
    guests = [
        clone_plan.stand_in(group, name, template, host)
        if template is not None and name in absent
        else running(name, group.at_member(number), host)
        for number, name in enumerate(group.members)
    ]
    first = guests[0]
    if template is not None and first.name in absent:
        first = template  # the group is the router that the template would be
    everyone = guests if template is None else [template, *guests]
    found = {
        (guest.uuid, side): on_lower(group.name, guest, lower, host)
        for guest in everyone
        for side, lower in group.lowers
    }
    _alone(group, guests, host)
    devices = {}
    for side, lower in group.lowers:
        nic = found[first.uuid, side]
        link = host.links.get(nic.device)
        if first is template:
            _nobodys(nic, template, host)
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
    if template is not None:
        clone_plan.make(group, template, clones, host, made)
    return made


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
