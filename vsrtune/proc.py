"""Processes and threads from /proc."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from vsrtune.cpuset import CpuSet
from vsrtune.model import Sched, ThreadKey
from vsrtune.qemu_args import QemuArgs
from vsrtune.qemu_args import parse as parse_args
from vsrtune.rootfs import HostRoot

# USER_HZ, the unit of start times and CPU times in /proc, is 100 on every
# architecture that has KVM, whatever CONFIG_HZ is.
CLOCK_TICKS = 100

# include/linux/sched.h
PF_KTHREAD = 0x00200000

# Daemons that change the same settings as we do, by their comm.
DAEMONS = ("irqbalance", "tuned", "stalld", "numad")

_QEMU = re.compile(r"qemu-system-[\w.-]+|qemu-kvm|kvm|qemu")
_WORKER = re.compile(r"vhost-(\d+)", re.ASCII)
# kernel threads have their whole name in /proc since 5.17 (get_kthread_comm).
_NAPI = re.compile(r"napi/(.+)-\d+", re.ASCII)
_SOFTIRQ = re.compile(r"ksoftirqd/(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Stat:
    """Fields of /proc/TID/stat (proc(5)); times in clock ticks."""

    tid: int
    comm: str
    ppid: int
    flags: int
    cpu_ticks: int
    start_time: int
    processor: int

    @property
    def kthread(self) -> bool:
        """Whether it is a kernel thread."""
        return bool(self.flags & PF_KTHREAD)


@dataclass(frozen=True, slots=True)
class RawThread:
    """One thread as /proc shows it. ``cgroup`` is the path below /sys/fs/cgroup
    without a leading slash, None where cpusets are not under cgroup v2."""

    key: ThreadKey
    name: str
    kthread: bool
    sched: Sched
    affinity: CpuSet
    last_cpu: int
    cpu_ns: int
    cgroup: str | None


@dataclass(frozen=True, slots=True)
class QemuProcess:
    """One QEMU that runs a guest."""

    pid: int
    start_time: int
    args: QemuArgs


@dataclass(frozen=True, slots=True)
class Daemon:
    """One of DAEMONS that runs."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Processes:
    """Result of one pass over /proc. ``workers`` holds the vhost kernel threads:
    owner's tid to their tids; ``softirq`` the ksoftirqd threads: CPU to tid; ``napi``
    the NAPI kernel threads: device, as they name it, to tids."""

    qemus: tuple[QemuProcess, ...]
    workers: dict[int, tuple[int, ...]]
    daemons: tuple[Daemon, ...]
    softirq: tuple[tuple[int, int], ...] = ()
    napi: dict[str, tuple[int, ...]] = field(default_factory=dict)


def parse_stat(text: str) -> Stat:
    """Read /proc/TID/stat. The comm may hold spaces and parentheses, so the last
    ``)`` ends it. Raises ValueError or IndexError on anything else."""
    head, _, tail = text.rpartition(")")
    tid, _, comm = head.partition("(")
    fields = tail.split()
    return Stat(
        tid=int(tid),
        comm=comm,
        ppid=int(fields[1]),
        flags=int(fields[6]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_time=int(fields[19]),
        processor=int(fields[36]),
    )


def parse_status_allowed(text: str) -> CpuSet:
    """``Cpus_allowed_list`` of /proc/TID/status. Raises ValueError when absent."""
    for line in text.splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return CpuSet.parse(line.partition(":")[2])
    raise ValueError("no Cpus_allowed_list in status")


def parse_cgroup(text: str) -> str | None:
    """The cgroup v2 path of /proc/TID/cgroup, without its leading slash.

    None when there is no v2 hierarchy, or the cpuset controller is still on v1.
    """
    path: str | None = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, where = rest.partition(":")
        if "cpuset" in controllers.split(","):
            return None
        if number == "0" and not controllers:
            path = where.removeprefix("/")
    return path


def worker_owner(comm: str) -> int | None:
    """The owner's tid when ``comm`` names a vhost worker (``vhost-<tid>``)."""
    match = _WORKER.fullmatch(comm)
    return int(match[1]) if match else None


def napi_device(comm: str) -> str | None:
    """The device that a NAPI kernel thread was made for (``napi/<device>-<id>``); it
    may have another name by now, or be in another network namespace."""
    match = _NAPI.fullmatch(comm)
    return match[1] if match else None


def is_qemu(exe: str) -> bool:
    """Whether an executable's path is a QEMU system emulator (``kvm`` on Proxmox,
    ``qemu-kvm`` on RHEL)."""
    base = exe.removesuffix(" (deleted)").rpartition("/")[2]
    return _QEMU.fullmatch(base) is not None


def scan(root: HostRoot) -> Processes:
    """One pass over /proc: QEMU guests, vhost kernel threads and known daemons.

    A process that vanishes meanwhile is not in the result. Raises OSError when
    /proc itself cannot be listed.
    """
    qemus: dict[int, tuple[Stat, list[str]]] = {}
    workers: dict[int, list[int]] = {}
    daemons: list[Daemon] = []
    softirq: list[tuple[int, int]] = []
    napi: dict[str, list[int]] = {}
    for stat in _processes(root):
        if stat.kthread:
            owner = worker_owner(stat.comm)
            if owner is not None:
                workers.setdefault(owner, []).append(stat.tid)
            match = _SOFTIRQ.fullmatch(stat.comm)
            if match is not None:
                softirq.append((int(match[1]), stat.tid))
            device = napi_device(stat.comm)
            if device is not None:
                napi.setdefault(device, []).append(stat.tid)
        elif stat.comm in DAEMONS:
            daemons.append(Daemon(stat.comm, stat.tid))
        elif _runs_qemu(root, stat):
            argv = _argv(root, stat.tid)
            if argv:
                qemus[stat.tid] = (stat, argv)
    # A QEMU below a QEMU is a helper of it (a fork about to exec, the cleanup
    # process of -run-with async-teardown), not a guest.
    found = [
        QemuProcess(pid, stat.start_time, args)
        for pid, (stat, argv) in sorted(qemus.items())
        if stat.ppid not in qemus and (args := parse_args(argv)).guest
    ]
    return Processes(
        tuple(found),
        {owner: tuple(sorted(tids)) for owner, tids in workers.items()},
        tuple(sorted(daemons, key=lambda d: (d.name, d.pid))),
        tuple(sorted(softirq)),
        {device: tuple(sorted(tids)) for device, tids in napi.items()},
    )


def _processes(root: HostRoot) -> Iterator[Stat]:
    for name in root.listdir("/proc"):
        if name.isdecimal():
            try:
                yield parse_stat(root.read(f"/proc/{name}/stat"))
            except OSError:
                continue


def _runs_qemu(root: HostRoot, stat: Stat) -> bool:
    try:
        return is_qemu(root.readlink(f"/proc/{stat.tid}/exe"))
    except PermissionError:
        # Not root: the comm is cut to 15 characters, which is enough.
        return is_qemu(stat.comm)
    except OSError:
        return False


def _argv(root: HostRoot, pid: int) -> list[str]:
    try:
        text = root.read(f"/proc/{pid}/cmdline")
    except OSError:
        return []
    return text.removesuffix("\0").split("\0") if text else []


def read_threads(root: HostRoot, pid: int) -> list[RawThread]:
    """The threads of a process in tid order, without those that end meanwhile.
    Raises OSError when the process is gone."""
    threads = []
    for name in root.listdir(f"/proc/{pid}/task"):
        if name.isdecimal():
            thread = read_thread(root, pid, int(name))
            if thread is not None:
                threads.append(thread)
    return sorted(threads, key=lambda t: t.key.tid)


def read_thread(root: HostRoot, pid: int, tid: int) -> RawThread | None:
    """One thread of thread group ``pid``; None when it is gone."""
    base = f"/proc/{pid}/task/{tid}"
    try:
        stat = parse_stat(root.read(f"{base}/stat"))
        allowed = parse_status_allowed(root.read(f"{base}/status"))
        cgroup = parse_cgroup(root.read(f"{base}/cgroup"))
        sched = root.sched_attr(tid)
        return RawThread(
            key=ThreadKey(pid, tid, stat.start_time),
            name=stat.comm,
            kthread=stat.kthread,
            sched=sched,
            affinity=allowed,
            last_cpu=stat.processor,
            cpu_ns=_cpu_ns(root, base, stat),
            cgroup=cgroup,
        )
    except (FileNotFoundError, ProcessLookupError):
        return None


def _cpu_ns(root: HostRoot, base: str, stat: Stat) -> int:
    try:
        return int(root.read(f"{base}/schedstat").split()[0])
    except (PermissionError, FileNotFoundError, IndexError, ValueError):
        # Kernels without CONFIG_SCHED_INFO.
        return stat.cpu_ticks * (1_000_000_000 // CLOCK_TICKS)


def read_links(root: HostRoot, pid: int) -> dict[int, str]:
    """Open descriptors of a process and where they point, in number order.
    Raises OSError when the process is gone or its descriptors are not ours to see."""
    base = f"/proc/{pid}/fd"
    links: dict[int, str] = {}
    for number in sorted(int(n) for n in root.listdir(base)):
        try:
            links[number] = root.readlink(f"{base}/{number}")
        except OSError:
            continue
    return links


def parse_fdinfo_iff(text: str) -> str:
    """The device of an open /dev/net/tun from its fdinfo (``iff:`` line), or "" when
    the descriptor is not attached."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == "iff":
            return value.strip()
    return ""
