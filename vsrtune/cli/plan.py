"""``vsrtune plan`` and ``vsrtune verify``: observe, compare, change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vsrtune.cli.options import (
    StatePlaces,
    journalled,
    json_option,
    load_policies,
    observe,
    options,
    places_options,
    policies_option,
    root_option,
    say,
    trace_option,
    unread,
)
from vsrtune.core.exit_codes import ExitCode
from vsrtune.views import tables

if TYPE_CHECKING:
    from vsrtune.attach.plan.requests import Batch
    from vsrtune.model.plan import Plan
    from vsrtune.model.snapshot import Snapshot
    from vsrtune.policy.model import Policy


@click.command()
@options(policies_option, json_option, root_option, trace_option)
@places_options
def plan(
    policy_dirs: tuple[Path, ...],
    as_json: bool,
    root: Path | None,
    trace_seconds: float,
    places: StatePlaces,
) -> int:
    """Show what the policies would change, and why.

    Lists every change, every setting that is left as it is with the reason, and what
    is refused. `vsrtune apply` carries out exactly this plan. Switches of attachments
    stand first, and are in no stored plan (--json).

    \b
    Exit codes: 0 a plan could be made, 2 a policy is wrong, 4 not all guests could be
    looked at, 5 a guest is refused.
    """
    from vsrtune.cli import render
    from vsrtune.model.plan import plan_text

    policies = load_policies(policy_dirs)
    # The plan overrules pins set by hand since the last apply, as `systemctl reload
    # vsrtune` does: an operator who asks for a plan asks for the policies.
    snapshot, made = _planned(policies, root, trace_seconds, places, reassert=True)
    if as_json:
        click.echo(plan_text(made, snapshot.host.boot_id))
        missing = _say_unread(snapshot, policies)
        return ExitCode.REFUSED if made.refusals else missing
    found = _attachments(policies, root, places)
    if found:
        from vsrtune.cli.attachments import table

        render.show([table(found)])
    render.show(tables.plan_tables(made))
    missing = _say_unread(snapshot, policies)
    refused = bool(made.refusals) or any(batch.switch is None for batch in found)
    return ExitCode.REFUSED if refused else missing


@click.command()
@options(policies_option, root_option, trace_option)
@places_options
def verify(
    policy_dirs: tuple[Path, ...], root: Path | None, trace_seconds: float, places: StatePlaces
) -> int:
    """Exit 3 when the host is not what the policies say.

    Names every setting that differs, those included that an operator changed by hand
    and that the daemon therefore leaves alone, and every guest that the daemon has stepped
    down. Names policies for which no guest runs; if there is no other policy, there is
    nothing to compare (exit 4).

    \b
    Exit codes: 0 no difference, 2 a policy is wrong, 3 differences, 4 nothing was compared,
    or not all guests could be looked at, 5 a guest is refused.
    """
    from vsrtune.policy.matching import assign, no_guest

    policies = load_policies(policy_dirs)
    snapshot, made = _planned(policies, root, trace_seconds, places)
    lines = tables.drift_lines(made.actions, made.skipped)
    found = _attachments(policies, root, places)
    lines += [f"{', '.join(batch.guests)}: not on {batch.to}" for batch in found]
    for line in lines:
        say(line)
    for refusal in made.refusals:
        say(f"{refusal.guest}: refused ({refusal.policy}): {refusal.reason}", err=True)
    idle = assign(snapshot.guests, policies).unmatched
    for policy in idle:
        say(no_guest(policy))
    missing = _say_unread(snapshot, policies)
    if made.refusals:
        return ExitCode.REFUSED
    if lines:
        return ExitCode.DIFFERS
    if len(idle) == len(policies) and not missing:
        why = "no policy names a guest that runs" if policies else "there is no policy"
        say(f"vsrtune: nothing was compared: {why}", err=True)
        return ExitCode.UNREAD
    if not missing:
        say("no drift: the host is as the policies say")
    return missing


def _planned(
    policies: tuple[Policy, ...],
    root: Path | None,
    trace_seconds: float,
    places: StatePlaces,
    *,
    reassert: bool = False,
) -> tuple[Snapshot, Plan]:
    from vsrtune.plan.full_plan import full_plan

    entries, steps = journalled(places.journal, root)
    snapshot = observe(root, places.uri, trace_seconds, policies, entries)
    return snapshot, full_plan(snapshot, policies, entries, reassert=reassert, steps=steps)


def _say_unread(snapshot: Snapshot, policies: tuple[Policy, ...]) -> ExitCode:
    """Print on standard error what could not be read of the policies' guests, and return the
    exit code."""
    from vsrtune.cli.main import complain

    missing = unread(snapshot, policies)
    for problem in missing:
        complain(problem)
    return ExitCode.UNREAD if missing else ExitCode.DONE


def _attachments(
    policies: tuple[Policy, ...], root: Path | None, places: StatePlaces
) -> tuple[Batch, ...]:
    """Switches that the policies ask for on this host; none on a recorded one."""
    if root is not None:
        return ()
    from vsrtune.cli import attachments

    if not attachments.concerned(policies, places.ledger):
        return ()
    return attachments.preview(attachments.by_policies(policies), places)
