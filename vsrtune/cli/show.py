# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune show`` and ``vsrtune record``."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import click

from vsrtune.cli import attachments, render
from vsrtune.cli.options import (
    StatePlaces,
    check_place,
    chosen,
    journal_option,
    journalled,
    lasting,
    look_options,
    observe,
    options,
    places_options,
    readable_policies,
    trace_option,
    unread,
    uri_option,
)
from vsrtune.cli.render import print_json, say
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.core.text import printable
from vsrtune.daemon.guard import STARVED_PATH
from vsrtune.daemon.pass_result import guest_states
from vsrtune.execute.journal import last_change
from vsrtune.execute.jsonl_log import holder
from vsrtune.host.filesystem import HostRoot, LiveRoot, boot_id
from vsrtune.host.state_files import told_by_daemon
from vsrtune.model.daemon_state import DaemonState, PlanState, Starved, Unmade
from vsrtune.model.guest import SchedClass
from vsrtune.model.journal_records import Entry
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot, SnapshotSlice
from vsrtune.model.stepdown import Steps
from vsrtune.observe import samples
from vsrtune.observe.config_files import load_dirs
from vsrtune.observe.recording import record as save
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.matching import heeded
from vsrtune.policy.model import Policy
from vsrtune.views import page_data, tables
from vsrtune.views.top_frame import Frame, make_frame
from vsrtune.views.top_tables import bottleneck_table

# The least time in which loads and lost frames are counted.
_SECONDS = 1.0


@click.command()
@look_options
@options(trace_option, journal_option, uri_option)
def show(
    guests: tuple[str, ...],
    policy_dirs: tuple[Path, ...],
    as_json: bool,
    wide: bool,
    root: Path | None,
    trace_seconds: float,
    journal: Path,
    uri: str,
) -> None:
    """Show guests, threads, interfaces, CPUs and interrupts.

    Column "mapped" says how sure the interface of a vhost worker is: exact (seen
    transmitting), order (creation order, counts agree), uncertain, or none. The stage
    that limits each guest is judged over a second; `vsrtune top` looks longer. What
    somebody has changed since vsrtune set it is listed with who it was, as far as that can
    be known, and what the policy says of it.

    \b
    Exit codes: 0 shown, 1 no such guest, 4 the host could not be read.
    """
    host = observe(root, uri, trace_seconds, readable_policies(policy_dirs))
    snapshot = chosen(host, guests)
    if as_json:
        click.echo(snapshot.to_json())
        return

    if root is not None:
        render.show(tables.snapshot_tables(snapshot), wide=wide)
        return

    plan = Plan()
    # Other commands report policies and journals that cannot be read.
    with contextlib.suppress(VsrtuneError):
        entries, stepped = journalled(journal, root)
        entries = lasting(entries, host)
        plan = full_plan(host, load_dirs(policy_dirs), entries, steps=stepped)
    shown = frozenset(g.ref for g in snapshot.guests)
    steps = tables.step_table(s for s in plan.skipped if s.guest in shown)
    drift = tables.drift_table(d for d in plan.drift if not guests or d.target.guest in shown)
    frame = measure(LiveRoot(), host, shown, _SECONDS)
    # Without those of whose path nothing is full.
    limited = replace(frame, bottlenecks=tuple(b for b in frame.bottlenecks if b.where))
    render.show(
        [
            *tables.filled(steps, tables.starved_table(told_by_daemon(STARVED_PATH, Starved))),
            *tables.snapshot_tables(snapshot, frame.budgets),
            *tables.filled(bottleneck_table(limited), drift),
        ],
        wide=wide,
    )


@click.command()
@look_options
@places_options
def status(
    guests: tuple[str, ...],
    policy_dirs: tuple[Path, ...],
    as_json: bool,
    wide: bool,
    root: Path | None,
    places: StatePlaces,
) -> int:
    """Show on one screen the daemon, the guests, what is wrong, and the last change.

    Looks at the host as it is now, whether or not the daemon runs. Guests that need
    somebody come first; `vsrtune verify` names every setting that differs. While a policy
    is wrong, no guest is judged. --json has the fields of the daemon's /status.json.

    \b
    Exit codes: 0 nothing is wrong, 1 no such guest, 2 a policy is wrong, 3 something is not as
    the policies say, 4 not all guests could be looked at.
    """
    failure: VsrtuneError | None = None
    policies: tuple[Policy, ...] = ()
    try:
        policies = load_dirs(policy_dirs)
    except VsrtuneError as error:
        failure = error
    entries, steps = journalled(places.journal, root)
    host = observe(root, places.uri, 0, policies, entries)
    shown = chosen(host, guests)
    if failure is None:
        state = current_state(host, shown, policies, entries, steps)
    else:
        # How the guests should be is not known; a daemon that runs keeps the older policies.
        state = DaemonState(shown, reload_success=False, failure=str(failure))
    if root is None:
        state = replace(state, starved=told_by_daemon(STARVED_PATH, Starved))
    page = page_data.status_page(state)
    if failure is None:
        page["problems"] += _elsewhere(policies, root, shown, places, guests)
    if as_json:
        print_json(page)
    else:
        daemon, change = (
            ("a recorded host", "not recorded")
            if root is not None
            else _journal_says(places.journal)
        )
        render.show(page_data.screen(page, daemon, change), wide=wide)
    if failure is not None:
        return failure.exit_code
    if unread(host, policies):
        return ExitCode.UNREAD
    return ExitCode.DIFFERS if page_data.wrong(page) else ExitCode.DONE


def current_state(
    host: Snapshot,
    shown: Snapshot,
    policies: Sequence[Policy],
    entries: Sequence[Entry],
    steps: Steps,
) -> DaemonState:
    """The state that a daemon would have after a pass over ``host`` in which it changes nothing, of
    the guests that are ``shown``."""
    made = full_plan(host, policies, lasting(entries, host), steps=steps)
    refs = frozenset(guest.ref for guest in shown.guests)
    if len(refs) < len(host.guests):
        made = made.about(refs)
    differs = Counter(action.target.guest for action in made.actions)
    observed = SnapshotSlice(shown)
    return DaemonState(
        replace(shown, problems=heeded(host, policies)),
        guest_states(observed, made, policies, differs, {}, steps),
        policies=len(policies),
        drifts=made.drift,
        plan=PlanState.after(made, tuple(Unmade(action, "") for action in made.actions)),
    )


def _elsewhere(
    policies: Sequence[Policy],
    root: Path | None,
    shown: Snapshot,
    places: StatePlaces,
    names: Collection[str],
) -> list[dict[str, str]]:
    """Problems of guests that are not on the attachment that their policy asks for."""
    try:
        found = attachments.asked(policies, root, shown, places, names)
    except VsrtuneError as error:
        return [{"where": "attachments", "what": printable(str(error))}]
    return [{"where": printable(who), "what": what} for who, what in attachments.wrong(found)]


def _journal_says(journal: Path) -> tuple[str, str]:
    """Who keeps the host tuned, and the last change."""
    process = holder(journal)
    daemon = f"{process} runs" if process else "does not run: systemctl start vsrtune"
    found = last_change(journal, boot_id())
    if found is None:
        return daemon, ""
    at, what = found
    return daemon, f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}: {what}"


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--note", default="", help="A remark to keep with the recording.")
@options(trace_option, uri_option)
def record(file: Path, note: str, trace_seconds: float, uri: str) -> None:
    """Save what vsrtune sees of this host in FILE, which must be new.

    `vsrtune show --root FILE` and `vsrtune plan --root FILE` then work on any machine.
    MAC addresses and UUIDs are replaced; names of guests and devices are kept, so read
    the file before you pass it on.

    \b
    Exit codes: 0 recorded, 1 something failed, or the file exists, 2 its directory does not.
    """
    check_place(file)
    with render.patience("recording the host"):
        snapshot = save(file, uri, trace_seconds=trace_seconds, note=note)
    say(f"Recorded {len(snapshot.guests)} guests in {file}.")


def measure(
    root: HostRoot,
    host: Snapshot,
    shown: frozenset[str],
    least_seconds: float,
    clock: Callable[[], int] = time.monotonic_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> Frame:
    """What the guests (refs) that are ``shown`` do in a time: the longest period of a budget on the
    host, at least ``least_seconds``. ``clock`` gives nanoseconds."""
    threads = (t.sched for g in host.guests for t in g.threads)
    periods = [s.period_ns / 1e9 for s in threads if s.cls is SchedClass.DEADLINE]
    before = samples.take(root, host, clock)
    if shown:
        sleep(max([least_seconds, *periods]))
    return make_frame(before, samples.take(root, host, clock), only=shown)
