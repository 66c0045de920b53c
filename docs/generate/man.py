"""The manual pages: vsrtune(8) from the command line, vsrtune-policy(5) from the schema."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from generate import roff
from generate.tables import keys, limits
from vsrtune import __version__
from vsrtune.cli.main import cli
from vsrtune.cli.options import ATTACH_LEDGER, GROUP_DIR, JOURNAL, POLICY_DIR
from vsrtune.core.exit_codes import ExitCode
from vsrtune.policy.schema import SCHEMA

_ROOT = Path(__file__).resolve().parents[2]

FILES = (
    (f"{POLICY_DIR}/*.yaml", "Policies, one for each file; see vsrtune-policy(5)."),
    (f"{GROUP_DIR}/*.yaml", "Groups, one for each file; see docs/groups.md."),
    ("/usr/share/vsrtune/policies/*.yaml", "Policies to copy."),
    ("/etc/default/vsrtune", "Environment of the daemon, such as VSRTUNE_METRICS."),
    (str(JOURNAL), "What was changed on this boot, with the original values."),
    (str(ATTACH_LEDGER), "Switched attachments, and the devices made for them."),
    ("/run/vsrtune/trace-results.json", "Which worker was seen to serve which interface."),
    (
        "/usr/share/doc/vsrtune/docs",
        "Documents, which messages name docs/NAME.md; measurements and tests are in the source.",
    ),
)


def commands(
    group: click.Group = cli, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is no group, by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))
        elif command is not None and not command.hidden:
            yield (*above, name), command


def command_page() -> str:
    """vsrtune.8."""
    out = [
        roff.title("vsrtune", 8, __version__),
        roff.section("NAME"),
        "vsrtune \\- tune KVM hosts that run virtual routers, and undo it exactly\n",
        roff.section("SYNOPSIS"),
        ".PP\n\\fBvsrtune\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR] [\\fIARGUMENTS\\fR]\n",
        roff.section("DESCRIPTION"),
        roff.text_blocks(_help(cli)),
        roff.section("COMMANDS"),
    ]
    variables: dict[str, list[str]] = {}
    for words, command in commands():
        out.append(roff.subsection(" ".join(("vsrtune", *words, *_usage(command)))))
        out.append(roff.text_blocks(_help(command)))
        for option in _options(command):
            out.append(roff.item(_tag(option), _said(option)))
            if isinstance(option.envvar, str):
                variables.setdefault(option.envvar, []).append(option.opts[0])
    out.append(roff.section("EXIT STATUS"))
    out += [roff.item(str(int(code)), code.meaning) for code in ExitCode]
    out.append(roff.section("ENVIRONMENT"))
    for name, options in sorted(variables.items()):
        out.append(roff.item(name, f"The default of {', '.join(dict.fromkeys(options))}."))
    out.append(roff.section("FILES"))
    out += [roff.item(path, text) for path, text in FILES]
    out.append(roff.section("SEE ALSO"))
    out.append(roff.paragraph("vsrtune-policy(5), virsh(1), sched(7), cpuset(7)"))
    return "".join(out)


def policy_page() -> str:
    """vsrtune-policy.5."""
    sample = (_ROOT / "policies/router.yaml").read_text("utf-8")
    settings = sample[sample.index("\nguest:") + 1 :].splitlines()
    out = [
        roff.title("vsrtune-policy", 5, __version__),
        roff.section("NAME"),
        "vsrtune\\-policy \\- how the threads and queues of virtual routers are tuned\n",
        roff.section("SYNOPSIS"),
        f".PP\n\\fI{roff.escape(str(POLICY_DIR))}/NAME.yaml\\fR\n",
        roff.section("DESCRIPTION"),
        roff.paragraph(str(SCHEMA["description"])),
        roff.paragraph(
            "One policy stands in each file. CPU lists are written 2, 1-3 or 0,2-3. A policy that "
            "names a guest exactly wins over one with a glob. `vsrtune policy init GUEST` writes "
            "a policy to begin with, `vsrtune policy check` names every error with its line, and "
            "`vsrtune plan` shows what the policies would change on this host."
        ),
        roff.section("KEYS"),
    ]
    for path, part, needed in keys(SCHEMA):
        text = str(part.get("description", ""))
        expects = limits(part)
        if expects:
            text += f"\nWrite: {expects}."
        out.append(roff.item(path, text + ("\nRequired." if needed else "")))
    out += [
        roff.section("EXAMPLE"),
        roff.example("\n".join(settings)),
        roff.section("SEE ALSO"),
        roff.paragraph("vsrtune(8), sched(7), cpuset(7)"),
    ]
    return "".join(out)


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "")


def _usage(command: click.Command) -> list[str]:
    words = ["[OPTIONS]"] if _options(command) else []
    for argument in command.params:
        if isinstance(argument, click.Argument):
            name = (argument.metavar or argument.name or "").upper()
            name += "..." if argument.nargs == -1 else ""
            words.append(name if argument.required else f"[{name}]")
    return words


def _options(command: click.Command) -> list[click.Option]:
    return [p for p in command.params if isinstance(p, click.Option) and not p.hidden]


def _tag(option: click.Option) -> str:
    names = ", ".join((*option.opts, *option.secondary_opts))
    if option.is_flag or option.count:
        return names
    if isinstance(option.type, click.Choice):
        return f"{names} {'|'.join(map(str, option.type.choices))}"
    return f"{names} {(option.metavar or option.type.name).upper()}"


def _said(option: click.Option) -> str:
    text = " ".join((option.help or "").split())
    shown = option.default
    if option.show_default and shown is not None and not callable(shown):
        values = shown if isinstance(shown, tuple | list) else (shown,)
        text += f" [default: {', '.join(map(str, values))}]"
    return text
