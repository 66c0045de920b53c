"""Carries a switch out, and puts the guests back when it does not come to its end.

Each step is in the ledger from before it is begun; one line retires all of them when the
last is done. So whatever stops a switch (a step that fails, a kill, a crash of the host),
the ledger says what to take back, and taking back may be repeated at any time: every
inverse looks at what is there first.

``sweep`` keeps the devices: one that a guest's interface names is there and up, one that
nobody names any more goes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from vsrtune import attach_steps as steps
from vsrtune.attach_define import define, undefine
from vsrtune.attach_devices import Devices
from vsrtune.attach_host import AttachHost
from vsrtune.attach_model import GuestNics, Switch
from vsrtune.attach_steps import Card, Device, Origin, Step
from vsrtune.errors import VanishedError, VsrtuneError, WriteError
from vsrtune.interface_xml import Nic, differences
from vsrtune.ledger import Entry, Ledger
from vsrtune.live_domains import AwayError, RefusedError, unplug

STEP, ORIGIN = "step", "origin"

# libvirtd is started again by systemd, and reads all its guests then.
_AWAY_SECONDS = 40.0
_TRIES, _TRY_PAUSE = 3, 2.0

T = TypeVar("T")


class AttachLedger(Ledger):
    """The ledger of switches and of the devices they made; it outlives a boot, as the
    persistent definitions do that name these devices."""

    busy = ("another switch is under way, or is being recovered", "wait for its end")
    unusable = ("the ledger of attachments cannot be used", "run as root")


class SwitchError(VsrtuneError):
    """A switch that failed. ``put_back`` tells whether the guests have what they had,
    ``started`` are those that had to be started for that."""

    def __init__(
        self, error: VsrtuneError, left: list[VsrtuneError], started: tuple[str, ...] = ()
    ) -> None:
        hint = error.hint
        what = f"{error.what}; everything is as it was before"
        if started:
            what += f", but {' '.join(started)} was ended by libvirt and has been started anew"
            hint = "the log of libvirtd says why it could not take the guest over when it came back"
        if left:
            more = "; ".join(str(e) for e in left)
            what = f"{error.what}; not everything could be put back: {more}"
            hint = "`vsrtune attach --recover` tries again"
        super().__init__(what, where=error.where, hint=hint, lasting=error.lasting)
        self.put_back = not left


@dataclass(frozen=True, slots=True)
class Swept:
    """What ``sweep`` did, and what it could not do."""

    did: tuple[str, ...]
    failed: tuple[VsrtuneError, ...]


class Switcher:
    """Switches over a host and an open ledger. ``before`` is called with each step as it
    is begun; ``patience`` is how long libvirt may be away, in seconds."""

    def __init__(
        self,
        host: AttachHost,
        ledger: Ledger,
        boot: str,
        before: Callable[[Step], None] = lambda _step: None,
        patience: float = _AWAY_SECONDS,
    ) -> None:
        self._patience = patience
        self._host = host
        self._devices = Devices(host)
        self._ledger = ledger
        self._boot = boot
        self._before = before

    def origins(self) -> tuple[Origin, ...]:
        """Of every device that vsrtune made and has not removed."""
        return tuple(steps.origin_from(e.data) for e in self._of(ORIGIN))

    def unfinished(self) -> bool:
        """Whether a switch was interrupted, so that ``recover`` must come first."""
        return bool(self._of(STEP))

    def carry_out(self, switch: Switch) -> Swept:
        """All steps, or none; what became of devices that nobody needs any more. Raises
        SwitchError."""
        for origin in switch.origins:
            self._ledger.add(ORIGIN, steps.to_data(origin))
        for step in switch.steps:
            entry = self._ledger.add(STEP, {"boot": self._boot, "step": steps.to_data(step)})
            self._before(step)
            try:
                with _translated():
                    self._do(step)
            except VsrtuneError as error:
                if isinstance(step, steps.Unplug) and isinstance(error, RefusedError):
                    self._ledger.done(entry)  # the guests have not heard of it
                left = self.recover()
                raise SwitchError(error, left, self._start_ended(switch, left)) from error
        self._ledger.done(*(entry.id for entry in self._of(STEP)))
        return self.sweep()

    def _start_ended(self, switch: Switch, left: list[VsrtuneError]) -> tuple[str, ...]:
        """Start the guests that ran and that libvirt ended meanwhile; their names. What
        keeps one from it is added to ``left``."""
        started = []
        for name, uuid in sorted({(m.guest, m.uuid) for m in switch.moves if any(m.live)}):
            try:
                if self._patiently(lambda uuid=uuid: self._host.start_ended(uuid)):  # type: ignore[misc]
                    started.append(name)
            except VsrtuneError as error:
                left.append(error)
        return tuple(started)

    def recover(self) -> list[VsrtuneError]:
        """Take back what an unfinished switch has done; what could not be. May be called
        at any time."""
        failures: list[VsrtuneError] = []
        for attempt in range(_TRIES):
            if attempt:
                # libvirt may still be plugging an interface in for a caller that died.
                self._host.sleep(_TRY_PAUSE)
            failures = []
            for entry in reversed(self._of(STEP)):
                try:
                    with _translated():
                        self._take_back(entry)
                    self._ledger.done(entry.id)
                except VsrtuneError as error:
                    failures.append(error)
            if not failures:
                break
        if not failures:
            failures += self.sweep().failed
        return failures

    # -- the devices between switches

    def boot_devices(self) -> Swept:
        """Make and bring up every device that was made before this host booted, without
        asking libvirt: its daemon may start guests as soon as it runs itself. Those of an
        unfinished switch too: its guests' definitions may name them."""
        return self._keep_all(None)

    def sweep(self) -> Swept:
        """Make and bring up the devices that a guest's interface names, remove those that
        no guest names. Does nothing while a switch is unfinished, removes nothing while
        libvirt does not answer."""
        if self.unfinished() or not self._of(ORIGIN):
            return Swept((), ())
        try:
            return self._keep_all(self._host.guests())
        except AwayError:
            return self._keep_all(None)

    def _keep_all(self, guests: tuple[GuestNics, ...] | None) -> Swept:
        origins = [(entry, steps.origin_from(entry.data)) for entry in self._of(ORIGIN)]
        named = _named([origin.device for _, origin in origins], guests)
        did: list[str] = []
        failed: list[VsrtuneError] = []

        def guarded(work: Callable[[], None]) -> None:
            try:
                with _translated():
                    work()
            except VsrtuneError as error:
                failed.append(error)

        for _, origin in origins:
            live, config = named[origin.device.name]
            if live or config:
                guarded(lambda origin=origin, live=live: self._keep(origin, did, live=live))  # type: ignore[misc]
        # A device goes before what it stands on, which was made before it.
        for entry, origin in reversed(origins):
            if not any(named[origin.device.name]):
                guarded(lambda origin=origin, entry=entry: self._drop(origin, entry, did))  # type: ignore[misc]
        return Swept(tuple(did), tuple(failed))

    def _drop(self, origin: Origin, entry: Entry, did: list[str]) -> None:
        device = origin.device
        if self._devices.find(device) is not None:
            self._devices.remove(device)
            did.append(f"removed {device.name}, no guest names it any more")
        self._ledger.done(entry.id)

    def _keep(self, origin: Origin, did: list[str], *, live: bool) -> None:
        device = origin.device
        link = self._devices.find(device)
        if link is None:
            self._devices.make(device)
            link = self._devices.find(device)
            who = f"{origin.guest} names it" if origin.guest else f"{origin.group} stands on it"
            on = f" on {device.lower}" if device.lower else ""
            did.append(f"made {device.name}{on}, {who}")
        else:
            flags = self._devices.flag(device)
            did += [f"set {flag} of {device.name}, which needs it" for flag in flags]
        if link is not None and not link.up:
            try:
                self._host.set_up(link.index, True)
                did.append(f"brought {device.name} up")
            except OSError as error:
                # A guest that is not running yet waits until macvtaps are gone.
                if error.errno != errno.EBUSY or live:
                    raise

    # -- one step

    def _do(self, step: Step) -> None:
        match step:
            case steps.MakeDevice():
                self._devices.make(step.device)
            case steps.RemoveDevice():
                self._devices.remove(step.device)
            case steps.Raise():
                for device in step.devices:
                    self._devices.set_up(device)
            case steps.Lower():
                for device in step.devices:
                    self._devices.set_down(device)
            case steps.Unplug():
                wanted = [(card.uuid, card.mac) for card in step.cards]
                self._patiently(lambda: self._unplug(wanted))
            case steps.Plug():
                for card in step.cards:
                    self._patiently(lambda card=card: self._plug(card))  # type: ignore[misc]
            case steps.Define():
                self._patiently(lambda: define(self._host, step))

    def _take_back(self, entry: Entry) -> None:
        """The inverse of a step that was begun and may have been done in part."""
        step = steps.step_from(entry.data["step"])
        this_boot = entry.data["boot"] == self._boot
        inverse = step.inverse()
        match inverse:
            case steps.Plug():
                for card in inverse.cards:
                    self._unless_gone(lambda card=card: self._replug(card, this_boot))  # type: ignore[misc]
            case steps.Unplug():
                for card in inverse.cards:
                    if this_boot:
                        self._unless_gone(
                            lambda card=card: self._unplug([(card.uuid, card.mac)])  # type: ignore[misc]
                        )
            case steps.Define():
                self._unless_gone(lambda: undefine(self._host, inverse))
            case steps.Raise():
                # Its lower device may be gone together with it.
                for device in inverse.devices:
                    if self._devices.find(device) is not None:
                        self._devices.set_up(device)
            case _:
                self._do(inverse)

    def _unless_gone(self, work: Callable[[], None]) -> None:
        """A guest that does not run any more needs nothing: its next start reads its
        definition."""
        try:
            self._patiently(work)
        except VanishedError:
            return

    def _replug(self, card: Card, this_boot: bool) -> None:
        """Give the guest what it had. An interface that is there may be about to go,
        because its unplug was asked for; so it is unplugged first, unless the guest does
        not let go of it."""
        present = self._nic(card)
        if present is not None:
            same = not differences(card.xml, present.xml)
            if same and not this_boot:
                return
            try:
                self._unplug([(card.uuid, card.mac)])
            except AwayError:
                raise
            except WriteError:
                present = self._nic(card)
                if present is None or differences(card.xml, present.xml):
                    raise
        self._plug(card)

    def _plug(self, card: Card) -> None:
        present = self._nic(card)
        if present is None:
            self._host.plug(card.uuid, card.xml, card.mac)
            present = self._nic(card)
        if present is None:
            raise WriteError("the guest has lost the interface again", where=card.where)
        other = differences(card.xml, present.xml)
        if other:
            raise WriteError(f"is not as asked: {'; '.join(other)}", where=card.where)
        link = self._host.links().get(present.device)
        if card.queue is not None and link is not None and link.queue != card.queue:
            self._host.set_queue(link.index, card.queue)

    def _unplug(self, wanted: list[tuple[str, str]]) -> None:
        unplug(self._host, wanted, clock=self._host.clock, sleep=self._host.sleep)

    def _nic(self, card: Card) -> Nic | None:
        return next((n for n in self._host.nics(card.uuid) if n.mac == card.mac), None)

    # -- helpers

    def _of(self, kind: str) -> list[Entry]:
        return [entry for entry in self._ledger.pending() if entry.kind == kind]

    def _patiently(self, work: Callable[[], T]) -> T:
        """Again when libvirt was away: everything here looks first at what is there."""
        end = self._host.clock() + self._patience
        while True:
            try:
                return work()
            except AwayError:
                if self._host.clock() > end:
                    raise
            self._host.sleep(0.5)


def _named(
    devices: Sequence[Device], guests: tuple[GuestNics, ...] | None
) -> dict[str, tuple[bool, bool]]:
    """Of each device by name, whether a running guest, or a definition, names it or one that
    stands on it; when libvirt does not answer, a definition may. A device comes after the one
    below it."""
    if guests is None:
        return {device.name: (False, True) for device in devices}
    live = {n.device for g in guests for n in g.live or ()}
    config = {n.device for g in guests for n in g.config or ()}
    for device in reversed(devices):
        for names in (live, config):
            if device.name in names:
                names.add(device.lower)
    return {device.name: (device.name in live, device.name in config) for device in devices}


@contextmanager
def _translated() -> Iterator[None]:
    """OSError of a link request as an error for people."""
    try:
        yield
    except OSError as error:
        raise _error(error) from error


def _error(error: OSError) -> VsrtuneError:
    hints = {
        errno.EOPNOTSUPP: "the module napi_macvlan is not loaded: `vsrtune doctor` says why",
        errno.EBUSY: "macvtap, macvlan or a bridge still holds the lower device: ip -d link",
        errno.EPERM: "run as root",
    }
    code = error.errno or 0
    return WriteError(
        f"the kernel refused: {error.strerror or os.strerror(code)}",
        where="network device",
        hint=hints.get(code, "see: dmesg"),
    )
