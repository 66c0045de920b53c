# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune try``: a policy in turns against untuned, on the router's own traffic."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from vsrtune.attach.signals import held
from vsrtune.bench.setup.tuning import Tuner
from vsrtune.cli import attachments
from vsrtune.cli.options import (
    Duration,
    StatePlaces,
    files_or_guests,
    json_option,
    observe,
    options,
    places_options,
    policies_option,
    readable_policies,
    running_guest,
)
from vsrtune.cli.policy import no_realtime
from vsrtune.cli.render import print_json, say, show
from vsrtune.cli.trial import guardian, rule
from vsrtune.cli.trial import run as trial_run
from vsrtune.cli.trial.rule import TrialTurn, TrialVerdict
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.execute.brought import refuse_brought
from vsrtune.execute.journal import Journal
from vsrtune.host.filesystem import boot_id
from vsrtune.model.guest import Guest
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.config_files import SUFFIXES, load_dirs, read_policy
from vsrtune.plan.full_plan import full_plan
from vsrtune.plan.starter_policy import policy_name, start
from vsrtune.policy.matching import Match, match, policies_of
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse
from vsrtune.views import tables

# The fewest pairs that decide take 50 s.
_LEAST_SECONDS, _MOST_SECONDS = 50.0, 600.0


@click.command("try")
@click.argument("subject", metavar="POLICY_FILE|GUEST", shell_complete=files_or_guests)
@options(
    click.option(
        "--for",
        "seconds",
        type=Duration(_LEAST_SECONDS, _MOST_SECONDS),
        default="120s",
        show_default=True,
        metavar="TIME",
        help="How long the turns take in all; switching between them comes on top.",
    ),
    click.option(
        "--keep-if-better",
        is_flag=True,
        help="Leave the policy applied, as `vsrtune apply` does, when it is shown to be better.",
    ),
    json_option,
    policies_option,
)
@places_options
def try_(
    subject: str,
    seconds: float,
    keep_if_better: bool,
    as_json: bool,
    policy_dirs: tuple[Path, ...],
    places: StatePlaces,
) -> int:
    """Try a policy against untuned, in turns, on the traffic that the router has.

    With POLICY_FILE, tries that policy on the guests that it names. With GUEST, tries the
    policy of the policy directories that names it, or if there is none the one that `vsrtune
    policy init` would write, on this guest alone. No frame is generated. For the second
    half of each turn of 4.1 s the frames that arrived for the guests and that they forwarded
    are counted.

    The policy is better only if the lower end of the 95 % interval of the forwarded share,
    tuned over untuned, is above 1. Everything ends at the original, also when the command is
    killed or its session is lost, unless --keep-if-better is given and the policy is better.

    \b
    Exit codes: 0 the trial was made, 1 something failed, 2 the policy is wrong, 4 the host could
    not be read, 5 the policy is refused, 6 nothing was decided: too little traffic, or too many
    turns were left out.
    """
    snapshot = observe(None, places.uri, 0.0, _known(subject, policy_dirs))
    policy, permanent = _chosen(subject, snapshot, policy_dirs)
    guests = _guests(policy, snapshot)
    # A switch stops the traffic for seconds.
    attachments.check_switched(
        [policy],
        places,
        "which is not tried in turns",
        "take the key out of the file that you try",
        [guest.ref for guest in guests],
    )
    turns: list[TrialTurn] = []
    with held() as signals, ExitStack() as stack, Journal.open(places.journal, boot_id()) as opened:
        if opened.foreign is not None:
            raise opened.foreign
        _check_untuned(opened, places.ledger)
        refuse_brought(snapshot)
        made = full_plan(snapshot, [policy], (), reassert=True)
        if not as_json:
            show(tables.plan_tables(made))
        if made.refusals:
            return ExitCode.REFUSED
        if not made.actions:
            click.echo("Nothing to try: the policy changes nothing here now.", err=True)
            return ExitCode.UNDECIDED
        guard = stack.enter_context(guardian.start(places))

        def wait(seconds: float) -> None:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, 0.1))
                signals.check()
            signals.check()

        names = [name for g in guests for name in {g.ref, g.name}]
        ground = trial_run.HostGround(
            Tuner(opened, names, places.uri),
            [policy],
            frozenset(g.ref for g in guests),
            places.uri,
        )
        pairs = int(seconds / trial_run.PAIR_SECONDS)
        for one in trial_run.run(ground, pairs, time.time_ns(), wait):
            turns.append(one)
            say(rule.line(one), err=as_json)
        verdict = rule.judge(turns, policy.path)
        keep = keep_if_better and verdict.better is True
        if not (turns[-1].tuned and keep):
            ground.switch(False)
            if keep:
                ground.switch(True)
        signals.check()
        guard.keep()
    for note in ground.notes:
        say(f"left alone: {note}", err=True)
    if as_json:
        _print_json(policy, guests, turns, verdict, keep)
    else:
        show([rule.table(turns)])
        for text in verdict.text:
            say(text)
        click.echo(
            f"It stays applied. To make it permanent: {permanent}. To take it back: vsrtune undo"
            if keep
            else "Everything is put back."
        )
    return ExitCode.UNDECIDED if verdict.better is None else ExitCode.DONE


def _is_file(subject: str) -> bool:
    path = Path(subject)
    return path.is_file() or path.suffix in SUFFIXES


def _known(subject: str, dirs: tuple[Path, ...]) -> tuple[Policy, ...]:
    """The policies that say whose plain QEMUs may be observed."""
    return (read_policy(Path(subject)),) if _is_file(subject) else readable_policies(dirs)


def _chosen(subject: str, snapshot: Snapshot, dirs: tuple[Path, ...]) -> tuple[Policy, str]:
    """The policy to try, and how to make it permanent. Raises VsrtuneError."""
    enable = "systemctl enable --now vsrtune"
    if _is_file(subject):
        policy = read_policy(Path(subject))
        # Two files for one guest are an error, with which no daemon starts, or refuse it.
        named = [g for g in snapshot.guests if match(policy, g) is Match.EXACT]
        same = (
            other.path
            for other in readable_policies(dirs)
            if (other.guest, other.user) == (policy.guest, policy.user)
            or any(match(other, guest) is Match.EXACT for guest in named)
        )
        place = next(same, f"{dirs[-1]}/")
        if Path(place).exists() and Path(place).samefile(subject):
            return policy, enable
        return policy, f"cp {shlex.quote(subject)} {shlex.quote(place)} && {enable}"
    guest = running_guest(snapshot, subject, "; a policy file ends in .yaml")
    others = load_dirs(dirs)
    own = policies_of(guest, others)
    if len(own) > 1:
        places = " and ".join(p.at("guest") for p in own)
        raise VsrtuneError(
            "several policies name this guest equally well",
            where=places,
            hint="name the file to try",
        )
    name = policy_name(guest)
    if own:
        # The policy may name other guests as well, on which nobody asked to try it.
        return replace(own[0], guest=parse(f"guest: {name}\n", subject).guest), enable
    text = start(snapshot, guest, others, no_realtime=no_realtime(None, snapshot)).text
    file = shlex.quote(f"{dirs[-1]}/{guest.name.replace('/', '-')}.yaml")
    init = f"vsrtune policy init {shlex.quote(subject)} -o {file}"
    return parse(text, f"policy init {subject}"), f"{init} && {enable}"


def _guests(policy: Policy, snapshot: Snapshot) -> list[Guest]:
    """The running guests that the policy names. Raises VsrtuneError when there are none."""
    found = [g for g in snapshot.guests if match(policy, g) is not Match.NONE]
    if not found:
        raise VsrtuneError(
            f"no running guest matches {policy.guest!r}",
            where=policy.at("guest"),
            hint="`vsrtune show` lists the guests",
        )
    return found


def _check_untuned(journal: Journal, ledger: Path) -> None:
    """Raises VsrtuneError when the host is not at its original, with which the trial compares."""
    live = len(journal.entries())
    if live or attachments.concerned((), ledger):
        raise VsrtuneError(
            f"this host is tuned already ({live} settings, or an attachment that a policy "
            "switched), so there is no untuned to compare with",
            where=str(journal.path),
            hint="run `vsrtune undo`, then try again",
        )


def _print_json(
    policy: Policy,
    guests: Sequence[Guest],
    turns: Sequence[TrialTurn],
    verdict: TrialVerdict,
    kept: bool,
) -> None:
    words = {True: "better", False: "not better", None: "undecided"}
    print_ready = {
        "policy": policy.path,
        "guests": [g.ref for g in guests],
        "verdict": words[verdict.better],
        "pairs": verdict.pairs,
        "share": verdict.share,
        "rate": verdict.rate,
        "left_out": verdict.left_out,
        "kept": kept,
        "text": verdict.text,
        "turns": turns,
    }
    print_json(print_ready)
