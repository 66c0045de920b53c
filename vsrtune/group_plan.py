"""Which steps make several guests one router (PVR), and guests of their own again: pure.

Invariants, which hold before and after every switch of these:
- All members stand on the same device of each side, one queue each: with a second queue
  a member would hear every broadcast twice.
- Members are plugged in in one order on all sides. The kernel numbers the queues of a
  device as they are opened, so a queue's number means the same member on each side.
- What each member had before is in its Origins until the group is deleted.
"""

from __future__ import annotations

from vsrtune import interface_xml
from vsrtune.attach_model import GuestNics, Host, Move, Switch
from vsrtune.attach_plan import device_like, no_others
from vsrtune.attach_steps import (
    Attachment,
    Define,
    Device,
    Lower,
    MakeDevice,
    Origin,
    Plug,
    Raise,
    Step,
    Unplug,
)
from vsrtune.errors import VsrtuneError
from vsrtune.group_members import (
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
from vsrtune.groups import Group
from vsrtune.interface_xml import Nic

_TO = Attachment.NAPI_MACVLAN


def create(group: Group, host: Host) -> Switch:
    """Put running guests on the shared devices of a group. Raises VsrtuneError with what
    is in the way."""
    new(group, host)
    guests = [running(m, group.at_member(n), host) for n, m in enumerate(group.members)]
    found = {
        (guest.uuid, side): on_lower(group.name, guest, lower, host)
        for guest in guests
        for side, lower in group.lowers
    }
    _alone(group, guests, host)
    devices = {side: _device(group, side, found[guests[0].uuid, side], host)
               for side, _ in group.lowers}  # fmt: skip
    notes: list[str] = []
    moves: list[Move] = []
    origins: list[Origin] = []
    for guest in guests:
        for side, lower in group.lowers:
            nic, device = found[guest.uuid, side], devices[side]
            notes += [f"{guest.name} {nic.mac}: {text}" for text in interface_xml.lost(nic)]
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
    steps: list[Step] = [MakeDevice(device) for device in made]
    steps.append(Unplug(tuple(card(m, 0, m.queue) for m in moves)))
    steps.append(Raise(made))
    steps.append(Plug(tuple(card(m, 1, m.device.queue) for m in moves)))
    steps += [Define(m.guest, m.uuid, m.mac, *m.config) for m in moves if m.config[0]]
    return Switch(_TO, tuple(moves), tuple(steps), tuple(origins), (), tuple(notes))


def delete(name: str, host: Host) -> Switch:
    """Give every member what it had before. Raises VsrtuneError when there is no such
    group."""
    origins = of_group(name, host)
    free_again(origins, host)
    known = [(origin, host.by_uuid.get(origin.uuid)) for origin in origins]
    moves = [back(origin, guest) for origin, guest in known if guest is not None]
    devices = tuple(dict.fromkeys(o.device for o in origins))
    steps: list[Step] = []
    off = tuple(card(m, 0, m.device.queue) for m in moves if m.live[0])
    home = tuple(card(m, 1, m.queue) for m in moves if m.live[1])
    if off:
        steps.append(Unplug(off))
    steps.append(Lower(devices))
    if home:
        steps.append(Plug(home))
    steps += [Define(m.guest, m.uuid, m.mac, *m.config) for m in moves if m.config[0]]
    return Switch(Attachment.MACVTAP, tuple(moves), tuple(steps), (), devices)


def _alone(group: Group, guests: list[GuestNics], host: Host) -> None:
    """Refuse when anybody else stands on the lower devices."""
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


def _device(group: Group, side: str, first: Nic, host: Host) -> Device:
    name = group.device(side)
    free_name(name, host)
    lower, link = host.links[first.lower], host.links.get(first.device)
    return device_like(host, name, first, lower, link, every_queue=True)
