# SPDX-License-Identifier: GPL-2.0-or-later
"""Attachments for plan, verify, apply and undo: survey them, report them, switch them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from vsrtune.attach import transaction
from vsrtune.attach.host import LiveHost
from vsrtune.attach.ledger import STEP
from vsrtune.attach.plan.model import AttachHostState, Switch
from vsrtune.attach.plan.requests import Batch, batches, wanted
from vsrtune.attach.plan.steps import Define, Plug, Step
from vsrtune.attach.signals import Interrupted
from vsrtune.attach.survey import known_origins, survey
from vsrtune.attach.sweep import Swept
from vsrtune.attach.transaction import Switcher
from vsrtune.cli import render
from vsrtune.cli.options import StatePlaces
from vsrtune.cli.render import patience, say
from vsrtune.core.codec import decode
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.execute.ledger import read_pending
from vsrtune.model.domain_xml import nic
from vsrtune.model.guest import Attachment, NicKind
from vsrtune.model.snapshot import Snapshot
from vsrtune.policy.matching import assign
from vsrtune.policy.model import Policy
from vsrtune.views.tables import Table

_TAKEN_BACK = "a switch is under way, or was interrupted and is taken back"


def concerned(policies: Sequence[Policy], ledger: Path) -> bool:
    """Whether there may be anything to switch, including an interrupted switch. Otherwise
    libvirt need not be asked."""
    return (
        any(p.attachment is not None for p in policies)
        or any(e.kind == STEP for e in read_pending(ledger))
        or any(o.by_policy for o in known_origins(ledger))
    )


def look(places: StatePlaces) -> AttachHostState:
    """The host as it is; the ledger is read without its lock. Raises VsrtuneError."""
    with contextlib.closing(LiveHost(places.uri)) as live, patience("looking at the host"):
        return survey(live, known_origins(places.ledger), places.journal)


@contextlib.contextmanager
def opened(places: StatePlaces) -> Iterator[tuple[Switcher, LiveHost]]:
    """What switches need, with the ledger locked."""
    live = LiveHost(places.uri)
    with transaction.opened(live, places.ledger) as switcher:
        yield switcher, live


def preview(
    policies: Sequence[Policy], places: StatePlaces, only: Collection[str] = ()
) -> tuple[Batch, ...]:
    """The switches that would be made; where ``only`` names guests, those of at least one of them.
    Raises VsrtuneError."""
    if not concerned(policies, places.ledger):
        return ()
    host = look(places)
    found = batches(host, wanted(host, known_origins(places.ledger), policies))
    back = _interrupted(places.ledger)
    found = (back, *found) if back is not None else found
    return tuple(batch for batch in found if not only or {*only}.intersection(batch.guests))


def check_switched(
    policies: Sequence[Policy],
    places: StatePlaces,
    why: str,
    otherwise: str,
    only: Collection[str] | None = None,
) -> None:
    """Raise VsrtuneError when the policies ask for a switch that is not done yet: of the guests
    ``only``, or without these of any that can be switched. ``why`` none is made now, and what to do
    ``otherwise``."""
    if all(p.attachment is None for p in policies):
        return
    host = look(places)
    moved = {
        name: batch
        for batch in batches(host, wanted(host, (), policies))
        for name in batch.guests
        if (batch.error is None if only is None else name in only)
    }
    if moved:
        to = ", ".join(dict.fromkeys(batch.to for batch in moved.values()))
        raise VsrtuneError(
            f"{', '.join(moved)}: not on {to} yet, {why}",
            where=", ".join(dict.fromkeys(batch.reason for batch in moved.values())),
            hint=f"switch with `vsrtune attach` first, or {otherwise}",
        )


def asked(
    policies: Sequence[Policy],
    root: Path | None,
    shown: Snapshot,
    places: StatePlaces,
    names: Collection[str],
) -> tuple[Batch, ...]:
    """Switches that the policies ask for, of the guests ``shown`` where an operator ``names`` any;
    without their steps on a recorded host, of which ``shown`` is looked at."""
    if root is not None:
        return recorded(shown, policies)
    refs = {guest.ref for guest in shown.guests} if names else ()
    return preview(policies, places, refs)


def _interrupted(ledger: Path) -> Batch | None:
    """What takes back a switch that was interrupted, None when there is none."""
    texts = [entry.data["step"] for entry in read_pending(ledger) if entry.kind == STEP]
    steps: list[Step] = [decode(Step, text) for text in texts]  # type: ignore[arg-type]
    if not steps:
        return None
    guests = {step.guest: None for step in steps if isinstance(step, Define)}
    plugs = [step for step in steps if isinstance(step, Plug)]
    guests |= {card.guest: None for step in plugs for card in step.cards}
    direct = any(nic(c.xml).kind == "direct" for step in plugs if not step.on for c in step.cards)
    to = Attachment.MACVTAP if direct or not plugs else Attachment.NAPI_MACVLAN
    return Batch(tuple(guests), to, _TAKEN_BACK)


def wrong(found: Sequence[Batch]) -> list[tuple[str, str]]:
    """What is not as it is to be, of whom and what, for each batch."""
    return [
        (", ".join(b.guests) or "devices", _TAKEN_BACK)
        if b.reason == _TAKEN_BACK
        else (", ".join(b.guests), f"not on {b.to}")
        for b in found
    ]


def carry_out(
    policies: Sequence[Policy], places: StatePlaces
) -> Iterator[tuple[Batch, VsrtuneError | None]]:
    """Switch batch by batch, and yield each batch as it is done, with its error. Raises
    VsrtuneError when an interrupted switch could not be taken back first, and when a switch is
    interrupted."""
    if not concerned(policies, places.ledger):
        return
    with opened(places) as (switcher, live):
        complain(switcher.take_back_unfinished().failed)
        origins = switcher.origins()
        host = survey(live, origins, places.journal)
        done = []
        for batch in batches(host, wanted(host, origins, policies)):
            error = batch.error
            if batch.switch is not None:
                try:
                    carry(switcher, batch.switch)
                    done.append(batch.switch)
                except VsrtuneError as failed:
                    if failed.exit_code is ExitCode.INTERRUPTED:
                        raise
                    error = failed
            yield batch, error
        tell_of_boot(*done)


def carry(switcher: Switcher, switch: Switch) -> Swept:
    """Carry out a switch. Raises VsrtuneError, also for a second Ctrl-C, which ends it at once."""
    try:
        with patience(f"carrying out {len(switch.steps)} steps"):
            return switcher.carry_out(switch)
    except KeyboardInterrupt:
        left = switcher.unfinished()
        what = "not everything could be put back" if left else "no switch is left unfinished"
        raise Interrupted(
            f"interrupted; {what}", hint="`vsrtune attach --recover` goes on" if left else ""
        ) from None


def tell_of_boot(*switches: Switch) -> None:
    """Say how the devices that definitions name since these switches are made at a boot, unless the
    host does that already."""
    from vsrtune.doctor.facts.module import BOOT_UNIT, boot_unit_enabled

    forth = [switch for switch in switches if switch.to is Attachment.NAPI_MACVLAN]
    named = any(s.clones or any(move.config[1] for move in s.moves) for s in forth)
    if named and boot_unit_enabled() is False:
        say(f"For these guests to start after a reboot: systemctl enable {BOOT_UNIT}")


def recorded(snapshot: Snapshot, policies: Sequence[Policy]) -> tuple[Batch, ...]:
    """The switches that the policies ask for on a recorded host. It shows the devices of running
    guests only, and no definition, so there are no steps."""
    kinds = {Attachment.MACVTAP: NicKind.NAPI_MACVTAP, Attachment.NAPI_MACVLAN: NicKind.MACVTAP}
    return tuple(
        Batch((guest.ref,), policy.attachment, policy.at("attachment"))
        for guest, policy in assign(snapshot.guests, policies).pairs
        if policy.attachment is not None
        and any(i.kind is kinds[policy.attachment] for i in guest.interfaces)
    )


def table(found: Sequence[Batch], *, verbose: bool = False) -> Table:
    """The batches as a table; ``verbose``: with their steps."""
    rows: list[tuple[str, ...]] = []
    for batch in found:
        names, steps = ", ".join(batch.guests), ["is planned on the host itself only"]
        if batch.reason == _TAKEN_BACK:
            names, steps = names or "devices", ["take back what was done"]
        elif batch.error is not None:
            steps = [f"refused: {batch.error}"]
        elif batch.switch is not None:
            made = [str(step) for step in batch.switch.steps]
            steps = made if verbose else [f"{len(made)} steps"]
            steps += [f"note: {note}" for note in batch.switch.notes]
        rows += [(names, str(batch.to), step, batch.reason) for step in steps]
    return Table("Attachments", ("guests", "to", "step", "why"), rows, text=("step", "why"))


def recover(switcher: Switcher) -> ExitCode:
    """Take back an interrupted switch, sweep, print the results, and return the exit code: whether
    the switch was taken back."""
    unfinished = switcher.unfinished()
    failures = switcher.recover() if unfinished else []
    if unfinished and not failures:
        say("An interrupted switch was taken back: the guests have what they had.")
    elif not failures:
        say("No switch was interrupted.")
    code = complain(failures)
    outcome(switcher.sweep())
    return code


def outcome(swept: Swept) -> ExitCode:
    """Print the result of a sweep of devices, and return the exit code."""
    for text in swept.did:
        say(text)
    return complain(swept.failed)


def complain(failures: Sequence[VsrtuneError]) -> ExitCode:
    """Print errors, and return the exit code."""
    render.complain(*failures)
    return ExitCode.FAILED if failures else ExitCode.DONE


def show(switch: Switch) -> None:
    """Print the steps and the notes of a switch."""
    if not (switch.moves or switch.steps or switch.ended or switch.kept):
        say("Nothing to do.")
    told = [str(step) for step in switch.steps]
    told += [
        " and remove ".join((f"end and undefine {clone.guest}", *(f.path for f in clone.files)))
        for clone in switch.ended
    ]
    if switch.leaves:
        told.append(f"remove {', '.join(d.name for d in switch.leaves)}")
    for number, text in enumerate(told, 1):
        say(f"{number}. {text}")
    for note in switch.notes:
        say(f"note: {note}")
