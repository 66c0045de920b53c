# SPDX-License-Identifier: GPL-2.0-or-later
"""Plans the steps that make several guests one router, and separate them again. Pure.

Invariants, which hold before and after each of these switches:
- Members are plugged in in the same order on all sides. The kernel numbers the queues of a device
  in the order in which they are opened, so a queue's number means the same member on each side.
- A device of ours on a lower device is up only while that carries no macvtap.
- The Origins of each member hold the interfaces that it had before, until the group is deleted.
  For a member that was made for the group (``clone_plan``) they hold those that it would have by
  itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vsrtune.attach.plan.model import AttachHostState, Move, Switch
from vsrtune.attach.plan.steps import (
    Define,
    MadeDevice,
    MakeDevice,
    Origin,
    Plug,
    Raise,
    Step,
)
from vsrtune.core.errors import VsrtuneError
from vsrtune.group import clone_plan, msr, pvr
from vsrtune.group.members import back, cards, free_again, of_group, one_by_one
from vsrtune.group.parser import Group
from vsrtune.group.schema import MSR
from vsrtune.model.guest import Attachment


def create(group: Group, host: AttachHostState) -> Switch:
    """Move running guests to the devices of a group, and make members that are missing. Raises
    VsrtuneError with the obstacle."""
    if group.name in host.groups:
        raise VsrtuneError(
            "a group of that name is there already",
            where=group.at("group", "name"),
            hint=f"`vsrtune group status {group.name}` shows it, `vsrtune group delete "
            f"{group.name}` ends it",
        )
    layout = (msr if group.kind == MSR else pvr).layout(group, host)
    devices = tuple(dict.fromkeys(origin.device for origin in layout.origins))
    for device in devices:
        _free(device.name, host)
    beside, shared = _by_place(devices, layout.origins)
    added = [move for move in layout.moves if not move.live[0]]
    replaced = [move for move in layout.moves if move.live[0]]
    steps = [
        *(MakeDevice(device) for device in devices),
        *layout.files,
        # Interfaces that are added come first: while a guest cannot take one, the others go on.
        *_raise(beside),
        *_plug(added, 1),
        *_plug(replaced, 0, on=False),
        *_raise(shared),
        *_plug(replaced, 1),
        *layout.guests,
        *_defines(layout.moves),
    ]
    return Switch(
        Attachment.NAPI_MACVLAN,
        tuple(layout.moves),
        tuple(steps),
        tuple(layout.origins),
        notes=tuple(layout.notes),
        clones=tuple(layout.clones),
    )


def delete(name: str, host: AttachHostState, *, keep_clones: bool = False) -> Switch:
    """Give every guest the interfaces that it had before, and end the members that were made for
    the group; with ``keep_clones`` these become guests like the others. Raises VsrtuneError when
    there is no such group."""
    clones = clone_plan.of_group(name, host)
    # Clones that somebody undefined may have left nothing but their files.
    origins = () if clones and name not in host.groups else of_group(name, host)
    ended = () if keep_clones else clones
    notes = clone_plan.end(ended, host)
    vanished = {clone.uuid for clone in ended}
    known = [(origin, host.by_uuid.get(origin.uuid)) for origin in origins]
    moves = [back(o, guest) for o, guest in known if guest is not None and o.uuid not in vanished]
    free_again(name, origins, moves, host)
    # Backwards, because some of them stand on others.
    devices = tuple(dict.fromkeys(origin.device for origin in reversed(origins)))
    _, shared = _by_place(devices[::-1], origins)
    steps = [
        *(one_by_one(moves) if ended else _plug(moves, 0, on=False)),
        *_raise(shared, on=False),
        *_plug(moves, 1),
        # Backwards, so that interfaces come to their places again if the steps are taken back.
        *_defines(moves[::-1]),
    ]
    return Switch(
        Attachment.MACVTAP,
        tuple(moves),
        tuple(steps),
        leaves=devices,
        notes=tuple(notes),
        ended=ended,
        kept=clones if keep_clones else (),
    )


def _free(name: str, host: AttachHostState) -> None:
    """Refuse a name that a device has."""
    if name in host.links or name in host.origins:
        raise VsrtuneError(
            "a device of that name is there already", where=name,
            hint=f"another name for the group, or, if nothing needs it: ip link delete {name}",
        )  # fmt: skip


def _by_place(
    devices: Sequence[MadeDevice], origins: Iterable[Origin]
) -> tuple[tuple[MadeDevice, ...], tuple[MadeDevice, ...]]:
    """The devices that stand beside the lower devices, on others of ours, and those that take a
    lower device from macvtaps."""
    lowers = {origin.outside for origin in origins}
    beside = tuple(device for device in devices if device.lower not in lowers)
    return beside, tuple(device for device in devices if device.lower in lowers)


def _plug(moves: Iterable[Move], which: int, *, on: bool = True) -> list[Step]:
    found = cards(moves, which)
    return [Plug(found, on)] if found else []


def _raise(devices: tuple[MadeDevice, ...], *, on: bool = True) -> list[Step]:
    return [Raise(devices, on)] if devices else []


def _defines(moves: Sequence[Move]) -> list[Step]:
    return [Define(m.guest, m.uuid, m.mac, *m.config) for m in moves if any(m.config)]
