# SPDX-License-Identifier: GPL-2.0-or-later
"""The observed guests as frozen values, as the planner sees them.

The key of a thread is its pid, tid and start time, so that a reused tid is never taken for the
thread that had it before.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.text import time_text
from vsrtune.model.module_counters import TapCounters


class Role(enum.StrEnum):
    """What a thread does for its guest."""

    VCPU = "vcpu"
    VHOST = "vhost"
    NAPI = "napi"
    EMULATOR = "emulator"
    IOTHREAD = "iothread"
    WORKER = "worker"


# Roles of the threads that handle a guest's frames. A NAPI thread is a kernel thread that serves
# the own queue of one of the guest's napi_macvtap devices.
DATA_PLANE = (Role.VCPU, Role.VHOST, Role.NAPI)


class WorkerKind(Enum):
    """How the kernel runs a vhost worker, decided per thread."""

    KTHREAD = "kthread"
    TASK = "task"


class Confidence(Enum):
    """How certain the mapping is, of a vhost worker to an interface and queue, or of a NAPI thread
    to a device."""

    EXACT = "exact"  # by a trace of its transmissions, or by our kernel module
    ORDER = "order"  # creation order equals descriptor order, counts agree; NAPI: by name
    UNCERTAIN = "uncertain"  # counts agree, but hotplug may have changed the order
    NONE = "none"  # not mapped

    @property
    def usable(self) -> bool:
        """True when a per-interface setting may rely on it."""
        return self in (Confidence.EXACT, Confidence.ORDER)


class SchedClass(Enum):
    """Scheduling classes (sched(7)), with the kernel's policy numbers in POLICY_NUMBERS. No policy
    asks for IDLE or EXT (sched_ext), which every user may give to his threads."""

    OTHER = "other"
    FIFO = "fifo"
    RR = "rr"
    BATCH = "batch"
    IDLE = "idle"
    DEADLINE = "deadline"
    EXT = "ext"


# Threads of these run before all of the ordinary classes (sched(7)).
REALTIME = (SchedClass.FIFO, SchedClass.RR)
# Only root gives these: they run before the others, or have a budget.
TIMED = (*REALTIME, SchedClass.DEADLINE)

POLICY_NUMBERS = {
    SchedClass.OTHER: 0,
    SchedClass.FIFO: 1,
    SchedClass.RR: 2,
    SchedClass.BATCH: 3,
    SchedClass.IDLE: 5,
    SchedClass.DEADLINE: 6,
    SchedClass.EXT: 7,
}


@dataclass(frozen=True, slots=True)
class Sched:
    """Scheduling parameters as ``sched_getattr(2)`` gives them; times in nanoseconds."""

    cls: SchedClass = SchedClass.OTHER
    priority: int = 0
    nice: int = 0
    reset_on_fork: bool = False
    runtime_ns: int = 0
    deadline_ns: int = 0
    period_ns: int = 0

    def __str__(self) -> str:
        match self.cls:
            case SchedClass.FIFO | SchedClass.RR:
                text = f"{self.cls.value}:{self.priority}"
            case SchedClass.DEADLINE:
                due = (
                    "" if self.deadline_ns == self.period_ns else time_text(self.deadline_ns) + "/"
                )
                text = f"deadline:{time_text(self.runtime_ns)}/{due}{time_text(self.period_ns)}"
            case _:
                text = self.cls.value + (f" nice {self.nice}" if self.nice else "")
        return text + (" reset-on-fork" if self.reset_on_fork else "")


def is_lowered(written: Sched, now: Sched) -> bool:
    """Whether a thread has the realtime class that was ``written`` at a lower priority. Its owner
    may lower it, and only root could have given the class (user_check_sched_setscheduler): it is
    for whoever gave it to take it away again."""
    given = replace(now, priority=written.priority) == written
    return written.cls in REALTIME and given and now.priority < written.priority


def level(sched: Sched) -> int:
    """How urgent a thread is: its realtime priority, 0 for the ordinary classes."""
    return sched.priority if sched.cls in REALTIME else 0


@dataclass(frozen=True, slots=True, order=True)
class ThreadKey:
    """Identity of a thread. ``start_time`` is field 22 of /proc/TID/stat, in clock ticks."""

    pid: int
    tid: int
    start_time: int

    def __str__(self) -> str:
        return f"{self.tid}"

    def __hash__(self) -> int:
        # Few keys share a tid, and a plan looks up thousands of them.
        return self.tid


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a guest.

    ``index`` is the vcpu or iothread number. ``interface`` (host device) and ``queue`` are set for
    mapped vhost workers, ``interface`` also for NAPI threads. ``pin`` is libvirt's own view of the
    pin, for vcpus and the emulator's main thread of libvirt guests. ``cpuset_cpus`` is the raw
    text of the cgroup's ``cpuset.cpus`` ("" when unset), None without a cpuset controller;
    ``cpuset_effective`` are the CPUs that it yields; ``cpuset_limit`` are those of the cgroup
    above, the most that rewriting ``cpuset.cpus`` can give. ``cgroup`` is the path below
    /sys/fs/cgroup. ``load`` is the share of a CPU that the thread demanded in each of the latest
    windows (model/load.py), the newest last; empty when it was not measured.
    """

    key: ThreadKey
    name: str
    role: Role
    sched: Sched
    affinity: CpuSet
    last_cpu: int
    cpu_ns: int
    cgroup: str
    cpuset_cpus: str | None = None
    cpuset_effective: CpuSet | None = None
    index: int | None = None
    worker: WorkerKind | None = None
    interface: str | None = None
    queue: int | None = None
    confidence: Confidence | None = None
    pin: CpuSet | None = None
    cpuset_limit: CpuSet | None = None
    load: tuple[float, ...] = ()

    def __hash__(self) -> int:
        return self.key.tid


class NicKind(Enum):
    """The kind of a guest's device on the host. A TAP may be a port of a bridge or an Open
    vSwitch, or routed."""

    MACVTAP = "macvtap"
    NAPI_MACVTAP = "napi_macvtap"
    TAP = "tap"
    OTHER = "other"

    @property
    def rings(self) -> bool:
        """True when txqueuelen is the length of the rings and nothing else."""
        return self in (NicKind.MACVTAP, NicKind.NAPI_MACVTAP)


@dataclass(frozen=True, slots=True)
class Interface:
    """One NIC of a guest. ``target`` is the host device, ``lower`` the chain of lower devices from
    the attachment down to the physical (or last visible) one, ``queues`` the number of open tap
    queues, ``ring_drops`` the frames dropped because the ring was full (macvtap rx_dropped). Only
    devices of our kernel module have ``counters`` and ``threaded``, which is as in sysfs: 0 when
    the NAPI of the device's own queue has no thread. Both are None for all other devices."""

    target: str
    ifindex: int
    kind: NicKind
    mac: str
    model: str
    vhost: bool
    queues: int
    txqueuelen: int
    ring_drops: int
    lower: tuple[str, ...]
    alias: str = ""
    threaded: int | None = None
    counters: TapCounters | None = None


@dataclass(frozen=True, slots=True)
class Irq:
    """An interrupt of a device. ``effective`` (effective_affinity_list) is the truth. ``managed``:
    the kernel refused to move it in this boot."""

    number: int
    name: str
    affinity: CpuSet
    effective: CpuSet
    managed: bool = False

    @property
    def shared(self) -> bool:
        """True when other devices share the interrupt."""
        return "," in self.name


@dataclass(frozen=True, slots=True)
class PassedDevice:
    """A PCI device that its guest drives itself, through VFIO. ``node`` is its NUMA node, -1 for
    none. ``irqs`` are those that its guest has enabled, in the order of the device's vectors."""

    address: str
    node: int
    irqs: tuple[Irq, ...] = ()


# What becomes of the frames of an interface that has no tap on the host, by libvirt's type of it.
_WITHOUT_TAP = {
    "vhostuser": "threads of another process (a switch in user space) move its frames; vsrtune "
    "never touches them, and tunes the vcpus alone",
    "vdpa": "its vDPA device moves its frames, without a vhost-net worker; vsrtune tunes the vcpus "
    "alone",
    "hostdev": "the guest drives the device itself, without a vhost-net worker; vsrtune tunes the "
    "vcpus, and the device's interrupts follow them",
    "pod": "its devices are in its pod's network namespace, where vsrtune does not look; its vhost "
    "workers are tuned, and which device each serves is not known",
    "user": "QEMU or a process beside it moves its frames in user space, too slowly for a router; "
    "not tuned",
}


@dataclass(frozen=True, slots=True)
class OtherNic:
    """A NIC of a libvirt guest that has no network device of this host, or whose ``device`` cannot
    be seen. ``kind`` is the type of the interface in the live XML, where libvirt has resolved its
    networks; ``backend`` is that of type ``user``, such as ``passt``. Kind ``pod`` stands for all
    NICs of a guest in a pod."""

    kind: str
    backend: str
    mac: str
    model: str
    device: str = ""

    @property
    def label(self) -> str:
        """``hostdev``, ``user (passt)``."""
        return f"{self.kind} ({self.backend})" if self.backend else self.kind

    @property
    def why(self) -> str:
        """Who moves its frames, and what vsrtune does about it."""
        if self.kind in _WITHOUT_TAP:
            return _WITHOUT_TAP[self.kind]
        if self.device:
            return f"its device {self.device} is not in this network namespace; not tuned"
        return "it has no tap on this host; not tuned"


@dataclass(frozen=True, slots=True)
class CarriedPin:
    """A pin of libvirt's that vsrtune made, according to the domain itself (``carried``): of a
    vcpu, or of the emulator (``vcpu`` None). ``original`` are the CPUs that libvirt would pin it
    to without vsrtune, None for no pin. ``thread`` is the one that vsrtune pinned, None when the
    domain does not tell."""

    vcpu: int | None
    cpus: CpuSet
    original: CpuSet | None
    thread: ThreadKey | None = None


@dataclass(frozen=True)
class Guest:
    """A running guest. ``source`` is ``libvirt``; ``qemu``, a plain QEMU, which policies name as
    ``qemu:NAME``; ``proxmox``, a QEMU of Proxmox VE, whose name is its VMID; ``kubevirt``, one of
    KubeVirt, whose name is NAMESPACE/NAME; or ``foreign``, a guest of another libvirt than the one
    that vsrtune asks, which no policy reaches. ``problems`` say what is not known of the guest.
    ``busy``: libvirt starts, restores, saves or migrates it. ``uid`` is the user that a plain QEMU
    runs as, 0 for all others. ``unconfirmed``: it seems to be libvirt's, but libvirt does not
    answer and has not confirmed it before. ``other_nics`` are those without a place among
    ``interfaces``, ``passed`` the PCI devices that it drives itself."""

    # No slots: see Host.

    name: str
    uuid: str
    source: str
    pid: int
    start_time: int
    threads: tuple[Thread, ...]
    interfaces: tuple[Interface, ...]
    problems: tuple[str, ...] = ()
    busy: bool = False
    carried: tuple[CarriedPin, ...] = ()
    uid: int = 0
    unconfirmed: bool = False
    other_nics: tuple[OtherNic, ...] = ()
    passed: tuple[PassedDevice, ...] = ()

    @cached_property
    def ref(self) -> str:
        """The name that policies use: ``NAME``, ``proxmox:VMID``, ``kubevirt:NAMESPACE/NAME``, or
        ``qemu:NAME`` with ``@UID``
        unless it is root's, because any user may choose the name of another's guest. A foreign
        guest is ``foreign:NAME``, because it may have the name of a libvirt guest."""
        if self.source == "libvirt":
            return self.name
        return f"{self.source}:{self.name}" + (f"@{self.uid}" if self.uid else "")

    @property
    def waits(self) -> bool:
        """True while vsrtune changes nothing of the guest and leaves its settings in place."""
        return self.busy or self.unconfirmed

    @property
    def main(self) -> Thread | None:
        """QEMU's main thread."""
        return next(iter(self.by_role(Role.EMULATOR)), None)

    def by_role(self, role: Role) -> tuple[Thread, ...]:
        """Threads of a role in index, then creation order."""
        return self._by_role.get(role, ())

    @cached_property
    def _by_role(self) -> dict[Role, tuple[Thread, ...]]:
        found: dict[Role, list[Thread]] = {}
        for thread in self.threads:
            found.setdefault(thread.role, []).append(thread)
        return {role: tuple(sorted(threads, key=_age)) for role, threads in found.items()}


def _age(thread: Thread) -> tuple[int, int, int]:
    return thread.index or 0, thread.key.start_time, thread.key.tid


class Attachment(enum.StrEnum):
    """The kind of device on which a guest's interfaces stand."""

    MACVTAP = "macvtap"
    NAPI_MACVLAN = "napi-macvlan"


def thread_label(thread: Thread) -> str:
    """``vcpu 0``, ``iothread 1``, ``vhost macvtap0/0``, ``napi nvt0``,
    ``emulator``."""
    if thread.role is Role.VHOST:
        return f"vhost {thread.interface}/{thread.queue}" if thread.interface else "vhost ?"
    if thread.role is Role.NAPI:
        return f"napi {thread.interface}"
    return thread.role.value if thread.index is None else f"{thread.role.value} {thread.index}"
