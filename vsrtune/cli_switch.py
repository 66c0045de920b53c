"""What ``vsrtune attach`` and ``vsrtune group`` say of switches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vsrtune.cli_common import say
from vsrtune.core.exit_codes import ExitCode

if TYPE_CHECKING:
    from vsrtune.attach.plan.model import Switch
    from vsrtune.attach.sweep import Swept
    from vsrtune.attach.transaction import Switcher
    from vsrtune.core.errors import VsrtuneError


def recover(switcher: Switcher) -> ExitCode:
    """Take back, and say what came of it; the exit code."""
    unfinished = switcher.unfinished()
    failures = switcher.recover()
    if unfinished and not failures:
        say("An interrupted switch was taken back: the guests have what they had.")
    elif not failures:
        say("No switch was interrupted.")
    return complain(failures)


def outcome(swept: Swept) -> ExitCode:
    """Say what became of the devices; the exit code."""
    for text in swept.did:
        say(text)
    return complain(swept.failed)


def complain(failures: Sequence[VsrtuneError]) -> ExitCode:
    """Print errors; the exit code."""
    from vsrtune import cli

    for error in failures:
        cli.complain(error)
    return ExitCode.FAILED if failures else ExitCode.DONE


def show(switch: Switch) -> None:
    """Print the steps and the notes."""
    if not (switch.moves or switch.steps or switch.ended or switch.kept):
        say("Nothing to do.")
    told = [str(step) for step in switch.steps]
    told += [
        " and remove ".join((f"undefine {clone.guest}", *(f.path for f in clone.files)))
        for clone in switch.ended
    ]
    if switch.leaves:
        told.append(f"remove {', '.join(d.name for d in switch.leaves)}")
    for number, text in enumerate(told, 1):
        say(f"{number}. {text}")
    for note in switch.notes:
        say(f"note: {note}")
