"""Other software that changes the same settings, and what it does to us."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import NoReturn

from vsrtune.host.filesystem import HostRoot
from vsrtune.host.procfs import Daemon
from vsrtune.model.host import IRQBALANCE, Competitor

_NOHZ_FULL = "/sys/devices/system/cpu/nohz_full"
_TUNED_PROFILE = "/etc/tuned/active_profile"


def read_neighbours(
    root: HostRoot, daemons: Iterable[Daemon], rt_runtime_us: int
) -> tuple[Competitor, ...]:
    """Neighbours sorted by name and pid. ``rt_runtime_us`` is sched_rt_runtime_us:
    TuneD's realtime profiles and stalld set it to -1."""
    found = [_daemon(root, daemon, rt_runtime_us) for daemon in daemons]
    nohz = _read(root, _NOHZ_FULL)
    if nohz and nohz != "(null)":
        found.append(Competitor("nohz_full", None, f"CPUs {nohz} run without a timer tick"))
    return tuple(sorted(found, key=lambda n: (n.name, n.pid or 0)))


def _daemon(root: HostRoot, daemon: Daemon, rt_runtime_us: int) -> Competitor:
    detail = _detail(root, daemon.name, rt_runtime_us)
    if daemon.name != IRQBALANCE:
        return Competitor(daemon.name, daemon.pid, detail)
    banned, script = irqbalance_bans(_read(root, f"/proc/{daemon.pid}/cmdline").split("\0"))
    if banned:
        detail += f", but not of interrupts {', '.join(map(str, banned))}"
    if script:
        detail += f", of those that {script} does not ban"
    return Competitor(daemon.name, daemon.pid, detail, banned, script)


def irqbalance_bans(argv: Sequence[str]) -> tuple[tuple[int, ...], str]:
    """The interrupts that irqbalance's command line bans, and its policy script. What it does
    not understand itself is left out here too."""
    parser = _Quiet(add_help=False, allow_abbrev=True)
    parser.add_argument("--banirq", "-i", action="append", default=[])
    parser.add_argument("--policyscript", "-l", default="")
    try:
        known, _ = parser.parse_known_args(list(argv[1:]))
    except ValueError:
        return (), ""
    banned = {int(text) for text in known.banirq if text.isascii() and text.isdigit()}
    return tuple(sorted(banned)), known.policyscript


class _Quiet(argparse.ArgumentParser):
    """Raises ValueError where the other one exits."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _detail(root: HostRoot, name: str, rt_runtime_us: int) -> str:
    unthrottled = (
        "; sched_rt_runtime_us is -1, which switches off DEADLINE admission"
        if rt_runtime_us == -1
        else ""
    )
    match name:
        case "irqbalance":
            return "rewrites interrupt affinity every few seconds"
        case "numad":
            return "moves guests between NUMA nodes"
        case "stalld":
            return "boosts starved threads" + unthrottled
        case "tuned":
            profile = _read(root, _TUNED_PROFILE)
            return (f"profile {profile}" if profile else "no profile") + unthrottled
        case _:
            return ""


def _read(root: HostRoot, path: str) -> str:
    try:
        return root.read(path).strip()
    except OSError:
        return ""
