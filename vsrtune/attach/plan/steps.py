# SPDX-License-Identifier: GPL-2.0-or-later
"""The steps that move a guest's interfaces to other host devices, and back.

A step is a frozen value with an inverse. The ledger holds each step from before it begins until
the whole switch is done. Whatever interrupts the switch, the inverses of the steps that began, in
reverse order, give the guests back what they had.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import ClassVar

from vsrtune.attach.plan.clone_model import CloneStep

NAPI_KIND = "napi_macvtap"
# Its attributes that are on or off.
EVERY_QUEUE, UPLINK = "every-queue", "uplink"


@dataclass(frozen=True, slots=True)
class MadeDevice:
    """A device that vsrtune makes for one interface of a guest, or for others of ours to stand
    on, on the device named ``lower`` ("" for none). ``mode`` as in host.MODES (0 for kinds
    without), ``mtu`` in bytes, ``queue`` its txqueuelen, ``vlan`` the tag of a VLAN device. With
    ``every_queue`` several guests share it, and each gets the frames of neighbours that all of
    them must hear. With ``uplink`` it gets the frames that its siblings send to addresses that
    none of them has (docs/groups.md)."""

    name: str
    lower: str
    mac: str
    mode: int
    mtu: int
    queue: int
    kind: str = NAPI_KIND
    every_queue: bool = False
    uplink: bool = False
    vlan: int = 0

    @property
    def flags(self) -> tuple[str, ...]:
        """Its flags that are on (docs/kmod.md)."""
        flags = ((EVERY_QUEUE, self.every_queue), (UPLINK, self.uplink))
        return tuple(name for name, on in flags if on)


@dataclass(frozen=True, slots=True)
class Card:
    """One interface of a running guest, by the text with which libvirt attaches it.
    ``queue`` is the txqueuelen of its host device, None to leave that alone."""

    guest: str
    uuid: str
    mac: str
    xml: str
    queue: int | None = None

    @property
    def where(self) -> str:
        """The interface in messages."""
        return f"{self.guest}: interface {self.mac}"


@dataclass(frozen=True, slots=True)
class MakeDevice:
    """Make the device, down, and wait for its /dev/tapN if it has one; or, unless ``on``, remove
    it."""

    device: MadeDevice
    on: bool = True
    kind: ClassVar[str] = "make-device"

    def __str__(self) -> str:
        d = self.device
        if not self.on:
            return f"remove {d.kind} {d.name}"
        on = f" on {d.lower}" if d.lower else ""
        words = [f"MAC {d.mac}"]
        words += [f"txqueuelen {d.queue}"] if d.kind == NAPI_KIND else []
        words += [f"id {d.vlan}"] if d.vlan else []
        words += [f"{flag} on" for flag in d.flags]
        return f"make {d.kind} {d.name}{on} ({', '.join(words)})"


@dataclass(frozen=True, slots=True)
class Plug:
    """Give the running guests these interfaces; or, unless ``on``, take them out, and wait until
    the guests have released them."""

    cards: tuple[Card, ...]
    on: bool = True
    kind: ClassVar[str] = "plug"

    def __str__(self) -> str:
        cards = ", ".join(f"{c.guest} {c.mac}" for c in self.cards)
        return f"{'plug' if self.on else 'unplug'} {cards}"


@dataclass(frozen=True, slots=True)
class Raise:
    """Bring the devices up: from now on their lower devices serve them alone; or, unless ``on``,
    down, which frees their lower devices for macvtap."""

    devices: tuple[MadeDevice, ...]
    on: bool = True
    kind: ClassVar[str] = "raise"

    def __str__(self) -> str:
        names = ", ".join(d.name for d in self.devices)
        return f"bring {'up' if self.on else 'down'} {names}"


@dataclass(frozen=True, slots=True)
class Define:
    """Replace the interface ``before`` with ``after`` in the guest's persistent definition; with
    ``before`` "" add it, with ``after`` "" remove it."""

    guest: str
    uuid: str
    mac: str
    before: str
    after: str
    kind: ClassVar[str] = "define"

    def __str__(self) -> str:
        change = "" if self.before and self.after else "no " if self.before else "another "
        return f"define {self.guest}: {change}interface {self.mac} in the persistent definition"


Step = MakeDevice | Plug | Raise | Define | CloneStep


def inverse(step: Step) -> Step:
    """The step that takes a step back."""
    if isinstance(step, Define):
        return replace(step, before=step.after, after=step.before)
    return replace(step, on=not step.on)


class MsrRole(enum.StrEnum):
    """The role of a device of a multistage router."""

    LINK = "link"
    BALANCER = "balancer"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Stage:
    """The place of a device in a multistage router: on the side of that name, which lies on the
    device ``outside``. ``router`` is the router to which a balancer's device leads, "" when it
    leads to all."""

    role: MsrRole
    side: str
    outside: str
    router: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """A device of ours and the interface that it replaces, for the way back: ``live`` and
    ``config`` are the interface's XML in the running guest and in its persistent definition, ""
    where it had none.
    ``by_policy``: a policy asked for the device, not an operator by hand. ``group`` names the
    group that owns the device; there is then one Origin for each member, and ``queue`` is the
    txqueuelen of the device that this member had. Devices of a multistage router have a
    ``stage``. A device on which others of ours stand has no guest (""), and stays while one of
    those does. ``uri`` names the libvirt whose guest it is, "" in ledgers that do not tell."""

    device: MadeDevice
    guest: str
    uuid: str
    live: str
    config: str
    by_policy: bool = False
    group: str = ""
    queue: int | None = None
    stage: Stage | None = None
    uri: str = ""

    @property
    def outside(self) -> str:
        """The device that the interface stood on."""
        return self.stage.outside if self.stage is not None else self.device.lower
