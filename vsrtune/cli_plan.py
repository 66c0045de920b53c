"""``vsrtune plan`` and ``vsrtune verify``: look, compare, change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vsrtune import report
from vsrtune.cli_common import (
    attach_ledger_option,
    entries,
    journal_option,
    json_option,
    load_policies,
    observe,
    options,
    policies_option,
    root_option,
    trace_option,
    uri_option,
)

if TYPE_CHECKING:
    from vsrtune.attach_wishes import Batch
    from vsrtune.policy import Policy


@click.command()
@options(
    policies_option,
    json_option,
    root_option,
    trace_option,
    journal_option,
    attach_ledger_option,
    uri_option,
)
def plan(
    policy_dirs: tuple[Path, ...],
    as_json: bool,
    root: Path | None,
    trace_seconds: float,
    journal: Path,
    attach_ledger: Path,
    uri: str,
) -> int:
    """Show what the policies would change, and why.

    Lists every change, every setting that is left as it is with the reason, and what
    is refused. `vsrtune apply` carries out exactly this plan. Switches of attachments
    stand first, and are in no stored plan (--json).

    \b
    Exit codes: 0 a plan could be made, 2 a policy is wrong or refused.
    """
    from vsrtune import plan_json, render
    from vsrtune.full_plan import full_plan

    policies = load_policies(policy_dirs)
    ours = entries(journal, root)
    snapshot = observe(root, uri, trace_seconds, policies, ours)
    # An operator who asks for a plan asks for the policies: pins set by hand since
    # the last apply are in it, as they are after `systemctl reload vsrtune`.
    made = full_plan(snapshot, policies, ours, reassert=True)
    if as_json:
        click.echo(plan_json.dumps(made, snapshot.host.boot_id))
        return 2 if made.refusals else 0
    found = _attachments(policies, root, uri, attach_ledger, journal)
    if found:
        from vsrtune.attach_show import table

        render.show([table(found)])
    render.show(report.plan_tables(made))
    return 2 if made.refusals or any(batch.switch is None for batch in found) else 0


@click.command()
@options(
    policies_option,
    root_option,
    trace_option,
    journal_option,
    attach_ledger_option,
    uri_option,
)
def verify(
    policy_dirs: tuple[Path, ...],
    root: Path | None,
    trace_seconds: float,
    journal: Path,
    attach_ledger: Path,
    uri: str,
) -> int:
    """Exit 1 when the host is not what the policies say.

    Names every setting that differs, those included that an operator changed by hand
    and that the daemon therefore leaves alone.

    \b
    Exit codes: 0 no difference, 1 differences, 2 a policy is wrong or refused.
    """
    from vsrtune.full_plan import full_plan

    policies = load_policies(policy_dirs)
    ours = entries(journal, root)
    snapshot = observe(root, uri, trace_seconds, policies, ours)
    made = full_plan(snapshot, policies, ours)
    lines = report.drift_lines(made.actions, made.skipped)
    found = _attachments(policies, root, uri, attach_ledger, journal)
    lines += [f"{', '.join(batch.guests)}: not on {batch.to}" for batch in found]
    for line in lines:
        click.echo(line)
    for refusal in made.refusals:
        click.echo(f"{refusal.guest}: refused ({refusal.policy}): {refusal.reason}", err=True)
    if made.refusals:
        return 2
    if not lines:
        click.echo("no drift: the host is as the policies say")
    return 1 if lines else 0


def _attachments(
    policies: tuple[Policy, ...], root: Path | None, uri: str, ledger: Path, journal: Path
) -> tuple[Batch, ...]:
    """Switches that the policies ask for on this host; a recorded one has none."""
    if root is not None:
        return ()
    from vsrtune import attach_show

    if not attach_show.concerned(policies, ledger):
        return ()
    return attach_show.preview(attach_show.asked(policies), uri, ledger, journal)
