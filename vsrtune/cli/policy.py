# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune policy``: check files, print the schema, write a starting policy."""

from __future__ import annotations

from pathlib import Path

import click

from vsrtune.cli.options import (
    Commands,
    check_dirs,
    check_place,
    guest_names,
    journal_option,
    journalled,
    no_policies,
    observe,
    options,
    policies_option,
    root_option,
    running_guest,
    trace_option,
    uri_option,
)
from vsrtune.cli.render import complain, print_json, say
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.model.guest import Guest
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe import config_files
from vsrtune.observe.config_files import load_dirs
from vsrtune.policy.model import Policy
from vsrtune.policy.schema import SCHEMA


@click.group(cls=Commands)
def policy() -> None:
    """Check policy files; print their schema; write one to begin with."""


@policy.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@policies_option
def check(files: tuple[Path, ...], policy_dirs: tuple[Path, ...]) -> int:
    """Check policy FILES and name every error with its file and line.

    Without FILES, checks the policy directories as the daemon would read them, users of
    this host included. Looks at no guest; `vsrtune plan` does.

    \b
    Exit codes: 0 all files are good, 2 at least one is not, 4 a directory does not exist.
    """
    if not files:
        check_dirs(policy_dirs)
    paths = files or config_files.files_in(policy_dirs)
    if not paths:
        say(f"vsrtune: {no_policies(policy_dirs)}", err=True)
    # A file named by the operator may be a draft; the daemon is more careful.
    errors = [] if files else config_files.unsafe(paths)
    good, wrong = config_files.read_all(paths)
    errors += wrong
    if not files:
        errors += config_files.with_users(good)[1]
    complain(*errors)
    bad = {error.where.rpartition(":")[0] for error in errors} | {e.where for e in errors}
    asks = {policy.path: policy.asks for policy in good}
    for path in paths:
        if str(path) not in bad:
            empty = ", but it asks for nothing: remove profile: none, or write settings"
            say(f"{path}: good{'' if asks[str(path)] else empty}")
    return ExitCode.WRONG if errors else ExitCode.DONE


@policy.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors and CI."""
    print_json(SCHEMA)


@policy.command()
@click.argument("guest", shell_complete=guest_names)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this file, which must not exist, instead of standard output.",
)
@options(policies_option, root_option, trace_option, journal_option, uri_option)
def init(
    guest: str,
    output: Path | None,
    policy_dirs: tuple[Path, ...],
    root: Path | None,
    trace_seconds: float,
    journal: Path,
    uri: str,
) -> int:
    """Write a commented starting policy for GUEST, which runs on this host.

    GUEST is a name as `vsrtune show` lists it (qemu:NAME, proxmox:VMID or
    kubevirt:NAMESPACE/NAME for one that libvirt does not manage) or a UUID. The policy
    is planned before it is written, beside those that are there already: `vsrtune plan`
    refuses nothing of it on this host as it is now.

    \b
    Exit codes: 0 written, 1 no such guest, or the file exists, or another policy of that
    directory names the guest, 2 a policy that is there is wrong, or the file's directory
    does not exist, 4 the host could not be read.
    """
    # The planner, which `policy check` and `policy schema` need not load.
    from vsrtune.plan.starter_policy import start

    check_place(output)
    policies = load_dirs(policy_dirs)
    snapshot = observe(root, uri, trace_seconds, policies)
    entries, _ = journalled(journal, root)
    running = running_guest(snapshot, guest)
    if output is not None and _would_be_read(output, policy_dirs):
        _check_named(running, output, policies)
    made = start(
        snapshot,
        running,
        policies,
        {e.target: e.written for e in entries},
        no_realtime(root, snapshot),
    )
    if output is None:
        click.echo(made.text, nl=False)
        return ExitCode.DONE
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(made.text)
    except FileExistsError:
        raise VsrtuneError(
            "the file exists and is left as it is",
            where=str(output),
            hint="change it, or name a new one",
        ) from None
    read = _would_be_read(output, policy_dirs)
    move = "" if read else f"move it to {policy_dirs[-1]}, under a name that ends in .yaml, then "
    say(f"{output}: written; next: {move}vsrtune plan")
    return ExitCode.DONE


def _would_be_read(file: Path, policy_dirs: tuple[Path, ...]) -> bool:
    places = [directory.resolve() for directory in policy_dirs]
    return file.suffix in config_files.SUFFIXES and file.parent.resolve() in places


def _check_named(guest: Guest, output: Path, policies: tuple[Policy, ...]) -> None:
    """Raises VsrtuneError when a policy that would stand beside ``output`` names the guest: with
    both of them no daemon starts, or the guest is refused."""
    from vsrtune.policy.matching import Match, match

    for policy in policies:
        # Of two files of one name, in two directories, only one is read.
        beside = Path(policy.path).name != output.name
        if beside and match(policy, guest) is Match.EXACT:
            raise VsrtuneError(
                f"this policy names {guest.ref} already, and a guest has one",
                where=policy.at("guest"),
                hint="change this file, or move it away first; without -o, init prints the policy "
                "that it would write",
            )


def no_realtime(root: Path | None, snapshot: Snapshot) -> str:
    """Why this kernel would refuse fifo and rr; "" when it does not, or when that is unknown."""
    from vsrtune.doctor.facts.host import rt_groups
    from vsrtune.host.filesystem import LiveRoot
    from vsrtune.host.recorded import load

    host = LiveRoot() if root is None else load(root).root()
    where = rt_groups(host, snapshot.host.kernel)
    return f"the kernel has RT_GROUP_SCHED ({where}), so EPERM is likely" if where else ""
