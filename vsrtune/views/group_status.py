# SPDX-License-Identifier: GPL-2.0-or-later
"""How a group's members are attached now, and the counters of each: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vsrtune.attach.plan.model import AttachHostState
from vsrtune.attach.plan.steps import Origin
from vsrtune.group.members import on_device
from vsrtune.model.daemon_state import GroupGuest
from vsrtune.model.guest import Guest
from vsrtune.model.module_counters import QueueCounters
from vsrtune.views.tables import NOTHING, Table


@dataclass(frozen=True, slots=True)
class Place:
    """One member on one device of its group. ``state`` is plugged, stalled (plugged, but it
    takes no frames), drained or stopped. ``queue`` holds the counters of its queue on the
    device, None until its worker has sent. ``role`` is member, or in a multistage router
    balancer or router; ``side`` is the side's name in the group file. ``health`` is what the daemon
    says of a guest that it watches, "" of others."""

    group: str
    member: str
    device: str
    lower: str
    state: str
    queue: QueueCounters | None = None
    role: str = "member"
    side: str = ""
    health: str = ""


def places(
    origins: Sequence[Origin],
    host: AttachHostState,
    guests: Sequence[Guest],
    watched: Iterable[GroupGuest] = (),
) -> tuple[Place, ...]:
    """The places of every member, on each side; ``guests`` are the observed guests, ``watched``
    those that the daemon watches."""
    health = {(w.group, w.guest): _health(w) for w in watched}
    observed = {g.uuid: g for g in guests}
    found = []
    for origin in origins:
        device, stage = origin.device, origin.stage
        if not origin.guest:
            continue  # others stand on it
        guest = host.by_uuid.get(origin.uuid)
        state = "stopped"
        if guest is not None and guest.live is not None:
            there = on_device(guest.live, device.name) is not None
            state = "plugged" if there else "drained"
        queue = _queue(observed.get(origin.uuid), device.name) if state == "plugged" else None
        if queue is not None and queue.stalled:
            state = "stalled"
        role = str(stage.role) if stage is not None else "member"
        side = stage.side if stage is not None else device.name.removeprefix(f"{origin.group}-")
        found.append(
            Place(
                origin.group,
                origin.guest,
                device.name,
                device.lower,
                state,
                queue,
                role,
                side,
                health.get((origin.group, origin.guest), ""),
            )
        )
    return tuple(found)


def _health(watched: GroupGuest) -> str:
    if not watched.fault:
        return "good"
    return f"{watched.fault}; {watched.hint}" if watched.hint else watched.fault


def _queue(guest: Guest | None, device: str) -> QueueCounters | None:
    """The device's queue through which a thread of the guest was the last to send."""
    if guest is None:
        return None
    tids = {thread.key.tid for thread in guest.threads}
    for interface in guest.interfaces:
        if interface.target == device and interface.counters is not None:
            return next((q for q in interface.counters.queues if q.worker_tid in tids), None)
    return None


def table(group: str, found: Sequence[Place]) -> Table:
    """The places of a group as a table."""
    watched = any(place.health for place in found)
    rows = [_row(place) | ({"health": place.health} if watched else {}) for place in found]
    return Table.of(f"Group {group}", rows, spare=("role", "side"), text=("health",))


def _row(place: Place) -> dict[str, str]:
    queue = place.queue
    counts: tuple[int | None, ...] = (None,) * 4
    if queue is not None:
        counts = (queue.queue, queue.received, queue.dropped_ring_full, queue.tx_packets)
    texts = (NOTHING if n is None else str(n) for n in counts)
    return {
        "member": place.member,
        "role": place.role,
        "side": place.side,
        "device": place.device,
        "on": place.lower,
        "state": place.state,
        **dict(zip(("queue", "received", "dropped", "sent"), texts, strict=True)),
    }
