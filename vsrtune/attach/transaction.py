# SPDX-License-Identifier: GPL-2.0-or-later
"""Carries a switch out, and puts the guests back if it does not complete.

Each step is in the ledger before it begins; one line retires all steps when the last is done.
Whatever stops a switch (a step that fails, a kill, a crash of the host), the ledger tells what to
take back. This may be repeated at any time, because every inverse first checks what exists.

A signal that would end the process is held until the steps that began are taken back.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from vsrtune.attach.clones import Clones
from vsrtune.attach.devices import Devices
from vsrtune.attach.errors import SwitchError, translated
from vsrtune.attach.host import LiveHost
from vsrtune.attach.ledger import ASKED, CLONE, ENDED, GROUP, ORIGIN, STEP, AttachLedger
from vsrtune.attach.libvirt_hotplug import RELEASE_SECONDS, AwayError, RefusedError, SilentError
from vsrtune.attach.overlays import OutOfReachError
from vsrtune.attach.plan.clone_model import Clone, CloneFiles
from vsrtune.attach.plan.model import Switch
from vsrtune.attach.plan.steps import (
    Card,
    Define,
    MakeDevice,
    Origin,
    Plug,
    Raise,
    Step,
    inverse,
)
from vsrtune.attach.signals import Interrupted, held
from vsrtune.attach.sweep import LATE_SECONDS, Sweep, Swept
from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import VanishedError, VsrtuneError, WriteError
from vsrtune.execute.ledger import LedgerEntry
from vsrtune.host.filesystem import boot_id
from vsrtune.model.domain_xml import DomainNic, added, differences, nic, nics, replaced

# systemd starts libvirtd again, which then reads all its guests.
_AWAY_SECONDS = 40.0
_TRIES, _TRY_PAUSE = 3, 2.0
_UNPLUG_PAUSE = 0.05
# The request is lost if the guest's kernel does not listen yet.
_ASK_AGAIN = 10.0

_ANEW = "repeat the command, which plans anew"

T = TypeVar("T")


@contextlib.contextmanager
def opened(host: LiveHost, ledger: Path) -> Iterator[Switcher]:
    """A Switcher on a host, which is closed in the end, with the ledger at that path locked.
    Raises VsrtuneError."""
    with contextlib.closing(host), AttachLedger.open(ledger) as entries:
        yield Switcher(host, entries, boot_id())


class Switcher:
    """Carries out switches on a host with an open ledger. ``patience`` is how long libvirt may be
    away, in seconds, ``tries`` how often a switch is taken back until that succeeds. ``check``
    is called before each step and at every wait of a switch: what it raises has the switch taken
    back. ``given`` are the interfaces that guests have got back, which the next try to take a
    switch back leaves alone."""

    def __init__(
        self,
        host: LiveHost,
        ledger: AttachLedger,
        boot: str,
        patience: float = _AWAY_SECONDS,
        *,
        tries: int = _TRIES,
        check: Callable[[], None] = lambda: None,
        given: set[Card] | None = None,
    ) -> None:
        self._patience = patience
        self._tries = tries
        self._asked = check
        self._host = host
        self._devices = Devices(host)
        self._clones = Clones(host)
        self._ledger = ledger
        self._boot = boot
        self._given = set[Card]() if given is None else given
        # Interfaces that guests were asked to release, and have not.
        self._asked_for: set[Card] = set()
        self._sweep = Sweep(host, ledger, self._patiently)
        self._check: Callable[[], None] = _nothing

    def origins(self) -> tuple[Origin, ...]:
        """The Origin of every device that vsrtune made and has not removed."""
        return tuple(origin for _, origin in self._ledger.origins())

    def clones(self) -> tuple[Clone, ...]:
        """Every guest that vsrtune made and has not ended."""
        return tuple(clone for _, clone in self._ledger.clones())

    def take_over(self, guest: str) -> bool:
        """Have the devices of the guest (UUID) stay when no policy asks for them any more. True
        when there are any that a policy had asked for."""
        found = [e for e, o in self._ledger.origins() if o.by_policy and o.uuid == guest]
        for entry in found:
            self._ledger.add(ORIGIN, {**entry.data, "by_policy": False})
            self._ledger.done(entry.id)
        return bool(found)

    def unfinished(self) -> bool:
        """Whether a switch was interrupted, so that ``recover`` must come first."""
        return bool(self._ledger.of(STEP))

    def take_back_unfinished(self) -> Swept:
        """Take back a switch that was interrupted, if there is one, and sweep: what a guest has
        released late it gets back now, or the devices of the next switch keep it from that. Raises
        VsrtuneError with the first failure to take back."""
        if self.unfinished() and (failures := self.recover()):
            raise failures[0]
        return self.sweep()

    def carry_out(self, switch: Switch) -> Swept:
        """Carry out all steps, or none. Returns the result of the sweep that follows. Raises
        SwitchError, and Interrupted when a signal came too late to have the switch taken back."""
        self._no_remains(switch)
        with held() as signals:

            def check() -> None:
                self._asked()
                signals.check()

            try:
                self._check = check
                try:
                    self._all(switch)
                finally:
                    self._check = _nothing
            except VsrtuneError as error:
                left = self.recover()
                started = self._start_ended(switch, left)
                ask = bool(signals.signal) or isinstance(error, Interrupted)
                guests = {move.uuid for move in switch.moves}
                late = [card for _, card in self._ledger.asked() if card.uuid in guests]
                raise SwitchError(error, left, started, late, interrupted=ask) from error
            except KeyboardInterrupt:
                self.recover()
                raise
            swept = self.sweep()
            signals.check(" after the last step: the switch is done")
        return swept

    def _all(self, switch: Switch) -> None:
        uri = self._host.uri
        for origin in switch.origins:
            self._ledger.add(ORIGIN, encode(replace(origin, uri=uri)))
        for step in switch.steps:
            self._check()
            data = {"boot": self._boot, "step": encode(step), "uri": uri}
            entry = self._ledger.add(STEP, data)
            try:
                with translated():
                    self._do(step)
            except RefusedError:
                unplugs = isinstance(step, Plug) and not step.on
                if unplugs or isinstance(step, CloneFiles):
                    self._ledger.done(entry)  # nothing was done, and a file there is not ours
                raise
        # The entries for clones and groups are written before the steps are retired, and count
        # from then on.
        for kind, clones in ((CLONE, switch.clones), (ENDED, switch.ended)):
            for clone in clones:
                self._ledger.add(kind, encode(replace(clone, uri=clone.uri or uri)))
        for group in dict.fromkeys(o.group for o in switch.origins if o.group):
            self._ledger.add(GROUP, {"name": group})
        kept = [entry for entry, clone in self._ledger.clones() if clone in switch.kept]
        vanished = {o.group for o in self.origins() if o.group and o.device in switch.leaves}
        left = [entry for entry, group in self._ledger.groups() if group in vanished]
        self._ledger.done(*(entry.id for entry in (*self._ledger.of(STEP), *kept, *left)))

    def _no_remains(self, switch: Switch) -> None:
        """Refuse to make a guest with the UUID of an earlier clone that is not removed yet: it
        would be taken for that clone."""
        for _, old in self._ledger.clones(ENDED):
            if any(old.uuid == new.uuid for new in switch.clones):
                raise VsrtuneError(
                    f"what was made for it when the group {old.group} was created before is not "
                    "all removed yet",
                    where=old.guest,
                    hint="`vsrtune attach --recover` removes it, or says what is in the way",
                )

    def _start_ended(self, switch: Switch, left: list[VsrtuneError]) -> tuple[str, ...]:
        """Start the guests that ran and that libvirt ended meanwhile. Returns their names, and
        adds errors to ``left``."""
        started = []
        for name, uuid in sorted({(m.guest, m.uuid) for m in switch.moves if any(m.live)}):
            try:
                if self._patiently(lambda uuid=uuid: self._host.start_ended(uuid)):  # type: ignore[misc]
                    started.append(name)
            except VsrtuneError as error:
                left.append(error)
        return tuple(started)

    def recover(self) -> list[VsrtuneError]:
        """Take back the steps of an unfinished switch, then sweep. Returns the errors of the steps
        that could not be taken back: what a sweep fails at may concern another guest, and the next
        one tells it. May be called at any time."""
        failures: list[VsrtuneError] = []
        taken: set[int] = set()
        for attempt in range(self._tries):
            if attempt:
                # libvirt may still be plugging an interface in for a caller that died.
                self._host.sleep(_TRY_PAUSE)
            failures = self._take_back_all(taken)
            # Waiting helps neither a process without access nor a QEMU that was waited for.
            if all(isinstance(error, OutOfReachError | SilentError) for error in failures):
                break
        if not failures:
            self.sweep()
        return failures

    def _take_back_all(self, taken: set[int]) -> list[VsrtuneError]:
        """Take back every step once. ``taken`` are the steps that need not be taken back again
        even if the ledger does not have that yet: its disk may be full."""
        failures: list[VsrtuneError] = []
        begun = min((entry.id for entry in self._ledger.of(STEP)), default=0)
        said = self._ledger.of(CLONE, ENDED, GROUP) if begun else []
        try:
            self._ledger.done(*(entry.id for entry in said if entry.id > begun))
        except VsrtuneError as error:
            failures.append(error)
        told = not failures
        for entry in reversed(self._ledger.of(STEP)):
            try:
                if entry.id not in taken:
                    with translated():
                        self._take_back(entry)
                    taken.add(entry.id)
                # Without any step the entries for clones and groups would count.
                if told:
                    self._ledger.done(entry.id)
            except AwayError as error:
                # The steps before it made devices on which guests may stand, and are taken back
                # after it or not at all.
                failures.append(error)
                break
            except VsrtuneError as error:
                failures.append(error)
        return failures

    # -- between switches

    def boot_devices(self) -> Swept:
        """Make every device that was made before this host booted, without asking libvirt, whose
        daemon may start guests as soon as it runs, and bring up those that definitions name. This
        includes the devices of an unfinished switch."""
        return self._sweep.unasked(LATE_SECONDS)

    def sweep(self) -> Swept:
        """Plug in what guests have released late, make and bring up the devices that a guest needs,
        remove those that no guest needs and the clones that switches ended. Does nothing while a
        switch is unfinished. While libvirt does not answer it removes nothing, and only definitions
        count."""
        if self.unfinished() or not self._ledger.of(ORIGIN, ENDED, GROUP, ASKED):
            return Swept((), ())
        again = self._plug_again()  # before its device goes, which no guest may name any more
        swept = self._sweep.all()
        return Swept((*again.did, *swept.did), (*again.failed, *swept.failed))

    def _plug_again(self) -> Swept:
        """Give the guests back what they have released after all. The request is used up then, and
        also when the guest's run has ended."""
        did: list[str] = []
        failed: list[VsrtuneError] = []
        for entry, card in list(self._ledger.asked()):
            if entry.data["uri"] != self._host.uri:
                continue  # it is none of this libvirt's guests, and would seem to have ended
            try:
                with translated(), contextlib.suppress(VanishedError):
                    if self._run(card) == entry.data["run"]:
                        if self._nic(card) is not None:
                            continue
                        self._plug(card)
                        did.append(f"plugged {card.where} in again, which was released late")
                self._ledger.done(entry.id)
            except AwayError:
                break
            except VsrtuneError as error:
                failed.append(error)
        return Swept(tuple(did), tuple(failed))

    def _run(self, card: Card) -> str:
        """Names the run of the guest. Raises VanishedError when it does not run."""
        return f"{self._boot}/{self._host.run(card.uuid)}"

    # -- one step

    def _do(self, step: Step) -> None:
        match step:
            case MakeDevice(device, on):
                (self._devices.make if on else self._devices.remove)(device)
            case Raise(devices, on):
                for device in devices:
                    (self._devices.set_up if on else self._devices.set_down)(device)
            case Plug(on=False):
                requests: dict[Card, float] = {}
                self._patiently(lambda: self._unchanged(step.cards))
                self._patiently(lambda: self._unplug(step.cards, requests))
            case Plug():
                for card in step.cards:
                    self._patiently(lambda card=card: self._plug(card))  # type: ignore[misc]
            case Define():
                self._patiently(lambda: define(self._host, step))
            case _:
                self._patiently(lambda: self._clones.do(step))

    def _take_back(self, entry: LedgerEntry) -> None:
        """Carry out the inverse of a step that began and may be done in part."""
        if (uri := entry.data.get("uri", self._host.uri)) != self._host.uri:
            # Its guests are none of this libvirt's, and would seem to have ended.
            raise WriteError(
                "the switch that was interrupted is one of another libvirt",
                where=str(uri),
                hint=f"vsrtune attach --recover --connect {shlex.quote(str(uri))}",
            )
        step: Step = decode(Step, entry.data["step"])  # type: ignore[arg-type]
        this_boot = entry.data["boot"] == self._boot
        back = inverse(step)
        match back:
            case Plug(on=True):
                self._replug(back.cards, this_boot)
            case Plug():
                cards = tuple(c for c in back.cards if self._stands(c, this_boot))
                if failed := self._let_go(cards):
                    raise next(iter(failed.values()))
            case Define():
                self._unless_vanished(lambda: undefine(self._host, back))
            case Raise(on=True):
                # The lower device may be gone together with the device.
                for device in back.devices:
                    if self._devices.find(device) is not None:
                        self._devices.set_up(device)
            case _:
                self._do(back)

    def _each(self, cards: tuple[Card, ...], work: Callable[[Card], None]) -> None:
        """Call ``work`` for each card. A guest that does not give way does not stop the others;
        the first error is raised after them."""
        failed: list[VsrtuneError] = []
        for card in cards:
            try:
                self._unless_vanished(lambda card=card: work(card))  # type: ignore[misc]
            except AwayError:
                raise
            except VsrtuneError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _unless_vanished(self, work: Callable[[], None]) -> None:
        """Call ``work``. A guest that does not run any more needs nothing: its next start reads
        its definition."""
        try:
            self._patiently(work)
        except VanishedError:
            return

    def _stands(self, card: Card, this_boot: bool) -> bool:
        """Whether the interface is to be unplugged: the one of that MAC stands where a step put it.
        A guest that has started since may have got it from its definition, which has been taken
        back by now; it keeps the interface if the definition still has it."""
        try:
            present = self._patiently(lambda: self._nic(card))
            wanted = nic(card.xml)
            if present is None or not _same_place(wanted, present):
                return False
            defined = () if this_boot else nics(self._host.definition(card.uuid))
            return not any(_same_place(wanted, n) for n in defined)
        except VanishedError:
            return False

    def _replug(self, cards: tuple[Card, ...], this_boot: bool) -> None:
        """Give the guests their interfaces back. A present interface may be about to go, because
        its unplug was requested. It is therefore unplugged first, unless the guest does not
        release it, or an earlier try has given it. A request cannot be withdrawn: what the guest
        keeps is noted for ``sweep``."""
        cards = tuple(c for c in cards if c not in self._given or not self._is_back(c))
        if not this_boot:
            cards = tuple(card for card in cards if not self._is_back(card))
        failed = self._let_go(cards)

        def give(card: Card) -> None:
            if card in failed and not self._is_back(card):
                raise failed[card]
            self._plug(card)
            if card in self._asked_for:
                data = {"run": self._run(card), "card": encode(card), "uri": self._host.uri}
                self._forget((card,))
                self._ledger.add(ASKED, data)
            self._given.add(card)

        self._each(cards, give)

    def _is_back(self, card: Card) -> bool:
        """Whether the guest has the interface as it should be."""
        try:
            present = self._patiently(lambda: self._nic(card))
        except VanishedError:
            return False
        return present is not None and not differences(card.xml, present.xml)

    def _let_go(self, cards: tuple[Card, ...]) -> dict[Card, VsrtuneError]:
        """Unplug the interfaces that are there, all at the same time. Returns the errors of those
        that stay: a guest that does not give way stops no other. Raises AwayError."""
        requests: dict[Card, float] = {}
        failed: dict[Card, VsrtuneError] = {}
        self._patiently(lambda: self._release(cards, requests, failed))
        return {c: error for c, error in failed.items() if not isinstance(error, VanishedError)}

    def _plug(self, card: Card) -> None:
        present = self._nic(card)
        if present is None:
            self._host.plug(card.uuid, card.xml, card.mac)
            present = self._nic(card)
        if present is None:
            raise WriteError("the guest has lost the interface again", where=card.where)
        other = differences(card.xml, present.xml)
        if other:
            raise WriteError(f"is not as requested: {'; '.join(other)}", where=card.where)
        link = self._host.link(present.device)
        if card.queue is not None and link is not None and link.queue != card.queue:
            self._host.set_queue(link.index, card.queue)

    def _unplug(self, cards: tuple[Card, ...], requests: dict[Card, float]) -> None:
        """Unplug the interfaces that are there, all at the same time, and return when the guests
        have released them. ``requests`` are the times of the last requests of an earlier call that
        found libvirt away; this call keeps it up to date.

        Raises RefusedError when libvirt refused before any request was made, otherwise WriteError.
        """
        try:
            self._release(cards, requests)
        except RefusedError as error:
            if requests:
                raise WriteError(error.what, where=error.where, hint=error.hint) from error
            raise

    def _unchanged(self, cards: tuple[Card, ...]) -> None:
        """Refuse to unplug what is not as it was when the host was read: it would not come back."""
        for card in cards:
            present = self._nic(card)
            if present is not None and (other := differences(card.xml, present.xml)):
                raise RefusedError(_changed(other), where=card.where, hint=_ANEW)

    def _release(
        self,
        cards: tuple[Card, ...],
        requests: dict[Card, float],
        failed: dict[Card, VsrtuneError] | None = None,
    ) -> None:
        """With ``failed``, interfaces that fail are noted there, and the others go on."""
        # Each guest has its time from its own first request on: libvirt may keep another one's
        # waiting.
        ends: dict[Card, float] = {}
        requests.update(dict.fromkeys(requests, float("-inf")))
        while True:
            waiting = [card for card in cards if card not in (failed or ())]
            present: dict[tuple[str, str], DomainNic] = {}
            for uuid in {card.uuid for card in waiting}:
                with _noted(failed, [card for card in waiting if card.uuid == uuid]):
                    present |= {(uuid, n.mac): n for n in self._host.nics(uuid)}
            left = [card for card in waiting if (card.uuid, card.mac) in present]
            if not left:
                self._forget(waiting)
                return
            for card in (c for c in left if c not in (failed or ())):
                with _noted(failed, [card], [c for c in left if c.uuid == card.uuid]):
                    self._request(card, present[card.uuid, card.mac], requests, ends)
            self._sleep(_UNPLUG_PAUSE)

    def _request(
        self, card: Card, found: DomainNic, requests: dict[Card, float], ends: dict[Card, float]
    ) -> None:
        """Ask for the release of an interface, and from time to time again until its end."""
        now = self._host.clock()
        if now > ends.get(card, now):
            raise WriteError(
                f"the guest did not release the interface in {RELEASE_SECONDS:g} s",
                where=card.where,
                hint="its kernel must support PCI hotplug",
            )
        if now - requests.get(card, float("-inf")) >= _ASK_AGAIN:
            try:
                self._host.request_unplug(card.uuid, found)
            except (AwayError, SilentError):
                requests[card] = now  # libvirt may have passed it on
                self._asked_for.add(card)
                raise
            requests[card] = now
            self._asked_for.add(card)
            ends.setdefault(card, self._host.clock() + RELEASE_SECONDS)

    def _forget(self, cards: Iterable[Card]) -> None:
        """Forget that guests were asked to release these interfaces."""
        self._asked_for.difference_update(cards)
        gone = {(card.uuid, card.mac) for card in cards}
        asked = self._ledger.asked()
        self._ledger.done(*(entry.id for entry, c in asked if (c.uuid, c.mac) in gone))

    def _nic(self, card: Card) -> DomainNic | None:
        return next((n for n in self._host.nics(card.uuid) if n.mac == card.mac), None)

    # -- helpers

    def _patiently(self, work: Callable[[], T]) -> T:
        """Repeat ``work`` while libvirt is away: everything here first checks what exists."""
        end = self._host.clock() + self._patience
        while True:
            try:
                return work()
            except AwayError:
                if self._host.clock() > end:
                    raise
            self._sleep(0.5)

    def _sleep(self, seconds: float) -> None:
        self._check()
        self._host.sleep(seconds)


@contextlib.contextmanager
def _noted(
    failed: dict[Card, VsrtuneError] | None, cards: Iterable[Card], siblings: Iterable[Card] = ()
) -> Iterator[None]:
    """Note an error in ``failed`` for the cards instead of raising it, and for their ``siblings``
    when the guest is gone or silent. Raises it without ``failed``, and an AwayError."""
    try:
        yield
    except VsrtuneError as error:
        if failed is None or isinstance(error, AwayError):
            raise
        failed.update(dict.fromkeys(cards, error))
        if isinstance(error, SilentError | VanishedError):
            failed.update(dict.fromkeys(siblings, error))


def _nothing() -> None:
    """The check outside a switch: no signal is held."""


def _changed(other: tuple[str, ...]) -> str:
    return f"somebody has changed it since the switch was planned: {'; '.join(other)}"


def _same_place(one: DomainNic, other: DomainNic) -> bool:
    """Whether both are the interface of that MAC on the same device. libvirt names each macvtap
    anew."""
    alike = (one.mac, one.kind, one.lower) == (other.mac, other.kind, other.lower)
    return alike and (one.device == other.device or one.kind == "direct")


def define(host: LiveHost, step: Define) -> None:
    """Change, add or remove the interface, unless that is done already."""
    where = f"{step.guest}: interface {step.mac} of the definition"
    text = host.definition(step.uuid)
    macs = [nic(xml).mac for xml in (step.before, step.after) if xml]
    now = _first(text, *macs)
    if now is None and not step.after:
        return
    if now is not None and step.after and not differences(step.after, now.xml):
        return
    if step.before:
        if now is not None and (other := differences(step.before, now.xml)):
            raise WriteError(_changed(other), where=where, hint=_ANEW)
        changed = replaced(text, now.mac if now is not None else step.mac, step.after)
    elif now is None:
        changed = added(text, step.after)
    else:
        raise WriteError("there is another one of that MAC", where=where)
    host.define(changed, where)
    now = _first(host.definition(step.uuid), macs[-1])
    if not step.after:
        other = ("is there still",) if now is not None else ()
    else:
        other = differences(step.after, now.xml if now is not None else "<interface/>")
    if other:
        raise WriteError(f"is not as requested: {'; '.join(other)}", where=where)


def undefine(host: LiveHost, back: Define) -> None:
    """Take a Define back, unless somebody else has changed or removed the interface since."""
    present = nics(host.definition(back.uuid))
    if not back.before:
        if not any(now.mac == nic(back.after).mac for now in present):
            define(host, back)
        return
    mac = nic(back.before).mac
    for now in (n for n in present if n.mac == mac):
        if not differences(back.before, now.xml):
            define(host, back)


def _first(domain: str, *macs: str) -> DomainNic | None:
    """The interface of a domain with the first of these MACs that it has."""
    by_mac = {n.mac: n for n in reversed(nics(domain))}
    return next((by_mac[mac] for mac in macs if mac in by_mac), None)
