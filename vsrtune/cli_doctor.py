"""``vsrtune doctor``: is this host fit for what vsrtune offers?"""

from __future__ import annotations

import json
from pathlib import Path

import click

from vsrtune.cli_common import attach_ledger_option, json_option, options


@click.command()
@options(json_option, attach_ledger_option)
def doctor(as_json: bool, attach_ledger: Path) -> int:
    """Check this host: the kernel module, its signature, lower devices, switches.

    \b
    Exit codes: 0 no problem, 1 at least one.
    """
    from vsrtune import render
    from vsrtune.attach import ORIGIN, STEP
    from vsrtune.attach_steps import origin_from
    from vsrtune.codec import encode
    from vsrtune.doctor_checks import Level, check_all
    from vsrtune.doctor_read import read
    from vsrtune.ledger import read_pending
    from vsrtune.report import Table

    entries = read_pending(attach_ledger)
    devices = tuple(origin_from(e.data).device.name for e in entries if e.kind == ORIGIN)
    findings = check_all(read(devices, any(e.kind == STEP for e in entries)))
    problems = sum(found.level is Level.PROBLEM for found in findings)
    if as_json:
        click.echo(json.dumps({"problems": problems, "findings": encode(findings)}, indent=2))
        return 1 if problems else 0
    rows: list[tuple[str, ...]] = [(str(f.level), f.check, f.what, f.hint or "-") for f in findings]
    title = f"{problems} problem{'s' * (problems != 1)}" if problems else "No problem found."
    render.show([Table(title, ("", "check", "found", "what to do"), rows)])
    return 1 if problems else 0
