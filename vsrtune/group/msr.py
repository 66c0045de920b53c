"""Plans the steps that put balancers in front of routers (MSR), and remove them again. Pure.

Invariants, which hold before and after each of these switches:
- On every link there is one device of a balancer, which has the flag uplink: it gets the frames
  that routers send to their neighbours outside.
- A balancer's interfaces outside are left alone; their MACs are those of the whole router.
- Routers keep their MACs, so their configuration by MAC stays right.
- The Origins of each router hold the interfaces that it had before, until the group is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass

from vsrtune.attach.plan.model import AttachHostState, GuestNics, Move, Switch
from vsrtune.attach.plan.steps import (
    Define,
    MadeDevice,
    MakeDevice,
    MsrRole,
    Origin,
    Plug,
    Raise,
    Stage,
    Step,
    Unplug,
)
from vsrtune.core.errors import VsrtuneError
from vsrtune.group import msr_links
from vsrtune.group.members import (
    back,
    card,
    defined,
    free_again,
    free_name,
    moved,
    new,
    of_group,
    on_device,
    on_lower,
    one_on,
    running,
)
from vsrtune.group.msr_links import Side, SideLinks, side_links
from vsrtune.group.parser import Group
from vsrtune.group.schema import BRIDGE
from vsrtune.model import domain_xml
from vsrtune.model.domain_xml import DomainNic
from vsrtune.model.guest import Attachment
from vsrtune.model.host import MODES

_TO = Attachment.NAPI_MACVLAN


@dataclass(frozen=True, slots=True)
class _Found:
    """One side as it is, and the devices to make for it. ``nics`` and ``devices`` are those of the
    routers, in their order."""

    name: str
    lower: str
    balancer: GuestNics
    outer: DomainNic
    made: SideLinks
    nics: tuple[DomainNic, ...]
    devices: tuple[MadeDevice, ...]


def create(group: Group, host: AttachHostState) -> Switch:
    """Put running routers behind running balancers. Raises VsrtuneError with the obstacle."""
    new(group, host)
    routers = _routers(group, host)
    sides = _sides(group, routers, host)
    for side in sides:
        for device in (*side.made.links, *side.made.balancer, *side.devices):
            free_name(device.name, host)
    notes: list[str] = []
    origins: list[Origin] = []
    inner: list[Move] = []
    for side in sides:
        ends = group.members if group.links != BRIDGE else ("",)
        stage = Stage(MsrRole.LINK, side.name, side.lower)
        origins += [Origin(d, "", "", "", "", group=group.name, stage=stage)
                    for d in side.made.links]  # fmt: skip
        for router, device in zip(ends, side.made.balancer, strict=True):
            b = side.balancer
            xml = domain_xml.another(side.outer, device.mac, device.name)
            config = ("", xml if b.config is not None else "")
            inner.append(Move(b.name, b.uuid, device.mac, device, ("", xml), config))
            stage = Stage(MsrRole.BALANCER, side.name, side.lower, router)
            origins.append(Origin(device, b.name, b.uuid, "", "", group=group.name, stage=stage))
    moves: list[Move] = []
    for number, guest in enumerate(routers):
        for side in sides:
            nic, device = side.nics[number], side.devices[number]
            notes += [f"{guest.name} {nic.mac}: {text}" for text in domain_xml.lost(nic)]
            kept = defined(guest, nic, side.lower, notes)
            config = (kept.xml, moved(kept, device)) if kept is not None else ("", "")
            pair, queue = (nic.xml, moved(nic, device)), _kept(nic, host)
            moves.append(Move(guest.name, guest.uuid, nic.mac, device, pair, config, queue))
            stage = Stage(MsrRole.ROUTER, side.name, side.lower)
            origins.append(Origin(device, guest.name, guest.uuid, nic.xml, config[0],
                                  group=group.name, queue=queue, stage=stage))  # fmt: skip
    notes += [f"{name} forwards when it has loaded what this prints: vsrtune group rules "
              f"{group.name} {name}" for name, _ in group.balancers]  # fmt: skip
    devices = tuple(origin.device for origin in origins)
    steps: list[Step] = [MakeDevice(device) for device in devices]
    steps.append(Raise(devices))
    # The balancers first: while one of them cannot take its interfaces, the routers go on.
    steps.append(Plug(tuple(card(m, 1, m.device.queue) for m in inner)))
    steps.append(Unplug(tuple(card(m, 0, m.queue) for m in moves)))
    steps.append(Plug(tuple(card(m, 1, m.device.queue) for m in moves)))
    steps += _defines([*inner, *moves])
    return Switch(_TO, (*inner, *moves), tuple(steps), tuple(origins), (), tuple(notes))


def delete(name: str, host: AttachHostState) -> Switch:
    """Give every router the interfaces that it had before, and remove the internal ones of the
    balancers. Raises VsrtuneError when there is no such group."""
    origins = of_group(name, host)
    moves: list[Move] = []
    for origin in origins:
        guest = host.by_uuid.get(origin.uuid)
        if guest is None:
            continue
        if origin.stage is not None and origin.stage.role is MsrRole.BALANCER:
            moves.append(_gone(origin, guest))
        else:
            moves.append(back(origin, guest))
    free_again(name, origins, moves, host)
    off = tuple(card(m, 0, m.device.queue) for m in moves if m.live[0])
    home = tuple(card(m, 1, m.queue) for m in moves if m.live[1])
    steps: list[Step] = []
    if off:
        steps.append(Unplug(off))
    if home:
        steps.append(Plug(home))
    # Backwards, so that interfaces come to their places again if the steps are taken back.
    steps += _defines(moves[::-1])
    devices = tuple(origin.device for origin in reversed(origins))
    return Switch(Attachment.MACVTAP, tuple(moves), tuple(steps), (), devices)


def planned(group: Group, host: AttachHostState) -> tuple[Side, ...]:
    """The sides of a group that was not created, for its rules. Raises VsrtuneError with the
    obstacle to its create."""
    new(group, host)
    return tuple(
        Side(
            found.name,
            found.lower,
            found.balancer.name,
            found.outer.mac,
            tuple((d.mac, d.lower) for d in found.made.balancer),
            group.links != BRIDGE,
            tuple(nic.mac for nic in found.nics),
        )
        for found in _sides(group, _routers(group, host), host)
    )


def created(name: str, host: AttachHostState) -> tuple[tuple[str, ...], tuple[Side, ...]]:
    """The routers of a created group, and its sides. A router that somebody undefined, or from
    which somebody took a side, is none of them. Raises VsrtuneError when there is no such group,
    or when a balancer is not what it was."""
    by_side: dict[str, list[tuple[Stage, Origin]]] = {}
    for origin in of_group(name, host):
        if origin.stage is None:
            raise VsrtuneError(
                "it has no balancers", where=name, hint="rules are for groups of kind msr"
            )
        by_side.setdefault(origin.stage.side, []).append((origin.stage, origin))
    on = [{o.guest: o.device.mac for s, o in pairs if s.role is MsrRole.ROUTER}
          for pairs in by_side.values()]  # fmt: skip
    routers = tuple(guest for guest in on[0] if all(guest in macs for macs in on))
    found = []
    for (side, pairs), macs in zip(by_side.items(), on, strict=True):
        ends = [(s, o) for s, o in pairs if s.role is MsrRole.BALANCER]
        guest = host.by_uuid.get(ends[0][1].uuid) if ends else None
        if guest is None:
            raise VsrtuneError(
                "the balancer is gone", where=f"{name}: {side}",
                hint=f"vsrtune group delete {name}",
            )  # fmt: skip
        stage = ends[0][0]
        outer = one_on(name, guest, stage.outside, host)
        own = tuple(macs[r] for r in routers)
        each = bool(stage.router)
        inner = tuple((o.device.mac, o.device.lower) for s, o in ends
                      if s.router in routers or not each)  # fmt: skip
        found.append(Side(side, stage.outside, guest.name, outer.mac, inner, each, own))
    return routers, tuple(found)


def _routers(group: Group, host: AttachHostState) -> list[GuestNics]:
    return [running(m, group.at_member(n), host) for n, m in enumerate(group.members)]


def _sides(group: Group, routers: list[GuestNics], host: AttachHostState) -> list[_Found]:
    balancers = {
        name: running(name, group.at("group", "balancers", name), host)
        for name, _ in group.balancers
    }
    taken = {n.mac for g in host.guests for n in (*(g.live or ()), *(g.config or ()))}
    taken |= {link.mac for link in host.links.values()}
    found = []
    for number, (side, lower) in enumerate(group.lowers, 1):
        below = host.links.get(lower)
        if below is None:
            raise VsrtuneError(
                "there is no such device", where=group.at("group", "lower", side),
                hint="see: ip link",
            )  # fmt: skip
        balancer = balancers[group.balancer(side)]
        outer = on_lower(group.name, balancer, lower, host, one_queue=False)
        nics = tuple(on_lower(group.name, r, lower, host, one_queue=False) for r in routers)
        _differ(routers, nics)
        made = side_links(group.name, number, group.links, len(routers), below.mtu, taken)
        taken |= {device.mac for device in (*made.links, *made.balancer)}
        devices = tuple(
            _device(msr_links.name(group.name, number, msr_links.ROUTER, n), on, nic, host)
            for n, (on, nic) in enumerate(zip(made.of_router, nics, strict=True), 1)
        )
        found.append(_Found(side, lower, balancer, outer, made, nics, devices))
    return found


def _differ(routers: list[GuestNics], nics: tuple[DomainNic, ...]) -> None:
    """Refuse routers that a balancer cannot tell apart."""
    first: dict[str, str] = {}
    for router, nic in zip(routers, nics, strict=True):
        if nic.mac in first:
            raise VsrtuneError(
                f"its MAC {nic.mac} is that of {first[nic.mac]} too", where=router.name,
                hint="each router has MACs of its own (virsh edit)",
            )  # fmt: skip
        first[nic.mac] = router.name


def _device(name: str, on: str, nic: DomainNic, host: AttachHostState) -> MadeDevice:
    """A router's device in place of its macvtap."""
    link = host.links.get(nic.device)
    mtu = link.mtu if link is not None else host.links[nic.lower].mtu
    queue = _kept(nic, host)
    return MadeDevice(name, on, nic.mac, MODES["bridge"], mtu, 500 if queue is None else queue)


def _kept(nic: DomainNic, host: AttachHostState) -> int | None:
    link = host.links.get(nic.device)
    return host.kept(link) if link is not None else None


def _gone(origin: Origin, guest: GuestNics) -> Move:
    """The move that removes a balancer's internal interface."""
    live = on_device(guest.live or (), origin.device.name)
    config = on_device(guest.config or (), origin.device.name)
    pairs = [(nic.xml if nic is not None else "", "") for nic in (live, config)]
    return Move(guest.name, guest.uuid, origin.device.mac, origin.device, pairs[0], pairs[1])


def _defines(moves: list[Move]) -> list[Step]:
    return [Define(m.guest, m.uuid, m.mac, *m.config) for m in moves if any(m.config)]
