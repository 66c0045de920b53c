"""Plans the steps that make several guests one router (PVR), and separate them again. Pure.

Invariants, which hold before and after each of these switches:
- All members stand on the same device of each side, one queue each: with a second queue a member
  would hear every broadcast twice.
- Members are plugged in in the same order on all sides. The kernel numbers the queues of a device
  in the order in which they are opened, so a queue's number means the same member on each side.
- The Origins of each member hold the interfaces that it had before, until the group is deleted.
  For a member that was made for the group (``clone_plan``) they hold those that it would have by
  itself.
"""

from __future__ import annotations

from vsrtune.attach.plan.model import AttachHostState, GuestNics, Move, Switch
from vsrtune.attach.plan.planner import device_like, no_others
from vsrtune.attach.plan.steps import (
    Define,
    Lower,
    MadeDevice,
    MakeDevice,
    Origin,
    Plug,
    Raise,
    Step,
    Unplug,
)
from vsrtune.core.errors import VsrtuneError
from vsrtune.group import clone_plan
from vsrtune.group.members import (
    back,
    card,
    defined,
    free_again,
    free_name,
    moved,
    new,
    of_group,
    on_lower,
    running,
)
from vsrtune.group.parser import Group
from vsrtune.model import domain_xml
from vsrtune.model.domain_xml import DomainNic
from vsrtune.model.guest import Attachment

_TO = Attachment.NAPI_MACVLAN


def create(group: Group, host: AttachHostState) -> Switch:
    """Put running guests, and clones in place of missing ones, on the shared devices of a group.
    Raises VsrtuneError with the obstacle."""
    new(group, host)
    absent = clone_plan.missing(group, host)
    template = clone_plan.source(group, host) if absent else None
    if template is not None:
        for _, lower in group.lowers:
            on_lower(group.name, template, lower, host)
    guests = [
        clone_plan.stand_in(group, name, template, host)
        if template is not None and name in absent
        else running(name, group.at_member(number), host)
        for number, name in enumerate(group.members)
    ]
    made_here = {g.uuid for g in guests if g.name in absent}
    found = {
        (guest.uuid, side): on_lower(group.name, guest, lower, host)
        for guest in guests
        for side, lower in group.lowers
    }
    _alone(group, guests, host)
    devices = {}
    for side, _ in group.lowers:
        first = found[guests[0].uuid, side]
        if template is not None and guests[0].uuid in made_here:
            # The group is then the router that the template would be.
            first = clone_plan.in_the_place(template, guests[0], first.mac)
            _nobodys(first, template, host)
        devices[side] = _device(group, side, first, host)
    notes: list[str] = []
    moves: list[Move] = []
    origins: list[Origin] = []
    shared: dict[tuple[str, str], str] = {}
    for guest in guests:
        for side, lower in group.lowers:
            nic, device = found[guest.uuid, side], devices[side]
            notes += [f"{guest.name} {nic.mac}: {text}" for text in domain_xml.lost(nic)]
            if guest.uuid in made_here:
                shared[guest.uuid, nic.mac] = moved(nic, device)
                moves.append(Move(guest.name, guest.uuid, nic.mac, device))
                origins.append(
                    Origin(device, guest.name, guest.uuid, nic.xml, nic.xml, group=group.name)
                )
                continue
            kept = defined(guest, nic, lower, notes)
            config = kept.xml if kept is not None else ""
            link = host.links.get(nic.device)
            moves.append(
                Move(
                    guest.name,
                    guest.uuid,
                    nic.mac,
                    device,
                    (nic.xml, moved(nic, device)),
                    (config, moved(kept, device) if kept is not None else ""),
                    host.kept(link) if link is not None else None,
                )
            )
            origins.append(
                Origin(device, guest.name, guest.uuid, nic.xml, config, group=group.name,
                       queue=moves[-1].queue)
            )  # fmt: skip
    made = tuple(devices.values())
    adopted = [m for m in moves if m.uuid not in made_here]
    steps: list[Step] = [MakeDevice(device) for device in made]
    clones: clone_plan.Made | None = None
    if template is not None:
        own = [g for g in guests if g.uuid in made_here]
        clones = clone_plan.make(group, template, own, shared, host)
        steps += clones.files
        notes += clones.notes
    if adopted:
        steps.append(Unplug(tuple(card(m, 0, m.queue) for m in adopted)))
    steps.append(Raise(made))
    if adopted:
        steps.append(Plug(tuple(card(m, 1, m.device.queue) for m in adopted)))
    if clones is not None:
        steps += clones.guests
    steps += [Define(m.guest, m.uuid, m.mac, *m.config) for m in adopted if m.config[0]]
    return Switch(
        _TO, tuple(moves), tuple(steps), tuple(origins), (), tuple(notes),
        clones=clones.clones if clones is not None else (),
    )  # fmt: skip


def delete(name: str, host: AttachHostState, *, keep_clones: bool = False) -> Switch:
    """Give every member the interfaces that it had before, and end the members that were made for
    the group; with ``keep_clones`` these become guests like the others. Raises VsrtuneError when
    there is no such group."""
    clones = clone_plan.of_group(name, host)
    # Clones that somebody undefined may have left nothing but their files.
    origins = () if clones and name not in host.groups else of_group(name, host)
    ended = () if keep_clones else clones
    ending, notes = clone_plan.end(ended, host)
    vanished = {clone.uuid for clone in ended}
    known = [(origin, host.by_uuid.get(origin.uuid)) for origin in origins]
    moves = [back(o, guest) for o, guest in known if guest is not None and o.uuid not in vanished]
    free_again(name, origins, moves, host)
    devices = tuple(dict.fromkeys(o.device for o in origins))
    steps: list[Step] = []
    off = tuple(card(m, 0, m.device.queue) for m in moves if m.live[0])
    home = tuple(card(m, 1, m.queue) for m in moves if m.live[1])
    if off:
        steps.append(Unplug(off))
    steps += ending
    if devices:
        steps.append(Lower(devices))
    if home:
        steps.append(Plug(home))
    steps += [Define(m.guest, m.uuid, m.mac, *m.config) for m in moves if m.config[0]]
    return Switch(
        Attachment.MACVTAP, tuple(moves), tuple(steps), (), devices, tuple(notes),
        ended=ended, kept=clones if keep_clones else (),
    )  # fmt: skip


def _alone(group: Group, guests: list[GuestNics], host: AttachHostState) -> None:
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


def _device(group: Group, side: str, first: DomainNic, host: AttachHostState) -> MadeDevice:
    name = group.device(side)
    free_name(name, host)
    lower, link = host.links[first.lower], host.links.get(first.device)
    return device_like(host, name, first, lower, link, every_queue=True)
