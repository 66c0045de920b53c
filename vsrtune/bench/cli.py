# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune bench``: measure routers, compare configurations, render stored results."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vsrtune.cli.options import (
    Commands,
    Duration,
    check_place,
    guest_names,
    options,
    uri_option,
)
from vsrtune.cli.render import say
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.host.state_files import MAX_SIZE, replace_file

if TYPE_CHECKING:
    from vsrtune.bench.spec.model import Outcome, Spec

_MAX_BYTES = 256 * 1024
_SPEC_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_OUTPUT = click.Path(path_type=Path, dir_okay=False, allow_dash=True)

html_file_option = click.option(
    "--html", "html_file", type=click.Path(path_type=Path, dir_okay=False),
    help="Write a report with plots here (needs python3-matplotlib).",
)  # fmt: skip


def _path(**more: Any) -> tuple[Any, ...]:
    """The options of a path, with ``more`` of the two devices."""
    return (
        click.option("--left", help="The device that sends: [HOST:]DEVICE[@NAMESPACE].", **more),
        click.option("--right", help="The device that receives.", **more),
        click.option("--source", help="IPv4 source address of the frames."),
        click.option("--destination", help="IPv4 destination address; no host must answer there."),
        click.option("--mac", help="MAC to send to; the guest's first interface by default."),
    )


_MEASURING = (
    click.option(
        "--json",
        "json_file",
        type=_OUTPUT,
        help="Store the result here; - prints it instead of tables.",
    ),
    html_file_option,
    click.option(
        "--seed",
        type=click.IntRange(0),
        help="Order of the trials; drawn and printed by default.",
    ),
    click.option("--quiet", is_flag=True, help="No progress on standard error."),
    uri_option,
)


@click.group(cls=Commands)
def bench() -> None:
    """Measure routers on this host, and compare configurations.

    Sends frames from one device to another through the routers, counts what arrives, and
    says where the rest was lost and what forwarding cost. The host is restored at the end.

    \b
    vsrtune bench run SPEC.yaml                measure
    vsrtune bench compare A.yaml B.yaml        is B faster than A, and how sure is that
    vsrtune bench paper --guest vr1 ...        the papers' core, on your hardware
    vsrtune bench report RESULT.json           show a stored result
    vsrtune bench clean                        take back what a killed run left
    """


@bench.command()
@click.argument("spec_file", required=False, type=_SPEC_FILE, metavar="[SPEC.yaml]")
@options(
    click.option(
        "--guest", shell_complete=guest_names, help="Instead of SPEC.yaml: the router, a guest."
    ),
    click.option("--native", is_flag=True, help="Instead of --guest: this host routes."),
    *_path(),
    click.option("--rates", help="Frames per second to offer, by commas."),
    click.option("--seconds", type=Duration(0, 86400), metavar="TIME", help="Length of a trial."),
    click.option("--repeats", type=int, help="Trials at each rate."),
    click.option("--size", help="Frame size without FCS, 60 to 1514, or imix."),
    click.option("--flows", type=int, help="Flows, 1 to 1000000."),
    *_MEASURING,
)
def run(spec_file: Path | None, **given: Any) -> int:
    """Measure what SPEC.yaml describes, or what the options do.

    \b
    vsrtune bench run --guest vr1 --left g0@gen --right s0@sink \\
      --source 10.10.1.2 --destination 10.20.1.100 --rates 1000,8000

    \b
    Exit codes: 0 measured, 1 something failed, 2 the specification is wrong, 4 the host could
    not be read.
    """
    how = {name: given.pop(name) for name in ("json_file", "html_file", "seed", "quiet", "uri")}
    short = {name: value for name, value in given.items() if value not in (None, False)}
    if spec_file is not None and short:
        names = ", ".join(f"--{name}" for name in short)
        raise click.UsageError(f"{names}: write this in {spec_file}, or leave the file out")
    spec = read_spec(spec_file) if spec_file is not None else short_spec(short)
    return _measure([spec], None, **how)


@bench.command()
@click.argument("spec_files", nargs=-1, required=True, type=_SPEC_FILE, metavar="A.yaml B.yaml...")
@options(
    click.option(
        "--pairs", type=click.IntRange(1), default=9, show_default=True,
        help="Rounds; in each every configuration meets every load.",
    ),
    *_MEASURING,
)  # fmt: skip
def compare(spec_files: tuple[Path, ...], pairs: int, **how: Any) -> int:
    """Measure configurations in turn, interleaved, and say which differ.

    The first file says what is measured and is the baseline; the others need only a name
    and a configuration. Ratios are those of the later to the first within a round.

    \b
    Exit codes: 0 measured, 1 something failed, 2 a specification is wrong, 4 the host could
    not be read.
    """
    if len(spec_files) < 2:
        raise click.UsageError("name at least two files, the baseline first")
    first = read_spec(spec_files[0])
    specs = [first, *(read_spec(path, first) for path in spec_files[1:])]
    return _measure(specs, pairs, **how)


@bench.command()
@options(
    click.option("--guest", shell_complete=guest_names, required=True, help="The router."),
    *_path(required=True),
    click.option("--cpus", help="CPUs of the kit, the first for interrupts; four by default."),
    click.option("--only", multiple=True, metavar="NAME", help="Only untuned and these."),
    click.option("--most", type=click.IntRange(1024), default=2_000_000, show_default=True,
                 help="Frames per second that are never exceeded."),
    click.option("--seconds", type=Duration(0.1, 60), metavar="TIME", default="2s",
                 show_default=True, help="Length of a trial."),
    click.option("--pairs", type=click.IntRange(1), default=9, show_default=True, help="Rounds."),
    *_MEASURING,
)  # fmt: skip
def paper(
    cpus: str | None, only: tuple[str, ...], most: int, pairs: int, json_file: Path | None,
    html_file: Path | None, seed: int | None, quiet: bool, uri: str, **given: Any,
) -> int:  # fmt: skip
    """Measure the papers' core: overload, pins, classes, queue lengths, budgets, peers.

    Measures some 15 configurations in turn, in under an hour. The file that --json names keeps
    what was measured: after a kill, the same command goes on with what is missing. Frames go
    from 198.18.0.2 to 198.19.0.100 by default; docs/hardware.md says what to connect.

    \b
    vsrtune bench paper --guest vr1 --left box:eth1 --right box:eth2 --json r.json

    \b
    Exit codes: 0 measured, 1 something failed, 2 an option or the file is wrong, 4 the host
    could not be read.
    """
    from vsrtune.bench.paper import configurations
    from vsrtune.cli.options import running_guest
    from vsrtune.observe.observer import live_observer

    if json_file is None or str(json_file) == "-":
        raise click.UsageError("name a file for the result with --json")
    places = {"source": "198.18.0.2", "destination": "198.19.0.100"}
    short = {name: value for name, value in given.items() if value is not None}
    spec = short_spec({**places, **short, "rates": "1024"})
    method = replace(spec.method, latency=spec.left.host == spec.right.host, reordering=True)
    spec = replace(spec, method=method, limits=replace(spec.limits, pps=most))
    earlier = _stored(json_file) if json_file.exists() else None
    snapshot = live_observer(uri).observe()
    guest = running_guest(snapshot, given["guest"])
    found = configurations(guest, snapshot.host.online, cpus, only)
    specs = [replace(spec, configuration=one) for one in found]
    kit = {"save": partial(_store, json_file), "earlier": earlier}
    return _measure(specs, pairs, json_file, html_file, seed, quiet, uri, **kit)


@bench.command()
@click.argument(
    "result", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True)
)
@html_file_option
def report(result: Path, html_file: Path | None) -> None:
    """Show a result stored with --json, on any machine.

    \b
    Exit codes: 0 shown, 1 plots cannot be drawn, 2 the file holds no result.
    """
    check_outputs(None, html_file)
    deliver(_stored(result), None, html_file)


@bench.command()
def clean() -> int:
    """Take back what a killed run left on this host; every run does so when it starts.

    \b
    Exit codes: 0 nothing is left, 1 something could not be taken back.
    """
    from vsrtune.bench import session

    lines = session.clean()
    for line in lines:
        say(line)
    if not lines:
        click.echo("Nothing to clean: no bench has left anything on this host.")
    return ExitCode.DONE


def read_spec(path: Path, base: Spec | None = None) -> Spec:
    """Read a specification file and the text of its policy. Raises PolicyErrors."""
    from vsrtune.bench.spec.parser import load_text, with_policy
    from vsrtune.observe.config_files import read_text

    spec = load_text(read_text(path), str(path), base)
    named = spec.configuration.policy_path
    if named is None:
        return spec
    policies = read_text(Path(named), _MAX_BYTES)
    if len(policies.encode("utf-8", "replace")) > _MAX_BYTES:
        raise VsrtuneError(f"longer than {_MAX_BYTES} bytes", where=named)
    return with_policy(spec, policies)


_END = re.compile(r"(?:(?P<host>[^:]+):)?(?P<device>[^@:]+)(?:@(?P<namespace>[^@]+))?")


def short_spec(given: dict[str, Any]) -> Spec:
    """The specification that the command-line options describe."""
    from vsrtune.bench.spec.parser import load
    from vsrtune.policy.yaml_reader import Document

    native = "native" in given
    if native and "guest" in given:
        raise click.UsageError("--guest and --native exclude each other")
    needed = ("left", "right", "source", "destination", "mac" if native else "guest")
    missing = ", ".join(f"--{name}" for name in needed if name not in given)
    if missing:
        raise click.UsageError(f"without SPEC.yaml, {missing} must be given")

    def those(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if name in given}

    traffic = those("size", "flows")
    if "size" in traffic:
        traffic["size"] = _plain(traffic["size"])
    rates = [_plain(rate) for rate in given.get("rates", "1000,4000,16000").split(",")]
    router = {"native": "host"} if native else those("guest")
    data: dict[str, Any] = {
        "name": given.get("guest", "native"),
        "left": _endpoint(given["left"], "--left"),
        "right": _endpoint(given["right"], "--right"),
        "routers": [{**router, "forth": those("mac", "source", "destination")}],
        "traffic": traffic,
        "method": {"kind": "sweep", "rates": rates, **those("seconds", "repeats")},
    }
    return load(Document(data), "command line")


def _endpoint(text: str, option: str) -> dict[str, str]:
    found = _END.fullmatch(text)
    if found is None:
        raise click.UsageError(f"{option} {text}: write [HOST:]DEVICE[@NAMESPACE], as g0@gen")
    return {name: value for name, value in found.groupdict().items() if value is not None}


def _plain(text: str) -> int | str:
    """A number as a file has it. The schema judges other texts."""
    return int(text) if text.isdecimal() else text


def check_outputs(json_file: Path | None, html_file: Path | None) -> None:
    """Raises an error before a long run when its result could not be delivered."""
    for path in (json_file, html_file):
        check_place(path)
    if html_file is not None:
        from vsrtune.bench.report import plots

        plots.require()


def _stored(path: Path) -> Outcome:
    from vsrtune.bench.report.files import outcome_from_json

    with click.open_file(str(path), encoding="utf-8", errors="replace") as file:
        return outcome_from_json(file.read(MAX_SIZE), str(path))


def _store(json_file: Path, outcome: Outcome) -> None:
    """Write a result; a file holds the old one or the new one, also after a kill."""
    from vsrtune.bench.report.files import outcome_to_json

    whole = json_file.is_file() or not json_file.exists()
    with click.open_file(str(json_file), "w", encoding="utf-8", atomic=whole) as file:
        file.write(outcome_to_json(outcome))


def deliver(outcome: Outcome, json_file: Path | None, html_file: Path | None) -> None:
    """Print and store a result; store it first, because it cannot be had again."""
    from vsrtune.bench.report import tables
    from vsrtune.bench.report.files import page
    from vsrtune.cli import render

    try:
        if json_file is not None:
            _store(json_file, outcome)
        if html_file is not None:
            replace_file(html_file, page(outcome).encode(), 0o644)
    finally:
        if str(json_file) != "-":
            render.show(tables.outcome_tables(outcome))


def _measure(
    specs: Sequence[Spec],
    pairs: int | None,
    json_file: Path | None,
    html_file: Path | None,
    seed: int | None,
    quiet: bool,
    uri: str,
    **kit: Any,
) -> int:
    """Measure and deliver. After an error or Ctrl-C, deliver the trials made before it, then
    raise it again. ``kit`` are arguments of ``measure`` more."""
    from vsrtune.bench.progress import ProgressWatch
    from vsrtune.bench.session import Unfinished, measure

    check_outputs(json_file, html_file)
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    try:
        with ProgressWatch(quiet=quiet) as watch:
            outcome = measure(specs, pairs, seed=seed, uri=uri, watch=watch, **kit)
    except Unfinished as stop:
        deliver(stop.outcome, json_file, html_file)
        raise
    deliver(outcome, json_file, html_file)
    return ExitCode.DONE
