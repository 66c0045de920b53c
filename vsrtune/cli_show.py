"""``vsrtune show`` and ``vsrtune record``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from vsrtune.cli_common import json_option, observe, options, root_option, trace_option, uri_option
from vsrtune.errors import VsrtuneError


@click.command()
@click.argument("guests", nargs=-1)
@options(json_option, root_option, trace_option, uri_option)
def show(
    guests: tuple[str, ...], as_json: bool, root: Path | None, trace_seconds: float, uri: str
) -> None:
    """Show guests, threads, interfaces, CPUs and interrupts.

    GUESTS limits the output to these guests (qemu:NAME for one that libvirt does not
    manage). Column "mapped" says how sure the interface of a vhost worker is: exact
    (seen transmitting), order (creation order, counts agree), uncertain, or none.
    """
    snapshot = observe(root, uri, trace_seconds)
    if guests:
        missing = set(guests) - {g.ref for g in snapshot.guests}
        if missing:
            raise VsrtuneError(
                "no such guest is running", where=min(missing), hint="`vsrtune show` lists them"
            )
        snapshot = replace(snapshot, guests=tuple(g for g in snapshot.guests if g.ref in guests))
    if as_json:
        click.echo(snapshot.to_json())
        return
    from vsrtune import render, report
    from vsrtune.budget_use import measure
    from vsrtune.rootfs import LiveRoot

    budgets = measure(LiveRoot(), snapshot) if root is None else {}
    render.show(report.snapshot_tables(snapshot, budgets))


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
