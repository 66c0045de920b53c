# SPDX-License-Identifier: GPL-2.0-or-later
"""Plans the steps that move guests from macvtap to NAPI-macvlan, and back. Pure.

Invariants, which ``plan`` keeps:
- All interfaces on one lower device stand on the same kind, because both kinds need that device
  for themselves. Either every guest on it moves, or none.
- A device exists, with its /dev/tapN, before a guest is unplugged for it.
- A device of ours is up only while its lower device carries no macvtap.
- A guest's persistent definition changes last: the next start of the guest uses it after an
  interrupted switch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain, count

from vsrtune.attach.plan.model import (
    OURS,
    STACKED,
    AttachHostState,
    GuestNics,
    Move,
    Switch,
    SwitchRequest,
    movable,
)
from vsrtune.attach.plan.steps import (
    Card,
    Define,
    MadeDevice,
    MakeDevice,
    Origin,
    Plug,
    Raise,
    Step,
)
from vsrtune.core.errors import VsrtuneError
from vsrtune.model import domain_xml
from vsrtune.model.domain_xml import DomainNic
from vsrtune.model.guest import Attachment
from vsrtune.model.host import MODES, Link, mode_name


def plan(request: SwitchRequest, host: AttachHostState, names: Collection[str] = ()) -> Switch:
    """Plan the requested switch. ``names`` are those of devices that other plans for this host
    make. Raises VsrtuneError with the obstacle."""
    guests = [host.guest(name) for name in request.guests]
    if not (request.live or request.config):
        live = any(g.live is not None for g in guests)
        config = any(g.config is not None for g in guests)
        request = replace(request, live=live, config=config)
    wanted = {g.uuid: _selected(g, request, host) for g in guests}
    lowers = {
        host.lower(n) for g in guests for n in g.nics if n.mac in wanted[g.uuid]
    } - {""}  # fmt: skip
    notes: list[str] = []
    if request.live:
        _take_along(request, host, wanted, lowers, notes)
        no_others(host, lowers, forth=request.to is Attachment.NAPI_MACVLAN)
    for guest in host.guests:
        if wanted.get(guest.uuid):
            not_saved(guest)
    _no_members(request, host, wanted)
    moves: list[Move] = []
    for guest in host.guests:
        for mac in sorted(wanted.get(guest.uuid, ())):
            taken = {*names, *(m.device.name for m in moves)}
            move = _move(request, host, guest, mac, notes, taken)
            if move is not None:
                moves.append(move)
    return _switch(request, host, tuple(moves), notes)


def not_saved(guest: GuestNics) -> None:
    """Refuse a guest that libvirt can only restore with the devices that it had. Raises
    VsrtuneError."""
    if guest.saved is not None:
        raise VsrtuneError(
            "libvirt has saved it (managedsave), and restores it with the devices that it had",
            where=guest.name,
            hint=f"start it first: virsh start {guest.name}",
        )


def _named(found: DomainNic, name: str, host: AttachHostState) -> bool:
    return not name or name.lower() == found.mac or name in (found.device, host.lower(found))


def _selected(guest: GuestNics, request: SwitchRequest, host: AttachHostState) -> set[str]:
    """MACs of the requested interfaces."""
    if guest.live is None and not request.config:
        raise VsrtuneError(
            "the guest does not run", where=guest.name, hint="start it, or use --config"
        )
    if guest.config is None and not request.live:
        raise VsrtuneError(
            "the guest has no persistent definition", where=guest.name, hint="use --live"
        )
    found = {
        n.mac
        for n in guest.nics
        if _named(n, request.interface, host) and (request.interface or movable(n, host))
    }
    if not found:
        known = ", ".join(sorted({f"{n.mac} ({n.kind})" for n in guest.nics})) or "none"
        which = request.interface or "on macvtap or NAPI-macvlan"
        hint = f"its interfaces: {known}"
        if any(n.kind in ("bridge", "network") for n in guest.nics):
            hint += "; one on a bridge must first be of type direct, on a NIC in no bridge"
        raise VsrtuneError(f"it has no interface {which}", where=guest.name, hint=hint)
    return found


def _take_along(
    request: SwitchRequest,
    host: AttachHostState,
    wanted: dict[str, set[str]],
    lowers: set[str],
    notes: list[str],
) -> None:
    """Add the interfaces that must move too, because they stand on the same lower devices. A guest
    that does not run holds a lower device by our device, which stays up for it; its macvtap is
    made when it starts."""
    others: list[str] = []
    back = request.to is Attachment.MACVTAP
    for guest in host.guests:
        running = guest.live is not None
        for found in guest.present:
            lower = host.lower(found)
            if (
                lower not in lowers
                or found.mac in wanted.get(guest.uuid, ())
                or _there(request, found, host)
            ):
                continue
            text = f"{guest.name} {found.mac} on {lower}"
            if request.all_of_lower and (running or request.config):
                wanted.setdefault(guest.uuid, set()).add(found.mac)
            elif running or back:
                others.append(text)
            else:
                notes.append(f"{text}: the guest does not run, and cannot start on macvtap there")
    if others:
        raise VsrtuneError(
            "the lower device serves macvtap or NAPI-macvlan, never both, and other interfaces "
            f"stand on it: {', '.join(others)}",
            where=", ".join(sorted(lowers)),
            hint="--all-of-lower moves them too",
        )


def _there(request: SwitchRequest, found: DomainNic, host: AttachHostState) -> bool:
    """Whether the interface stands on the requested kind already."""
    if request.to is Attachment.NAPI_MACVLAN:
        return host.on_napi(found)
    return found.kind == "direct"


def _no_members(
    request: SwitchRequest, host: AttachHostState, wanted: Mapping[str, set[str]]
) -> None:
    """Refuse to take single members of a group off their device."""
    if request.to is Attachment.NAPI_MACVLAN:
        return
    for guest in host.guests:
        for found in guest.nics:
            origin = host.group(found.device)
            if origin is not None and found.mac in wanted.get(guest.uuid, ()):
                raise VsrtuneError(
                    f"its interface {found.mac} is on {found.device} of the group {origin.group}",
                    where=guest.name,
                    hint=f"vsrtune group delete {origin.group}",
                )


def no_others(
    host: AttachHostState, lowers: Collection[str], *, forth: bool, but: Collection[str] = ()
) -> None:
    """Refuse if the lower devices carry something that belongs to no libvirt guest, is none of
    ``but``, and is in the way of NAPI-macvlan (``forth``), or of macvtap. Raises VsrtuneError."""
    kinds = STACKED if forth else OURS
    known = {n.device for g in host.guests for n in g.nics} | set(but)
    for name in sorted(lowers):
        lower = host.links.get(name)
        if lower is None:
            raise VsrtuneError("there is no such device", where=name, hint="see: ip link")
        if lower.master and forth:
            master = host.by_index.get(lower.master)
            raise VsrtuneError(
                f"it is a port of {master.name if master else 'another device'}, and NAPI-macvlan "
                "wants it for itself",
                where=name,
                hint=f"ip link set {name} nomaster, if nothing needs that",
            )
        for link in host.links.values():
            holds = link.lower == lower.index and link.kind in kinds and (forth or link.up)
            if holds and link.name not in known:
                raise VsrtuneError(
                    f"the {link.kind} {link.name} stands on it and belongs to no libvirt guest",
                    where=name,
                    hint="stop what uses it, then remove it: `ip link delete`",
                )


def _move(
    request: SwitchRequest,
    host: AttachHostState,
    guest: GuestNics,
    mac: str,
    notes: list[str],
    taken: Collection[str],
) -> Move | None:
    """The move of one interface; None when nothing of it has to move. ``taken`` are the names of
    devices that are planned already."""
    found = []
    for nics, wanted, where in (
        (guest.live, request.live, "the running guest"),
        (guest.config, request.config, "its definition"),
    ):
        nic = _of(nics, mac) if wanted else None
        if nic is not None and _there(request, nic, host):
            notes.append(f"{guest.name} {mac}: {where} has it on {request.to} already")
            nic = None
        found.append(nic)
    live, config = found
    if live is None and config is None:
        return None
    if request.to is Attachment.NAPI_MACVLAN:
        return _forth(host, guest, mac, live, config, notes, taken)
    return _back(host, guest, mac, live, config)


def _of(nics: tuple[DomainNic, ...] | None, mac: str) -> DomainNic | None:
    found = [n for n in nics or () if n.mac == mac]
    if len(found) > 1:
        raise VsrtuneError(
            "the guest has several interfaces of that MAC", where=f"interface {mac}",
            hint="give every interface its own MAC (virsh edit)",
        )  # fmt: skip
    return found[0] if found else None


def _forth(
    host: AttachHostState,
    guest: GuestNics,
    mac: str,
    live: DomainNic | None,
    config: DomainNic | None,
    notes: list[str],
    taken: Collection[str],
) -> Move:
    for found in filter(None, (live, config)):
        reason = domain_xml.unsupported(found)
        if reason:
            raise VsrtuneError(
                reason,
                where=f"{guest.name}: interface {mac}",
                hint="name another interface with --interface",
            )
        notes += [f"{guest.name} {mac}: {text}" for text in domain_xml.lost(found)]
    source = live or config
    assert source is not None
    if live is not None and config is not None and live.lower != config.lower:
        raise VsrtuneError(
            f"the running guest has it on {live.lower}, its definition on {config.lower}",
            where=f"{guest.name}: interface {mac}",
            hint="switch one of them (--live or --config), or start the guest anew first",
        )
    as_before = (guest.uuid, mac, source.lower)
    made = (o.device for o in host.origins.values()
            if (o.uuid, o.device.mac, o.device.lower) == as_before)  # fmt: skip
    device = next(made, None)  # the same as before if it was made already
    if device is None:
        lower = host.links.get(source.lower)
        if lower is None:
            raise VsrtuneError(
                "the lower device is not there", where=f"{guest.name}: {source.lower}",
                hint="see: ip link",
            )  # fmt: skip
        link = host.links.get(live.device) if live is not None else None
        device = device_like(host, _name(host, mac, taken), source, lower, link)
    pairs = [(f.xml, domain_xml.on_device(f, device.name)) if f else ("", "")
             for f in (live, config)]  # fmt: skip
    return Move(guest.name, guest.uuid, mac, device, pairs[0], pairs[1], device.queue)


def device_like(
    host: AttachHostState,
    name: str,
    source: DomainNic,
    lower: Link,
    link: Link | None,
    *,
    every_queue: bool = False,
) -> MadeDevice:
    """A device of ours in place of the macvtap of an interface: ``link`` is that macvtap, None
    when the guest does not run."""
    return MadeDevice(
        name=name,
        lower=lower.name,
        mac=source.mac,
        mode=MODES[domain_xml.mode(source)],
        mtu=link.mtu if link is not None else lower.mtu,
        queue=host.kept(link) if link is not None else 500,
        every_queue=every_queue,
    )


def _name(host: AttachHostState, mac: str, taken: Collection[str]) -> str:
    """A free device name that libvirt leaves alone."""
    base = f"nvt{mac.replace(':', '')[-8:]}"
    used = {*host.links, *host.origins, *taken}
    names = chain([base], (f"{base}{n}" for n in count(2)))
    return next(name for name in names if name not in used)


def _back(
    host: AttachHostState,
    guest: GuestNics,
    mac: str,
    live: DomainNic | None,
    config: DomainNic | None,
) -> Move:
    source = live or config
    assert source is not None
    if not host.on_napi(source):
        raise VsrtuneError(
            f"its type is {source.kind}, and its device none of vsrtune's",
            where=f"{guest.name}: interface {mac}",
            hint="name another interface with --interface",
        )
    origin = host.origins.get(source.device)
    link = host.links.get(source.device)
    lower = host.lower(source)
    if not lower:
        raise VsrtuneError(
            "the device it stood on cannot be told",
            where=f"{guest.name}: {source.device}",
            hint="edit the guest's definition by hand (virsh edit)",
        )
    if origin is not None:
        device = origin.device
    else:
        assert link is not None
        device = MadeDevice(source.device, lower, mac, link.mode, link.mtu, link.queue)
    mode = mode_name(device.mode if link is None else link.mode)
    pairs = []
    for found, before in (
        (live, origin.live if origin else ""),
        (config, origin.config if origin else ""),
    ):
        if found is None:
            pairs.append(("", ""))
            continue
        # The interface that was there before, unless somebody has changed it since.
        if not before or domain_xml.differences(
            domain_xml.on_device(domain_xml.nic(before), source.device), found.xml
        ):
            before = domain_xml.as_direct(found, lower, mode)
        pairs.append((found.xml, before))
    queue = host.kept(link) if link is not None else None
    return Move(guest.name, guest.uuid, mac, device, pairs[0], pairs[1], queue)


def _switch(
    request: SwitchRequest, host: AttachHostState, moves: tuple[Move, ...], notes: list[str]
) -> Switch:
    old = tuple(Card(m.guest, m.uuid, m.mac, m.live[0], m.queue) for m in moves if m.live[0])
    new = tuple(Card(m.guest, m.uuid, m.mac, m.live[1], m.queue) for m in moves if m.live[0])
    defines = tuple(Define(m.guest, m.uuid, m.mac, *m.config) for m in moves if m.config[0])
    forth = request.to is Attachment.NAPI_MACVLAN
    # On the way back, devices of guests that do not run go down too. One that is down stays down
    # when that is taken back: a guest that runs may need the lower device for itself.
    up = {name for name, link in host.links.items() if link.up}
    devices = tuple(m.device for m in moves if m.live[0] or (not forth and m.device.name in up))
    steps: list[Step] = []
    if forth:
        steps += [MakeDevice(m.device) for m in moves if m.device.name not in host.links]
    if old:
        steps.append(Plug(old, on=False))
        steps.append(Raise(devices, on=forth))
        steps.append(Plug(new))
    steps += defines
    if forth:
        known = set(host.origins)
        origins = tuple(
            Origin(m.device, m.guest, m.uuid, m.live[0], m.config[0], request.by_policy)
            for m in moves
            if m.device.name not in known
        )
        _warn(host, moves, notes)
        return Switch(request.to, moves, tuple(steps), origins, (), tuple(notes))
    return Switch(request.to, moves, tuple(steps), (), _unused(host, moves), tuple(notes))


def _unused(host: AttachHostState, moves: tuple[Move, ...]) -> tuple[MadeDevice, ...]:
    """Devices that nothing needs after the moves."""
    leaves = []
    for move in moves:
        now = host.by_uuid[move.uuid]
        live = _of(now.live, move.mac)
        config = _of(now.config, move.mac)
        stays = (live is not None and host.on_napi(live) and not move.live[0]) or (
            config is not None and host.on_napi(config) and not move.config[0]
        )
        if not stays:
            leaves.append(move.device)
    return tuple(leaves)


def _warn(host: AttachHostState, moves: tuple[Move, ...], notes: list[str]) -> None:
    for move in moves:
        guest = host.by_uuid[move.uuid]
        if move.live[0] and not move.config[0] and guest.config is not None:
            notes.append(
                f"{move.guest} {move.mac}: its definition keeps macvtap, and the guest cannot "
                f"start again while other guests on {move.device.lower} have NAPI-macvlan"
            )
        if move.config[0] and not move.live[0] and guest.live is not None:
            notes.append(
                f"{move.guest} {move.mac}: {move.device.name} comes up when the last macvtap on "
                f"{move.device.lower} is gone, which the daemon sees to"
            )
