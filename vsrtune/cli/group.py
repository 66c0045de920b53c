# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune group``: several guests that are one router."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from vsrtune.attach.plan.model import AttachHostState, Switch
from vsrtune.attach.survey import survey, template_of
from vsrtune.cli import attachments
from vsrtune.cli.options import (
    ATTACH_LEDGER,
    Commands,
    StatePlaces,
    check_written,
    dry_run_option,
    group_names,
    groups_option,
    guest_names,
    json_option,
    observe,
    places_options,
    wide_option,
)
from vsrtune.cli.render import complain, print_json, say, show
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.daemon.group_health import GROUPS_PATH
from vsrtune.group import clone_plan, msr_rules, planner
from vsrtune.group import members as group_members
from vsrtune.group import scale as group_scale
from vsrtune.group.parser import Group, parse
from vsrtune.host.state_files import told_by_daemon
from vsrtune.model.daemon_state import GroupGuest
from vsrtune.observe.config_files import SUFFIXES, files_in, read_text
from vsrtune.policy.model import PolicyErrors
from vsrtune.views import group_status


def name_of(word: str) -> str:
    """The name of the group in a file, or ``word`` itself. Raises PolicyErrors."""
    return _read(Path(word)).name if _is_file(word) else word


def _named(_context: click.Context, _argument: click.Parameter, word: str | None) -> str | None:
    return name_of(word) if word is not None else None


_file_argument = click.argument("word", metavar="GROUP", shell_complete=group_names)
_name_argument = click.argument(
    "name", metavar="GROUP", callback=_named, shell_complete=group_names
)


@click.group(cls=Commands)
def group() -> None:
    """Make several guests one router, and guests again.

    Of two kinds: Parallel Virtual Routers (pvr), and the multistage router (msr), which has
    balancers in front. GROUP is a file, or the name of one in /etc/vsrtune/groups without
    its .yaml; for a group that is there, its name alone does.
    """


@group.command()
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)
def check(files: tuple[Path, ...]) -> int:
    """Check group FILES and name every error with its file and line.

    Looks at the files alone, not at the host; `vsrtune group create --dry-run` does both.

    \b
    Exit codes: 0 all files are good, 2 at least one is not.
    """
    code = ExitCode.DONE
    for path in files:
        try:
            _read(path)
        except PolicyErrors as errors:
            complain(errors)
            code = ExitCode.WRONG
        else:
            say(f"{path}: good")
    return code


@group.command()
@_file_argument
@groups_option
@dry_run_option
@places_options
def create(word: str, groups: Path, dry_run: bool, places: StatePlaces) -> int:
    """Make the running guests of GROUP one router.

    Of kind pvr: all get the same two devices, one on each side. Their interfaces are
    unplugged and plugged in again with the MACs of the first member. Members that are not
    there are made from the group's template, and started. Of kind msr: routers are
    unplugged and plugged in again behind the balancers, which get interfaces to them and
    must then load what `rules` prints. All routers must be configured as one. The router is
    interrupted meanwhile. A step that fails, or an interruption, is taken back.

    \b
    Exit codes: 0 done, 1 refused or failed, 2 the file is not good, 4 the host could not be
    read.
    """
    wanted = load_group(word, groups)
    return _carry_out(
        wanted.name, lambda host: planner.create(wanted, host), places, dry_run, wanted.template
    )


@group.command()
@click.argument(
    "name", metavar="GROUP", required=False, callback=_named, shell_complete=group_names
)
@json_option
@wide_option
@places_options
def status(name: str | None, as_json: bool, wide: bool, places: StatePlaces) -> int:
    """Show where the members of GROUP, or of all groups, are plugged in, and their frames.

    Of a group whose file has `health`, also what the daemon says of its routers and
    balancers.

    \b
    Exit codes: 0 shown, 1 there is no such group, 4 the host could not be read, or the
    ledger that is named does not exist.
    """
    check_written(places.ledger, ATTACH_LEDGER)
    host = attachments.look(places)
    names = [name] if name is not None else sorted(host.groups)
    members = {n: group_members.of_group(n, host) for n in names}
    guests = observe(None, places.uri, 0).guests if members else ()
    watched = told_by_daemon(GROUPS_PATH, GroupGuest)
    found = {n: group_status.places(of, host, guests, watched) for n, of in members.items()}
    if as_json:
        print_json([place for rows in found.values() for place in rows])
    elif found:
        show([group_status.table(n, rows) for n, rows in found.items()], wide=wide)
    else:
        click.echo("No group was created on this host.")
    return ExitCode.DONE


@group.command()
@_file_argument
@click.argument("balancer", metavar="[BALANCER]", required=False, shell_complete=guest_names)
@click.option(
    "--routers",
    "count",
    metavar="N",
    type=click.IntRange(1, 99),
    help="For the first N routers, not for those that are plugged in now.",
)
@click.option(
    "--without",
    metavar="ROUTER",
    multiple=True,
    shell_complete=guest_names,
    help="For the others only.",
)
@groups_option
@places_options
def rules(
    word: str,
    balancer: str | None,
    count: int | None,
    without: tuple[str, ...],
    groups: Path,
    places: StatePlaces,
) -> int:
    """Print the nftables rules for a BALANCER of GROUP (kind msr), for nft -f in its guest.

    At their head the guest's devices are named, with their MACs. Without --routers they
    are for those that are plugged in now, and for all as long as GROUP is not created.

    \b
    Exit codes: 0 printed, 1 refused, 2 the file is not good, 4 the host could not be read.
    """
    name, host = name_of(word), attachments.look(places)
    _check_libvirt(name, host, places.uri)
    wanted = None if name in host.groups else load_group(word, groups)
    click.echo(msr_rules.of_group(name, wanted, host).text(balancer, count, without), nl=False)
    return ExitCode.DONE


@group.command()
@_name_argument
@click.argument("count", metavar="N", type=click.IntRange(1, 256))
@dry_run_option
@places_options
def scale(name: str, count: int, dry_run: bool, places: StatePlaces) -> int:
    """Keep the first N members of GROUP plugged in, and take the others off.

    Running guests only: a member that is started anew joins. The members of an msr are its
    routers, and its balancers must load what `rules` prints: after routers came, and
    before any go.

    \b
    Exit codes: 0 done or nothing to do, 1 refused or failed, 4 the host could not be read.
    """
    return _carry_out(name, lambda host: group_scale.scale(name, count, host), places, dry_run)


@group.command()
@_name_argument
@click.argument("member", metavar="MEMBER", shell_complete=guest_names)
@dry_run_option
@places_options
def drain(name: str, member: str, dry_run: bool, places: StatePlaces) -> int:
    """Take MEMBER's interfaces off; the others of GROUP get its flows.

    Drain a router of an msr only after its balancers have loaded what `rules --without
    MEMBER` prints. MEMBER joins again with `scale`, or when it is started anew.

    \b
    Exit codes: 0 done or nothing to do, 1 refused or failed, 4 the host could not be read.
    """
    return _carry_out(name, lambda host: group_scale.drain(name, member, host), places, dry_run)


@group.command()
@_name_argument
@click.option(
    "--keep-clones",
    is_flag=True,
    help="Leave members that `create` made as guests of their own, with MACs of their own.",
)
@dry_run_option
@places_options
def delete(name: str, keep_clones: bool, dry_run: bool, places: StatePlaces) -> int:
    """Give every guest of GROUP what it had before, and remove the devices.

    Members that `create` made are ended and undefined, and the files that it made for them
    are removed.

    \b
    Exit codes: 0 done, 1 refused or failed, 4 the host could not be read.
    """
    return _carry_out(
        name, lambda host: planner.delete(name, host, keep_clones=keep_clones), places, dry_run
    )


def _carry_out(
    name: str,
    choose: Callable[[AttachHostState], Switch],
    places: StatePlaces,
    dry_run: bool,
    template: str = "",
) -> int:
    """Survey the host, plan for the group, and do it unless it is a dry run."""
    with attachments.opened(places) as (switcher, live):
        if switcher.unfinished():
            if dry_run:
                click.echo("A switch was interrupted: the next one takes it back first.")
            elif code := attachments.recover(switcher):
                return code
        elif not dry_run:
            # A failure may concern another group, or something that this command removes.
            attachments.outcome(switcher.sweep())
        source = template_of(live, template) if template else None
        host = survey(live, switcher.origins(), places.journal, switcher.clones(), source)
        _check_libvirt(name, host, live.uri)
        switch = choose(host)
        attachments.show(switch)
        failed: tuple[VsrtuneError, ...] = ()
        if not dry_run and (switch.steps or switch.leaves or switch.ended or switch.kept):
            swept = attachments.carry(switcher, switch)
            attachments.tell_of_boot(switch)
            for text in swept.did if switch.ended else ():
                say(text)
            failed = swept.failed
    return attachments.complain(failed)


def _check_libvirt(name: str, host: AttachHostState, uri: str) -> None:
    """Raises VsrtuneError when guests of the group are those of another libvirt than ``uri``, to
    which they seem not to run."""
    for one in (*host.groups.get(name, ()), *clone_plan.of_group(name, host)):
        if one.uri not in ("", uri):
            raise VsrtuneError(
                "guests of the group are those of another libvirt",
                where=uri,
                hint=f"--connect {one.uri}",
            )


def load_group(word: str, directory: Path) -> Group:
    """The group of a file, or the group of that name in the directory. Raises PolicyErrors
    for errors in the file, VsrtuneError when there is no such group."""
    if _is_file(word):
        return _read(Path(word))
    for path in files_in([directory]):
        # One bad file must not hide a group in another.
        if path.stem == word:
            group = _read(path)
            if group.name == word:
                return group
            raise VsrtuneError(
                f"the group in it is called {group.name}", where=group.at("group", "name"),
                hint=f"call the file {group.name}.yaml",
            )  # fmt: skip
    raise VsrtuneError(
        f"there is no file {directory / word}.yaml",
        where=word,
        hint="name a file, or write the group there (docs/groups.md)",
    )


def _read(path: Path) -> Group:
    return parse(read_text(path), str(path))


def _is_file(word: str) -> bool:
    return "/" in word or word.endswith(SUFFIXES)
