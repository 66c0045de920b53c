"""Finds and judges the guests of a group and their interfaces, for every kind of group. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from vsrtune.attach.plan.model import AttachHostState, GuestNics, Move
from vsrtune.attach.plan.planner import no_others
from vsrtune.attach.plan.steps import Card, MadeDevice, MsrRole, Origin
from vsrtune.core.errors import VsrtuneError
from vsrtune.group.parser import Group
from vsrtune.model import domain_xml
from vsrtune.model.domain_xml import DomainNic
from vsrtune.model.host import mode_name


def of_group(name: str, host: AttachHostState) -> tuple[Origin, ...]:
    """The Origins of a created group, by member, then side. Raises VsrtuneError when there is no
    such group."""
    if name not in host.groups:
        known = ", ".join(sorted(host.groups)) or "none"
        raise VsrtuneError(
            "there is no such group on this host", where=name, hint=f"created groups: {known}"
        )
    return tuple(host.groups[name])


def on_device(nics: Iterable[DomainNic], device: str) -> DomainNic | None:
    """A guest's interface on a host device."""
    return next((n for n in nics if n.device == device), None)


def members_of(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """The Origins of the guests that come and go: the members of a pvr, the routers of an msr."""
    return tuple(o for o in origins if o.stage is None or o.stage.role is MsrRole.ROUTER)


def new(group: Group, host: AttachHostState) -> None:
    """Refuse a group that was created already."""
    if group.name in host.groups:
        raise VsrtuneError(
            "a group of that name is there already",
            where=group.at("group", "name"),
            hint=f"`vsrtune group status {group.name}` shows it, `vsrtune group delete "
            f"{group.name}` ends it",
        )


def free_name(name: str, host: AttachHostState) -> None:
    """Refuse a name that a device has."""
    if name in host.links or name in host.origins:
        raise VsrtuneError(
            "a device of that name is there already", where=name,
            hint=f"another name for the group, or, if nothing needs it: ip link delete {name}",
        )  # fmt: skip


def running(name: str, where: str, host: AttachHostState) -> GuestNics:
    """The guest of that name, which runs and is in no other group. ``where`` is the place that
    names it."""
    guest = next((g for g in host.guests if g.name == name), None)
    if guest is None:
        raise VsrtuneError(
            f"there is no libvirt guest {name}",
            where=where,
            hint="see: virsh list --all; members of a pvr that are not there can be made from a "
            "template:",
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


def one_on(group: str, guest: GuestNics, lower: str, host: AttachHostState) -> DomainNic:
    """The one interface of a guest on a lower device."""
    nics = guest.live if guest.live is not None else guest.config
    found = [n for n in nics or () if host.lower(n) == lower]
    if len(found) != 1:
        many = f"{len(found)} interfaces" if found else "no interface"
        raise VsrtuneError(
            f"it has {many} on this device, and a member of {group} has one",
            where=f"{guest.name}: {lower}",
            hint="see: virsh domiflist " + guest.name,
        )
    return found[0]


def on_lower(
    group: str, guest: GuestNics, lower: str, host: AttachHostState, *, one_queue: bool = True
) -> DomainNic:
    """The one interface of a guest on a lower device, if it can be moved."""
    nic = one_on(group, guest, lower, host)
    where = f"{guest.name}: {lower}"
    if host.on_napi(nic):
        raise VsrtuneError(
            "the interface is on NAPI-macvlan already, by itself", where=where,
            hint=f"vsrtune attach --to macvtap {guest.name}",
        )  # fmt: skip
    reason = domain_xml.unsupported(nic)
    if not reason and one_queue and domain_xml.queues(nic) > 1:
        reason = (
            f"it has {domain_xml.queues(nic)} queue pairs, and would hear each broadcast as often"
        )
    if reason:
        kind = "macvtap of one queue" if one_queue else "macvtap"
        raise VsrtuneError(reason, where=where, hint=f"give the guest a {kind} there (virsh edit)")
    return nic


def defined(guest: GuestNics, nic: DomainNic, lower: str, notes: list[str]) -> DomainNic | None:
    """The interface in the persistent definition, which changes with the running one."""
    kept = next((n for n in guest.config or () if n.mac == nic.mac), None)
    if kept is not None and kept.kind == "direct" and kept.lower == lower:
        return kept
    if guest.config is not None:
        notes.append(
            f"{guest.name} {nic.mac}: its definition has no macvtap on {lower} and is left alone"
        )
    return None


def moved(nic: DomainNic, device: MadeDevice) -> str:
    """The XML of the interface on a device of ours."""
    return domain_xml.with_mac(domain_xml.on_device(nic, device.name), device.mac)


def back(origin: Origin, guest: GuestNics) -> Move:
    """The move that gives a member the interface that it had before."""
    before = domain_xml.nic(origin.live or origin.config)
    live = config = ("", "")
    if guest.live is not None:
        now = on_device(guest.live, origin.device.name)
        if now is not None:
            live = (now.xml, _was(origin, now, origin.live))
        elif origin.live and not any(n.mac == before.mac for n in guest.live):
            live = ("", origin.live)  # drained
    if guest.config is not None:
        kept = on_device(guest.config, origin.device.name)
        if kept is not None:
            config = (kept.xml, _was(origin, kept, origin.config))
    return Move(origin.guest, origin.uuid, before.mac, origin.device, live, config, origin.queue)


def _was(origin: Origin, now: DomainNic, before: str) -> str:
    """The XML of the interface that a member had before. If somebody has changed the interface
    since, the present one on a macvtap, with the MAC from before."""
    was = domain_xml.nic(before or origin.live or origin.config)
    if before and not domain_xml.differences(moved(was, origin.device), now.xml):
        return before
    direct = domain_xml.as_direct(now, origin.outside, mode_name(origin.device.mode))
    return domain_xml.with_mac(direct, was.mac)


def free_again(
    name: str, origins: Iterable[Origin], moves: Iterable[Move], host: AttachHostState
) -> None:
    """Refuse if other NAPI-macvlan devices stand on lower devices to which macvtaps come back."""
    own = {o.device.name for o in origins}
    lowers = {domain_xml.nic(m.live[1]).lower for m in moves if m.live[1]}
    no_others(host, lowers, forth=False, but=own)
    for guest in host.guests:
        for nic in guest.live if guest.live is not None else guest.config or ():
            lower, link = host.lower(nic), host.links.get(nic.device)
            # The device of a guest that does not run is there for its start.
            holds = guest.live is not None or (link is not None and link.up)
            if holds and host.on_napi(nic) and lower in lowers and nic.device not in own:
                first = f"virsh shutdown {guest.name}, then: " if guest.live is not None else ""
                raise VsrtuneError(
                    f"{guest.name} has {nic.device} on it, and the macvtaps of {name} cannot "
                    "come back beside that",
                    where=lower,
                    hint=f"{first}vsrtune attach --to macvtap {guest.name}; it can start again "
                    "when the group is deleted",
                )


def card(move: Move, which: int, queue: int | None) -> Card:
    """The card of the interface before (0) or after (1) the move."""
    xml = move.live[which]
    return Card(move.guest, move.uuid, domain_xml.nic(xml).mac, xml, queue)
