"""``vsrtune show`` and ``vsrtune record``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vsrtune.actions import Plan
from vsrtune.cli_common import (
    check_guests,
    entries,
    journal_option,
    json_option,
    observe,
    options,
    policies_option,
    readable_policies,
    root_option,
    trace_option,
    uri_option,
)
from vsrtune.errors import VsrtuneError
from vsrtune.model import Snapshot

if TYPE_CHECKING:
    from vsrtune.report import Table


@click.command()
@click.argument("guests", nargs=-1)
@options(policies_option, json_option, root_option, trace_option, journal_option, uri_option)
def show(
    guests: tuple[str, ...],
    policy_dirs: tuple[Path, ...],
    as_json: bool,
    root: Path | None,
    trace_seconds: float,
    journal: Path,
    uri: str,
) -> None:
    """Show guests, threads, interfaces, CPUs and interrupts.

    GUESTS limits the output to these guests (qemu:NAME for one that libvirt does not
    manage). Column "mapped" says how sure the interface of a vhost worker is: exact
    (seen transmitting), order (creation order, counts agree), uncertain, or none. What
    somebody has changed since vsrtune set it is listed with who it was, as far as that
    can be known, and what the policy says of it.
    """
    snapshot = observe(root, uri, trace_seconds, readable_policies(policy_dirs))
    changed = Plan() if as_json or root is not None else _plan(snapshot, policy_dirs, journal)
    if guests:
        check_guests(snapshot, guests)
        snapshot = replace(snapshot, guests=tuple(g for g in snapshot.guests if g.ref in guests))
    if as_json:
        click.echo(snapshot.to_json())
        return
    from vsrtune import render, report
    from vsrtune.budget_use import measure
    from vsrtune.rootfs import LiveRoot

    budgets = measure(LiveRoot(), snapshot) if root is None else {}
    shown = {g.ref for g in snapshot.guests}
    drift = tuple(d for d in changed.drift if not guests or d.target.guest in shown)
    tables = [*report.snapshot_tables(snapshot, budgets), *report.drift_tables(drift)]
    queues = _queues(shown) if root is None else []
    render.show([*tables, *queues, *_moves(snapshot, root)])


def _queues(shown: set[str]) -> list[Table]:
    """What the daemon tells of adaptive queues."""
    from vsrtune.queue_status import read
    from vsrtune.report import Table

    rows: list[tuple[str, ...]] = [
        (q.guest, str(q.length), q.phase, str(q.changes), q.why) for q in read() if q.guest in shown
    ]
    heads = ("guest", "length", "phase", "changes", "why")
    return [Table("Adaptive queues, as the daemon keeps them", heads, rows)] if rows else []


def _plan(snapshot: Snapshot, policy_dirs: tuple[Path, ...], journal: Path) -> Plan:
    """What the daemon would plan; nothing where policies or journal cannot be read, of which
    other commands tell."""
    from vsrtune.full_plan import full_plan
    from vsrtune.policy_files import load_dirs

    try:
        return full_plan(snapshot, load_dirs(policy_dirs), entries(journal, None))
    except VsrtuneError:
        return Plan()


def _moves(snapshot: Snapshot, root: Path | None) -> list[Table]:
    """What the daemon has moved, if it has."""
    import time

    from vsrtune import load_file, report

    loads = load_file.load(snapshot.host.boot_id) if root is None else None
    if loads is None or not loads.moves:
        return []
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(loads.last_time))
    return [report.moves_table(loads.moves, loads.last_moves, when)]


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--note", default="", help="A remark to keep with the recording.")
@options(trace_option, uri_option)
def record(directory: Path, note: str, trace_seconds: float, uri: str) -> None:
    """Save what vsrtune sees of this host in DIRECTORY, which must be new or empty.

    `vsrtune show --root DIRECTORY` and `vsrtune plan --root DIRECTORY` then work on
    any machine. MAC addresses and UUIDs are replaced; names of guests and devices are
    kept, so read the files before you pass them on.
    """
    from vsrtune.record import record as save

    seen = save(directory, uri, trace_seconds=trace_seconds, note=note)
    click.echo(f"Recorded {len(seen.guests)} guests in {directory}.")
