# SPDX-License-Identifier: GPL-2.0-or-later
"""The switches that policies ask for. Pure.

A policy's ``attachment`` concerns the guest's macvtap and NAPI-macvlan interfaces, in the running
guest and in its persistent definition. Guests that share a lower device switch together, and only
if the policies of all of them ask for the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vsrtune.attach.plan.model import AttachHostState, GuestNics, Switch, SwitchRequest, movable
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


def wanted(host: AttachHostState, policies: Sequence[Policy]) -> dict[str, tuple[Attachment, str]]:
    """For each running libvirt guest: the attachment that its policy asks for, and its place in
    the policy."""
    running = [_guest(g) for g in host.guests if g.live is not None]
    return {
        guest.name: (policy.attachment, policy.at("attachment"))
        for guest, policy in assign(running, policies).pairs
        if policy.attachment is not None
    }


def _guest(found: GuestNics) -> Guest:
    return Guest(found.name, found.uuid, "libvirt", 0, 0, (), ())


def batches(host: AttachHostState, policies: Sequence[Policy]) -> tuple[Batch, ...]:
    """The switches that the policies ask for."""
    by_guest = wanted(host, policies)
    by_target: dict[Attachment, list[str]] = {}
    for name, (to, _) in by_guest.items():
        by_target.setdefault(to, []).append(name)
    reasons = {name: where for name, (_, where) in by_guest.items()}
    return tuple(
        batch for to, names in by_target.items() for batch in _batches(host, names, to, reasons)
    )


def taken_back(
    host: AttachHostState, origins: Sequence[Origin], policies: Sequence[Policy]
) -> tuple[Batch, ...]:
    """The switches back of guests that a policy had switched (Origin.by_policy) and for which no
    policy asks for that any more. A guest that is shut down, or that two policies name, does not
    switch back."""
    guests = [_guest(g) for g in host.guests]
    found = assign(guests, policies)
    held = {guest.name for guest, policy in found.pairs if policy.attachment is not None}
    refused = {refusal.guest for refusal in found.refusals}
    held |= {guest.name for guest in guests if guest.ref in refused}
    made = {o.uuid for o in origins if o.by_policy}
    names = [g.name for g in host.guests if g.uuid in made and g.name not in held]
    reasons = dict.fromkeys(names, "no policy asks for napi-macvlan any more")
    return _batches(host, names, Attachment.MACVTAP, reasons)


def _batches(
    host: AttachHostState, names: Sequence[str], to: Attachment, reasons: Mapping[str, str]
) -> tuple[Batch, ...]:
    found: list[Batch] = []
    for group in _groups(host, names):
        reason = ", ".join(sorted({reasons[name] for name in group}))
        request = SwitchRequest(to, group, live=False, config=False, by_policy=True)
        try:
            made = {m.device.name for b in found if b.switch is not None for m in b.switch.moves}
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
