"""Other software that changes the same settings, and what it does to us."""

from __future__ import annotations

from collections.abc import Iterable

from vsrtune.model import Neighbour
from vsrtune.proc import Daemon
from vsrtune.rootfs import HostRoot

_NOHZ_FULL = "/sys/devices/system/cpu/nohz_full"
_TUNED_PROFILE = "/etc/tuned/active_profile"


def read_neighbours(
    root: HostRoot, daemons: Iterable[Daemon], rt_runtime_us: int
) -> tuple[Neighbour, ...]:
    """Neighbours sorted by name and pid. ``rt_runtime_us`` is sched_rt_runtime_us:
    TuneD's realtime profiles and stalld set it to -1."""
    found = [
        Neighbour(daemon.name, daemon.pid, _detail(root, daemon.name, rt_runtime_us))
        for daemon in daemons
    ]
    nohz = _read(root, _NOHZ_FULL)
    if nohz and nohz != "(null)":
        found.append(Neighbour("nohz_full", None, f"CPUs {nohz} run without a timer tick"))
    return tuple(sorted(found, key=lambda n: (n.name, n.pid or 0)))


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
