# SPDX-License-Identifier: GPL-2.0-or-later
"""The work between switches: makes and brings up devices that a guest needs, removes devices that
nobody needs any more, and clones whose group was deleted.

Everything here first checks what exists, and may be repeated at any time.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from vsrtune.attach.clones import Clones
from vsrtune.attach.devices import Devices
from vsrtune.attach.errors import translated
from vsrtune.attach.host import LiveHost
from vsrtune.attach.ledger import ENDED, STEP, AttachLedger
from vsrtune.attach.libvirt_hotplug import AwayError
from vsrtune.attach.plan.model import GuestNics, contend
from vsrtune.attach.plan.steps import MadeDevice, Origin
from vsrtune.core.errors import ObserveError, VsrtuneError
from vsrtune.execute.ledger import LedgerEntry
from vsrtune.model.domain_xml import nics

# A NIC may come late in the boot, and one that is gone keeps libvirt waiting.
LATE_SECONDS = 20.0
_PAUSE = 0.1

Patiently = Callable[[Callable[[], list[str]]], list[str]]


@dataclass(frozen=True, slots=True)
class Swept:
    """The changes that ``sweep`` made, and its failures."""

    did: tuple[str, ...]
    failed: tuple[VsrtuneError, ...]


class Sweep:
    """Sweeps a host with an open ledger; ``patiently`` repeats a call while libvirt is away."""

    def __init__(self, host: LiveHost, ledger: AttachLedger, patiently: Patiently) -> None:
        self._host = host
        self._ledger = ledger
        self._patiently = patiently
        self._devices = Devices(host)
        self._clones = Clones(host)

    def all(self) -> Swept:
        """Sweep everything; remove nothing while libvirt does not answer."""
        ended = self._end_clones()
        try:
            kept = self._look_after(self._host.guests())
        except AwayError:
            kept = self.unasked()
        return Swept((*ended.did, *kept.did), (*ended.failed, *kept.failed))

    def unasked(self, wait: float = 0.0) -> Swept:
        """Without libvirt: make all devices, and bring up those that definitions name. Others
        might take their lower devices from guests that libvirt starts on macvtap. Without
        definitions to read, bring all up. ``wait`` so many seconds for lower devices."""
        devices = [origin.device for _, origin in self._ledger.origins()]
        lowers = {d.lower for d in devices} - {"", *(d.name for d in devices)}
        end = self._host.clock() + wait
        while lowers - self._host.links().keys() and self._host.clock() < end:
            self._host.sleep(_PAUSE)
        texts = self._host.definitions()
        guests = None if texts is None else tuple(map(_defined, texts))
        waits: set[str] = set()
        if guests is not None and self._ledger.of(STEP):
            # Some definitions are changed already: a guest starts on a device that is down, and
            # recovery goes on from there.
            waits = {n.lower for g in guests for n in g.config or () if n.kind == "direct"}
        return self._look_after(guests, asked=False, waits=waits)

    def _look_after(
        self,
        guests: tuple[GuestNics, ...] | None,
        *,
        asked: bool = True,
        waits: Collection[str] = (),
    ) -> Swept:
        """Keep the devices that ``guests`` need, None when that is unknown. Remove the others, or,
        unless libvirt was ``asked``, keep them too, and leave them down. Leave devices down on the
        lower devices ``waits``."""
        origins = list(self._ledger.origins())
        created = {group for _, group in self._ledger.groups()}
        named = _named([origin for _, origin in origins], guests, created)
        did: list[str] = []
        failed: list[VsrtuneError] = []

        def guarded(work: Callable[[], None]) -> None:
            try:
                with translated():
                    work()
            except VsrtuneError as error:
                failed.append(error)

        for _, origin in origins:
            live, config = named[origin.device.name]
            rivals = [o.device for _, o in origins if contend(o.device, origin.device)]
            rests = not live and any(named[rival.name][0] for rival in rivals)
            up = (live or config) and not rests and origin.device.lower not in waits
            # What gives way to a guest that runs.
            idle = [rival for rival in rivals if live and named[rival.name] == (False, True)]
            if live or config or not asked:
                guarded(
                    lambda origin=origin, live=live, up=up, idle=idle: self._keep(  # type: ignore[misc]
                        origin, did, live=live, up=up, idle=idle
                    )
                )
        # A device goes before the device below it, which was made before it.
        for entry, origin in reversed(origins):
            # Another libvirt's guest is none of those that were asked for.
            ours = origin.uri in ("", self._host.uri)
            if asked and ours and not any(named[origin.device.name]):
                guarded(lambda origin=origin, entry=entry: self._drop(origin, entry, did))  # type: ignore[misc]
        left = {origin.group for _, origin in self._ledger.origins()}
        vanished = [entry.id for entry, group in self._ledger.groups() if group not in left]
        guarded(lambda: self._ledger.done(*vanished))
        return Swept(tuple(did), tuple(failed))

    def _end_clones(self) -> Swept:
        """End the clones that a switch left until after its end, because that cannot be taken
        back."""
        did: list[str] = []
        failed: list[VsrtuneError] = []
        for entry, clone in list(self._ledger.clones(ENDED)):
            if clone.uri not in ("", self._host.uri):
                continue  # it is none of this libvirt's guests, and would seem to have ended
            try:
                with translated():
                    did += self._patiently(lambda clone=clone: self._clones.end(clone))  # type: ignore[misc]
            except VsrtuneError as error:
                failed.append(error)
                continue
            made = [
                e.id for e, other in self._ledger.clones() if replace(other, uri=clone.uri) == clone
            ]
            self._ledger.done(entry.id, *made)
        return Swept(tuple(did), tuple(failed))

    def _drop(self, origin: Origin, entry: LedgerEntry, did: list[str]) -> None:
        device = origin.device
        if self._devices.find(device) is not None:
            self._devices.remove(device)
            did.append(f"removed {device.name}, no guest names it any more")
        self._ledger.done(entry.id)

    def _keep(
        self,
        origin: Origin,
        did: list[str],
        *,
        live: bool,
        up: bool,
        idle: Collection[MadeDevice],
    ) -> None:
        device = origin.device
        link = self._devices.find(device)
        if link is None:
            self._devices.make(device)
            link = self._devices.find(device)
            who = f"{origin.guest} names it" if origin.guest else f"{origin.group} stands on it"
            who = who if up else "it stays down until a guest needs it"
            on = f" on {device.lower}" if device.lower else ""
            did.append(f"made {device.name}{on}, {who}")
        else:
            flags = self._devices.flag(device)
            did += [f"set {flag} of {device.name}, which needs it" for flag in flags]
            # The lower device's may have been lower when the device was made, or meanwhile.
            lower = self._host.link(device.lower) if device.lower else None
            mtu = min(device.mtu, lower.mtu) if lower is not None else 0
            if link.mtu < mtu:
                self._host.set_mtu(link.index, mtu)
                did.append(f"set the MTU of {device.name} to {mtu}, as its interface had before")
        if up and link is not None and not link.up:
            for rival in idle:
                if (other := self._devices.find(rival)) is not None and other.up:
                    self._host.set_up(other.index, False)
                    did.append(f"set {rival.name} down, {device.name} cannot be up beside it")
            try:
                self._devices.raise_lower(device)
                self._host.set_up(link.index, True)
                did.append(f"brought {device.name} up")
            except OSError as error:
                # A guest that is not running yet waits until macvtaps are gone, and until one that
                # has its MAC has stopped and it starts itself.
                if error.errno not in (errno.EBUSY, errno.EADDRINUSE) or live:
                    raise


def _defined(text: str) -> GuestNics:
    """The guest of a definition; without interfaces if libvirt cannot read it either."""
    try:
        return GuestNics("", "", None, nics(text, texts=False))
    except ObserveError:
        return GuestNics("", "", None, None)


def _named(
    origins: Sequence[Origin], guests: tuple[GuestNics, ...] | None, created: Collection[str]
) -> dict[str, tuple[bool, bool]]:
    """For each device by name: whether a running guest, and whether a definition or a saved guest,
    names it or a device that stands on it. If that is unknown, a definition may name it. In
    ``origins`` a device comes after the one below it.

    The devices of a running or saved guest of a group in ``created`` count as named: while the
    guest is drained, and its definition is another one or none, only the Origin knows its devices.
    """
    if guests is None:
        return {origin.device.name: (False, True) for origin in origins}
    live = {n.device for g in guests for n in g.live or ()}
    config = {n.device for g in guests for n in (*(g.saved or ()), *(g.config or ()))}
    run = {g.uuid for g in guests if g.live is not None or g.saved is not None}
    config |= {o.device.name for o in origins if o.group in created and o.uuid in run}
    for origin in reversed(origins):
        for names in (live, config):
            if origin.device.name in names:
                names.add(origin.device.lower)
    return {o.device.name: (o.device.name in live, o.device.name in config) for o in origins}
