# SPDX-License-Identifier: GPL-2.0-or-later
"""The inputs and the plan of a switch of attachments: frozen values.

``AttachHostState`` is the host as read, with the few queries that planning needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from vsrtune.attach.plan.clone_model import Clone, Template
from vsrtune.attach.plan.steps import NAPI_KIND, MadeDevice, Origin, Step
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.domain_xml import DomainNic
from vsrtune.model.guest import Attachment
from vsrtune.model.host import MODES, Link

# Kinds that, like ours, need a lower device for themselves.
STACKED = ("macvtap", "macvlan", "ipvlan", "ipvtap")
OURS = (NAPI_KIND, "napi_macvlan")


@dataclass(frozen=True, slots=True)
class GuestNics:
    """A libvirt guest's interfaces: ``live`` of the running guest, None when it does not
    run, ``config`` of its persistent definition, None when it has none, ``saved`` of the guest
    whose memory libvirt keeps (virsh managedsave), None when it keeps none."""

    name: str
    uuid: str
    live: tuple[DomainNic, ...] | None
    config: tuple[DomainNic, ...] | None
    saved: tuple[DomainNic, ...] | None = None

    @property
    def nics(self) -> tuple[DomainNic, ...]:
        """Its interfaces in all of them."""
        return (*(self.live or ()), *(self.saved or ()), *(self.config or ()))

    @property
    def present(self) -> tuple[DomainNic, ...]:
        """The interfaces that it has; those of its next start when it does not run."""
        return (self.live if self.live is not None else self.saved or self.config) or ()


@dataclass(frozen=True, slots=True)
class SwitchRequest:
    """A request of the operator or of a policy: of these guests (names) the interfaces that
    ``interface`` names by MAC, host device or lower device ("": all), in the running guests, in
    their persistent definitions, or both; without either in both, as far as the guests have them
    (virsh's --persistent). ``all_of_lower`` includes every other guest on the same lower
    devices."""

    to: Attachment
    guests: tuple[str, ...]
    interface: str = ""
    live: bool = True
    config: bool = True
    all_of_lower: bool = False
    by_policy: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """The move of one interface of one guest between devices: XML before and after, "" where that
    side of the guest does not change."""

    guest: str
    uuid: str
    mac: str
    device: MadeDevice
    live: tuple[str, str] = ("", "")
    config: tuple[str, str] = ("", "")
    queue: int | None = None


@dataclass(frozen=True, slots=True)
class Switch:
    """A planned switch; it has no steps if all is as desired already. The ledger gets ``origins``
    before the first step, and forgets those of ``leaves``, with their devices, after the last.
    After the last step the ledger has the ``clones`` as vsrtune's, the ``ended`` are undefined
    with all their files, and the ``kept`` are the operator's."""

    to: Attachment
    moves: tuple[Move, ...]
    steps: tuple[Step, ...]
    origins: tuple[Origin, ...] = ()
    leaves: tuple[MadeDevice, ...] = ()
    notes: tuple[str, ...] = ()
    clones: tuple[Clone, ...] = ()
    ended: tuple[Clone, ...] = ()
    kept: tuple[Clone, ...] = ()


class AttachHostState:
    """The host as read: guests, links, the Origins of our devices. ``kept(link)`` is the queue
    length for a guest's new device."""

    def __init__(
        self,
        guests: Collection[GuestNics],
        links: Collection[Link],
        origins: Collection[Origin],
        kept: Callable[[Link], int] = lambda link: link.queue,
        clones: Mapping[Clone, str] | None = None,
        template: Template | None = None,
    ) -> None:
        self.guests = sorted(guests, key=lambda g: g.name)
        self.by_uuid = {g.uuid: g for g in self.guests}
        self.links = {link.name: link for link in links}
        self.by_index = {link.index: link for link in links}
        self.origins = {o.device.name: o for o in origins if not o.group}
        # By group: of every member and side, in the order in which they were plugged in.
        self.groups: dict[str, list[Origin]] = {}
        for origin in origins:
            if origin.group:
                self.groups.setdefault(origin.group, []).append(origin)
        self.kept = kept
        # The guests that vsrtune made, with their present definition; "" for a guest without.
        self.clones = dict(clones or {})
        # The template from which missing members can be made.
        self.template = template

    def guest(self, name: str) -> GuestNics:
        """The guest of that name or UUID. Raises VsrtuneError."""
        for guest in self.guests:
            if name in (guest.name, guest.uuid):
                return guest
        raise VsrtuneError(
            "there is no such libvirt guest", where=name, hint="see: virsh list --all"
        )

    def group(self, device: str) -> Origin | None:
        """An Origin of the group to which the device belongs; None for any other device."""
        found = (o for origins in self.groups.values() for o in origins)
        return next((o for o in found if o.device.name == device), None)

    def on_napi(self, found: DomainNic) -> bool:
        """Whether the interface stands on a device that vsrtune made, or could have."""
        link = self.links.get(found.device)
        made = found.device in self.origins or self.group(found.device) is not None
        return found.kind == "ethernet" and (made or (link is not None and link.kind == NAPI_KIND))

    def lower(self, found: DomainNic) -> str:
        """The lower device of a macvtap interface, or of one of ours; "" for others."""
        if found.kind == "direct":
            return found.lower
        if not self.on_napi(found):
            return ""
        origin = self.origins.get(found.device) or self.group(found.device)
        if origin is not None:
            return origin.device.lower
        link = self.by_index.get(self.links[found.device].lower)
        return link.name if link is not None else ""


def movable(found: DomainNic, host: AttachHostState) -> bool:
    """Whether an interface stands on a macvtap, or on a device of ours."""
    return host.lower(found) != "" and (found.kind == "direct" or host.on_napi(found))


def contend(one: MadeDevice | Link, other: MadeDevice | Link) -> bool:
    """Whether one of them alone can be up: the module accepts no second device of a MAC on a lower
    device, and none beside one in mode passthrough."""
    beside = one.name != other.name and one.lower == other.lower
    alike = one.mac == other.mac or MODES["passthrough"] in (one.mode, other.mode)
    return beside and alike and one.kind == other.kind == NAPI_KIND
