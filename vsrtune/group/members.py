# SPDX-License-Identifier: GPL-2.0-or-later
"""Finds and judges the guests of a group and their interfaces, for every kind of group. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from itertools import count

from vsrtune.attach.plan.clone_model import Clone
from vsrtune.attach.plan.model import AttachHostState, GuestNics, Move
from vsrtune.attach.plan.planner import no_others, not_saved
from vsrtune.attach.plan.steps import Card, MadeDevice, MsrRole, Origin, Plug, Stage, Step
from vsrtune.core.errors import VsrtuneError
from vsrtune.group.parser import Group
from vsrtune.model import domain_xml
from vsrtune.model.domain_xml import DomainNic
from vsrtune.model.host import mode_name


class Layout:
    """The devices of a group that is to be created, and the running guests that move to them.

    ``origins`` are in the order in which devices are made and guests are plugged in: each device
    after the one below it, members in one order on all sides. ``clones`` are members that are
    made: ``files`` are the steps before a guest is interrupted, ``guests`` those after the
    group's devices are up.
    """

    def __init__(self, group: Group, host: AttachHostState) -> None:
        self._group = group.name
        self._host = host
        self.origins: list[Origin] = []
        self.moves: list[Move] = []
        self.clones: list[Clone] = []
        self.files: list[Step] = []
        self.guests: list[Step] = []
        self.notes: list[str] = []

    def add(
        self,
        device: MadeDevice,
        guest: GuestNics | None = None,
        stage: Stage | None = None,
        before: tuple[str, str] = ("", ""),
        queue: int | None = None,
    ) -> None:
        """Add a device for a guest, or for other devices to stand on. ``before`` is the interface
        that the device replaces, in the running guest and in its definition."""
        name, uuid = (guest.name, guest.uuid) if guest is not None else ("", "")
        self.origins.append(
            Origin(device, name, uuid, *before, group=self._group, queue=queue, stage=stage)
        )

    def adopt(
        self, guest: GuestNics, nic: DomainNic, device: MadeDevice, stage: Stage | None = None
    ) -> None:
        """Move the interface of a running guest to a device. The definition changes with it,
        unless it has no macvtap there."""
        self.notes += [f"{guest.name} {nic.mac}: {text}" for text in domain_xml.lost(nic)]
        lower = stage.outside if stage is not None else device.lower
        kept = next((n for n in guest.config or () if n.mac == nic.mac), None)
        if kept is not None and (kept.kind != "direct" or kept.lower != lower):
            kept = None
        if kept is None and guest.config is not None:
            self.notes.append(
                f"{guest.name} {nic.mac}: its definition has no macvtap on {lower} and is left "
                "alone"
            )
        config = (kept.xml, moved(kept, device)) if kept is not None else ("", "")
        link = self._host.links.get(nic.device)
        queue = self._host.kept(link) if link is not None else None
        self.add(device, guest, stage, (nic.xml, config[0]), queue)
        live = (nic.xml, moved(nic, device))
        self.moves.append(Move(guest.name, guest.uuid, nic.mac, device, live, config, queue))


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


def macs(host: AttachHostState) -> set[str]:
    """All MACs that are in use on this host."""
    guests = {n.mac for g in host.guests for n in g.nics}
    return guests | {link.mac for link in host.links.values()}


def free_mac(words: str, taken: Collection[str], prefix: bytes = b"\x02") -> str:
    """A MAC that begins with ``prefix`` (by default, it is locally administered), follows from
    the words, and is none of ``taken``."""
    digests = (hashlib.sha256(f"{words}/{salt}".encode()).digest() for salt in count())
    found = ((prefix + digest)[:6].hex(":") for digest in digests)
    return next(mac for mac in found if mac not in taken)


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


def moved(nic: DomainNic, device: MadeDevice) -> str:
    """The XML of the interface on a device of ours."""
    return domain_xml.with_mac(domain_xml.on_device(nic, device.name), device.mac)


def cards(moves: Iterable[Move], which: int) -> tuple[Card, ...]:
    """The interfaces that running guests have before (0) or after (1) the moves. A device of ours
    was made with its queue, which others use too, and which may be somebody's choice by now."""
    found = []
    for move in moves:
        if xml := move.live[which]:
            nic = domain_xml.nic(xml)
            queue = None if nic.device == move.device.name else move.queue
            found.append(Card(move.guest, move.uuid, nic.mac, xml, queue))
    return tuple(found)


def one_by_one(moves: Collection[Move]) -> list[Step]:
    """Take the guests off devices on which others stay, one after the other: the kernel puts the
    last queue of a device into the place of a closed one, so two guests that go at once could leave
    another order on each side."""
    guests = dict.fromkeys(move.uuid for move in moves)
    found = (cards([m for m in moves if m.uuid == uuid], 0) for uuid in guests)
    return [Plug(of_guest, on=False) for of_guest in found if of_guest]


def back(origin: Origin, guest: GuestNics) -> Move:
    """The move that gives a guest of a group the interface that it had before; a balancer had
    none. Raises VsrtuneError when libvirt has saved the guest."""
    not_saved(guest)
    before = origin.live or origin.config
    mac = domain_xml.nic(before).mac if before else origin.device.mac
    live = _restored(origin, guest.live, origin.live)
    config = _restored(origin, guest.config, origin.config)
    if origin.live and guest.live is not None and not any(live):
        drained = all(n.mac != mac for n in guest.live)
        live = ("", origin.live if drained else "")
    return Move(origin.guest, origin.uuid, mac, origin.device, live, config, origin.queue)


def _restored(origin: Origin, nics: tuple[DomainNic, ...] | None, before: str) -> tuple[str, str]:
    """The interface on the device of an Origin, and the one to replace it with: the one from
    before. If somebody has changed the interface since, the present one on a macvtap, with the
    MAC from before."""
    now = on_device(nics or (), origin.device.name)
    if now is None:
        return "", ""
    if not (origin.live or origin.config):
        return now.xml, ""
    was = domain_xml.nic(before or origin.live or origin.config)
    if before and not domain_xml.differences(moved(was, origin.device), now.xml):
        return now.xml, before
    direct = domain_xml.as_direct(now, origin.outside, mode_name(origin.device.mode))
    return now.xml, domain_xml.with_mac(direct, was.mac)


def free_again(
    name: str, origins: Iterable[Origin], moves: Iterable[Move], host: AttachHostState
) -> None:
    """Refuse if other NAPI-macvlan devices stand on lower devices to which macvtaps come back."""
    own = {o.device.name for o in origins}
    lowers = {domain_xml.nic(m.live[1]).lower for m in moves if m.live[1]}
    no_others(host, lowers, forth=False, but=own)
    for guest in host.guests:
        for nic in guest.present:
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
