"""Options and helpers that several subcommands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vsrtune.errors import VsrtuneError

if TYPE_CHECKING:
    from vsrtune.journal_records import Entry
    from vsrtune.model import Snapshot
    from vsrtune.policy import Policy
    from vsrtune.policy_match import Scope

F = TypeVar("F", bound=Callable[..., Any])

POLICY_DIR = Path("/etc/vsrtune/policies")
GROUP_DIR = Path("/etc/vsrtune/groups")
JOURNAL = Path("/var/lib/vsrtune/journal.jsonl")
ATTACH_LEDGER = Path("/var/lib/vsrtune/attach.jsonl")
URI = "qemu:///system"

_DIRECTORY = click.Path(path_type=Path, exists=True, file_okay=False)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
policies_option = click.option(
    "--policies",
    "policy_dirs",
    multiple=True,
    type=click.Path(path_type=Path),
    default=(POLICY_DIR,),
    show_default=True,
    envvar="VSRTUNE_POLICIES",
    help="Directory with policy files (*.yaml); may be given several times.",
)
journal_option = click.option(
    "--journal",
    type=click.Path(path_type=Path, dir_okay=False),
    default=JOURNAL,
    show_default=True,
    envvar="VSRTUNE_JOURNAL",
    help="Where the changes and their original values are written down.",
)
attach_ledger_option = click.option(
    "--attach-ledger",
    type=click.Path(path_type=Path, dir_okay=False),
    default=ATTACH_LEDGER,
    show_default=True,
    envvar="VSRTUNE_ATTACH_LEDGER",
    help="Where switches of attachments and the devices they made are written down.",
)
root_option = click.option(
    "--root",
    type=_DIRECTORY,
    envvar="VSRTUNE_ROOT",
    help="Look at a host recorded with `vsrtune record` instead of this one.",
)
trace_option = click.option(
    "--trace",
    "trace_seconds",
    type=click.FloatRange(0, 60),
    default=0.0,
    show_default=True,
    envvar="VSRTUNE_TRACE",
    help="Watch transmissions for this many seconds to see which worker serves which interface.",
)
uri_option = click.option(
    "--connect", "uri", default=URI, show_default=True, envvar="VSRTUNE_CONNECT",
    help="The libvirt connection.",
)  # fmt: skip


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Apply option decorators in the order in which help should list them."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def observe(
    root: Path | None,
    uri: str,
    trace_seconds: float,
    policies: Iterable[Policy] = (),
    ours: Iterable[Entry] = (),
) -> Snapshot:
    """This host, or the recorded one under ``root``. The plain QEMUs are shown that are root's,
    or of a user whom one of ``policies`` names or of whose guests something is among ``ours``."""
    scope = curious(policies, ours)
    if root is not None:
        from vsrtune.record import replay

        return replay(root, scope)
    from vsrtune.load_file import with_loads
    from vsrtune.observe import live_observer

    return with_loads(live_observer(uri, lambda: scope).observe(trace_seconds))


def curious(policies: Iterable[Policy] = (), ours: Iterable[Entry] = ()) -> Scope:
    """What an operator who looks wants to see: all that the policies make guests, and root's
    QEMUs, also those that no policy names yet."""
    from vsrtune.policy_match import scope

    refs = {entry.target.guest for entry in ours}
    return replace(scope(tuple(policies), refs), policies=None)


def readable_policies(dirs: tuple[Path, ...]) -> tuple[Policy, ...]:
    """The policies for those who can do without; none where they are wrong, of which other
    commands tell."""
    from vsrtune.policy_files import load_dirs

    try:
        return load_dirs(dirs)
    except VsrtuneError:
        return ()


def check_guests(snapshot: Snapshot, asked: Iterable[str]) -> None:
    """Raises VsrtuneError when one of the guests that an operator names does not run."""
    missing = set(asked) - {g.ref for g in snapshot.guests}
    if missing:
        raise VsrtuneError(
            "no such guest is running", where=min(missing), hint="`vsrtune show` lists them"
        )


def entries(journal: Path, root: Path | None) -> tuple[Entry, ...]:
    """What vsrtune has written on this host; nothing on a recorded one."""
    if root is not None:
        return ()
    from vsrtune.journal import read_entries
    from vsrtune.rootfs import boot_id

    return read_entries(journal, boot_id())


def load_policies(dirs: tuple[Path, ...]) -> tuple[Policy, ...]:
    """The policies; says on standard error when there are none."""
    from vsrtune.policy_files import load_dirs

    policies = load_dirs(dirs)
    if not policies:
        click.echo(f"vsrtune: {no_policies(dirs)}", err=True)
    return policies


def no_policies(dirs: tuple[Path, ...]) -> str:
    """What to do when there is no policy."""
    places = ", ".join(str(d) for d in dirs)
    return (
        f"no policy in {places}, so no guest is tuned; "
        "`vsrtune policy init GUEST` writes one, more are in /usr/share/vsrtune/policies; "
        "then try `vsrtune plan`"
    )
