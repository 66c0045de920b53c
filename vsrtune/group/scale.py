# SPDX-License-Identifier: GPL-2.0-or-later
"""Plans which members of a group are plugged in: drain and scale, for every kind. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vsrtune.attach.plan.model import AttachHostState, GuestNics, Move, Switch
from vsrtune.attach.plan.steps import Origin, Plug, Step
from vsrtune.core.errors import VsrtuneError
from vsrtune.group.members import cards, members_of, moved, of_group, on_device, one_by_one
from vsrtune.model import domain_xml
from vsrtune.model.guest import Attachment


def drain(name: str, member: str, host: AttachHostState) -> Switch:
    """Take one running member's interfaces off the devices. Raises VsrtuneError."""
    origins = members_of(of_group(name, host))
    members = names(origins)
    if member not in members:
        raise VsrtuneError(
            f"it is no member of the group {name}", where=member,
            hint=f"its members: {', '.join(members)}",
        )  # fmt: skip
    return _change(origins, host, [m for m in plugged(origins, host) if m != member])


def scale(name: str, count: int, host: AttachHostState) -> Switch:
    """Keep the first ``count`` members plugged in, and no other. Raises VsrtuneError."""
    origins = members_of(of_group(name, host))
    members = names(origins)
    if not 1 <= count <= len(members):
        raise VsrtuneError(
            f"it has {len(members)} members, so not {count} of them can be plugged in",
            where=name,
            hint=f"a number from 1 to {len(members)}; `vsrtune group delete {name}` ends it",
        )
    return _change(origins, host, members[:count])


def _change(origins: tuple[Origin, ...], host: AttachHostState, keep: list[str]) -> Switch:
    """Plug in the members ``keep``, then take the others off, so that somebody forwards at any
    time."""
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
            _unlike(guest, mac)
            xml = moved(domain_xml.nic(origin.live), origin.device)
            come.append(Move(guest.name, guest.uuid, mac, origin.device, ("", xml)))
        elif not wanted and now is not None:
            go.append(Move(guest.name, guest.uuid, mac, origin.device, (now.xml, "")))
    if origins[0].stage is not None and (come or go):
        notes += _rules(origins[0].group, come, go)
    if go and not staying:
        raise VsrtuneError(
            "no running member would be left to forward",
            where=origins[0].group,
            hint=f"start or scale up another one, or: vsrtune group delete {origins[0].group}",
        )
    steps: list[Step] = []
    if come:
        steps.append(Plug(cards(come, 1)))
    steps += one_by_one(go)
    return Switch(
        Attachment.NAPI_MACVLAN, (*come, *go), tuple(steps), notes=tuple(dict.fromkeys(notes))
    )


def _unlike(guest: GuestNics, mac: str) -> None:
    """Refuse to give a guest a MAC that another interface of it has."""
    other = next((n for n in guest.live or () if n.mac == mac), None)
    if other is not None:
        raise VsrtuneError(
            f"it has an interface with the MAC {mac} already, on {other.device or other.kind}, and "
            "its group would give it another one",
            where=guest.name,
            hint=f"virsh detach-interface {guest.name} {other.kind} --mac {mac} --live",
        )


def _rules(group: str, come: list[Move], go: list[Move]) -> Iterator[str]:
    """Notes about the rules that balancers have to load."""
    command = f"vsrtune group rules {group} BALANCER"
    if come:
        who = ", ".join(dict.fromkeys(m.guest for m in come))
        yield f"{who} gets frames when the balancers have loaded what this prints: {command}"
    if go:
        who = ", ".join(dict.fromkeys(m.guest for m in go))
        yield (
            f"frames for {who} are lost until the balancers have loaded what this prints, so "
            f"load it before: {command} --routers N, or --without ROUTER"
        )


def names(origins: Iterable[Origin]) -> list[str]:
    """The guests, each once, in their order."""
    return list(dict.fromkeys(o.guest for o in origins))


def plugged(origins: Iterable[Origin], host: AttachHostState) -> list[str]:
    """Members of which at least one interface is on its device."""
    found = []
    for origin in origins:
        guest = host.by_uuid.get(origin.uuid)
        if guest is not None and on_device(guest.live or (), origin.device.name) is not None:
            found.append(origin)
    return names(found)
