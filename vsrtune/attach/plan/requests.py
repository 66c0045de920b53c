# SPDX-License-Identifier: GPL-2.0-or-later
"""The switches that policies ask for. Pure.

A policy's ``attachment`` concerns the guest's macvtap and NAPI-macvlan interfaces, in the running
guest and in its persistent definition. Guests that share a lower device switch together, and only
if the policies of all of them ask for the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vsrtune.attach.plan.model import AttachHostState, Switch, SwitchRequest, movable
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.plan.steps import Origin
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.guest import Attachment, Guest
from vsrtune.policy.matching import assign
from vsrtune.policy.model import Policy


@dataclass(frozen=True, slots=True)
class Batch:
    """Guests (names) that switch together. ``error`` tells why they cannot; there is then no
    ``switch``. ``reason`` tells why they switch."""

    guests: tuple[str, ...]
    to: Attachment
    reason: str
    switch: Switch | None = None
    error: VsrtuneError | None = None


def wanted(
    host: AttachHostState, origins: Collection[Origin], policies: Sequence[Policy]
) -> dict[str, tuple[Attachment, str]]:
    """The attachment that a guest is to have, and why: for each running libvirt guest the one that
    its policy asks for, and its place in the policy. A guest that a policy had switched
    (Origin.by_policy) goes back, running or not, when no policy asks for any. A guest that two
    policies name does not."""
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
    return back | {name: to for name, to in asked.items() if name in runs}


def batches(
    host: AttachHostState, asked: Mapping[str, tuple[Attachment, str]]
) -> tuple[Batch, ...]:
    """The switches that give the guests what ``wanted`` has found, those back to macvtap first."""
    found: list[Batch] = []
    for to in (Attachment.MACVTAP, Attachment.NAPI_MACVLAN):
        for group in _groups(host, [name for name, (target, _) in asked.items() if target is to]):
            reason = ", ".join(sorted({asked[name][1] for name in group}))
            request = SwitchRequest(to, group, live=False, config=False, by_policy=True)
            made = {m.device.name for b in found if b.switch is not None for m in b.switch.moves}
            try:
                switch = plan(request, host, made)
            except VsrtuneError as error:
                found.append(Batch(group, to, reason, None, error))
                continue
            if switch.moves:
                found.append(Batch(group, to, reason, switch))
    return tuple(found)


def _groups(host: AttachHostState, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups of guests that share lower devices, directly or through others, sorted by name. A
    guest without an interface that can move is in none."""
    groups: list[tuple[set[str], set[str]]] = []
    for name in sorted(names):
        guest = host.guest(name)
        lowers = {host.lower(n) for n in guest.nics if movable(n, host)}
        if not lowers:
            continue
        members = {name}
        for group in [g for g in groups if g[1] & lowers]:
            groups.remove(group)
            members |= group[0]
            lowers |= group[1]
        groups.append((members, lowers))
    return sorted(tuple(sorted(members)) for members, _ in groups)
