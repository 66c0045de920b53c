"""The parts of a host that are not a guest's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from vsrtune.attempts import Attempts
from vsrtune.core.cpuset import CpuSet
from vsrtune.host.cpus import read_cpus
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.interrupts import read_names
from vsrtune.host.netdev import NetReader
from vsrtune.host.procfs import CLOCK_TICKS, read_thread
from vsrtune.host.scheduler import read_books
from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.model.guest import Guest, SchedClass
from vsrtune.model.host import Cpu, DeadlineCpu, Host, Nic, SoftirqThread
from vsrtune.napi import read_nic_threads
from vsrtune.neighbours import read_neighbours
from vsrtune.process_table import Processes
from vsrtune.seen import SeenMemory

_KERNEL = "/proc/sys/kernel"


class HostReader:
    """Reads the host in one pass; ``attempts`` keeps what could not be read."""

    def __init__(
        self, root: HostRoot, net: NetReader, memory: SeenMemory, attempts: Attempts
    ) -> None:
        self._root = root
        self._net = net
        self._memory = memory
        self._try = attempts.attempt
        self._irq_names: Mapping[int, str] | None = None

    def boot_id(self) -> str:
        """The kernel's id of this boot."""
        return self._try("host", lambda: self._text(f"{_KERNEL}/random/boot_id"), "")

    def cpus(self) -> tuple[Cpu, ...]:
        """The CPUs."""
        return self._try("cpus", lambda: read_cpus(self._root), ())

    def host(
        self,
        boot_id: str,
        cpus: tuple[Cpu, ...],
        processes: Processes,
        guests: Iterable[Guest],
        cpusets: tuple[CpusetGroup, ...],
    ) -> Host:
        """The rest, around what has been read."""
        runtime = self._try("sched", lambda: self._number("sched_rt_runtime_us"), 0)
        guests = tuple(guests)
        online = CpuSet(c.id for c in cpus if c.online)
        return Host(
            boot_id=boot_id,
            kernel=self._try("host", lambda: self._text(f"{_KERNEL}/osrelease"), ""),
            clock_ticks=CLOCK_TICKS,
            cpus=cpus,
            nics=self.nics(lower_devices(guests), processes),
            sched_rt_runtime_us=runtime,
            sched_rt_period_us=self._try("sched", lambda: self._number("sched_rt_period_us"), 0),
            neighbours=read_neighbours(self._root, processes.daemons, runtime),
            softirq=self._softirq(processes),
            cpusets=cpusets,
            deadline=self.books(online, guests, cpusets),
            rr_timeslice_ms=self._rr_timeslice(),
        )

    def _rr_timeslice(self) -> int | None:
        try:
            return self._number("sched_rr_timeslice_ms")
        except (OSError, ValueError):
            return None  # recorded before anyone read it

    def books(
        self, online: CpuSet, guests: Iterable[Guest], cpusets: Iterable[CpusetGroup]
    ) -> tuple[DeadlineCpu, ...]:
        """What the kernel has booked for class deadline."""
        budgets = any(t.sched.cls is SchedClass.DEADLINE for g in guests for t in g.threads)
        partitions = any(c.partition != "member" for c in cpusets)
        return read_books(self._root, online, totals=budgets or partitions)

    def nics(self, lowers: set[str], processes: Processes) -> tuple[Nic, ...]:
        """Lower devices of the guests, and the host's hardware NICs, with the NAPI threads
        that have their names."""
        hardware: list[str] = self._try("net", self._net.hardware_names, [])
        nics = []
        for name in sorted(lowers.union(hardware)):
            nic = self._try("net", partial(self._nic, name, processes.napi.get(name, ())), None)
            if nic is not None:
                nics.append(nic)
        return tuple(nics)

    def _nic(self, name: str, threads: Iterable[int]) -> Nic | None:
        nic = self._net.nic(name, self._names_of_irqs, self._memory.rx_cpus)
        if nic is not None and nic.threaded_napi:
            nic = replace(nic, napi=read_nic_threads(self._root, threads))
        if nic is not None and self._memory.seen.irqs:
            fixed = self._memory.fixed
            irqs = tuple(replace(i, managed=fixed(i.number, i.name)) for i in nic.irqs)
            nic = replace(nic, irqs=irqs)
        return nic

    def _names_of_irqs(self) -> Mapping[int, str]:
        if self._irq_names is None:
            names: Mapping[int, str] = self._try("irq", lambda: read_names(self._root), {})
            self._irq_names = names
        return self._irq_names

    def _softirq(self, processes: Processes) -> tuple[SoftirqThread, ...]:
        found = []
        for cpu, tid in processes.softirq:
            thread = self._try("proc", partial(read_thread, self._root, tid, tid), None)
            if thread is not None:
                found.append(SoftirqThread(thread.key, cpu, thread.sched))
        return tuple(found)

    def _text(self, path: str) -> str:
        return self._root.read(path).strip()

    def _number(self, name: str) -> int:
        return int(self._root.read(f"{_KERNEL}/{name}"))


def lower_devices(guests: Iterable[Guest]) -> set[str]:
    """The devices below all interfaces of the guests."""
    return {lower for g in guests for i in g.interfaces for lower in i.lower}
