# SPDX-License-Identifier: GPL-2.0-or-later
"""The ``vsrtune`` command: finds the subcommand, turns errors into exit codes.

Subcommands live in the modules that COMMANDS names, which are imported when they are called,
not before. They return their exit code; only ``main`` exits.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from vsrtune import __version__
from vsrtune.cli.options import Commands
from vsrtune.cli.render import complain, say
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode

# name: (module, attribute, short help). The help stands here so that `vsrtune --help`
# need not import the modules.
COMMANDS = {
    "status": ("cli.show", "status", "Show the daemon, guests, what is wrong, the last change."),
    "show": ("cli.show", "show", "Show guests, threads, interfaces, CPUs and interrupts."),
    "top": ("cli.top", "top", "Watch CPUs, threads, drops and budgets, live."),
    "plan": ("cli.plan", "plan", "Show what the policies would change, and why."),
    "try": ("cli.trial.command", "try_", "Try a policy against untuned, on the traffic there is."),
    "apply": ("cli.apply", "apply", "Carry out the plan once, and print it."),
    "confirm": ("cli.apply", "confirm", "Keep what `vsrtune apply --confirm` has applied."),
    "verify": ("cli.plan", "verify", "Exit 3 when the host is not what the policies say."),
    "undo": ("cli.apply", "undo", "Put back everything vsrtune has changed."),
    "record": ("cli.show", "record", "Save what vsrtune sees of this host in a new file."),
    "policy": ("cli.policy", "policy", "Check policy files, print their schema, write one."),
    "attach": ("cli.attach", "attach", "Move guests between macvtap and NAPI-macvlan."),
    "group": ("cli.group", "group", "Make several guests one router, and guests again."),
    "doctor": ("cli.doctor", "doctor", "Check whether this host is fit."),
    "bench": ("bench.cli", "bench", "Measure routers and compare configurations."),
    "daemon": ("cli.daemon", "daemon", "Keep the host tuned until stopped, then undo."),
}


class LazyCommands(Commands):
    """A group that imports a subcommand when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's interface)
        return list(COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002 (click's interface)
        cmd_name: str,
    ) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        found = getattr(importlib.import_module(f"vsrtune.{module}"), attribute)
        return found if isinstance(found, click.Command) else None

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 (click's interface)
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="vsrtune %(version)s")
def cli() -> None:
    """Tune KVM hosts that run virtual routers, and undo it exactly.

    \b
    vsrtune show     what runs where now; `vsrtune top` watches it
    vsrtune plan     what the policies in /etc/vsrtune/policies would change
    vsrtune apply    do it once; `systemctl start vsrtune` keeps doing it
    vsrtune undo     take everything back
    """


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    # Closed by whoever started this.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 (to the end)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Names of guests may hold characters that the locale cannot print.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(list(args), prog_name="vsrtune", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except VsrtuneError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone; click makes the latter of the former. Python flushes
        # once more at exit: send that to /dev/null instead of printing a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.NO_READER
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say(f"vsrtune: error: {where}{error.strerror or error}", err=True)
        return ExitCode.FAILED
    return code if isinstance(code, int) else ExitCode.DONE


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
