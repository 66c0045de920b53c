# SPDX-License-Identifier: GPL-2.0-or-later
"""Options and helpers that several subcommands share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from vsrtune.cli.render import patience, say
from vsrtune.core.errors import InputError, ObserveError, VsrtuneError
from vsrtune.core.text import parse_time

if TYPE_CHECKING:
    from vsrtune.model.guest import Guest
    from vsrtune.model.journal_records import Entry
    from vsrtune.model.snapshot import Snapshot
    from vsrtune.model.stepdown import Steps
    from vsrtune.model.targets import Target
    from vsrtune.policy.matching import QemuFilter
    from vsrtune.policy.model import Policy

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

POLICY_DIR = Path("/etc/vsrtune/policies")
GROUP_DIR = Path("/etc/vsrtune/groups")
JOURNAL = Path("/var/lib/vsrtune/journal.jsonl")
ATTACH_LEDGER = Path("/var/lib/vsrtune/attach.jsonl")
URI = "qemu:///system"


class Commands(click.Group):
    """A group of commands that says which one a misspelt word may mean."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), 1)
            if near:
                error.message += f" Did you mean {near[0]}?"
            raise


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Apply option decorators in the order in which help should list them."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


class Duration(click.ParamType):
    """A time between two limits in seconds: ``5s``, ``250ms``; a number alone is of seconds."""

    name = "time"

    def __init__(self, least: float, most: float) -> None:
        self._least = least
        self._most = most

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        text = str(value).strip()
        try:
            seconds = parse_time(f"{text}s" if text[-1:].isdecimal() else text) / 1e9
        except VsrtuneError as error:
            self.fail(str(error), param, ctx)
        if not self._least <= seconds <= self._most:
            self.fail(f"{text} is not between {self._least:g}s and {self._most:g}s", param, ctx)
        return seconds


def guest_names(ctx: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Completion: the guests of this host, or of the one recorded in --root. Names that a shell
    would not take as they are, which any user's process can have, are not offered."""
    import shlex

    from vsrtune.host.filesystem import LiveRoot
    from vsrtune.observe.qemu_processes import ProcessTable

    try:
        if ctx.params.get("root") is not None:
            names = [guest.ref for guest in observe(ctx.params["root"], URI, 0).guests]
        else:
            names = [
                p.args.name if p.by_libvirt else ":".join(p.named[:2])
                for p in ProcessTable().scan(LiveRoot()).qemus
            ]
    except (VsrtuneError, OSError):
        return []
    safe = sorted({name for name in names if shlex.quote(name) == name})
    return [CompletionItem(name) for name in safe if name.startswith(begun)]


def files_or_guests(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Completion: guests, and files, which the shell knows. In bash a file's item takes what
    came before it away."""
    return [CompletionItem(begun, type="file"), *guest_names(ctx, param, begun)]


def group_names(ctx: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Completion: the groups of the directory of groups, and files."""
    from vsrtune.observe.config_files import files_in

    try:
        names = [path.stem for path in files_in([ctx.params.get("groups") or GROUP_DIR])]
    except VsrtuneError:
        names = []
    found = [CompletionItem(name) for name in names if name.startswith(begun)]
    return [CompletionItem(begun, type="file"), *found]


class _Directory(click.Path):
    """A directory. Path takes an empty name, that of an unset variable, for the current one. In a
    list of several, an empty one is that of no directory."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [name for name in super().split_envvar_value(rv) if name] or [""]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name is empty; name a directory, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_DIRECTORY = _Directory(path_type=Path, file_okay=False)

dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show what would be done, and do nothing."
)
verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Show every change, and every setting left as it is."
)
wide_option = click.option(
    "--wide", is_flag=True, help="Cut and wrap nothing, however narrow the terminal is."
)
guest_option = click.option(
    "--guest",
    "guests",
    multiple=True,
    metavar="GUEST",
    shell_complete=guest_names,
    help="Only this guest, as `vsrtune show` names it; may be given several times.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
policies_option = click.option(
    "--policies",
    "policy_dirs",
    multiple=True,
    type=_DIRECTORY,
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
groups_option = click.option(
    "--groups",
    type=_DIRECTORY,
    default=GROUP_DIR,
    show_default=True,
    envvar="VSRTUNE_GROUPS",
    help="Directory with group files (*.yaml).",
)
root_option = click.option(
    "--root",
    type=_FILE,
    envvar="VSRTUNE_ROOT",
    help="Look at a host recorded with `vsrtune record` instead of this one.",
)
trace_option = click.option(
    "--trace",
    "trace_seconds",
    type=Duration(0, 60),
    default="0s",
    show_default=True,
    metavar="TIME",
    envvar="VSRTUNE_TRACE",
    help="Watch transmissions this long to see which worker serves which interface.",
)


def _local(_context: click.Context, _option: click.Parameter, uri: str) -> str:
    """Refuse other hosts, and transports for which libvirt starts a program that the URI
    names."""
    scheme, _, rest = uri.partition("://")
    if scheme.partition("+")[2].lower() not in ("", "unix") or rest.partition("/")[0]:
        raise click.BadParameter(
            f"{uri} leads to another host or to a program; vsrtune tunes the host that it "
            f"runs on: {URI}"
        )
    return uri


uri_option = click.option(
    "--connect", "uri", default=URI, show_default=True, envvar="VSRTUNE_CONNECT",
    callback=_local, help="The libvirt connection.",
)  # fmt: skip


def look_options(function: F) -> F:
    """The options of every command that looks at a host and changes nothing."""
    return options(guest_option, json_option, wide_option, policies_option, root_option)(function)


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Where vsrtune writes down what it does on this host, and the libvirt connection."""

    journal: Path
    ledger: Path
    uri: str


def places_options(function: Callable[..., T]) -> Callable[..., T]:
    """The options --journal, --attach-ledger and --connect, as one argument ``places``."""

    @options(journal_option, attach_ledger_option, uri_option)
    @functools.wraps(function)
    def command(*args: Any, journal: Path, attach_ledger: Path, uri: str, **others: Any) -> T:
        return function(*args, places=StatePlaces(journal, attach_ledger, uri), **others)

    return command


def observe(
    root: Path | None,
    uri: str,
    trace_seconds: float,
    policies: Iterable[Policy] = (),
    entries: Iterable[Entry] = (),
) -> Snapshot:
    """A snapshot of this host, or of the one recorded in ``root``. It shows the plain QEMUs of
    root, of users whom ``policies`` name, and of users with a guest among ``entries``.
    Raises ObserveError when there is no host."""
    qemu_filter = curious_filter(policies, entries)
    if root is not None:
        from vsrtune.observe.recording import replay

        return readable(replay(root, qemu_filter), root)
    from vsrtune.observe.load import with_loads
    from vsrtune.observe.observer import live_observer

    traced = f", and watching transmissions for {trace_seconds:g}s" if trace_seconds else ""
    with patience(f"looking at the host{traced}"):
        seen = with_loads(live_observer(uri, lambda: qemu_filter).observe(trace_seconds))
    return readable(seen, root)


def readable(snapshot: Snapshot, root: Path | None) -> Snapshot:
    """``snapshot``. Raises ObserveError when it shows no CPU: then nothing in it can be judged."""
    if snapshot.host.online:
        return snapshot
    if root is None:
        raise ObserveError(
            "no online CPU could be read", where="/sys/devices/system/cpu", hint="mount sysfs"
        )
    from vsrtune.host.recorded import HINT

    raise ObserveError(
        "no host is recorded here: it shows no CPU",
        where=str(root),
        hint=HINT,
    )


def unread(snapshot: Snapshot, policies: Iterable[Policy]) -> tuple[ObserveError, ...]:
    """Reasons why guests that the policies name may run without being in the snapshot, or what
    they ask for was not looked at."""
    from vsrtune.policy.matching import needs_libvirt

    wanted = list(policies)
    # Guests that no policy names do not count here.
    libvirt = needs_libvirt((), wanted)
    return tuple(
        ObserveError(
            f"guests that the policies name could not be observed whole: {problem.what}",
            where=problem.reader,
            hint="`vsrtune show` lists all that could not be read",
        )
        for problem in snapshot.problems
        if wanted
        and (
            problem.reader in ("proc", "net", "irq", "sched")
            or problem.reader.startswith("guest ")
            or (libvirt and problem.reader in ("libvirt", "domain"))
        )
    )


def check_written(path: Path, default: Path) -> None:
    """Raises ObserveError when an operator names a journal or ledger that does not exist.

    The default one need not exist: a host on which vsrtune has changed nothing has none.
    """
    if path != default and not path.exists():
        raise ObserveError(
            "the file does not exist, so it is not known what vsrtune has changed",
            where=str(path),
            hint=f"name the file that was used when it was changed (without the option: {default})",
        )


def curious_filter(policies: Iterable[Policy] = (), entries: Iterable[Entry] = ()) -> QemuFilter:
    """The filter of commands that show: everything that the policies make guests, and root's
    QEMUs, even those that no policy names yet."""
    from vsrtune.policy.matching import qemu_filter

    refs = {entry.target.guest for entry in entries}
    return replace(qemu_filter(tuple(policies), refs), policies=None)


def readable_policies(dirs: tuple[Path, ...]) -> tuple[Policy, ...]:
    """The policies, for commands that can do without; none when they are wrong, which other
    commands report."""
    from vsrtune.observe.config_files import load_dirs

    try:
        return load_dirs(dirs)
    except VsrtuneError:
        return ()


def running_guest(snapshot: Snapshot, name: str, more: str = "") -> Guest:
    """The guest of that name or UUID. Raises VsrtuneError when none runs; ``more`` is added to
    its hint."""
    for guest in snapshot.guests:
        # A guest without a UUID has an empty one.
        if name and name in (guest.ref, guest.uuid):
            return guest
    there = ", ".join(guest.ref for guest in snapshot.guests) or "none"
    raise VsrtuneError(
        "no such guest is running", where=name, hint=f"these are running: {there}{more}"
    )


def chosen(snapshot: Snapshot, names: Collection[str]) -> Snapshot:
    """The snapshot with the guests that an operator names, all when there is no name. Raises
    VsrtuneError when one of them does not run."""
    refs = [running_guest(snapshot, name).ref for name in names]
    shown = (g for g in snapshot.guests if not names or g.ref in refs)
    return replace(snapshot, guests=tuple(shown))


def journalled(journal: Path, root: Path | None) -> tuple[tuple[Entry, ...], Steps]:
    """The journal's entries for this host, and the guests stepped down; nothing for a recorded
    host."""
    if root is not None:
        return (), {}
    from vsrtune.execute.journal import read_fold
    from vsrtune.host.filesystem import boot_id

    fold = read_fold(journal, boot_id())
    return tuple(fold.live.values()), fold.steps


def lasting(entries: Iterable[Entry], snapshot: Snapshot) -> tuple[Entry, ...]:
    """The entries without the classes of threads that have ended, of which there is nothing to give
    back. What ``snapshot`` does not show may have ended or hide."""
    from vsrtune.execute.comparison import is_gone
    from vsrtune.execute.host_writer import LiveSysOps
    from vsrtune.model.present import PresentValues
    from vsrtune.model.targets import ThreadSched

    ops, present = LiveSysOps(), PresentValues(snapshot)

    def ended(target: Target) -> bool:
        hidden = isinstance(target, ThreadSched) and not present.shows(target)
        return hidden and is_gone(target, ops)

    return tuple(entry for entry in entries if not ended(entry.target))


def load_policies(dirs: tuple[Path, ...]) -> tuple[Policy, ...]:
    """Load the policies, and say on standard error when there are none. Raises ObserveError
    when a directory that an operator names does not exist, because `apply` would take
    everything back."""
    from vsrtune.observe.config_files import load_dirs

    check_dirs(dirs)
    policies = load_dirs(dirs)
    if not policies:
        say(f"vsrtune: {no_policies(dirs)}", err=True)
    return policies


def check_place(file: Path | None) -> None:
    """Raises InputError, before any work, when a file could not be written."""
    if file is None or str(file) == "-" or (file.exists() and not file.is_file()):
        return
    if not file.parent.is_dir():
        raise InputError(
            "the directory does not exist", where=str(file.parent), hint="make it, or name another"
        )
    import tempfile

    try:
        # os.access knows neither a full file system nor who is root on a file server.
        with tempfile.TemporaryFile(dir=file.parent) as trial:
            trial.write(b"x")
            trial.flush()
    except OSError as error:
        raise InputError(
            f"no file can be written there: {error.strerror}", where=str(file.parent),
            hint="name another directory, or make room",
        ) from error  # fmt: skip


def check_dirs(dirs: tuple[Path, ...]) -> None:
    """Raises ObserveError when a directory does not exist; the default one need not exist."""
    for directory in dirs:
        if directory != POLICY_DIR and not directory.exists():
            raise ObserveError(
                "the directory does not exist",
                where=str(directory),
                hint=f"name one that holds policies (without the option: {POLICY_DIR})",
            )


def no_policies(dirs: tuple[Path, ...]) -> str:
    """The text for an operator without a policy."""
    places = ", ".join(str(d) for d in dirs)
    return (
        f"no policy in {places}, so no guest is tuned; "
        f"`vsrtune policy init GUEST -o {dirs[-1]}/FILE.yaml` writes one, more are in "
        "/usr/share/vsrtune/policies; "
        "then try `vsrtune plan`"
    )
