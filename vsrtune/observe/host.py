# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads the parts of a host that belong to no guest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.cpus import read_books
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.host.netdev import NetReader
from vsrtune.host.procfs import CLOCK_TICKS, read_thread
from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.model.guest import Guest, SchedClass
from vsrtune.model.host import IRQBALANCE, Competitor, Cpu, DeadlineCpu, Host, Nic, SoftirqThread
from vsrtune.model.snapshot import Problem
from vsrtune.observe.qemu_processes import Processes
from vsrtune.observe.tap_backends import read_nic_threads
from vsrtune.observe.tracing import TraceMemory

_KERNEL = "/proc/sys/kernel"
_TIMESLICE = "sched_rr_timeslice_ms"


class HostReader:
    """Reads the host in one pass; ``problem_log`` keeps what could not be read."""

    def __init__(
        self, root: HostRoot, net: NetReader, memory: TraceMemory, problem_log: ProblemLog
    ) -> None:
        self._root = root
        self._net = net
        self._memory = memory
        self._try = problem_log.attempt

    def host(
        self,
        boot_id: str,
        cpus: tuple[Cpu, ...],
        processes: Processes,
        guests: Iterable[Guest],
        cpusets: tuple[CpusetGroup, ...],
    ) -> Host:
        """The host, from the given values and everything else, which is read now."""
        runtime = self._try("sched", partial(self._number, "sched_rt_runtime_us"), 0)
        timeslice = None
        if not self._root.read_only(f"{_KERNEL}/{_TIMESLICE}"):
            # No problem without it: old recordings do not have it.
            timeslice = ProblemLog().attempt("", partial(self._number, _TIMESLICE), None)
        guests = tuple(guests)
        online = CpuSet(c.id for c in cpus if c.online)
        return Host(
            boot_id=boot_id,
            kernel=self._try("host", lambda: self._root.read(f"{_KERNEL}/osrelease").strip(), ""),
            clock_ticks=CLOCK_TICKS,
            cpus=cpus,
            nics=self.nics(lower_devices(guests), processes),
            sched_rt_runtime_us=runtime,
            sched_rt_period_us=self._try("sched", partial(self._number, "sched_rt_period_us"), 0),
            neighbours=read_neighbours(self._root, processes.daemons, runtime),
            softirq=self._softirq(processes),
            cpusets=cpusets,
            deadline=self.books(online, guests, cpusets),
            rr_timeslice_ms=timeslice,
        )

    def books(
        self, online: CpuSet, guests: Iterable[Guest], cpusets: Iterable[CpusetGroup]
    ) -> tuple[DeadlineCpu, ...]:
        """The kernel's books of class deadline."""
        budgets = any(t.sched.cls is SchedClass.DEADLINE for g in guests for t in g.threads)
        partitions = any(c.partition != "member" for c in cpusets)
        return read_books(self._root, online, totals=budgets or partitions)

    def nics(self, lowers: set[str], processes: Processes) -> tuple[Nic, ...]:
        """The lower devices of the guests and the host's hardware NICs, with the NAPI threads that
        have their names."""
        hardware: list[str] = self._try("net", self._net.hardware_names, [])
        nics = []
        for name in sorted(lowers.union(hardware)):
            nic = self._try("net", partial(self._nic, name, processes.napi.get(name, ())), None)
            if nic is not None:
                nics.append(nic)
        return tuple(nics)

    def _nic(self, name: str, threads: Iterable[int]) -> Nic | None:
        nic = self._net.nic(name, self._memory.rx_cpus)
        if nic is not None and nic.threaded_napi:
            nic = replace(nic, napi=read_nic_threads(self._root, threads))
        if nic is not None and self._memory.results.irqs:
            fixed = self._memory.fixed
            irqs = tuple(replace(i, managed=fixed(i.number, i.name)) for i in nic.irqs)
            nic = replace(nic, irqs=irqs)
        return nic

    def _softirq(self, processes: Processes) -> tuple[SoftirqThread, ...]:
        found = []
        for cpu, tid in processes.softirq:
            thread = self._try("proc", partial(read_thread, self._root, tid, tid), None)
            if thread is not None:
                found.append(SoftirqThread(thread.key, cpu, thread.sched))
        return tuple(found)

    def _number(self, name: str) -> int:
        return int(self._root.read(f"{_KERNEL}/{name}"))


def lower_devices(guests: Iterable[Guest]) -> set[str]:
    """The devices below all interfaces of the guests."""
    return {lower for g in guests for i in g.interfaces for lower in i.lower}


_NOHZ_FULL = "/sys/devices/system/cpu/nohz_full"
_TUNED_PROFILE = "/etc/tuned/active_profile"
_IRQ = re.compile(r"[0-9]{1,9}", re.ASCII)
# Characters of a command line of irqbalance that is read.
_LONGEST = 4096


def read_neighbours(
    root: HostRoot, daemons: Iterable[tuple[str, int]], rt_runtime_us: int
) -> tuple[Competitor, ...]:
    """Competitors, sorted by name and pid. ``daemons`` are names and pids, ``rt_runtime_us`` is
    sched_rt_runtime_us: TuneD's realtime profiles and stalld set it to -1."""
    found = [_daemon(root, name, pid, rt_runtime_us) for name, pid in daemons]
    nohz = text_of(root, _NOHZ_FULL)
    if nohz and nohz != "(null)":
        found.append(Competitor("nohz_full", None, f"CPUs {nohz} run without a timer tick"))
    return tuple(sorted(found, key=lambda n: (n.name, n.pid or 0)))


def _daemon(root: HostRoot, name: str, pid: int, rt_runtime_us: int) -> Competitor:
    detail = _detail(root, name, rt_runtime_us)
    if name != IRQBALANCE:
        return Competitor(name, pid, detail)
    line = text_of(root, f"/proc/{pid}/cmdline") or ""
    # A container's root may have given its process this name, and any command line.
    words = line.split("\0") if len(line) <= _LONGEST else []
    banned, script = irqbalance_bans(words)
    if banned:
        detail += f", but not of interrupts {', '.join(map(str, banned))}"
    if script:
        detail += f", of those that {script} does not ban"
    return Competitor(name, pid, detail, banned, script)


def irqbalance_bans(argv: Sequence[str]) -> tuple[tuple[int, ...], str]:
    """The interrupts that irqbalance's command line bans, and its policy script. Arguments that
    irqbalance itself does not understand are left out."""
    parser = _Quiet(add_help=False, allow_abbrev=True)
    parser.add_argument("--banirq", "-i", action="append", default=[])
    parser.add_argument("--policyscript", "-l", default="")
    try:
        known, _ = parser.parse_known_args(list(argv[1:]))
    except ValueError:
        return (), ""
    banned = {int(text) for text in known.banirq if _IRQ.fullmatch(text)}
    return tuple(sorted(banned)), known.policyscript


class _Quiet(argparse.ArgumentParser):
    """Raises ValueError where its base class exits."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _detail(root: HostRoot, name: str, rt_runtime_us: int) -> str:
    details = {
        IRQBALANCE: "rewrites interrupt affinity every few seconds",
        "numad": "moves guests between NUMA nodes",
        "stalld": "boosts starved threads",
    }
    if name == "tuned":
        profile = text_of(root, _TUNED_PROFILE)
        details[name] = f"profile {profile}" if profile else "no profile"
    if name in ("stalld", "tuned") and rt_runtime_us == -1:
        details[name] += "; sched_rt_runtime_us is -1, which switches off DEADLINE admission"
    return details.get(name, "")


T = TypeVar("T")


class ProblemLog:
    """The problems of readers, in the order in which they occurred."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def attempt(self, reader: str, read: Callable[[], T], default: T) -> T:
        """``read``'s result; when it fails, a Problem of ``reader`` and ``default``."""
        try:
            return read()
        except VsrtuneError as error:
            what = str(error)
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        except (ValueError, LookupError, RecursionError) as error:
            what = (
                f"unexpected content: {error}; please report it with the output of `vsrtune record`"
            )
        self.problems.append(Problem(reader, what))
        return default
