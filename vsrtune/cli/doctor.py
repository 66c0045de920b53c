# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune doctor``: is this host fit for what vsrtune offers?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from vsrtune.attach.ledger import STEP
from vsrtune.attach.survey import known_origins
from vsrtune.cli.options import (
    attach_ledger_option,
    json_option,
    observe,
    options,
    policies_option,
    readable_policies,
    root_option,
    uri_option,
    wide_option,
)
from vsrtune.cli.render import print_json, say, show
from vsrtune.core.text import counted
from vsrtune.doctor import guest_checks, host_checks, module_checks
from vsrtune.doctor.facts.host import read_facts
from vsrtune.doctor.facts.module import read
from vsrtune.doctor.model import (
    Case,
    Finding,
    Severity,
    checks_in,
    exit_code,
    name_of,
    run,
    trap_of,
    worst,
)
from vsrtune.doctor.module_checks import ModuleFacts
from vsrtune.execute.ledger import read_pending
from vsrtune.host.filesystem import LiveRoot
from vsrtune.host.recorded import load
from vsrtune.views.tables import Table


@click.command()
@options(json_option, wide_option, policies_option, root_option, uri_option, attach_ledger_option)
def doctor(
    as_json: bool,
    wide: bool,
    policy_dirs: tuple[Path, ...],
    root: Path | None,
    uri: str,
    attach_ledger: Path,
) -> int:
    """Check whether this host is fit, and say what to do where it is not.

    Looks for every trap that is known: kernel settings, interrupts, other tuning
    software, queues, devices, priorities, cpuset partitions, the kernel module. Names the
    value that tells and where it was read, and ends with one sentence. Changes nothing.

    \b
    Exit codes: 0 fine, 1 at least one error, 3 at least one warning, 4 the host could not
    be read.
    """
    policies = readable_policies(policy_dirs)
    snapshot = observe(root, uri, 0, policies)
    host = LiveRoot() if root is None else load(root).root()
    case = Case(snapshot, read_facts(host, snapshot), policies)
    findings = check_all(case, None if root is not None else _module(attach_ledger))
    if as_json:
        told = {"worst": str(worst(findings)), "findings": findings}
        print_json(told)
    else:
        show([_table(findings)], wide=wide)
        click.echo("")
        say(summary(findings))
    return exit_code(findings)


def _module(ledger: Path) -> ModuleFacts:
    devices = tuple(origin.device.name for origin in known_origins(ledger))
    return read(devices, any(e.kind == STEP for e in read_pending(ledger)))


def _table(findings: tuple[Finding, ...]) -> Table:
    rows: list[tuple[str, ...]] = [
        (str(f.level), f.check, f.what, f.hint or "-", f.evidence or "-") for f in findings
    ]
    heads = ("", "check", "found", "what to do", "seen in")
    return Table("Checks", heads, rows, spare=("seen in",), text=("found", "what to do"))


def summary(findings: Sequence[Finding]) -> str:
    """What the findings come to, in one sentence."""
    bad = [f for f in findings if f.level in (Severity.ERROR, Severity.WARNING)]
    if not bad:
        return "No problem was found: nothing stands in a router's way on this host."
    counts = [(level, sum(f.level is level for f in bad)) for level in (*Severity,)[::-1]]
    told = " and ".join(counted(n, level) for level, n in counts if n)
    first = next((f.hint for f in bad if f.hint), "")
    return f"This host has {told}" + (f"; begin with: {first}" if first else ".")


OF_HOST = checks_in(host_checks) + checks_in(guest_checks)
OF_MODULE = checks_in(module_checks)


def traps() -> list[tuple[str, str]]:
    """Name and trap of each check, for the reference."""
    return [(name_of(check), trap_of(check)) for check in OF_HOST + OF_MODULE]


def check_all(case: Case, facts: module_checks.ModuleFacts | None) -> tuple[Finding, ...]:
    """Every finding, the most important first. ``facts`` is None for a recorded host, whose
    module is unknown."""
    found = run(OF_HOST, case)
    if facts is not None:
        found += run(OF_MODULE, facts)
    # Those of a level stay in the order of the checks.
    return tuple(sorted(found, key=lambda one: -one.level.rank))
