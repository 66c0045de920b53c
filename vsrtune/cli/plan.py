# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune plan`` and ``vsrtune verify``: observe, compare, change nothing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import click

from vsrtune.attach.plan.requests import Batch
from vsrtune.cli import attachments
from vsrtune.cli.options import (
    StatePlaces,
    chosen,
    journalled,
    lasting,
    load_policies,
    look_options,
    observe,
    options,
    places_options,
    trace_option,
    unread,
    verbose_option,
)
from vsrtune.cli.render import complain, print_json, say, show
from vsrtune.core.exit_codes import ExitCode
from vsrtune.core.text import counted
from vsrtune.model.plan import Plan, plan_text
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.matching import assign, no_guest
from vsrtune.policy.model import Policy
from vsrtune.views import tables


@click.command()
@options(
    verbose_option,
    click.option(
        "--detailed-exitcode", "detailed", is_flag=True, help="Exit 3 when there are changes."
    ),
)
@look_options
@options(trace_option)
@places_options
def plan(
    verbose: bool,
    detailed: bool,
    guests: tuple[str, ...],
    policy_dirs: tuple[Path, ...],
    as_json: bool,
    wide: bool,
    root: Path | None,
    trace_seconds: float,
    places: StatePlaces,
) -> int:
    """Show what the policies would change, and why.

    Has a line for each guest, then what is refused, what others have changed, and
    warnings. With -v, lists every change with its reason, and every setting that is left
    as it is. `vsrtune apply` carries out exactly this plan. Switches of attachments stand
    first, and are in no stored plan (--json), which always is of all guests.

    \b
    Exit codes: 0 a plan could be made, 1 no such guest, 2 a policy is wrong, 3 there are
    changes (with --detailed-exitcode), 4 not all guests could be looked at, 5 a guest is
    refused.
    """
    if as_json and guests:
        raise click.UsageError("--json stores the plan, which is of all guests: leave --guest out")
    policies = load_policies(policy_dirs)
    # The plan overrules pins set by hand since the last apply, as `systemctl reload
    # vsrtune` does: an operator who asks for a plan asks for the policies.
    snapshot, made = _planned(policies, root, trace_seconds, places, reassert=True)
    shown, made = _only(snapshot, made, guests)
    found: tuple[Batch, ...] = ()
    if as_json:
        click.echo(plan_text(made, snapshot.host.boot_id))
    else:
        found = attachments.asked(policies, root, shown, places, guests)
        switches = [attachments.table(found, verbose=verbose)] if found else []
        assignment = assign(shown.guests, policies)
        if guests:
            assignment.unmatched = []
        names = {name for batch in found for name in batch.guests}
        changes = tables.plan_tables(made, assignment, verbose=verbose, switched=names)
        show([*switches, *changes], wide=wide)
    missing = unread(snapshot, policies)
    complain(*missing)
    if made.refusals or any(batch.error is not None for batch in found):
        return ExitCode.REFUSED
    if detailed and (made.actions or found):
        return ExitCode.DIFFERS
    return ExitCode.UNREAD if missing else ExitCode.DONE


@click.command()
@look_options
@options(trace_option)
@places_options
def verify(
    guests: tuple[str, ...],
    policy_dirs: tuple[Path, ...],
    as_json: bool,
    wide: bool,
    root: Path | None,
    trace_seconds: float,
    places: StatePlaces,
) -> int:
    """Exit 3 when the host is not what the policies say.

    Names every setting that differs, those included that an operator changed by hand
    and that the daemon therefore leaves alone, and every guest that the daemon has stepped
    down. Names policies for which no guest runs, or that ask for nothing; if there is no
    other policy, there is nothing to compare (exit 4). --json has the same as lists.

    \b
    Exit codes: 0 no difference, 1 no such guest, 2 a policy is wrong, 3 differences, 4 nothing
    was compared, or not all guests could be looked at, 5 a guest is refused.
    """
    policies = load_policies(policy_dirs)
    snapshot, made = _planned(policies, root, trace_seconds, places)
    shown, made = _only(snapshot, made, guests)
    found = attachments.asked(policies, root, shown, places, guests)
    lines = tables.drift_lines(made.actions, made.skipped)
    lines += [f"{who}: {what}" for who, what in attachments.wrong(found)]
    refused = [f"{r.guest}: refused ({r.policy}): {r.reason}" for r in made.refusals]
    assignment = assign(shown.guests, policies)
    idle = [] if guests else [no_guest(policy) for policy in assignment.unmatched]
    empty = [f"{g.ref}: {tables.EMPTY} ({p.path})" for g, p in assignment.pairs if not p.asks]
    vain = [f"{s.guest}: {s.subject}: {s.reason}" for s in made.skipped if s.vain]
    missing = unread(snapshot, policies)
    compared = len(assignment.pairs) > len(empty) or bool(lines or refused or missing)
    code = (
        ExitCode.REFUSED if refused else ExitCode.DIFFERS if lines
        else ExitCode.UNREAD if missing or not compared else ExitCode.DONE
    )  # fmt: skip
    if as_json:
        told = {
            "as_the_policies_say": code is ExitCode.DONE,
            "differs": lines,
            "refused": refused,
            "idle": [*idle, *empty],
            "cannot_be_made": vain,
            "unread": [str(problem) for problem in missing],
        }
        print_json(told)
        return code
    for line in lines:
        say(line, wide=wide, cut=True)
    for line in refused:
        say(line, err=True, wide=wide)
    for line in (*idle, *empty):
        say(line, wide=wide)
    complain(*missing)
    if not compared:
        why = "no policy sets anything of a guest that runs" if policies else "there is no policy"
        say(f"vsrtune: nothing was compared: {why}", err=True)
    if code is ExitCode.DONE:
        for line in vain:
            say(f"left alone: {line}", wide=wide)
        but = f", but for {counted(len(vain), 'setting')} that cannot be made" if vain else ""
        say(f"no drift: the host is as the policies say{but}")
    return code


def _only(snapshot: Snapshot, made: Plan, names: Collection[str]) -> tuple[Snapshot, Plan]:
    """The guests of these names, and the plan's part about them; all without a name."""
    shown = chosen(snapshot, names)
    if not names:
        return shown, made
    return shown, made.about({guest.ref for guest in shown.guests})


def _planned(
    policies: tuple[Policy, ...],
    root: Path | None,
    trace_seconds: float,
    places: StatePlaces,
    *,
    reassert: bool = False,
) -> tuple[Snapshot, Plan]:
    entries, steps = journalled(places.journal, root)
    snapshot = observe(root, places.uri, trace_seconds, policies, entries)
    entries = lasting(entries, snapshot)
    return snapshot, full_plan(snapshot, policies, entries, reassert=reassert, steps=steps)
