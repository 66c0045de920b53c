"""``vsrtune group``: several guests that are one router."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vsrtune.cli.options import (
    ATTACH_LEDGER,
    GROUP_DIR,
    attach_ledger_option,
    check_written,
    journal_option,
    json_option,
    options,
    say,
    uri_option,
)
from vsrtune.core.errors import PolicyError, VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.group.parser import Group, parse
from vsrtune.observe.config_files import SUFFIXES, files_in, read_text
from vsrtune.policy.model import PolicyErrors

if TYPE_CHECKING:
    from vsrtune.attach.plan.model import AttachHostState, Switch
    from vsrtune.attach.transaction import Switcher
    from vsrtune.core.errors import VsrtuneError
    from vsrtune.group.parser import Group

F = TypeVar("F", bound=Callable[..., Any])

_groups_option = click.option(
    "--groups",
    type=click.Path(path_type=Path, file_okay=False),
    default=GROUP_DIR,
    show_default=True,
    envvar="VSRTUNE_GROUPS",
    help="Directory with group files (*.yaml).",
)
_dry_run_option = click.option("--dry-run", is_flag=True, help="Show the steps and do nothing.")


def _places(function: F) -> F:
    """Options for the ledger, the journal and the connection."""
    return options(attach_ledger_option, journal_option, uri_option)(function)


@click.group()
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

    Looks at the files alone, not at the host; `vsrtune group plan` does both.

    \b
    Exit codes: 0 all files are good, 2 at least one is not.
    """
    from vsrtune.cli.main import complain

    bad = False
    for path in files:
        errors = check_file(path)
        for error in errors:
            complain(error)
        if not errors:
            say(f"{path}: good")
        bad = bad or bool(errors)
    return ExitCode.WRONG if bad else ExitCode.DONE


@group.command()
@click.argument("name", metavar="GROUP")
@_groups_option
@_places
def plan(name: str, groups: Path, attach_ledger: Path, journal: Path, uri: str) -> int:
    """Show the steps that `create` would take.

    \b
    Exit codes: 0 shown, 1 refused, 2 the file is not good.
    """
    return _create(name, groups, attach_ledger, journal, uri, dry_run=True)


@group.command()
@click.argument("name", metavar="GROUP")
@_groups_option
@_places
def create(name: str, groups: Path, attach_ledger: Path, journal: Path, uri: str) -> int:
    """Make the running guests of GROUP one router.

    Of kind pvr: all get the same two devices, one on each side. Their interfaces are
    unplugged and plugged in again with the MACs of the first member. Members that are not
    there are made from the group's template, and started. Of kind msr: routers are
    unplugged and plugged in again behind the balancers, which get interfaces to them and
    must then load what `rules` prints. All routers must be configured as one. The router is
    interrupted meanwhile. A step that fails, or an interruption, is taken back.

    \b
    Exit codes: 0 done, 1 refused or failed, 2 the file is not good.
    """
    return _create(name, groups, attach_ledger, journal, uri, dry_run=False)


@group.command()
@click.argument("name", metavar="GROUP", required=False)
@options(json_option)
@_places
def status(name: str | None, as_json: bool, attach_ledger: Path, journal: Path, uri: str) -> int:
    """Show where the members of GROUP, or of all groups, are plugged in, and their frames.

    \b
    Exit codes: 0 shown, 1 there is no such group, 4 the host could not be read, or the
    ledger that is named does not exist.
    """
    import json

    from vsrtune.attach.host import LiveHost
    from vsrtune.attach.survey import known_origins, survey
    from vsrtune.cli import render
    from vsrtune.cli.options import observe
    from vsrtune.core.codec import encode
    from vsrtune.group import members as group_members
    from vsrtune.views import group_status

    check_written(attach_ledger, ATTACH_LEDGER)
    with contextlib.closing(LiveHost(uri)) as live:
        host = survey(live, known_origins(attach_ledger), journal)
    names = [name_of(name)] if name is not None else sorted(host.groups)
    members = {n: group_members.of_group(n, host) for n in names}
    guests = observe(None, uri, 0).guests if members else ()
    found = {n: group_status.places(origins, host, guests) for n, origins in members.items()}
    if as_json:
        click.echo(json.dumps([encode(p) for places in found.values() for p in places], indent=2))
    elif found:
        render.show([group_status.table(n, places) for n, places in found.items()])
    else:
        click.echo("No group was created on this host.")
    return ExitCode.DONE


@group.command()
@click.argument("name", metavar="GROUP")
@click.argument("balancer", metavar="[BALANCER]", required=False)
@click.option(
    "--routers",
    "count",
    metavar="N",
    type=click.IntRange(1, 99),
    help="For the first N routers, not for those that are plugged in now.",
)
@click.option("--without", metavar="ROUTER", multiple=True, help="For the others only.")
@_groups_option
@_places
def rules(
    name: str,
    balancer: str | None,
    count: int | None,
    without: tuple[str, ...],
    groups: Path,
    attach_ledger: Path,
    journal: Path,
    uri: str,
) -> int:
    """Print the nftables rules for a BALANCER of GROUP (kind msr), for nft -f in its guest.

    At their head the guest's devices are named, with their MACs. Without --routers they
    are for those that are plugged in now, and for all as long as GROUP is not created.

    \b
    Exit codes: 0 printed, 1 refused, 2 the file is not good.
    """
    from vsrtune.attach.host import LiveHost
    from vsrtune.attach.survey import known_origins, survey
    from vsrtune.group import msr_rules

    with contextlib.closing(LiveHost(uri)) as live:
        host = survey(live, known_origins(attach_ledger), journal)
    own = name_of(name)
    wanted = None if own in host.groups else load_group(name, groups)
    click.echo(msr_rules.of_group(own, wanted, host).text(balancer, count, without), nl=False)
    return ExitCode.DONE


@group.command()
@click.argument("name", metavar="GROUP")
@click.argument("count", metavar="N", type=click.IntRange(1, 256))
@_dry_run_option
@_places
def scale(
    name: str, count: int, dry_run: bool, attach_ledger: Path, journal: Path, uri: str
) -> int:
    """Keep the first N members of GROUP plugged in, and take the others off.

    Running guests only: a member that is started anew joins. The members of an msr are its
    routers, and its balancers must load what `rules` prints: after routers came, and
    before any go.

    \b
    Exit codes: 0 done or nothing to do, 1 refused or failed.
    """
    from vsrtune.group import scale as group_scale

    own = name_of(name)
    return _carry_out(
        lambda host: group_scale.scale(own, count, host), attach_ledger, journal, uri, dry_run
    )


@group.command()
@click.argument("name", metavar="GROUP")
@click.argument("member", metavar="MEMBER")
@_dry_run_option
@_places
def drain(
    name: str, member: str, dry_run: bool, attach_ledger: Path, journal: Path, uri: str
) -> int:
    """Take MEMBER's interfaces off; the others of GROUP get its flows.

    Drain a router of an msr only after its balancers have loaded what `rules --without
    MEMBER` prints. MEMBER joins again with `scale`, or when it is started anew.

    \b
    Exit codes: 0 done or nothing to do, 1 refused or failed.
    """
    from vsrtune.group import scale as group_scale

    own = name_of(name)
    return _carry_out(
        lambda host: group_scale.drain(own, member, host), attach_ledger, journal, uri, dry_run
    )


@group.command()
@click.argument("name", metavar="GROUP")
@click.option(
    "--keep-clones",
    is_flag=True,
    help="Leave members that `create` made as guests of their own, with MACs of their own.",
)
@_dry_run_option
@_places
def delete(
    name: str, keep_clones: bool, dry_run: bool, attach_ledger: Path, journal: Path, uri: str
) -> int:
    """Give every guest of GROUP what it had before, and remove the devices.

    Members that `create` made are ended and undefined, and the files that it made for them
    are removed.

    \b
    Exit codes: 0 done, 1 refused or failed.
    """
    from vsrtune.group import planner

    own = name_of(name)
    return _carry_out(
        lambda host: planner.delete(own, host, keep_clones=keep_clones),
        attach_ledger, journal, uri, dry_run,
    )  # fmt: skip


def _create(
    name: str, groups: Path, ledger: Path, journal: Path, uri: str, *, dry_run: bool
) -> int:
    from vsrtune.group import planner

    wanted = load_group(name, groups)
    return _carry_out(
        lambda host: planner.create(wanted, host), ledger, journal, uri, dry_run, wanted.template
    )


def _carry_out(
    choose: Callable[[AttachHostState], Switch],
    path: Path,
    journal: Path,
    uri: str,
    dry_run: bool,
    template: str = "",
) -> int:
    """Survey the host, plan, and do it unless it is a dry run."""
    from vsrtune.attach.survey import cloning, survey
    from vsrtune.cli import attachments

    with _opened(path, uri) as (switcher, live):
        if switcher.unfinished():
            if dry_run:
                click.echo("A switch was interrupted: the next one takes it back first.")
            elif code := attachments.recover(switcher):
                return code
        elif not dry_run:
            # A failure may concern another group, or something that this command removes.
            attachments.outcome(switcher.sweep())
        source = cloning(live, template) if template else None
        switch = choose(survey(live, switcher.origins(), journal, switcher.clones(), source))
        attachments.show(switch)
        failed: tuple[VsrtuneError, ...] = ()
        if not dry_run and (switch.steps or switch.leaves or switch.ended or switch.kept):
            swept = switcher.carry_out(switch)
            for text in swept.did if switch.ended else ():
                say(text)
            failed = swept.failed
    return attachments.complain(failed)


@contextlib.contextmanager
def _opened(path: Path, uri: str) -> Iterator[tuple[Switcher, Any]]:
    from vsrtune.attach.host import LiveHost
    from vsrtune.attach.ledger import AttachLedger
    from vsrtune.attach.transaction import Switcher
    from vsrtune.host.filesystem import boot_id

    host = LiveHost(uri)
    with contextlib.closing(host), AttachLedger.open(path) as opened:
        yield Switcher(host, opened, boot_id()), host


def load_group(word: str, directory: Path) -> Group:
    """The group of a file, or the group of that name in the directory. Raises PolicyErrors
    for errors in the file, VsrtuneError when there is no such group."""
    if _is_file(word):
        path = Path(word)
        return parse(read_text(path), str(path))
    for path in files_in([directory]):
        # One bad file must not hide a group in another.
        if path.stem == word:
            group = parse(read_text(path), str(path))
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


def check_file(path: Path) -> Sequence[PolicyError]:
    """Every error of one file; empty when the file is good."""
    try:
        parse(read_text(path), str(path))
    except PolicyErrors as caught:
        return caught.errors
    return ()


def name_of(word: str) -> str:
    """The name of the group in a file, or ``word`` itself. Raises PolicyErrors."""
    if _is_file(word):
        path = Path(word)
        return parse(read_text(path), str(path)).name
    return word


def _is_file(word: str) -> bool:
    return "/" in word or word.endswith(SUFFIXES)
