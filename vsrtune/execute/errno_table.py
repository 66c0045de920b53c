# SPDX-License-Identifier: GPL-2.0-or-later
"""The meaning of an errno for each operation on the host: the only classification table.

A verdict tells whether the object is gone, whether a later try can help, why the kernel gives
this answer, and what to do. The sources are the kernel functions named beside the rows (6.1 and
6.12) and the lab's findings.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from vsrtune.core.errors import Lasting, VanishedError, WriteError
from vsrtune.plan.interrupt_cpus import MANAGED_HINT

_LATER = Lasting.TRANSIENT
_NEVER = Lasting.PERMANENT


class Operation(Enum):
    """The operation that failed with the errno."""

    READ = "read"
    AFFINITY = "sched_setaffinity"
    SCHED = "sched_setattr"
    DEADLINE = "sched_setattr to DEADLINE"
    THREADS = "write to cgroup.threads"
    TYPE = "write to cgroup.type"
    MKDIR = "mkdir of a cgroup"
    RMDIR = "rmdir of a cgroup"
    CPUSET = "write to cpuset.cpus"
    EXCLUSIVE = "write to cpuset.cpus.exclusive"
    PARTITION = "write to cpuset.cpus.partition"
    TXQUEUELEN = "write to tx_queue_len"
    THREADED = "write to threaded"
    IRQ = "write to smp_affinity_list"
    RPS = "write to rps_cpus"
    XPS = "write to xps_cpus"
    TIMESLICE = "write to sched_rr_timeslice_ms"
    LIMIT = "write to sched_rt_runtime_us"


@dataclass(frozen=True, slots=True)
class ErrnoVerdict:
    """``vanished``: the object is gone, which is no failure. ``reason`` is one clause that
    follows "because". ``hint`` tells the operator what to do, and may be empty."""

    lasting: Lasting
    reason: str
    hint: str = ""
    vanished: bool = False


_GONE = ErrnoVerdict(_NEVER, "the object no longer exists", vanished=True)
_ROOT = "run as root with CAP_SYS_NICE"
_MANAGED = "the interrupt is kernel-managed: its driver leaves its CPUs to the kernel"

# fmt: off
_AGAIN = "the daemon tries again at its next pass"
_TABLE: dict[tuple[Operation, int], ErrnoVerdict] = {
    # Such a file goes only with the object itself: our cgroup, the device, its queue.
    **{
        (operation, number): _GONE
        for operation in (
            Operation.MKDIR, Operation.EXCLUSIVE, Operation.PARTITION, Operation.TXQUEUELEN,
            Operation.THREADED, Operation.RPS, Operation.XPS,
        )
        for number in (errno.ENOENT, errno.ENODEV)
    },
    # __sched_setaffinity: the mask and the cpuset have no CPU in common.
    (Operation.AFFINITY, errno.EINVAL): ErrnoVerdict(
        _NEVER, "no CPU of the mask is online and allowed by the thread's cpuset",
        "compare the policy's CPUs with cpuset.cpus.effective of the thread's cgroup"),
    # dl_task_check_affinity: a DEADLINE thread must keep its whole root domain.
    (Operation.AFFINITY, errno.EBUSY): ErrnoVerdict(
        _NEVER, "a SCHED_DEADLINE thread keeps the CPUs of its root domain",
        "pin such a thread through a cpuset partition, before it becomes DEADLINE"),
    (Operation.AFFINITY, errno.EPERM): ErrnoVerdict(
        _NEVER, "the process may not change other users' threads", _ROOT),
    # __sched_setscheduler: task_group(p)->rt_bandwidth.rt_runtime is 0, or no capability.
    (Operation.SCHED, errno.EPERM): ErrnoVerdict(
        _NEVER, "real-time classes are forbidden here: CAP_SYS_NICE is missing, or the kernel "
        "has RT_GROUP_SCHED and the thread's cpu cgroup has no real-time budget",
        "run as root; under RT_GROUP_SCHED give the cgroup cpu.rt_runtime_us (v1) or "
        "disable the cpu controller for the guests' cgroups (v2)"),
    (Operation.SCHED, errno.EINVAL): ErrnoVerdict(
        _NEVER, "the kernel does not know this class or takes no such priority",
        "use a priority from 1 to 99"),
    # __sched_setscheduler: the span of the runqueue last used is not within the mask.
    (Operation.DEADLINE, errno.EPERM): ErrnoVerdict(
        _LATER, "the thread has not run since it was given its CPUs, so the kernel still "
        "counts it in its old root domain; or its mask is not a whole root domain",
        "retried once the guest has traffic"),
    # sched_dl_overflow
    (Operation.DEADLINE, errno.EBUSY): ErrnoVerdict(
        _NEVER, "admission control: the CPUs have too little deadline bandwidth left",
        "lower runtime/period, or free bandwidth held by other DEADLINE threads"),
    (Operation.DEADLINE, errno.EINVAL): ErrnoVerdict(
        _NEVER, "runtime <= deadline <= period must hold, runtime >= 1024 ns, period >= 100 us",
        "correct the times in the policy"),
    # sched_dl_global_validate
    (Operation.LIMIT, errno.EBUSY): ErrnoVerdict(
        _LATER, "budgets of class deadline on some CPU need more than that",
        "end them or make them smaller (`vsrtune show` lists what is booked)"),
    # cgroup_threads_write, cgroup_attach_permissions
    (Operation.THREADS, errno.EOPNOTSUPP): ErrnoVerdict(
        _NEVER, "the cgroup is not threaded, or belongs to another threaded domain than "
        "the thread",
        "cgroup.type of both cgroups must be 'threaded' below the same domain"),
    # cgroup_migrate_add_task, cpuset_can_attach
    (Operation.THREADS, errno.EINVAL): ErrnoVerdict(
        _NEVER, "the kernel thread is bound and cannot be moved, or its affinity is fixed",
        "leave this thread where it is"),
    (Operation.THREADS, errno.ENOSPC): ErrnoVerdict(
        _NEVER, "the target cpuset has no CPU or memory node",
        "look at cpuset.cpus.effective of the cgroup"),
    (Operation.THREADS, errno.EBUSY): ErrnoVerdict(
        _LATER, "the cgroup is changing, or delegates controllers to children", ""),
    (Operation.THREADS, errno.EAGAIN): ErrnoVerdict(
        _LATER, "a DEADLINE thread does not fit into the target cpuset now", ""),
    # cgroup_enable_threaded
    (Operation.TYPE, errno.EOPNOTSUPP): ErrnoVerdict(
        _NEVER, "the parent cgroup cannot hold threaded children",
        "cgroup.type of the parent must be 'domain threaded' or 'threaded'"),
    (Operation.TYPE, errno.EBUSY): ErrnoVerdict(
        _NEVER, "the cgroup holds processes or delegates controllers", "empty it first"),
    # cgroup_mkdir
    (Operation.MKDIR, errno.EAGAIN): ErrnoVerdict(
        _NEVER, "cgroup.max.descendants or cgroup.max.depth of an ancestor is reached",
        "raise that limit"),
    # cgroup_destroy_locked
    (Operation.RMDIR, errno.EBUSY): ErrnoVerdict(
        _LATER, "threads or child cgroups are still in it",
        "retried; look at its cgroup.threads"),
    # update_cpumask, validate_change, validate_partition
    (Operation.CPUSET, errno.EINVAL): ErrnoVerdict(
        _NEVER, "the kernel takes no such CPU list here: it names a CPU that does not exist, "
        "or overlaps an exclusive cpuset",
        "compare it with /sys/devices/system/cpu/possible and the cpuset partitions"),
    # bitmap_parselist
    (Operation.CPUSET, errno.ERANGE): ErrnoVerdict(
        _NEVER, "it names a CPU beyond the last one of this host",
        "compare it with /sys/devices/system/cpu/possible"),
    (Operation.CPUSET, errno.EBUSY): ErrnoVerdict(
        _NEVER, "DEADLINE threads in the cpuset would lose their CPUs",
        "give them another class first"),
    (Operation.CPUSET, errno.ENOSPC): ErrnoVerdict(
        _LATER, "threads are in the cpuset, and it would have no CPUs of its own",
        _AGAIN),
    # update_exclusive_cpumask, validate_change
    (Operation.EXCLUSIVE, errno.EINVAL): ErrnoVerdict(
        _NEVER, "a cgroup beside it, or a partition, has one of these CPUs for itself",
        "look at cpuset.cpus and cpuset.cpus.exclusive of the cgroups beside it"),
    # update_prstate
    (Operation.PARTITION, errno.EINVAL): ErrnoVerdict(
        _NEVER, "the kernel makes no partition here", "look at cpuset.cpus.partition"),
    # dev_change_tx_queue_len
    (Operation.TXQUEUELEN, errno.ENOMEM): ErrnoVerdict(
        _LATER, "there is no memory for rings of that length", "choose a shorter queue"),
    (Operation.TXQUEUELEN, errno.ERANGE): ErrnoVerdict(
        _NEVER, "the length is out of range", "use 1 to 32767"),
    (Operation.TXQUEUELEN, errno.EINVAL): ErrnoVerdict(
        _NEVER, "the device takes no such length", "use 1 to 32767"),
    # modify_napi_threaded, dev_set_threaded
    (Operation.THREADED, errno.EOPNOTSUPP): ErrnoVerdict(
        _LATER, "the device has no NAPI instance now", "see whether it is up: ip link"),
    (Operation.THREADED, errno.EINVAL): ErrnoVerdict(
        _NEVER, "the kernel takes no such value here", "threaded is true or false"),
    # write_irq_affinity: irq_can_set_affinity_usr() is false
    (Operation.IRQ, errno.EIO): ErrnoVerdict(_NEVER, _MANAGED, MANAGED_HINT),
    (Operation.IRQ, errno.EPERM): ErrnoVerdict(_NEVER, _MANAGED, MANAGED_HINT),
    # dw_pci_msi_set_affinity, brcm_msi_set_affinity: one line for all vectors. (NicWrites has made
    # sure that the mask has an online CPU.)
    (Operation.IRQ, errno.EINVAL): ErrnoVerdict(
        _NEVER, "the interrupt controller cannot route it there", MANAGED_HINT),
    # assign_managed_vector, vector_assign_managed_shutdown: the vector matrix is full
    (Operation.IRQ, errno.ENOSPC): ErrnoVerdict(
        _NEVER, "these CPUs have no interrupt vector left", "name more CPUs in cpus.irq"),
    (Operation.IRQ, errno.ENOENT): _GONE,
    # store_rps_map: rps_cpumask_housekeeping leaves no CPU
    (Operation.RPS, errno.EINVAL): ErrnoVerdict(
        _NEVER, "the kernel steers no frames to isolated CPUs (isolcpus, nohz_full)",
        "name CPUs that are not isolated"),
    # xps_cpus_store, __netif_set_xps_queue
    (Operation.XPS, errno.EINVAL): ErrnoVerdict(
        _NEVER, "the device takes no such CPUs for this queue",
        "see its queues: ethtool -l, tc -s qdisc show"),
}

# For every operation that has no row of its own.
_COMMON: dict[int, ErrnoVerdict] = {
    errno.ESRCH: _GONE,
    errno.ENOENT: ErrnoVerdict(_LATER, "the file does not exist", _AGAIN),
    errno.ENODEV: ErrnoVerdict(_LATER, "the file is being removed", _AGAIN),
    errno.EPERM: ErrnoVerdict(_NEVER, "the process may not do that", "run as root"),
    errno.EACCES: ErrnoVerdict(_NEVER, "the process may not do that", "run as root"),
    errno.EROFS: ErrnoVerdict(_NEVER, "the file system is read-only", "run outside the container"),
    errno.EAGAIN: ErrnoVerdict(_LATER, "the kernel is busy with it", ""),
    errno.EBUSY: ErrnoVerdict(_LATER, "the kernel is busy with it", ""),
    errno.EINTR: ErrnoVerdict(_LATER, "a signal interrupted the call", ""),
    errno.ENOMEM: ErrnoVerdict(_LATER, "the kernel has no memory for it", "free memory"),
    errno.EIO: ErrnoVerdict(_NEVER, "the kernel refuses to change it", ""),
}
# fmt: on


def name(number: int) -> str:
    """The symbol of an errno; if there are two, the one that the kernel's sources use."""
    if number == errno.EOPNOTSUPP:
        return "EOPNOTSUPP"
    return errno.errorcode.get(number, str(number))


def classify(operation: Operation, number: int) -> ErrnoVerdict:
    """The verdict on an errno. An errno without a row is permanent, and the reason names it."""
    found = _TABLE.get((operation, number)) or _COMMON.get(number)
    if found is not None:
        return found
    return ErrnoVerdict(_NEVER, f"of {name(number)} ({os.strerror(number)})", "see the kernel log")


@contextmanager
def told(operation: Operation, where: str, wanted: str = "") -> Iterator[None]:
    """Raise ``write_error`` for an OSError."""
    try:
        yield
    except OSError as error:
        raise write_error(operation, error, where, wanted) from error


def write_error(operation: Operation, error: OSError, where: str, wanted: str = "") -> WriteError:
    """The error to raise: VanishedError when the object is gone, otherwise WriteError with the
    verdict's lasting, reason and hint."""
    number = error.errno or 0
    verdict = classify(operation, number)
    if verdict.vanished:
        return VanishedError(verdict.reason, where=where)
    value = f" of '{wanted}'" if wanted else ""
    return WriteError(
        f"{operation.value}{value} failed with {name(number)} because {verdict.reason}",
        where=where,
        hint=verdict.hint,
        lasting=verdict.lasting,
    )
