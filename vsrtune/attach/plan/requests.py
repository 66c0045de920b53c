# SPDX-License-Identifier: GPL-2.0-or-later
"""The switches that policies ask for. Pure.

A policy's ``attachment`` concerns the guest's macvtap and NAPI-macvlan interfaces, in the running
guest and in its persistent definition. Guests that share a lower device switch together, and only
if the policies of all of them ask for the same. A guest that is shut down switches along with those
that run, unless it cannot be: on the other kind it could not start beside them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from vsrtune.attach.plan.model import AttachHostState, Switch, SwitchRequest, movable
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.plan.steps import Origin
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.guest import Attachment, Guest
from vsrtune.policy.matching import assign
from vsrtune.policy.model import Policy


@dataclass(frozen=True, slots=True)
class Batch:
    """Guests (names) that switch together, without those that are there already. ``error`` tells
    why they cannot; there is then no ``switch``. ``reason`` tells why they switch."""

    guests: tuple[str, ...]
    to: Attachment
    reason: str
    switch: Switch | None = None
    error: VsrtuneError | None = None


def wanted(
    host: AttachHostState, origins: Collection[Origin], policies: Sequence[Policy]
) -> dict[str, tuple[Attachment, str]]:
    """The attachment that a guest is to have, and why: the one that its policy asks for, and the
    place in the policy. A guest that is shut down has an entry when it shares lower devices with
    one that runs, unless libvirt has saved it, or a group stands there: its clones may be made of
    that guest, which is not to start beside them.

    A guest that a policy had switched (Origin.by_policy) goes back, running or not, when no policy
    asks for any. A guest that two policies name does not."""
    guests = [Guest(g.name, g.uuid, "libvirt", 0, 0, (), ()) for g in host.guests]
    found = assign(guests, policies)
    asked = {
        guest.name: (policy.attachment, policy.at("attachment"))
        for guest, policy in found.pairs
        if policy.attachment is not None
    }
    refused = {refusal.guest for refusal in found.refusals}
    by_policy = {o.uuid for o in origins if o.by_policy}
    back = {
        guest.name: (Attachment.MACVTAP, "no policy asks for napi-macvlan any more")
        for guest in guests
        if guest.uuid in by_policy and guest.name not in {*asked, *refused}
    }
    runs = {g.name for g in host.guests if g.live is not None}
    grouped = {origin.outside for of in host.groups.values() for origin in of}
    stay = {
        g.name
        for g in host.guests
        if g.saved is not None or any(host.lower(n) in grouped for n in g.nics)
    } - runs
    asked = back | {name: to for name, to in asked.items() if name not in stay}
    moves = {*back, *runs}
    for _, group in _groups(host, asked):
        moves |= set(group) if moves & set(group) else set()
    return {name: to for name, to in asked.items() if name in moves}


def batches(
    host: AttachHostState, asked: Mapping[str, tuple[Attachment, str]]
) -> tuple[Batch, ...]:
    """The switches that give the guests what ``wanted`` has found, those back to macvtap first."""
    found: list[Batch] = []
    for to, group in _groups(host, asked):
        reason = ", ".join(sorted({asked[name][1] for name in group}))
        request = SwitchRequest(to, group, live=False, config=False, by_policy=True)
        made = {m.device.name for b in found if b.switch is not None for m in b.switch.moves}
        try:
            switch, left = _possible(request, host, made)
        except VsrtuneError as error:
            found.append(Batch(group, to, reason, None, error))
            continue
        found += [Batch((name,), to, asked[name][1], None, error) for name, error in left.items()]
        if switch.moves:
            movers = tuple(dict.fromkeys(m.guest for m in switch.moves))
            found.append(Batch(movers, to, reason, switch))
    return tuple(found)


def _possible(
    request: SwitchRequest, host: AttachHostState, names: Collection[str]
) -> tuple[Switch, dict[str, VsrtuneError]]:
    """The switch of the guests that run, and of those shut down that can move: the others keep no
    router from what it is to have. Returns why these cannot, by guest. Back to macvtap all move or
    none, because a lower device serves one kind. Raises VsrtuneError."""
    forth = request.to is Attachment.NAPI_MACVLAN
    off = [name for name in request.guests if forth and host.guest(name).live is None]
    members = tuple(name for name in request.guests if name not in off)
    switch = plan(replace(request, guests=members), host, names)
    left: dict[str, VsrtuneError] = {}
    for name in off:
        try:
            switch = plan(replace(request, guests=(*members, name)), host, names)
            members = (*members, name)
        except VsrtuneError as error:
            left[name] = error
    return switch, left


def _groups(
    host: AttachHostState, asked: Mapping[str, tuple[Attachment, str]]
) -> list[tuple[Attachment, tuple[str, ...]]]:
    """Groups of guests that are to have the same and share lower devices, directly or through
    others, sorted by target and name. A guest without an interface that can move is in none."""
    groups: list[tuple[Attachment, set[str], set[str]]] = []
    for name, (to, _) in asked.items():
        guest = host.guest(name)
        lowers = {host.lower(n) for n in guest.nics if movable(n, host)}
        if not lowers:
            continue
        members = {name}
        for group in [g for g in groups if g[0] is to and g[2] & lowers]:
            groups.remove(group)
            members |= group[1]
            lowers |= group[2]
        groups.append((to, members, lowers))
    return sorted((to, tuple(sorted(members))) for to, members, _ in groups)
