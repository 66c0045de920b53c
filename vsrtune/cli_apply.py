"""``vsrtune apply`` and ``vsrtune undo``: change the host once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vsrtune import report
from vsrtune.cli_common import (
    attach_ledger_option,
    journal_option,
    json_option,
    load_policies,
    observe,
    options,
    policies_option,
    trace_option,
    uri_option,
)

if TYPE_CHECKING:
    from vsrtune.actions import Plan
    from vsrtune.executor import Result
    from vsrtune.journal import Journal
    from vsrtune.policy import Policy


@click.command()
@options(
    policies_option,
    click.option(
        "--plan",
        "stored",
        type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True),
        help="Carry out this plan, stored with `vsrtune plan --json`, unless the host "
        "has changed since.",
    ),
    trace_option,
    journal_option,
    attach_ledger_option,
    uri_option,
)
def apply(
    policy_dirs: tuple[Path, ...],
    stored: Path | None,
    trace_seconds: float,
    journal: Path,
    attach_ledger: Path,
    uri: str,
) -> int:
    """Carry out the plan once, and print it.

    What could not be carried out for a guest is taken back for that guest. The daemon
    (`systemctl start vsrtune`) does the same whenever the host changes; while it runs,
    use `systemctl reload vsrtune` instead.

    A thread takes class deadline only once it has run on its new CPUs. Until then the
    setting is named as pending, as is what concerns a NAPI thread that the plan itself
    makes (napi.threaded); apply again, or let the daemon do it.

    \b
    Exit codes: 0 done, 1 something failed, 2 a policy is wrong (nothing was changed)
    or refused (the refused guest was not changed).
    """
    from vsrtune import executor, plan_json, render
    from vsrtune.full_plan import full_plan
    from vsrtune.irq_plan import refused
    from vsrtune.journal import Journal
    from vsrtune.rootfs import boot_id
    from vsrtune.seen import SeenMemory
    from vsrtune.sysops import LiveSysOps

    boot = boot_id()
    made: Plan | None = None
    policies = () if stored is not None else load_policies(policy_dirs)
    if stored is not None:
        text = click.get_text_stream("stdin").read() if str(stored) == "-" else _text(stored)
        made = plan_json.loads(text, boot, str(stored))
    with Journal.open(journal, boot) as opened:
        _say_discarded(opened)
        ops = LiveSysOps(libvirt_uri=uri, budgets_end=opened.budgets_end)
        _say(executor.recover(ops, opened), "finished after a crash")
        switched = True
        if made is None:
            switched = _switch(policies, uri, attach_ledger, journal)
            snapshot = observe(None, uri, trace_seconds, policies, opened.entries())
            made = full_plan(snapshot, policies, opened.entries(), reassert=True)
        render.show(report.plan_tables(made))
        result = executor.apply(made, ops, opened)
    for action, error in result.failed:
        click.echo(f"vsrtune: error: {report.failure_line(action, error)}", err=True)
    for target in result.vanished:
        click.echo(f"{target}: gone meanwhile")
    for action, error in result.pending:
        click.echo(f"pending: {report.failure_line(action, error)}")
    for action, error in result.fixed:
        click.echo(f"left alone: {report.failure_line(action, error)}")
    if result.fixed:
        memory = SeenMemory()
        memory.load(boot)
        memory.remember_fixed(refused(result.fixed))
    if made.actions:
        click.echo(f"{len(result.done)} of {len(made.actions)} changes done.")
    if result.failed:
        how = "is as it was" if result.rolled_back else "could not be put back completely"
        click.echo(f"vsrtune: every guest with a failure {how}", err=True)
        return 1
    if not switched:
        return 1
    return 2 if made.refusals else 0


@click.command()
@options(json_option, journal_option, attach_ledger_option, uri_option)
def undo(as_json: bool, journal: Path, attach_ledger: Path, uri: str) -> int:
    """Put back everything vsrtune has changed on this host.

    A setting that somebody else has changed since is left alone and named. Guests that a
    policy had switched to another attachment are switched back; those that `vsrtune
    attach` has switched, and groups, stay where they are. A switch that was interrupted is
    taken back.

    \b
    Exit codes: 0 all is back, 1 something could not be put back.
    """
    from vsrtune.journal import Journal, read_entries
    from vsrtune.rootfs import boot_id

    boot = boot_id()
    switched = _switch((), uri, attach_ledger, journal, quiet=as_json)
    if not read_entries(journal, boot):
        if as_json:
            click.echo('{"restored": [], "left": [], "vanished": [], "failed": []}')
        else:
            click.echo("Nothing to undo: no setting on this host is vsrtune's.")
        return 0 if switched else 1
    from vsrtune import executor
    from vsrtune.sysops import LiveSysOps

    with Journal.open(journal, boot) as opened:
        result = executor.undo(LiveSysOps(libvirt_uri=uri, budgets_end=opened.budgets_end), opened)
    if as_json:
        _print_json(result)
    else:
        _say(result, "restored")
        click.echo(f"{len(result.done)} settings restored.")
    return 1 if result.failed or not switched else 0


def _switch(
    policies: Sequence[Policy], uri: str, ledger: Path, journal: Path, *, quiet: bool = False
) -> bool:
    """Bring guests to the attachments that the policies ask for, and those back whom none
    asks for any more. True when that could be done."""
    from vsrtune import attach_show
    from vsrtune.cli import complain

    if not attach_show.concerned(policies, ledger):
        return True
    clean = True
    choose = attach_show.asked(policies)
    for batch, error in attach_show.carry_out(choose, uri, ledger, journal):
        if error is not None:
            clean = False
            complain(error)
        elif not quiet:
            click.echo(f"{', '.join(batch.guests)}: on {batch.to} now ({batch.reason})")
    return clean


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _say_discarded(journal: Journal) -> None:
    if journal.discarded:
        click.echo(f"Forgot {journal.discarded} settings of before this host booted.")


def _say(result: Result, what: str) -> None:
    for action in result.done:
        click.echo(f"{what}: {report.action_line(action)}")
    for left in result.left:
        click.echo(f"left alone: {left}")
    for target in result.vanished:
        click.echo(f"gone: {target}")
    for action, error in result.failed:
        click.echo(f"vsrtune: error: {report.failure_line(action, error)}", err=True)


def _print_json(result: Result) -> None:
    import json

    print_ready = {
        "restored": [a.to_data() for a in result.done],
        "left": [str(left) for left in result.left],
        "vanished": [str(target) for target in result.vanished],
        "failed": [{"target": str(a.target), "error": str(e)} for a, e in result.failed],
    }
    click.echo(json.dumps(print_ready, indent=2, ensure_ascii=False))
