# SPDX-License-Identifier: GPL-2.0-or-later
"""Processes and threads from /proc, and what KVM says in debugfs of the threads that are vcpus."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.model.guest import Sched, ThreadKey

# USER_HZ, the unit of start times and CPU times in /proc, is 100 on every
# architecture that has KVM, whatever CONFIG_HZ is.
CLOCK_TICKS = 100

# include/linux/sched.h. Threads that vhost and io_uring start inside a process are user workers
# since 6.4; those of io_uring are IO workers as well. The bit of PF_USER_WORKER means nothing in
# 6.1. Programs cannot set any of these flags.
PF_IO_WORKER = 0x00000010
PF_USER_WORKER = 0x00004000
PF_KTHREAD = 0x00200000
PF_NO_SETAFFINITY = 0x04000000

# A pass reads no more of one process. A QEMU with 1024 vcpus, its iothreads and its workers has
# some 1200 threads; 256 queues on each of 16 NICs take 12,300 descriptors.
MOST_THREADS = 4096
MOST_DESCRIPTORS = 16384

# Daemons that change the same settings as vsrtune, by their comm.
DAEMONS = ("irqbalance", "tuned", "stalld", "numad")

# A comm cannot forge these: it is in the file's first line, and newlines in it are escaped.
_ALLOWED = "\nCpus_allowed_list:"
_UIDS = "\nUid:"

# Where KVM has a directory PID-FD for each machine, and in it one for each vcpu.
KVM = "/sys/kernel/debug/kvm"
_KVM_VCPU = re.compile(r"vcpu(\d{1,5})", re.ASCII)

_QEMU = re.compile(r"qemu-system-[\w.-]+|qemu-kvm|kvm|qemu")
_WORKER = re.compile(r"vhost-(\d{1,10})", re.ASCII)
# Kernel threads have their whole name in /proc since 5.17 (get_kthread_comm).
_NAPI = re.compile(r"napi/(.+)-\d+", re.ASCII)


class Stat(NamedTuple):
    """Fields of /proc/TID/stat (proc(5)); times in clock ticks."""

    tid: int
    comm: str
    state: str
    ppid: int
    flags: int
    cpu_ticks: int
    threads: int
    start_time: int
    processor: int

    @property
    def kthread(self) -> bool:
        """Whether it is a kernel thread."""
        return bool(self.flags & PF_KTHREAD)

    @property
    def by_kernel(self) -> bool:
        """Whether it runs kernel code only and vhost may have started it. Its name proves nothing,
        because a process names all of its threads."""
        return self.kthread or self.flags & (PF_USER_WORKER | PF_IO_WORKER) == PF_USER_WORKER

    @property
    def bound(self) -> bool:
        """Whether the kernel lets nobody set its mask."""
        return bool(self.flags & PF_NO_SETAFFINITY)


class RawThread(NamedTuple):
    """One thread as /proc shows it. ``cgroup`` is the path below /sys/fs/cgroup
    without a leading slash, None where cpusets are not under cgroup v2."""

    key: ThreadKey
    name: str
    kthread: bool
    by_kernel: bool
    sched: Sched
    affinity: CpuSet
    last_cpu: int
    cpu_ns: int
    cgroup: str | None


def parse_stat(text: str) -> Stat:
    """Read /proc/TID/stat. The comm may hold spaces and parentheses, so the last
    ``)`` ends it. Raises ValueError or IndexError on anything else."""
    head, _, tail = text.rpartition(")")
    tid, _, comm = head.partition("(")
    fields = tail.split(None, 37)
    return Stat(
        tid=int(tid),
        comm=comm,
        state=fields[0],
        ppid=int(fields[1]),
        flags=int(fields[6]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        start_time=int(fields[19]),
        processor=int(fields[36]),
    )


def parse_status_allowed(text: str) -> CpuSet:
    """``Cpus_allowed_list`` of /proc/TID/status. Raises ValueError when absent."""
    begin = text.find(_ALLOWED)
    if begin < 0:
        raise ValueError("no Cpus_allowed_list in status")
    begin += len(_ALLOWED)
    end = text.find("\n", begin)
    return CpuSet.parse(text[begin : end if end >= 0 else len(text)])


def parse_status_uids(text: str) -> tuple[int, int, int]:
    """The real, effective and saved user of /proc/TID/status. Raises ValueError when absent."""
    begin = text.find(_UIDS)
    words = text[begin + len(_UIDS) :].split(maxsplit=3)[:3]
    if begin < 0 or len(words) < 3:
        raise ValueError("no Uid in status")
    real, effective, saved = map(int, words)
    return real, effective, saved


def parse_cgroup(text: str) -> str | None:
    """The cgroup v2 path of /proc/TID/cgroup, without its leading slash.

    None when there is no v2 hierarchy, or the cpuset controller is still on v1.
    """
    if text.startswith("0::/") and text.find("\n") in (-1, len(text) - 1):
        return text[4:].rstrip("\n")
    path: str | None = None
    for line in text.split("\n"):
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
    """Whether an executable's path names a QEMU system emulator (``kvm`` on Proxmox, ``qemu-kvm``
    on RHEL)."""
    base = exe.removesuffix(" (deleted)").rpartition("/")[2]
    return _QEMU.fullmatch(base) is not None


def read_threads(root: HostRoot, pid: int) -> list[RawThread]:
    """The threads of a process in tid order, without those that end meanwhile.
    Raises OSError when the process is gone, or has more than MOST_THREADS."""
    threads = []
    for name in root.listdir(f"/proc/{pid}/task", MOST_THREADS):
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
            by_kernel=stat.by_kernel,
            sched=sched,
            affinity=allowed,
            last_cpu=stat.processor,
            cpu_ns=cpu_ns(root, base, stat),
            cgroup=cgroup,
        )
    except (FileNotFoundError, ProcessLookupError):
        return None


def read_kvm_vcpus(root: HostRoot, pid: int) -> dict[int, int]:
    """tid to vcpu number of the machine that a process has made (``kvm_create_vm_debugfs``). KVM
    tells since 6.0 which thread last ran a vcpu, 0 for none (``vcpu_get_pid``). Its own numbers
    may have gaps (those of x86 are APIC ids), so vcpus are counted in their order. Raises OSError
    when debugfs cannot be read or the kernel does not tell, ValueError unless the process has made
    one machine."""
    machines = [name for name in root.listdir(KVM) if name.startswith(f"{pid}-")]
    if len(machines) != 1:
        raise ValueError(f"KVM knows {len(machines)} machines of process {pid}")
    base = f"{KVM}/{machines[0]}"
    numbers = sorted(int(m[1]) for n in root.listdir(base) if (m := _KVM_VCPU.fullmatch(n)))
    tids = [int(root.read(f"{base}/vcpu{number}/pid")) for number in numbers]
    return {tid: index for index, tid in enumerate(tids) if tid}


def cpu_ns(root: HostRoot, base: str, stat: Stat) -> int:
    """The run time of the thread with that directory in /proc, in nanoseconds; from the ticks in
    ``stat`` where the kernel does not report it (CONFIG_SCHED_INFO). Raises OSError."""
    try:
        return int(root.read(f"{base}/schedstat").split()[0])
    except (PermissionError, FileNotFoundError, IndexError, ValueError):
        return stat.cpu_ticks * (1_000_000_000 // CLOCK_TICKS)


def read_links(root: HostRoot, pid: int, most: int | None = MOST_DESCRIPTORS) -> dict[int, str]:
    """Open descriptors of a process and where they point, in number order. Raises OSError when the
    process is gone, has more than ``most``, or access is denied."""
    base = f"/proc/{pid}/fd"
    links: dict[int, str] = {}
    for number in sorted(int(n) for n in root.listdir(base, most)):
        try:
            links[number] = root.readlink(f"{base}/{number}")
        except OSError:
            continue
    return links


def is_open(root: HostRoot, pid: int, number: int) -> bool:
    """Whether a descriptor is of an opened file: O_PATH takes no right on it. True where its fdinfo
    cannot be read, as of old recordings."""
    for line in (text_of(root, f"/proc/{pid}/fdinfo/{number}") or "").split("\n"):
        key, _, value = line.partition(":")
        if key == "flags":
            return not int(value, 8) & os.O_PATH
    return True


def parse_fdinfo_iff(text: str) -> str:
    """The device of an open /dev/net/tun from its fdinfo (``iff:`` line), or "" when
    the descriptor is not attached."""
    for line in text.split("\n"):
        key, _, value = line.partition(":")
        if key == "iff":
            return value.strip()
    return ""
