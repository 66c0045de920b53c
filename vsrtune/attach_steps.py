"""What moves a guest's interfaces to other host devices, step by step, and back.

A step is a frozen value with an inverse. The ledger holds each step from before it is
begun until the whole switch is done: whatever interrupts it, the inverses of the steps
that were begun, in reverse order, give the guests what they had.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from vsrtune.clone_model import Clone
from vsrtune.clone_steps import CloneStep
from vsrtune.codec import decode, encode

NAPI_KIND = "napi_macvtap"


class Attachment(enum.StrEnum):
    """What a guest's interfaces stand on."""

    MACVTAP = "macvtap"
    NAPI_MACVLAN = "napi-macvlan"


@dataclass(frozen=True, slots=True)
class Device:
    """A device that vsrtune makes for one interface of a guest, on the device named
    ``lower``. ``mode`` as in rtnl_model.MODES, ``mtu`` in bytes, ``queue`` its txqueuelen.
    With ``every_queue`` several guests share it, and what all of them must hear of their
    neighbours goes to each (docs/groups.md)."""

    name: str
    lower: str
    mac: str
    mode: int
    mtu: int
    queue: int
    kind: str = NAPI_KIND
    every_queue: bool = False


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
        """For people."""
        return f"{self.guest}: interface {self.mac}"


@dataclass(frozen=True, slots=True)
class MakeDevice:
    """Make the device, down, and wait for its /dev/tapN."""

    device: Device
    kind: ClassVar[str] = "make-device"

    def inverse(self) -> Step:
        return RemoveDevice(self.device)

    def __str__(self) -> str:
        d = self.device
        shared = ", every-queue on" if d.every_queue else ""
        return f"make {d.kind} {d.name} on {d.lower} (MAC {d.mac}, txqueuelen {d.queue}{shared})"


@dataclass(frozen=True, slots=True)
class RemoveDevice:
    """Remove the device."""

    device: Device
    kind: ClassVar[str] = "remove-device"

    def inverse(self) -> Step:
        return MakeDevice(self.device)

    def __str__(self) -> str:
        return f"remove {self.device.kind} {self.device.name}"


@dataclass(frozen=True, slots=True)
class Unplug:
    """Take the interfaces out of their running guests, and wait until the guests have
    released them."""

    cards: tuple[Card, ...]
    kind: ClassVar[str] = "unplug"

    def inverse(self) -> Step:
        return Plug(self.cards)

    def __str__(self) -> str:
        return f"unplug {_cards(self.cards)}"


@dataclass(frozen=True, slots=True)
class Plug:
    """Give the running guests these interfaces."""

    cards: tuple[Card, ...]
    kind: ClassVar[str] = "plug"

    def inverse(self) -> Step:
        return Unplug(self.cards)

    def __str__(self) -> str:
        return f"plug {_cards(self.cards)}"


@dataclass(frozen=True, slots=True)
class Raise:
    """Bring the devices up: from now on their lower devices serve them alone."""

    devices: tuple[Device, ...]
    kind: ClassVar[str] = "raise"

    def inverse(self) -> Step:
        return Lower(self.devices)

    def __str__(self) -> str:
        return f"bring up {', '.join(d.name for d in self.devices)}"


@dataclass(frozen=True, slots=True)
class Lower:
    """Bring the devices down, which frees their lower devices for macvtap."""

    devices: tuple[Device, ...]
    kind: ClassVar[str] = "lower"

    def inverse(self) -> Step:
        return Raise(self.devices)

    def __str__(self) -> str:
        return f"bring down {', '.join(d.name for d in self.devices)}"


@dataclass(frozen=True, slots=True)
class Define:
    """Put the interface ``after`` in the place of ``before`` in the guest's persistent
    definition."""

    guest: str
    uuid: str
    mac: str
    before: str
    after: str
    kind: ClassVar[str] = "define"

    def inverse(self) -> Step:
        return Define(self.guest, self.uuid, self.mac, self.after, self.before)

    def __str__(self) -> str:
        return f"define {self.guest}: interface {self.mac} in the persistent definition"


Step = MakeDevice | RemoveDevice | Unplug | Plug | Raise | Lower | Define | CloneStep


@dataclass(frozen=True, slots=True)
class Origin:
    """A device of ours and what its interface was before, for the way back: ``live`` and
    ``config`` are the interface's XML in the running guest and in its persistent
    definition, "" where it had none. ``by_policy`` tells what a policy asked for from what
    an operator did by hand. ``group`` names the group whose device it is; there is one
    Origin for each member then, and ``queue`` is the txqueuelen of what this one had."""

    device: Device
    guest: str
    uuid: str
    live: str
    config: str
    by_policy: bool = False
    group: str = ""
    queue: int | None = None


def to_data(value: Step | Origin | Clone) -> dict[str, Any]:
    """For the ledger."""
    data: dict[str, Any] = encode(value)
    return data


def step_from(data: Any) -> Step:
    """A step of ``to_data``. Raises VsrtuneError."""
    step: Step = decode(Step, data)  # type: ignore[arg-type]
    return step


def origin_from(data: Any) -> Origin:
    """An Origin of ``to_data``. Raises VsrtuneError."""
    return decode(Origin, data)


def clone_from(data: Any) -> Clone:
    """A Clone of ``to_data``. Raises VsrtuneError."""
    return decode(Clone, data)


def _cards(cards: tuple[Card, ...]) -> str:
    return ", ".join(f"{c.guest} {c.mac}" for c in cards)
