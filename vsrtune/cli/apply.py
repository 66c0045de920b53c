# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune apply`` and ``vsrtune undo``: change the host once."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import click

from vsrtune.cli import attachments
from vsrtune.cli.options import (
    JOURNAL,
    Duration,
    StatePlaces,
    check_written,
    dry_run_option,
    journal_option,
    json_option,
    lasting,
    load_policies,
    observe,
    options,
    places_options,
    policies_option,
    trace_option,
    unread,
    verbose_option,
    wide_option,
)
from vsrtune.cli.plan import plan
from vsrtune.cli.render import complain, patience, print_json, say, show
from vsrtune.cli.trial import guardian
from vsrtune.cli.trial.guardian import TrialGuard
from vsrtune.core.errors import ObserveError, VsrtuneError, WriteError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.execute import executor
from vsrtune.execute.brought import adopt_brought
from vsrtune.execute.executor import Result
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal, check_free, read_entries
from vsrtune.execute.vanished import forget
from vsrtune.host.filesystem import LiveRoot, boot_id
from vsrtune.host.state_files import MAX_SIZE
from vsrtune.model.journal_records import undo_action, undo_order
from vsrtune.model.plan import Plan, read_plan
from vsrtune.model.snapshot import Snapshot, SnapshotSlice
from vsrtune.observe.qemu_processes import ProcessTable
from vsrtune.observe.tracing import TraceMemory, Tracer
from vsrtune.plan import brought_pins
from vsrtune.plan.full_plan import full_plan
from vsrtune.plan.interrupts import refused
from vsrtune.policy.matching import assign
from vsrtune.policy.model import Policy
from vsrtune.views import tables


@click.command()
@options(
    policies_option,
    click.option(
        "--plan",
        "stored",
        type=click.File(encoding="utf-8", errors="replace"),
        metavar="FILE",
        help="Carry out this plan, stored with `vsrtune plan --json`, unless the host "
        "has changed since.",
    ),
    click.option(
        "--confirm",
        "confirm_seconds",
        type=Duration(1, 600),
        metavar="TIME",
        help="Put everything back unless this is confirmed within TIME (as 60s): with Enter, "
        "or with `vsrtune confirm` from another session.",
    ),
    trace_option,
    verbose_option,
    wide_option,
    dry_run_option,
)
@places_options
@click.pass_context
def apply(
    context: click.Context,
    policy_dirs: tuple[Path, ...],
    stored: TextIO | None,
    confirm_seconds: float | None,
    trace_seconds: float,
    verbose: bool,
    wide: bool,
    dry_run: bool,
    places: StatePlaces,
) -> int:
    """Carry out the plan once, and print it.

    What could not be carried out for a guest is taken back for that guest. The daemon
    (`systemctl start vsrtune`) does the same whenever the host changes; while it runs,
    use `systemctl reload vsrtune` instead.

    A thread takes class deadline only once it has run on its new CPUs. Until then the
    setting is named as pending, as is what concerns a NAPI thread that the plan itself
    makes (napi.threaded); apply again, or let the daemon do it.

    With --confirm everything, settings of earlier applies included, ends at the original
    as after `vsrtune undo`, unless it is confirmed in time. So it does when the command is
    killed or its session is lost. With it the command refuses policies that ask for
    a switch of attachments which is not done yet. --dry-run does what `vsrtune plan` does.

    \b
    Exit codes: 0 done, 1 something failed, or was not confirmed and is put back, 2 a policy
    or the stored plan is wrong (nothing was changed), 4 not all guests could be looked at,
    5 a guest is refused (it was not changed).
    """
    boot = boot_id()
    made: Plan | None = None
    policies: tuple[Policy, ...] = ()
    if stored is not None:
        made = read_plan(stored.read(MAX_SIZE), boot, stored.name)
    else:
        policies = load_policies(policy_dirs)
    if dry_run and made is not None:
        show(tables.plan_tables(made, verbose=verbose), wide=wide)
        return ExitCode.REFUSED if made.refusals else ExitCode.DONE
    if dry_run:
        arguments: dict[str, Any] = {
            "policy_dirs": policy_dirs, "trace_seconds": trace_seconds, "verbose": verbose,
            "wide": wide, "uri": places.uri,
            "journal": places.journal, "attach_ledger": places.ledger,
        }  # fmt: skip
        return int(context.invoke(plan, **arguments))
    with ExitStack() as stack:
        guard: TrialGuard | None = None
        with Journal.open(places.journal, boot) as opened, ExitStack() as told:
            if opened.foreign is not None:
                raise opened.foreign
            if confirm_seconds is None:
                guardian.check_over(places.journal)
                told.enter_context(_interrupt_told(opened, "`vsrtune undo` puts them back"))
            else:
                # A definition outlives a reboot, and no undo takes a switch to macvtap back.
                why = "and a switch does not undo itself"
                attachments.check_switched(policies, places, why, "apply without --confirm")
                guard = stack.enter_context(guardian.start(places, confirm_seconds))
            _say_discarded(opened)
            ops = _writer(places, opened)
            _say(executor.recover(ops, opened), "finished after a crash")
            switched = made is not None or _switch(policies, places)
            trace = trace_seconds if made is None else 0.0
            snapshot = observe(None, places.uri, trace, policies, opened.entries())
            missing = unread(snapshot, policies)
            _forget(snapshot, ops, opened)
            # The plan puts back what guests have brought along; the journal must record it first.
            adopt_brought(snapshot, snapshot.guests, opened)
            if made is None:
                entries, steps = lasting(opened.entries(), snapshot), opened.steps
                made = full_plan(snapshot, policies, entries, reassert=True, steps=steps)
            named = assign(snapshot.guests, policies) if stored is None else None
            show(tables.plan_tables(made, named, verbose=verbose), wide=wide)
            with patience("carrying out the plan"):
                result = executor.apply(made, ops, opened)
            live = len(opened.entries())
            changed = bool(live) or attachments.concerned((), places.ledger)
            if guard is not None and not changed:
                guard.keep()
        if guard is not None and changed:
            # Before anything is printed: a terminal may stop what writes to it.
            guard.ask()
        _say_applied(made, result, boot)
        if guard is not None:
            if changed:
                _ask(guard, f"{confirm_seconds:g} s", live, places.journal)
            guard.close()
            if not guard.kept:
                return ExitCode.FAILED
    if result.failed:
        names = ", ".join(dict.fromkeys(action.target.guest for action, _ in result.failed))
        how = "each is as it was"
        if not result.rolled_back:
            how = (
                "not all is as it was; `vsrtune undo` puts back everything that vsrtune has changed"
            )
        say(f"vsrtune: failed for {names}: {how}", err=True)
        return ExitCode.FAILED
    complain(*missing)
    if not switched:
        return ExitCode.FAILED
    if made.refusals:
        return ExitCode.REFUSED
    return ExitCode.UNREAD if missing else ExitCode.DONE


def _forget(snapshot: Snapshot, ops: LiveSysOps, opened: Journal) -> None:
    """Forget settings of guests that have ended, and complain of what that could not take back."""
    for _, taken in forget(SnapshotSlice(snapshot), ops, opened):
        if isinstance(taken, WriteError):
            complain(taken)


def _say_applied(made: Plan, result: Result, boot: str) -> None:
    """Print the result of the plan."""
    _say_left(result)
    for action, error in result.pending:
        say(f"pending: {tables.failure_line(action, error)}")
    for action, error in result.fixed:
        say(f"left alone: {tables.failure_line(action, error)}")
    if result.fixed:
        memory = TraceMemory()
        memory.load(boot)
        memory.remember_fixed(refused(result.fixed))
    if made.actions:
        say(f"{len(result.done)} of {len(made.actions)} changes done.")


def _ask(guard: TrialGuard, seconds: str, live: int, journal: Path) -> None:
    """Wait for Enter, `vsrtune confirm` or the deadline."""
    terminal = sys.stdin.isatty()
    # An Enter of before the question answers nothing.
    while terminal and select.select([sys.stdin], [], [], 0)[0] and sys.stdin.readline():
        pass
    how = "Press Enter, or run `vsrtune confirm`," if terminal else "Run `vsrtune confirm`"
    say(
        f"{how} within {seconds} to keep this. Otherwise `vsrtune undo` is run, which puts "
        f"back everything that vsrtune has changed ({live} settings now)."
    )
    while not guard.over:
        if not terminal:
            time.sleep(0.1)
        elif select.select([sys.stdin], [], [], 0.1)[0]:
            if not sys.stdin.readline():
                break  # the terminal has gone
            try:
                guardian.confirm(journal, boot_id())
            except VsrtuneError as error:
                complain(error)
    say("Confirmed." if guard.kept else "Not confirmed.")


@click.command()
@options(journal_option)
def confirm(journal: Path) -> int:
    """Keep what `vsrtune apply --confirm` has applied.

    \b
    Exit codes: 0 it stays, 1 nothing waits for a confirmation, or not any more.
    """
    guardian.confirm(journal, boot_id())
    say("Confirmed. `vsrtune undo` puts everything back.")
    return ExitCode.DONE


@click.command()
@options(json_option, dry_run_option)
@places_options
def undo(as_json: bool, dry_run: bool, places: StatePlaces) -> int:
    """Put back everything that vsrtune has changed on this host, and the pins that guests
    have brought along from another host or an earlier run.

    A setting that somebody else has changed since is left alone and named. Guests that a
    policy had switched to napi-macvlan are switched back; those that `vsrtune attach` has
    switched, and groups, stay where they are. A switch that was interrupted is taken back.

    \b
    Exit codes: 0 all is back, 1 something could not be put back, 4 the host could not be
    read (what the journal holds is back), or the journal that is named does not exist.
    """
    check_written(places.journal, JOURNAL)
    boot = boot_id()
    if dry_run:
        return _preview_undo(places, boot, as_json)
    from vsrtune.daemon.attachments import SETTLED_PATH
    from vsrtune.daemon.events.changes import remove_stale

    with ExitStack() as stack:
        # First of all, because the daemon, if it runs, has to put everything back itself.
        opened: Journal | None = None
        if places.journal.exists():
            opened = stack.enter_context(Journal.open(places.journal, boot))
        else:
            check_free(places.journal)
        with contextlib.suppress(OSError):
            remove_stale()
            Tracer().remove_stale()
        with contextlib.suppress(OSError):
            SETTLED_PATH.unlink()  # whoever starts the daemon again asks for the policies
        # Nothing that fails here keeps what the journal holds from being put back.
        codes: list[ExitCode] = []
        with _noted("guests may still be on the attachment of a policy", codes):
            if not _switch((), places, quiet=as_json):
                codes.append(ExitCode.FAILED)
        if opened is not None and opened.foreign is not None:
            raise opened.foreign
        with _noted("pins that guests have brought along may stay", codes):
            snapshot = _with_libvirt_guests(places.uri)
            known = () if opened is None else opened.entries()
            if snapshot is not None and brought_pins.entries(snapshot.guests, snapshot.host, known):
                if opened is None:
                    opened = stack.enter_context(Journal.open(places.journal, boot))
                adopt_brought(snapshot, snapshot.guests, opened)
            _check_confirmed(snapshot, places.uri)
        if opened is None or not (opened.entries() or opened.steps):
            if as_json:
                _print_json(Result())
            elif not codes:
                say("Nothing to undo: no setting on this host is vsrtune's.")
            return min(codes, default=ExitCode.DONE)
        again = _interrupt_told(opened, "`vsrtune undo` again puts them back")
        with again, patience("putting back what was changed"):
            result = executor.undo(_writer(places, opened), opened)
    if as_json:
        _print_json(result)
    else:
        _say(result, "restored")
        say(f"{len(result.done)} settings restored.")
    if result.failed:
        say("vsrtune: not all is back: run `vsrtune undo` again once that is solved", err=True)
        codes.append(ExitCode.FAILED)
    return min(codes, default=ExitCode.DONE)


@contextlib.contextmanager
def _interrupt_told(journal: Journal, what_next: str) -> Iterator[None]:
    """Say what is set when the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        live = len(journal.entries())
        left = f"{live} settings are vsrtune's; {what_next}" if live else "nothing is vsrtune's"
        say(f"vsrtune: interrupted: {left}", err=True)
        raise


@contextlib.contextmanager
def _noted(what: str, codes: list[ExitCode]) -> Iterator[None]:
    """Print any error of the block as the reason for ``what``, and add its exit code. Only an
    interrupt is raised."""
    try:
        yield
    except Exception as error:
        known = error if isinstance(error, VsrtuneError) else VsrtuneError(repr(error))
        if known.exit_code is ExitCode.INTERRUPTED:
            raise
        codes.append(known.exit_code)
        complain(
            VsrtuneError(
                f"{what}: {known}",
                hint="what the journal holds is put back even so; run `vsrtune undo` again once "
                "that is solved",
            )
        )


def _switch(policies: Sequence[Policy], places: StatePlaces, *, quiet: bool = False) -> bool:
    """Switch guests to the attachments that the policies ask for, and switch back guests for
    which no policy asks any more. True when every switch succeeded."""
    clean = True
    for batch, error in attachments.carry_out(policies, places):
        if error is not None:
            clean = False
            complain(error)
        elif not quiet:
            say(f"{', '.join(batch.guests)}: on {batch.to} now ({batch.reason})")
    return clean


def _with_libvirt_guests(uri: str) -> Snapshot | None:
    """A snapshot of this host; None when no libvirt guest runs on it."""
    if not any(process.by_libvirt for process in ProcessTable().scan(LiveRoot()).qemus):
        return None
    return observe(None, uri, 0.0)


def _check_confirmed(snapshot: Snapshot | None, uri: str) -> None:
    """Raise ObserveError when libvirt did not answer for a guest, or one could not be looked at."""
    if snapshot is None:
        return
    for problem in snapshot.problems:
        if problem.reader == "domain" or problem.reader.startswith("guest "):
            raise ObserveError(problem.what, hint="`vsrtune show` lists what could not be read")
    silent = [guest.ref for guest in snapshot.guests if guest.unconfirmed]
    if silent:
        raise ObserveError(
            f"libvirt does not answer for {', '.join(silent)}",
            where=uri,
            hint="systemctl status libvirtd virtqemud; --connect names another one",
        )


def _preview_undo(places: StatePlaces, boot: str, as_json: bool) -> int:
    """Print what undo would restore, unless somebody else has changed it since."""
    codes: list[ExitCode] = []
    snapshot = None
    with _noted("pins that guests have brought along may stay", codes):
        snapshot = _with_libvirt_guests(places.uri)
        _check_confirmed(snapshot, places.uri)
    known = read_entries(places.journal, boot)
    if snapshot is not None:
        known = (*known, *brought_pins.entries(snapshot.guests, snapshot.host, known))
    entries = undo_order(known)
    actions = [undo_action(entry) for entry in entries]
    switches = attachments.preview((), places)
    if as_json:
        would = {
            "would_restore": [action.to_data() for action in actions],
            "would_switch": [{"guests": b.guests, "to": str(b.to)} for b in switches],
        }
        print_json(would)
        return min(codes, default=ExitCode.DONE)
    for batch in switches:
        say(f"would switch: {', '.join(batch.guests) or 'devices'} to {batch.to} ({batch.reason})")
    for action in actions:
        say(f"would restore: {tables.action_line(action)}")
    say(f"{len(actions)} settings would be restored.")
    return min(codes, default=ExitCode.DONE)


def _writer(places: StatePlaces, journal: Journal) -> LiveSysOps:
    return LiveSysOps(
        libvirt_uri=places.uri, budgets_end=journal.budgets_end, original=journal.original
    )


def _say_discarded(journal: Journal) -> None:
    if journal.discarded:
        say(f"Forgot {journal.discarded} settings of before this host booted.")
    if journal.set_aside:
        say(f"The journal of another version and boot is kept as {journal.set_aside}.")


def _say(result: Result, what: str) -> None:
    for action in result.done:
        say(f"{what}: {tables.action_line(action)}")
    _say_left(result)


def _say_left(result: Result) -> None:
    for left in result.left:
        say(f"left alone: {left}")
    for target in result.vanished:
        say(f"gone: {target}")
    for action, error in result.failed:
        say(f"vsrtune: error: {tables.failure_line(action, error)}", err=True)


def _print_json(result: Result) -> None:
    print_ready = {
        "restored": [a.to_data() for a in result.done],
        "left": [str(left) for left in result.left],
        "vanished": [str(target) for target in result.vanished],
        "failed": [{"target": str(a.target), "error": str(e)} for a, e in result.failed],
    }
    print_json(print_ready)
