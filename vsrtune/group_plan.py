"""Which steps make several guests one router (PVR), and guests of their own again: pure.

Invariants, which hold before and after every switch of these:
- All members stand on the same device of each side, one queue each: with a second queue
  a member would hear every broadcast twice.
- Members are plugged in in one order on all sides. The kernel numbers the queues of a
  device as they are opened, so a queue's number means the same member on each side.
- What each member had before is in its Origins until the group is deleted. For one that
  was made for the group (``clone_plan``) that is what it would have by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from vsrtune import clone_plan, interface_xml
from vsrtune.attach_model import GuestNics, Host, Move, Switch
from vsrtune.attach_plan import device_like, no_others
from vsrtune.attach_steps import (
    Attachment,
    Card,
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
from vsrtune.groups import Group
from vsrtune.interface_xml import Nic
from vsrtune.rtnl_model import mode_name

_TO = Attachment.NAPI_MACVLAN


def create(group: Group, host: Host) -> Switch:
    """Put running guests on the shared devices of a group. Raises VsrtuneError with what
    is in the way."""
    if group.name in host.groups:
        raise VsrtuneError(
            "a group of that name is there already",
            where=group.at("group", "name"),
            hint=f"`vsrtune group status {group.name}` shows it, `vsrtune group delete "
            f"{group.name}` ends it",
        )
    absent = clone_plan.missing(group, host)
    template = clone_plan.source(group, host) if absent else None
    guests = [
        clone_plan.stand_in(group, name, template, host)
        if template is not None and name in absent
        else _member(group, number, host)
        for number, name in enumerate(group.members)
    ]
    made_here = {g.uuid for g in guests if g.name in absent}
    found = {
        (guest.uuid, side): _on(group, guest, lower, host)
        for guest in guests
        for side, lower in group.lowers
    }
    _alone(group, guests, host)
    devices = {}
    for side, _ in group.lowers:
        first = found[guests[0].uuid, side]
        if template is not None and guests[0].uuid in made_here:
            # It is the router that the template would be.
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
            notes += [f"{guest.name} {nic.mac}: {text}" for text in interface_xml.lost(nic)]
            if guest.uuid in made_here:
                shared[guest.uuid, nic.mac] = _shared(nic, device)
                moves.append(Move(guest.name, guest.uuid, nic.mac, device))
                origins.append(
                    Origin(device, guest.name, guest.uuid, nic.xml, nic.xml, group=group.name)
                )
                continue
            kept = _defined(guest, nic, lower, notes)
            config = kept.xml if kept is not None else ""
            link = host.links.get(nic.device)
            moves.append(
                Move(
                    guest.name,
                    guest.uuid,
                    nic.mac,
                    device,
                    (nic.xml, _shared(nic, device)),
                    (config, _shared(kept, device) if kept is not None else ""),
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
        steps.append(Unplug(tuple(_card(m, 0, m.queue) for m in adopted)))
    steps.append(Raise(made))
    if adopted:
        steps.append(Plug(tuple(_card(m, 1, m.device.queue) for m in adopted)))
    if clones is not None:
        steps += clones.guests
    steps += [Define(m.guest, m.uuid, m.mac, *m.config) for m in adopted if m.config[0]]
    new = clones.clones if clones is not None else ()
    return Switch(_TO, tuple(moves), tuple(steps), tuple(origins), (), tuple(notes), clones=new)


def delete(name: str, host: Host, *, keep_clones: bool = False) -> Switch:
    """Give every member what it had before, and end those that were made for the group; with
    ``keep_clones`` they become guests like the others. Raises VsrtuneError when there is no
    such group."""
    origins = of_group(name, host)
    _only(origins, host)
    clones = clone_plan.of_group(name, host)
    ended = () if keep_clones else clones
    ending, notes = clone_plan.end(ended, host)
    gone = {clone.uuid for clone in ended}
    moves = []
    for origin in origins:
        guest = host.by_uuid.get(origin.uuid)
        if guest is None or guest.uuid in gone:
            continue
        before = interface_xml.nic(origin.live or origin.config)
        live = config = ("", "")
        if guest.live is not None:
            now = on_device(guest.live, origin.device.name)
            if now is not None:
                live = (now.xml, _before(origin, now, origin.live))
            elif origin.live and not any(n.mac == before.mac for n in guest.live):
                live = ("", origin.live)  # drained
        if guest.config is not None:
            kept = on_device(guest.config, origin.device.name)
            if kept is not None:
                config = (kept.xml, _before(origin, kept, origin.config))
        moves.append(
            Move(origin.guest, origin.uuid, before.mac, origin.device, live, config, origin.queue)
        )
    devices = tuple(dict.fromkeys(o.device for o in origins))
    steps: list[Step] = []
    off = tuple(_card(m, 0, m.device.queue) for m in moves if m.live[0])
    back = tuple(_card(m, 1, m.queue) for m in moves if m.live[1])
    if off:
        steps.append(Unplug(off))
    steps += ending
    steps.append(Lower(devices))
    if back:
        steps.append(Plug(back))
    steps += [Define(m.guest, m.uuid, m.mac, *m.config) for m in moves if m.config[0]]
    return Switch(
        Attachment.MACVTAP, tuple(moves), tuple(steps), (), devices, tuple(notes),
        ended=ended, kept=clones if keep_clones else (),
    )  # fmt: skip


def drain(name: str, member: str, host: Host) -> Switch:
    """Take one running member's interfaces off the devices. Raises VsrtuneError."""
    origins = of_group(name, host)
    members = list(dict.fromkeys(o.guest for o in origins))
    if member not in members:
        raise VsrtuneError(
            f"it is no member of the group {name}", where=member,
            hint=f"its members: {', '.join(members)}",
        )  # fmt: skip
    return _change(origins, host, [m for m in _plugged(origins, host) if m != member])


def scale(name: str, count: int, host: Host) -> Switch:
    """Keep the first ``count`` members plugged in, and no other. Raises VsrtuneError."""
    origins = of_group(name, host)
    members = list(dict.fromkeys(o.guest for o in origins))
    if not 1 <= count <= len(members):
        raise VsrtuneError(
            f"it has {len(members)} members, so not {count} of them can be plugged in",
            where=name,
            hint=f"a number from 1 to {len(members)}; `vsrtune group delete {name}` ends it",
        )
    return _change(origins, host, members[:count])


def of_group(name: str, host: Host) -> tuple[Origin, ...]:
    """The Origins of a group that was created, by member, then side. Raises VsrtuneError
    when there is none."""
    if name not in host.groups:
        known = ", ".join(sorted(host.groups)) or "none"
        raise VsrtuneError(
            "there is no such group on this host", where=name, hint=f"created groups: {known}"
        )
    return tuple(host.groups[name])


def on_device(nics: Iterable[Nic], device: str) -> Nic | None:
    """A guest's interface on a host device."""
    return next((n for n in nics if n.device == device), None)


def _change(origins: tuple[Origin, ...], host: Host, keep: list[str]) -> Switch:
    """Plug in the members ``keep`` and take the others off; first those that come, so that
    somebody forwards at any time."""
    come: list[Move] = []
    go: list[Move] = []
    notes: list[str] = []
    staying = 0
    for origin in origins:
        guest = host.by_uuid.get(origin.uuid)
        wanted = origin.guest in keep
        if guest is None or guest.live is None:
            if wanted:
                notes.append(f"{origin.guest} does not run; it joins when it is started")
            continue
        staying += wanted
        now = on_device(guest.live, origin.device.name)
        mac = origin.device.mac
        if wanted and now is None:
            xml = _shared(interface_xml.nic(origin.live), origin.device)
            come.append(Move(guest.name, guest.uuid, mac, origin.device, ("", xml)))
        elif not wanted and now is not None:
            go.append(Move(guest.name, guest.uuid, mac, origin.device, (now.xml, "")))
    if go and not staying:
        raise VsrtuneError(
            "no running member would be left to forward",
            where=origins[0].group,
            hint=f"start or scale up another one, or: vsrtune group delete {origins[0].group}",
        )
    steps: list[Step] = []
    if come:
        steps.append(Plug(tuple(_card(m, 1, m.device.queue) for m in come)))
    if go:
        steps.append(Unplug(tuple(_card(m, 0, m.device.queue) for m in go)))
    return Switch(_TO, (*come, *go), tuple(steps), notes=tuple(dict.fromkeys(notes)))


def _plugged(origins: tuple[Origin, ...], host: Host) -> list[str]:
    """Members of which at least one interface is on its device."""
    found = []
    for origin in origins:
        guest = host.by_uuid.get(origin.uuid)
        if guest is not None and on_device(guest.live or (), origin.device.name) is not None:
            found.append(origin.guest)
    return list(dict.fromkeys(found))


def _member(group: Group, number: int, host: Host) -> GuestNics:
    """A member that runs and is in no other group."""
    where = group.at("group", "members", str(number))
    name = group.members[number]
    guest = next((g for g in host.guests if g.name == name), None)
    if guest is None:
        raise VsrtuneError(
            f"there is no libvirt guest {name}",
            where=where,
            hint="see: virsh list --all; a template: makes members that are not there",
        )
    if guest.live is None:
        raise VsrtuneError(f"{name} does not run", where=where, hint=f"virsh start {name}")
    for other, origins in host.groups.items():
        if any(o.uuid == guest.uuid for o in origins):
            raise VsrtuneError(
                f"{name} is a member of the group {other}", where=where,
                hint=f"vsrtune group delete {other}",
            )  # fmt: skip
    return guest


def _on(group: Group, guest: GuestNics, lower: str, host: Host) -> Nic:
    """The one interface of a guest on a lower device, if it can be moved."""
    found = [n for n in guest.live or () if host.lower(n) == lower]
    where = f"{guest.name}: {lower}"
    if len(found) != 1:
        many = f"{len(found)} interfaces" if found else "no interface"
        raise VsrtuneError(
            f"it has {many} on this device, and a member of {group.name} has one",
            where=where,
            hint="see: virsh domiflist " + guest.name,
        )
    (nic,) = found
    if host.ours(nic):
        raise VsrtuneError(
            "the interface is on NAPI-macvlan already, by itself", where=where,
            hint=f"vsrtune attach --to macvtap {guest.name}",
        )  # fmt: skip
    reason = interface_xml.unsupported(nic)
    if not reason and interface_xml.queues(nic) > 1:
        reason = (
            f"it has {interface_xml.queues(nic)} queue pairs, and would hear each broadcast "
            "as often"
        )
    if reason:
        raise VsrtuneError(
            reason, where=where, hint="give the guest a macvtap of one queue there (virsh edit)"
        )
    return nic


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


def _only(origins: Iterable[Origin], host: Host) -> None:
    """Refuse when other NAPI-macvlan devices stand on the lower devices, for macvtap could
    not come back there."""
    devices = {o.device.name for o in origins}
    lowers = {o.device.lower for o in origins}
    no_others(host, lowers, forth=False)
    for guest in host.guests:
        for nic in guest.live or ():
            lower = host.lower(nic)
            if host.ours(nic) and lower in lowers and nic.device not in devices:
                raise VsrtuneError(
                    f"{guest.name} has {nic.device} on it, and the members' macvtaps cannot come "
                    "back beside that",
                    where=lower,
                    hint=f"vsrtune attach --to macvtap {guest.name}",
                )


def _device(group: Group, side: str, first: Nic, host: Host) -> Device:
    name = group.device(side)
    if name in host.links or name in host.origins:
        raise VsrtuneError(
            "a device of that name is there already", where=name,
            hint=f"another name for the group, or, if nothing needs it: ip link delete {name}",
        )  # fmt: skip
    lower, link = host.links[first.lower], host.links.get(first.device)
    return device_like(host, name, first, lower, link, every_queue=True)


def _nobodys(nic: Nic, template: GuestNics, host: Host) -> None:
    """Refuse to use a template's MAC a second time."""
    for link in host.links.values():
        if link.mac == nic.mac:
            raise VsrtuneError(
                f"{link.name} has the MAC {nic.mac}, which would be the group's",
                where=template.name,
                hint="another template, or another MAC in this one (virsh edit)",
            )


def _defined(guest: GuestNics, nic: Nic, lower: str, notes: list[str]) -> Nic | None:
    """The interface in the persistent definition, which changes with the running one."""
    kept = next((n for n in guest.config or () if n.mac == nic.mac), None)
    if kept is not None and kept.kind == "direct" and kept.lower == lower:
        return kept
    if guest.config is not None:
        notes.append(
            f"{guest.name} {nic.mac}: its definition has no macvtap on {lower} and is left alone"
        )
    return None


def _shared(nic: Nic, device: Device) -> str:
    return interface_xml.with_mac(interface_xml.on_device(nic, device.name), device.mac)


def _before(origin: Origin, now: Nic, before: str) -> str:
    """What an interface was, unless somebody has changed it since: then the like of what it
    is, with its old MAC."""
    was = interface_xml.nic(before or origin.live or origin.config)
    if before and not interface_xml.differences(_shared(was, origin.device), now.xml):
        return before
    back = interface_xml.as_direct(now, origin.device.lower, mode_name(origin.device.mode))
    return interface_xml.with_mac(back, was.mac)


def _card(move: Move, which: int, queue: int | None) -> Card:
    """Of the interface as it is (0) or as it shall be (1)."""
    xml = move.live[which]
    return Card(move.guest, move.uuid, interface_xml.nic(xml).mac, xml, queue)
