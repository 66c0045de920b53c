# SPDX-License-Identifier: GPL-2.0-or-later
"""The machine: CPUs, network devices below the guests, interrupts, competing daemons."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from vsrtune.core.cpuset import CpuSet
from vsrtune.model import cpuset_tree
from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.model.guest import Irq, Sched, ThreadKey

_RELEASE = re.compile(r"(\d+)\.(\d+)", re.ASCII)


def release_of(text: str) -> tuple[int, int]:
    """A kernel's release, as (6, 12), from its full name; (0, 0) when that has none."""
    found = _RELEASE.match(text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU that is present. ``siblings`` are its SMT siblings, itself included. ``cache`` are the
    CPUs with which it shares its last level cache, itself included; empty when the kernel does not
    report them."""

    id: int
    online: bool
    isolated: bool
    siblings: CpuSet
    node: int
    cache: CpuSet = field(default_factory=CpuSet)


@dataclass(frozen=True, slots=True)
class NicQueue:
    """A queue of a lower device, ``rx-0`` or ``tx-0``. ``cpus`` are those of ``rps_cpus`` or
    ``xps_cpus``: empty when off, None when the kernel has no such setting here (``xps_cpus`` of a
    device with one transmit queue)."""

    name: str
    cpus: CpuSet | None


def rps_cpus(queues: Iterable[NicQueue]) -> CpuSet:
    """The CPUs of all receive queues' RPS."""
    return CpuSet.union(q.cpus for q in queues if q.name.startswith("rx-") and q.cpus)


@dataclass(frozen=True, slots=True)
class NicThread:
    """A kernel thread of a lower device's threaded NAPI, identified by its name alone."""

    key: ThreadKey
    name: str
    affinity: CpuSet


@dataclass(frozen=True, slots=True)
class Nic:
    """A lower device. ``rps_cpus`` are those of all its receive queues. ``rx_cpus`` are the CPUs
    on which a trace found its receive SoftIRQ, None without a result. ``inner``: it leads nowhere
    (a dummy), so frames pass only between the guests on it."""

    name: str
    ifindex: int
    driver: str
    node: int
    txqueuelen: int
    threaded_napi: bool
    rps_cpus: CpuSet
    irqs: tuple[Irq, ...] = ()
    rx_cpus: CpuSet | None = None
    queues: tuple[NicQueue, ...] = ()
    napi: tuple[NicThread, ...] = ()
    inner: bool = False

    @property
    def bridge(self) -> bool:
        """Whether it is a Linux bridge or an Open vSwitch."""
        return self.driver == "bridge" or self.name == "ovs-system"


@dataclass(frozen=True, slots=True)
class SoftirqThread:
    """``ksoftirqd/CPU``: runs the deferred SoftIRQ work of its CPU."""

    key: ThreadKey
    cpu: int
    sched: Sched


@dataclass(frozen=True, slots=True)
class DeadlineCpu:
    """DEADLINE bandwidths of one CPU's root domain as the kernel books them, in units of 1/2**20
    CPU: ``booked`` for the whole root domain (None when it was not read), ``fair_server`` the
    kernel's own for this CPU (0 before 6.12)."""

    cpu: int
    booked: int | None = None
    fair_server: int = 0


IRQBALANCE = "irqbalance"


@dataclass(frozen=True, slots=True)
class Competitor:
    """Other software that changes the same settings (irqbalance, TuneD, stalld...).
    ``banned_irqs`` are the interrupts that irqbalance was told to leave alone, ``policy_script``
    is the script that it asks about each interrupt ("" for none)."""

    name: str
    pid: int | None
    detail: str
    banned_irqs: tuple[int, ...] = ()
    policy_script: str = ""


@dataclass(frozen=True)
class Host:
    """The machine. ``sched_rt_runtime_us`` -1 means no RT throttling. ``cpusets`` is sorted by
    path, and empty without cgroup v2 cpusets. ``deadline`` is empty when the kernel's books are
    not readable. ``rr_timeslice_ms`` is None when it cannot be read and set."""

    # No slots: cached_property stores the results of frequent lookups.

    boot_id: str
    kernel: str
    clock_ticks: int
    cpus: tuple[Cpu, ...]
    nics: tuple[Nic, ...]
    sched_rt_runtime_us: int
    sched_rt_period_us: int
    neighbours: tuple[Competitor, ...] = ()
    softirq: tuple[SoftirqThread, ...] = ()
    cpusets: tuple[CpusetGroup, ...] = ()
    deadline: tuple[DeadlineCpu, ...] = ()
    rr_timeslice_ms: int | None = None

    @cached_property
    def release(self) -> tuple[int, int]:
        """The kernel's release, as (6, 12); (0, 0) when it is not known."""
        return release_of(self.kernel)

    def cpuset(self, path: str) -> CpusetGroup | None:
        """The cpuset of that cgroup; None for one that does not matter."""
        return cpuset_tree.find(self.cpusets, path)

    @cached_property
    def online(self) -> CpuSet:
        """CPUs that are online."""
        return CpuSet(c.id for c in self.cpus if c.online)

    @cached_property
    def everywhere(self) -> CpuSet:
        """The CPUs of a thread that nobody binds: partitions take theirs from its mask."""
        # Every pass asks. With many guests there are thousands of cgroups, and hardly a partition.
        if set(map(attrgetter("partition"), self.cpusets)) <= {"member"}:
            return self.online
        return self.online - CpuSet.union(c.effective for c in self.cpusets if c.valid)

    @cached_property
    def isolated(self) -> CpuSet:
        """CPUs isolated at boot (isolcpus) or by a partition of cgroup v2."""
        return CpuSet(c.id for c in self.cpus if c.isolated)

    @cached_property
    def housekeeping(self) -> CpuSet:
        """The CPUs of the host's services: those that nobody binds, within system.slice's list.
        All online ones if there are none, which no kernel allows."""
        free, services = self.unbound, self.cpuset("system.slice")
        return free if services is None else free & services.effective or free

    @property
    def unbound(self) -> CpuSet:
        """The CPUs of a thread that nobody binds, also of a guest without pins: libvirt gives it no
        isolated one. All online ones if there are none."""
        return self.everywhere - self.isolated or self.online

    def nic(self, name: str) -> Nic | None:
        """The lower device of that name, or None."""
        return self._nics.get(name)

    @cached_property
    def _nics(self) -> dict[str, Nic]:
        return {n.name: n for n in self.nics}


# Numbers of the macvlan kinds' modes in netlink (enum macvlan_mode), by libvirt's names.
MODES = {"private": 1, "vepa": 2, "bridge": 4, "passthrough": 8}


def mode_name(number: int) -> str:
    """libvirt's name of a mode; bridge for any other number."""
    return next((word for word, one in MODES.items() if one == number), "bridge")


@dataclass(frozen=True, slots=True)
class Link:
    """One network device. ``kind`` is that of `ip -d link` ("" for hardware), ``lower`` the index
    of the device below it (0: none, or in another namespace), ``master`` that of its bridge or
    bond (0: none), ``mode`` as in MODES (0: none), ``queue`` its txqueuelen in frames.

    ``every_queue``, ``uplink`` and ``napi_thread`` are attributes of our module's devices
    (docs/kmod.md): None when the device or the loaded module has none, ``napi_thread`` also while
    a thread begins or ends."""

    index: int
    name: str
    kind: str = ""
    lower: int = 0
    master: int = 0
    mode: int = 0
    mac: str = ""
    mtu: int = 0
    queue: int = 0
    up: bool = False
    every_queue: bool | None = None
    uplink: bool | None = None
    napi_thread: int | None = None
