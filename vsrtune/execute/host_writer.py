# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads and writes one action target on the host: the only writer.

Every read and write first checks that the object is still the one that the target names: a
thread by its start time, a device by its ifindex, a domain by the thread of its QEMU. Otherwise
it raises VanishedError.

A write may take several steps (a pin is the cpuset, the affinity, then the threads beside it).
Each write is idempotent and starts from any half-way state, so that the executor can finish or
take back a write that a crash interrupted.

An interrupt is the right one if its number is still its driver's: /sys/kernel/irq/N/actions names
who has requested it. While a device is down nobody has requested it, and the kernel keeps the
number and its affinity for the device.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import (
    FixedError,
    Lasting,
    PendingError,
    VanishedError,
    VsrtuneError,
    WriteError,
)
from vsrtune.execute.cgroups import Cgroups, settle
from vsrtune.execute.cpuset_clear import clear, unpark
from vsrtune.execute.errno_table import Operation, told, write_error
from vsrtune.execute.syscalls import LiveCalls
from vsrtune.execute.threads import CPUS, HostThread
from vsrtune.host.cgroupfs import MOUNT
from vsrtune.host.filesystem import HostRoot, LiveRoot
from vsrtune.host.interrupts import joined
from vsrtune.host.procfs import parse_stat
from vsrtune.model.deadline import LEAVING, lag_seconds, parse_overrun
from vsrtune.model.guest import Sched, SchedClass, ThreadKey
from vsrtune.model.journal_records import displaced
from vsrtune.model.targets import (
    DEVICE_SETTINGS,
    HOST_REF,
    CgroupDir,
    CpusetFile,
    DeviceNumber,
    DeviceTarget,
    EmulatorPin,
    IrqAffinity,
    Noted,
    Noting,
    Partition,
    Pin,
    QueueCpus,
    RealtimeLimit,
    RrTimeslice,
    RunTime,
    Setting,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadlessTarget,
    ThreadMask,
    ThreadSched,
    TimeSlice,
    Value,
    VcpuPin,
)

_NET = "/sys/class/net"
# The errnos for interrupts that the kernel manages itself, or that their controller cannot route:
# the mask has an online CPU by then.
_MANAGED = (errno.EIO, errno.EPERM, errno.EINVAL)
# Operations by the file that they write.
_OPERATIONS = {operation.value.removeprefix("write to "): operation for operation in Operation}


class NicWrites:
    """Interrupts and files of devices. Methods raise OSError unless they state otherwise."""

    def __init__(self, root: HostRoot, calls: LiveCalls) -> None:
        self._root = root
        self._calls = calls

    def read_irq(self, target: IrqAffinity) -> CpuSet:
        """The ``smp_affinity_list`` of an interrupt. Raises VanishedError."""
        return CpuSet.parse(self._root.read(self._irq(target)))

    def write_irq(self, target: IrqAffinity, cpus: CpuSet) -> None:
        """Set ``smp_affinity_list``; an empty mask would mean the kernel's default. Raises
        VanishedError, FixedError for an interrupt that the kernel never moves, and
        WriteError."""
        path = self._irq(target)
        self._check(str(target), cpus, empty=False)
        try:
            self._calls.write(path, str(cpus))
        except OSError as error:
            wrong = write_error(Operation.IRQ, error, str(target), str(cpus))
            if error.errno in _MANAGED:
                wrong = FixedError(wrong.what, where=wrong.where, hint=wrong.hint)
            raise wrong from error

    def read(self, target: DeviceTarget) -> int | CpuSet:
        """The value in a file of a device. Raises VanishedError."""
        path = self._file(target)
        if isinstance(target, DeviceNumber):
            return int(self._root.read(path))
        try:
            return CpuSet.from_mask(self._root.read(path))
        except FileNotFoundError:
            raise VanishedError("the device has no such queue now", where=str(target)) from None

    def write(self, target: DeviceTarget, value: int | CpuSet) -> None:
        """Write the value to a file of a device; no CPUs switch RPS or XPS off. Raises
        VanishedError, WriteError."""
        path = self._file(target)
        if isinstance(value, CpuSet):
            self._check(str(target), value, empty=True)
        text = value.to_mask() if isinstance(value, CpuSet) else str(value)
        with told(_OPERATIONS[path.rpartition("/")[2]], str(target), str(value)):
            self._calls.write(path, text)

    def _file(self, target: DeviceTarget) -> str:
        """The path of the file; the device may have been renamed."""
        names = [target.device]
        names += [n for n in self._root.listdir(_NET) if n != target.device]
        for name in names:
            try:
                if int(self._root.read(f"{_NET}/{name}/ifindex")) == target.ifindex:
                    return f"{_NET}/{name}/{target.path}"
            except OSError:
                continue
        raise VanishedError(f"no device has ifindex {target.ifindex} now", where=str(target))

    def _irq(self, target: IrqAffinity) -> str:
        try:
            actions = joined(self._root.read(f"/sys/kernel/irq/{target.irq}/actions"))
        except FileNotFoundError:
            raise VanishedError("the interrupt is gone", where=str(target)) from None
        if actions and actions != target.name:
            raise VanishedError(f"the number is that of {actions} now", where=str(target))
        return f"/proc/irq/{target.irq}/smp_affinity_list"

    def _check(self, where: str, cpus: CpuSet, *, empty: bool) -> None:
        possible = CpuSet.parse(self._root.read(f"{CPUS}/possible"))
        wrong = ""
        if not cpus <= possible:
            wrong = f"CPU {cpus - possible} does not exist on this host"
        elif not empty and not cpus & CpuSet.parse(self._root.read(f"{CPUS}/online")):
            wrong = f"none of CPUs {cpus or 'none'} is online"
        if wrong:
            hint = f"choose from CPUs {possible} that are online"
            raise WriteError(f"not written: {wrong}", where=where, hint=hint)


_RR_TIMESLICE = "/proc/sys/kernel/sched_rr_timeslice_ms"
_RT_RUNTIME = "/proc/sys/kernel/sched_rt_runtime_us"


class LiveSysOps:
    """The host as the executor uses it: this machine, or the one that ``root`` (reads) and
    ``calls`` (writes) give.

    No root domain is changed before ``budgets_end`` (``Journal.budgets_end``). ``original`` gives
    the value that undo restores for a target (``Journal.original``); that of a pin is noted in
    the guest's domain (``carried``). ``pulse`` is called ahead of each write, which may take half
    a minute, to show that the work moves on.
    """

    def __init__(
        self,
        libvirt_uri: str = "qemu:///system",
        root: HostRoot | None = None,
        calls: LiveCalls | None = None,
        budgets_end: float = 0.0,
        original: Callable[[Target], Value | None] = lambda _target: None,
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        self._original = original
        self._pulse = pulse
        self._root = root if root is not None else LiveRoot()
        self._calls = calls if calls is not None else LiveCalls(libvirt_uri)
        self._cgroups = Cgroups(self._root, self._calls)
        self._nics = NicWrites(self._root, self._calls)
        self._clock, self._sleep = time.monotonic, time.sleep
        self._budgets_end = budgets_end
        # Each takes values of its setting's type.
        self._writers: Mapping[type[Setting[Any]], Callable[[Any, Any], None]] = {
            ThreadAffinity: self._write_affinity,
            ThreadSched: self._write_sched,
            ThreadCgroup: self._move,
            VcpuPin: self._write_pin,
            EmulatorPin: self._write_pin,
            CgroupDir: self._cgroups.write_dir,
            CpusetFile: self._cgroups.write_list,
            Partition: self._cgroups.write_partition,
            **dict.fromkeys((*DEVICE_SETTINGS, QueueCpus), self._nics.write),
            IrqAffinity: self._nics.write_irq,
            RrTimeslice: self._write_timeslice,
            RealtimeLimit: self._write_limit,
        }

    def read(self, target: Target) -> Value:
        """The present value. Raises VanishedError, or WriteError when it cannot be read."""
        with self._translated(target):
            return self._read(target)

    def write(self, target: Target, value: Value) -> None:
        """Set the value. Raises VanishedError or WriteError."""
        self._pulse()
        with self._translated(target):
            self._write(target, value)

    def online(self) -> CpuSet:
        """The CPUs that are online now. Raises WriteError."""
        with self._translated(f"{CPUS}/online"):
            return CpuSet.parse(self._root.read(f"{CPUS}/online"))

    def unpartitioned(self, cpus: CpuSet) -> CpuSet:
        """Those of ``cpus`` that no cpuset partition holds: what the root cpuset has left
        (``top_cpuset.effective_cpus``). The kernel cuts the mask of every thread outside a
        partition to them. All of ``cpus`` without the controller on cgroup v2. Raises
        WriteError."""
        path = f"{MOUNT}/cpuset.cpus.effective"
        with self._translated(path):
            try:
                return cpus & CpuSet.parse(self._root.read(path))
            except FileNotFoundError:
                return cpus

    def left(self, target: Target, cpus: CpuSet) -> CpuSet:
        """What the cpuset of a thread leaves it of ``cpus`` (``HostThread.left``). All of them in a
        partition of ours, which goes, without a cpuset, and for other targets. Raises
        VanishedError or WriteError."""
        if not isinstance(target, ThreadAffinity | VcpuPin | EmulatorPin):
            return cpus
        with self._translated(target):
            thread = self._identified(target.thread, str(target))
            if thread.allowed() is None:
                return cpus
            above = self._cgroups.partitions(thread.cgroup())
            ours = (Partition(ref, path) for ref in (HOST_REF, target.guest) for path in above)
            if any(map(self._original, ours)):
                return cpus
            # A pin comes with its own list.
            return thread.left(cpus, above=not isinstance(target, ThreadAffinity))

    def whole(self, target: Target, value: Value) -> Value:
        """The mask or pin ``value`` of a thread that has all CPUs which its cpuset has left, with
        those that partitions have taken: it gets these once the partitions go. Other values are
        returned as they are. (Where the kernel cut a narrower mask, nothing shows what was asked
        for.) Raises VanishedError or WriteError."""
        if not isinstance(target, ThreadAffinity | VcpuPin | EmulatorPin):
            return value
        with self._translated(target):
            thread = self._identified(target.thread, str(target))
            online = self.online()
            taken = online - self.unpartitioned(online)
            if not taken or not self._cgroups.follows(thread):
                return value
            taken &= self._cgroups.listed(thread.cgroup(), online)
        if isinstance(value, Pin):
            return replace(value, cpus=value.cpus | taken)
        return value | taken if isinstance(value, CpuSet) else value

    def renewed(self, target: Noting, value: Noted) -> Noted:
        """``value`` of a CPU list or partition with the masks that threads are to have beside it:
        those noted in it, unless a thread got another one since, and those that threads got since.
        Raises WriteError."""
        with self._translated(target):
            return self._cgroups.renewed(target, value)

    def heir(self, target: ThreadSched) -> ThreadSched | None:
        """The main thread of the process of a thread that is gone, if it has not ended too. The
        thread that calls execve(2) takes its place (``de_thread``): number and start time are the
        main thread's then, class and mask stay its own. Raises WriteError."""
        gone = target.thread
        with self._translated(target):
            try:
                stat = parse_stat(self._root.read(f"/proc/{gone.pid}/task/{gone.pid}/stat"))
            except (FileNotFoundError, ProcessLookupError):
                return None
        # A process that started later only has the number.
        if gone.tid == gone.pid or stat.start_time > gone.start_time:
            return None
        main = ThreadKey(gone.pid, gone.pid, stat.start_time)
        return ThreadSched(target.guest, main, target.label)

    def _read(self, target: Target) -> Value:
        match target:
            case ThreadAffinity():
                return self._identified(target.thread, str(target)).affinity()
            case ThreadSched():
                self._identified(target.thread, str(target))
                return self._root.sched_attr(target.thread.tid)
            case ThreadCgroup():
                return self._identified(target.thread, str(target)).cgroup()
            case VcpuPin() | EmulatorPin():
                return self._read_pin(target)
            case CgroupDir() | CpusetFile() | Partition():
                return self._cgroups.read(target)
            case DeviceNumber() | QueueCpus():
                return self._nics.read(target)
            case IrqAffinity():
                return self._nics.read_irq(target)
            case RrTimeslice():
                return TimeSlice(int(self._root.read(_RR_TIMESLICE)))
            case RealtimeLimit():
                return RunTime(int(self._root.read(_RT_RUNTIME)))

    def _write(self, target: Target, value: Value) -> None:
        if not isinstance(target, ThreadSched | DeviceTarget | IrqAffinity | RrTimeslice):
            self._wait_for_budgets()
        self._writers[type(target)](target, value)

    def _write_affinity(self, target: ThreadAffinity, cpus: CpuSet) -> None:
        self._identified(target.thread, str(target)).set_affinity(cpus)

    @contextmanager
    def _translated(self, target: Target | str) -> Iterator[None]:
        """Turn every error into a WriteError or a VanishedError. A fault of our own, too, must keep
        no other setting from being restored."""
        try:
            yield
        except WriteError:
            raise
        except OSError as error:
            raise self._gone_or(error, target) from error
        except Exception as error:
            known = isinstance(error, (ValueError, IndexError, VsrtuneError))
            what = "the kernel's answer makes no sense" if known else "this is a fault of vsrtune"
            raise WriteError(
                f"{what}: {error if known else repr(error)}",
                where=str(target),
                hint="please report it with the output of `vsrtune record`",
            ) from error

    # -- threads

    def _identified(self, key: ThreadKey, where: str) -> HostThread:
        thread = HostThread(self._root, self._calls, key, where)
        thread.check()
        return thread

    def _write_sched(self, target: ThreadSched, sched: Sched) -> None:
        thread = self._identified(target.thread, str(target))
        deadline = sched.cls is SchedClass.DEADLINE
        tid = target.thread.tid
        before = self._root.sched_attr(tid)
        leaves = before.cls is SchedClass.DEADLINE and not deadline
        overrun = self._overrun(target.thread) if leaves else 0
        if leaves and thread.stat().state != "R" and not self._cgroups.partitions(thread.cgroup()):
            with suppress(OSError):
                self._calls.set_sched(tid, LEAVING)
        operation = Operation.DEADLINE if deadline else Operation.SCHED
        with told(operation, str(target), str(sched)):
            if deadline:
                self._enter_deadline(thread, target, sched)
            else:
                self._calls.set_sched(tid, sched)
        if leaves:
            over = self._clock() + lag_seconds(before, overrun)
            self._budgets_end = max(self._budgets_end, over)

    def _enter_deadline(self, thread: HostThread, target: ThreadSched, sched: Sched) -> None:
        """Make the thread DEADLINE. Raises PendingError if the thread has not run on its CPUs,
        otherwise the OSError of the call."""
        while True:
            outside = thread.stat().processor not in thread.affinity()
            try:
                return self._calls.set_sched(target.thread.tid, sched)
            except OSError as error:
                if error.errno != errno.EPERM:
                    raise
                cpu, mask = thread.stat().processor, thread.affinity()
                if cpu not in mask:
                    raise PendingError(
                        f"the thread has not run since it was given CPUs {mask} (last on CPU "
                        f"{cpu}), and the kernel takes class deadline only then",
                        where=str(target),
                        hint="tried again when it has run",
                        lasting=Lasting.TRANSIENT,
                    ) from error
                # A second call may succeed only if the thread has run on its CPUs meanwhile.
                if not outside:
                    raise

    def _overrun(self, key: ThreadKey) -> int:
        try:
            return parse_overrun(self._root.read(f"/proc/{key.pid}/task/{key.tid}/sched"))
        except OSError:
            return 0

    def _wait_for_budgets(self) -> None:
        """Wait until no thread that has left class deadline is in a period of its budget.

        Its bandwidth stays booked until then (its 0-lag time, ``inactive_task_timer``), and a
        root domain that is built anew meanwhile would be left with less than nothing. A thread
        that left asleep keeps its bandwidth booked until its root domain goes; if there is no
        partition to remove, the thread leaves through ``LEAVING``. (Not elsewhere: a thread that
        runs with that budget is throttled at once, and stays throttled if it gets another budget
        soon.)
        """
        rest = self._budgets_end - self._clock()
        if rest > 0:
            self._sleep(rest)

    def _move(self, target: ThreadCgroup, path: str) -> None:
        thread = self._identified(target.thread, str(target))
        if thread.cgroup() == path:
            return
        mask = thread.affinity()
        # A single thread moves only within its threaded domain. A kernel thread is a process of
        # its own and may go anywhere as such; a thread of QEMU would take all of QEMU along.
        leaves = "/" not in path or "/" not in thread.cgroup()
        file = "cgroup.procs" if leaves and thread.stat().kthread else "cgroup.threads"
        try:
            self._calls.write(f"{MOUNT}/{path}/{file}", str(target.thread.tid))
        except OSError as error:
            thread.check()
            raise write_error(Operation.THREADS, error, str(target), path) from error
        # 6.1 gives a moved thread all CPUs of its new cpuset (cpuset_attach).
        thread.keep_affinity(mask)

    # -- pins

    def _read_pin(self, target: VcpuPin | EmulatorPin) -> Pin:
        thread = self._identified(target.thread, str(target))
        cpus = thread.affinity()
        text = thread.cpuset_text()
        if text is None or isinstance(target, VcpuPin):
            return Pin(cpus, text)
        others = ((t.key, t.mask_or_none()) for t in self._neighbours(thread))
        masks = tuple(ThreadMask(k, m) for k, m in others if m is not None and m != cpus)
        return Pin(cpus, text, masks)

    def _write_pin(self, target: VcpuPin | EmulatorPin, pin: Pin) -> None:
        """Pin through libvirt, then correct what it cannot express.

        libvirt writes the cpuset and the affinity of one thread. An original may have another
        cpuset text (empty, as libvirt starts a guest without pins), and another affinity again
        (isolcpus): both are written after the nearest pin.
        """
        thread = self._identified(target.thread, str(target))
        where = str(target)
        if pin.cpuset is not None:
            unpark(self._root, self._calls, thread.home(), where)
        beside: dict[ThreadKey, CpuSet] = {}
        if isinstance(target, EmulatorPin) and pin.cpuset is not None:
            beside = {
                t.key: mask
                for t in self._neighbours(thread)
                if (mask := t.mask_or_none()) is not None
            }
        mask_then, allowed_then = thread.affinity(), thread.allowed()
        if pin.cpuset is None or displaced(pin):
            nearest = pin.cpus
        else:
            nearest = CpuSet.parse(pin.cpuset) if pin.cpuset else self.online()
        was = self._was(target)
        try:
            which = target.vcpu if isinstance(target, VcpuPin) else None
            self._calls.pin(target.uuid, which, nearest, was, thread.key)
        except VanishedError as error:
            thread.check()
            # Later actions rely on the pin: a realtime class, above all.
            raise WriteError(
                f"its QEMU runs, but libvirt has no such domain running: {error.what}",
                where=where,
                hint="it is just coming or going, or another libvirt's; see: virsh list --all",
                lasting=Lasting.TRANSIENT,
            ) from error
        except WriteError:
            thread.check()
            raise
        if pin.cpuset is None:
            return
        if thread.cpuset_text() != pin.cpuset:
            if pin.cpuset:
                thread.set_cpuset_text(pin.cpuset)
            else:
                clear(self._root, self._calls, thread.home(), where)
        if pin.cpuset != str(pin.cpus) or thread.affinity() != pin.cpus:
            thread.set_affinity(pin.cpus)
        followers = {mask_then, allowed_then}
        for key, mask in beside.items():
            known = next((o.cpus for o in pin.others if o.thread == key), None)
            wanted = known if known is not None else pin.cpus if mask in followers else mask
            settle(HostThread(self._root, self._calls, key, where), wanted)

    def _was(self, target: VcpuPin | EmulatorPin) -> CpuSet | None:
        """The CPUs to which libvirt pinned before us: ``was`` of ``LiveCalls.pin``."""
        original = self._original(target)
        if not isinstance(original, Pin):
            return None
        if original.cpuset is None:
            return CpuSet() if self.online() <= original.cpus else original.cpus
        return CpuSet.parse(original.cpuset)

    def _neighbours(self, thread: HostThread) -> list[HostThread]:
        """The other threads of the thread's cgroup: QEMU's own, and workers."""
        pid = thread.key.pid
        path = f"{MOUNT}/{thread.cgroup()}/cgroup.threads"
        found = []
        for word in self._root.read(path).split():
            tid = int(word)
            if tid == thread.key.tid:
                continue
            # A kernel thread is its own process.
            for owner in (pid, tid):
                try:
                    stat = parse_stat(self._root.read(f"/proc/{owner}/task/{tid}/stat"))
                except OSError:
                    continue
                key = ThreadKey(owner, tid, stat.start_time)
                found.append(HostThread(self._root, self._calls, key, thread.where))
                break
        return found

    # -- the host

    def _write_timeslice(self, target: RrTimeslice, value: TimeSlice) -> None:
        with told(Operation.TIMESLICE, str(target), str(value)):
            self._calls.write(_RR_TIMESLICE, str(value.ms))

    def _write_limit(self, target: RealtimeLimit, value: RunTime) -> None:
        with told(Operation.LIMIT, str(target), str(value)):
            self._calls.write(_RT_RUNTIME, str(value.us))

    def _gone_or(self, error: OSError, target: Target | str) -> WriteError:
        """VanishedError if the target's thread is gone by now, otherwise the error itself as a
        WriteError."""
        if not isinstance(target, ThreadlessTarget | str):
            try:
                self._identified(target.thread, str(target))
            except VanishedError as vanished:
                return vanished
            except OSError:
                pass  # the first error says more
        return write_error(Operation.READ, error, str(target))
