# SPDX-License-Identifier: GPL-2.0-or-later
"""Everything that vsrtune can change on a host: targets and their values.

Every target identifies its object so tightly (start times, ifindex, pid of the domain) that a
later object of the same name is never mistaken for it. A thread's ``label`` is for readers only
and not part of its identity, because it changes when a worker's interface becomes known.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar, cast, get_args, get_origin

from vsrtune.core.codec import decode
from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Interface, NicKind, Sched, ThreadKey

V = TypeVar("V")


class Setting(Generic[V]):
    """A setting of the host; its values are of type ``V``, which ``values`` is at run time."""

    __slots__ = ()
    values: ClassVar[type]

    def __init_subclass__(cls) -> None:
        for base in cls.__dict__.get("__orig_bases__", ()):
            if get_origin(base) is Setting:
                (cls.values,) = get_args(base)


@dataclass(frozen=True, slots=True)
class ThreadMask:
    """The affinity of one thread that shares the cgroup of a pinned one."""

    thread: ThreadKey
    cpus: CpuSet


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin made through libvirt: the thread's affinity, and the raw text of the cgroup's
    ``cpuset.cpus`` (None without a cpuset controller), which libvirt rewrites too and undo
    restores to the letter. ``others`` are threads of the same cgroup with another affinity, which
    a rewrite of the cpuset may lose (6.1 always loses it). They are carried for undo and not
    compared."""

    cpus: CpuSet
    cpuset: str | None
    others: tuple[ThreadMask, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"CPUs {self.cpus}"


@dataclass(frozen=True, slots=True)
class ThreadAffinity(Setting[CpuSet]):
    """``sched_setaffinity`` on one thread. Value: CpuSet."""

    kind: ClassVar[str] = "thread-affinity"
    guest: str
    thread: ThreadKey
    label: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.guest}: {self.label} (tid {self.thread.tid}) affinity"


@dataclass(frozen=True, slots=True)
class ThreadSched(Setting[Sched]):
    """``sched_setattr`` on one thread. Value: Sched."""

    kind: ClassVar[str] = "thread-sched"
    guest: str
    thread: ThreadKey
    label: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.guest}: {self.label} (tid {self.thread.tid}) scheduling"


@dataclass(frozen=True, slots=True)
class ThreadCgroup(Setting[str]):
    """The cgroup of one thread, moved through ``cgroup.threads``. Value: str, the
    path below /sys/fs/cgroup. Writing keeps the thread's affinity where the new
    cgroup allows it."""

    kind: ClassVar[str] = "thread-cgroup"
    guest: str
    thread: ThreadKey
    label: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.guest}: {self.label} (tid {self.thread.tid}) cgroup"


@dataclass(frozen=True, slots=True)
class CgroupDir(Setting[bool]):
    """A cgroup of vsrtune's own, threaded unless it is at the top. Value: bool, whether it
    exists."""

    kind: ClassVar[str] = "cgroup-dir"
    guest: str
    path: str

    def __str__(self) -> str:
        return f"{self.guest}: cgroup {self.path}"


@dataclass(frozen=True, slots=True)
class VcpuPin(Setting[Pin]):
    """``virDomainPinVcpuFlags(LIVE)``. Value: Pin. ``uuid`` names the domain,
    ``thread`` the vcpu thread whose affinity is read back."""

    kind: ClassVar[str] = "vcpu-pin"
    guest: str
    uuid: str
    vcpu: int
    thread: ThreadKey

    def __str__(self) -> str:
        return f"{self.guest}: vcpu {self.vcpu} pin"


@dataclass(frozen=True, slots=True)
class EmulatorPin(Setting[Pin]):
    """``virDomainPinEmulator(LIVE)``. Value: Pin. ``thread`` is QEMU's main thread."""

    kind: ClassVar[str] = "emulator-pin"
    guest: str
    uuid: str
    thread: ThreadKey

    def __str__(self) -> str:
        return f"{self.guest}: emulator pin"


@dataclass(frozen=True, slots=True)
class DeviceNumber(Setting[int]):
    """A number in a file of a guest's network device in sysfs. ``ifindex`` guards against a new
    device of the same name. Value: int.

    Each subclass is a row of ``DEVICE_SETTINGS``. Observation, drift, undo, the order of writes,
    the writer and reports read the class variables and know no setting by its name.
    """

    kind: ClassVar[str]
    # The file in the device's directory.
    path: ClassVar[str]
    # The field of Interface that holds the value, None for a device without the file.
    field: ClassVar[str]
    # The devices on which it can be set, and whether it is observed of all others too.
    kinds: ClassVar[tuple[NicKind, ...]] = tuple(NicKind)
    universal: ClassVar[bool] = False
    # Whether the kernel announces a change (RTM_NEWLINK). Otherwise the daemon polls the file.
    announced: ClassVar[bool] = False
    # The key of policies, and the name in reports.
    key: ClassVar[str]
    name: ClassVar[str]

    guest: str
    device: str
    ifindex: int

    def __str__(self) -> str:
        return f"{self.guest}: {self.device} {self.name}"

    @classmethod
    def observed(cls, device: Interface) -> int | None:
        """The present value."""
        return cast(int | None, getattr(device, cls.field))

    @classmethod
    def changed(cls, device: Interface, value: int) -> Interface:
        """The device with another value."""
        field: Any = {cls.field: value}
        return replace(device, **field)


class TxQueueLen(DeviceNumber):
    """The length of each ring of a macvtap or tap device, 1..32767."""

    __slots__ = ()
    kind = "txqueuelen"
    path = "tx_queue_len"
    field = "txqueuelen"
    kinds = tuple(kind for kind in NicKind if kind.rings)
    universal = True
    announced = True
    key = "queue.macvtap"
    name = "txqueuelen"


class NapiThreaded(DeviceNumber):
    """Whether the device's NAPI runs in kernel threads, 0 or 1. Setting it makes these threads,
    so vsrtune can tune them one pass later."""

    __slots__ = ()
    kind = "napi-threaded"
    path = "threaded"
    field = "threaded"
    kinds = (NicKind.NAPI_MACVTAP,)
    key = "napi.threaded"
    name = "threaded NAPI"


DeviceSetting = TxQueueLen | NapiThreaded
DEVICE_SETTINGS: tuple[type[DeviceNumber], ...] = get_args(DeviceSetting)


@dataclass(frozen=True, slots=True)
class QueueCpus(Setting[CpuSet]):
    """``rps_cpus`` of a receive queue of a lower device, or ``xps_cpus`` of a transmit queue.
    Value: CpuSet, empty when off. ``queue`` is the queue's directory, such as ``rx-0``."""

    kind: ClassVar[str] = "queue-cpus"
    guest: str
    device: str
    ifindex: int
    queue: str

    @property
    def path(self) -> str:
        """The file in the device's directory."""
        return f"queues/{self.queue}/{queue_file(self.queue)}"

    def __str__(self) -> str:
        return f"{self.guest}: {self.device} {self.queue} {queue_file(self.queue)}"


def queue_file(queue: str) -> str:
    """The attribute that holds the CPUs of a queue."""
    return "rps_cpus" if queue.startswith("rx-") else "xps_cpus"


@dataclass(frozen=True, slots=True)
class IrqAffinity(Setting[CpuSet]):
    """``smp_affinity_list`` of an interrupt. Value: CpuSet. ``name`` is the driver's name for it,
    which guards against a number that the kernel gave to another device."""

    kind: ClassVar[str] = "irq-affinity"
    guest: str
    irq: int
    name: str

    def __str__(self) -> str:
        return f"{self.guest}: irq {self.irq} ({self.name}) affinity"


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """How long a thread of class rr runs before its equals get their turn, in ms."""

    ms: int

    def __str__(self) -> str:
        return f"{self.ms}ms"


@dataclass(frozen=True, slots=True)
class RrTimeslice(Setting[TimeSlice]):
    """``kernel.sched_rr_timeslice_ms``, a single value for all threads of class rr. Value:
    TimeSlice."""

    kind: ClassVar[str] = "rr-timeslice"
    key: ClassVar[str] = "scheduler.slice"
    guest: str

    def __str__(self) -> str:
        return f"{self.guest}: time slice of class rr"


@dataclass(frozen=True, slots=True)
class RunTime:
    """How long threads may run in a period, in us."""

    us: int

    def __str__(self) -> str:
        return "no limit" if self.us < 0 else f"{self.us / 1000:g}ms"


@dataclass(frozen=True, slots=True)
class RealtimeLimit(Setting[RunTime]):
    """``kernel.sched_rt_runtime_us``, for the threads of classes fifo and rr of each CPU together.
    Value: RunTime."""

    kind: ClassVar[str] = "realtime-limit"
    key: ClassVar[str] = "scheduler.rest"
    guest: str

    def __str__(self) -> str:
        return f"{self.guest}: limit of realtime threads"


@dataclass(frozen=True, slots=True)
class CpusetList:
    """The raw text of a cpuset file, "" when unset. ``masks`` are threads below whose affinity is
    narrower than their cpuset, which a rewrite may lose (6.1 always loses it). They are carried
    for undo and not compared."""

    text: str
    masks: tuple[ThreadMask, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"CPUs {self.text}" if self.text else "unset"


@dataclass(frozen=True, slots=True)
class CpusetFile(Setting[CpusetList]):
    """``cpuset.cpus`` or ``cpuset.cpus.exclusive`` (``file``) of a cgroup on the way to a
    partition. Value: CpusetList."""

    kind: ClassVar[str] = "cpuset-file"
    guest: str
    path: str
    file: str

    def __str__(self) -> str:
        return f"{self.guest}: cgroup {self.path} {self.file}"


@dataclass(frozen=True, slots=True)
class PartitionState:
    """The text of ``cpuset.cpus.partition``: ``member``, ``root``, or ``root invalid (reason)``
    for a root that something else made invalid. ``masks`` are those of the host's threads that a
    write loses (before 6.2), as in ``CpusetList``."""

    text: str
    masks: tuple[ThreadMask, ...] = field(default=(), compare=False)

    @property
    def wanted(self) -> str:
        """The text that was written to the file, whether it is in force or not."""
        return self.text.partition(" ")[0]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Partition(Setting[PartitionState]):
    """Whether a cgroup is a cpuset partition, whose CPUs are a root domain of their own.
    Value: PartitionState."""

    kind: ClassVar[str] = "partition"
    guest: str
    path: str

    def __str__(self) -> str:
        return f"{self.guest}: partition {self.path}"


# What notes the masks of threads that a write loses.
Noting = CpusetFile | Partition
Noted = CpusetList | PartitionState

# The guest of targets that are the host's own, such as the ksoftirqd threads. No guest can have
# this name, because libvirt refuses a slash in names.
HOST_REF = "host/"

CgroupTarget = CgroupDir | CpusetFile | Partition
# Targets that are a file of a network device.
DeviceTarget = DeviceNumber | QueueCpus
# Single values of the host for all realtime threads, with their keys of policies.
SchedLimit = RrTimeslice | RealtimeLimit
Target = (
    ThreadAffinity
    | ThreadSched
    | ThreadCgroup
    | CgroupDir
    | CpusetFile
    | Partition
    | VcpuPin
    | EmulatorPin
    | DeviceSetting
    | QueueCpus
    | IrqAffinity
    | SchedLimit
)
# Targets without a thread.
ThreadlessTarget = CgroupTarget | DeviceTarget | IrqAffinity | SchedLimit
Value = CpuSet | Sched | Pin | TimeSlice | RunTime | CpusetList | PartitionState | str | int | bool


def decode_target(data: Any) -> Target:
    """Read an encoded target. Raises VsrtuneError as ``decode`` does."""
    return cast(Target, decode(cast(Any, Target), data, "$.target"))


def decode_value(target: Target, data: Any, where: str) -> Value:
    """Read an encoded value: its type follows from the target, because a CPU list
    and a path are both text. Raises VsrtuneError as ``decode`` does."""
    return cast(Value, decode(target.values, data, where))


def pinned_cpus(value: Value | None) -> CpuSet | None:
    """The CPUs of a pin or affinity value."""
    if isinstance(value, Pin):
        return value.cpus
    return value if isinstance(value, CpuSet) else None
