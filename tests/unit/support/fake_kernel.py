"""An imitated kernel and libvirt, for tests of what writes to a host.

FakeKernel serves the reads of ``filesystem.HostRoot`` and the calls of
``syscalls.LiveCalls``; ``ops()`` puts the real LiveSysOps on top, so its rules are
what is tested. Affinities follow the kernel named: 6.1 forgets a thread's own
mask when its cpuset is written or it is moved, 6.12 remembers it (``user_cpus_ptr``).

Every change of the host passes ``step``, where a test makes the nth one fail, or
kills the process, ahead of the effect or behind it. With ``path`` the state is on
disk after each step, and survives a real SIGKILL.
"""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vsrtune.core.codec import decode, encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VanishedError, WriteError
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Sched, SchedClass, ThreadKey
from vsrtune.model.journal_records import undo_action, undo_order
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    EmulatorPin,
    IrqAffinity,
    NapiThreaded,
    Pin,
    QueueCpus,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TxQueueLen,
    Value,
    VcpuPin,
)

KERNELS = ("6.1", "6.12")
RR_TIMESLICE = "/proc/sys/kernel/sched_rr_timeslice_ms"
RT_RUNTIME = "/proc/sys/kernel/sched_rt_runtime_us"
TOP = {"type": "domain", "cpus": ""}
UUID = "7b1e6f0c-3c8b-4a53-9f6e-5a2f7d3e0001"
SCOPE = "machine.slice/machine-qemu\\x2d1\\x2dvr1.scope"
LIBVIRT = f"{SCOPE}/libvirt"
OURS = f"{LIBVIRT}/vsrtune"
PLAIN = "system.slice/vr2.service"
BOOT = "5d8f7a44-1a3f-4b7e-8a5e-000000000001"

Step = Callable[[str], None]


class FakeKernel:
    """State is plain JSON data: ``threads``, ``cgroups``, ``devices``, ``irqs``, ``kernel``;
    ``domains`` are libvirt's, by uuid: the cgroup above the threads that it pins, these threads
    by the names of their cgroups, and its own record of the pins."""

    def __init__(self, state: dict[str, Any], path: Path | None = None) -> None:
        self.state = state
        self.path = path
        self.ahead: Step = lambda _what: None
        self.behind: Step = lambda _what: None
        self.log: list[str] = []

    # -- what tests do to the host

    @classmethod
    def load(cls, path: Path) -> FakeKernel:
        return cls(json.loads(path.read_text()), path)

    def save(self) -> None:
        if self.path is not None:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.state))
            os.replace(new, self.path)

    def clone(self) -> FakeKernel:
        return FakeKernel(copy.deepcopy(self.state))

    def ops(self, journal: Journal | None = None) -> LiveSysOps:
        original = journal.original if journal is not None else lambda _target: None
        return LiveSysOps(root=self, calls=self, original=original)

    def end_thread(self, tid: int) -> None:
        del self.state["threads"][str(tid)]

    def execve(self, tid: int) -> None:
        """A thread runs another program: it is all that its process has left, has the number and
        the start time of the main thread, and keeps class, mask and cgroup (de_thread)."""
        threads = self.state["threads"]
        pid = threads[str(tid)]["pid"]
        main = threads[str(tid)] | {"start": threads[str(pid)]["start"], "comm": "spin"}
        for other in [t for t, v in threads.items() if v["pid"] == pid]:
            del threads[other]
        threads[str(pid)] = main

    def end_guest(self, pid: int) -> None:
        """A guest dies: its threads and workers, its cgroups, its devices."""
        threads = self.state["threads"]
        for tid in [t for t, v in threads.items() if v["guest"] == pid]:
            del threads[tid]
        scope = {1000: SCOPE, 2000: PLAIN}[pid]
        for cgroup in [c for c in self.state["cgroups"] if c.startswith(scope)]:
            del self.state["cgroups"][cgroup]
        for device in [d for d, v in self.state["devices"].items() if v["guest"] == pid]:
            del self.state["devices"][device]

    def visible(self) -> dict[str, Any]:
        """Everything an operator can see, to compare to the letter."""
        seen = copy.deepcopy(self.state)
        for thread in seen["threads"].values():
            del thread["user"]
        for domain in seen.get("domains", {}).values():
            del domain["pins"]
        if not seen.get("leaked"):
            seen.pop("leaked", None)
        return seen

    def mask(self, tid: int) -> str:
        return str(self.state["threads"][str(tid)]["mask"])

    # -- HostRoot

    def read(self, path: str) -> str:
        parts = path.split("/")[1:]
        if parts[0] == "proc" and len(parts) == 5 and parts[2] == "task":
            return self._read_thread(int(parts[1]), int(parts[3]), parts[4])
        if path.startswith("/sys/fs/cgroup/"):
            return self._read_cgroup(path.removeprefix("/sys/fs/cgroup/"))
        if path.startswith("/sys/class/net/") and len(parts) == 5:
            device = self.state["devices"].get(parts[3])
            if device is not None and parts[4] in device:
                return f"{device[parts[4]]}\n"
        if "/queues/" in path:
            queues = self.state["devices"].get(parts[3], {}).get("queues", {})
            if parts[5] in queues:
                return CpuSet.parse(queues[parts[5]]).to_mask() + "\n"
        if path.startswith("/proc/irq/") and parts[2] in self.state["irqs"]:
            return f"{self.state['irqs'][parts[2]]['mask']}\n"
        if path.startswith("/sys/kernel/irq/") and parts[3] in self.state["irqs"]:
            return f"{self.state['irqs'][parts[3]]['actions']}\n"
        if path.startswith("/sys/devices/system/cpu/"):
            return f"{self.state[parts[-1]]}\n"
        if path == "/proc/sys/kernel/osrelease":
            return f"{self.state['kernel']}.0\n"
        if path == RR_TIMESLICE:
            return f"{self.state['rr_timeslice']}\n"
        if path == RT_RUNTIME:
            return f"{self.state['rt_runtime']}\n"
        raise FileNotFoundError(errno.ENOENT, "no such file", path)

    def listdir(self, path: str) -> list[str]:
        if path == "/sys/fs/cgroup" or path.startswith("/sys/fs/cgroup/"):
            above = path.removeprefix("/sys/fs/cgroup").removeprefix("/")
            inside = [c for c in self.state["cgroups"] if c.rpartition("/")[0] == above]
            return sorted(c.rpartition("/")[2] for c in inside)
        if path == "/sys/class/net":
            return sorted(self.state["devices"])
        raise FileNotFoundError(errno.ENOENT, "no such directory", path)

    def readlink(self, path: str) -> str:
        raise FileNotFoundError(errno.ENOENT, "no such link", path)

    def exists(self, path: str) -> bool:
        name = path.removeprefix("/sys/fs/cgroup/").removesuffix("/cgroup.procs")
        return name in (*self.state["cgroups"], "/sys/fs/cgroup")

    def sched_attr(self, tid: int) -> Sched:
        return decode(Sched, self._thread(tid)["sched"])

    def qmp_vcpus(self, pid: int, socket: str, timeout: float) -> dict[int, int]:
        raise NotImplementedError

    def _thread(self, tid: int) -> dict[str, Any]:
        found: dict[str, Any] | None = self.state["threads"].get(str(tid))
        if found is None:
            raise ProcessLookupError(errno.ESRCH, "no such process")
        return found

    def _read_thread(self, pid: int, tid: int, name: str) -> str:
        thread = self.state["threads"].get(str(tid))
        # A thread is found under its own number too, though no listing shows it there.
        if thread is None or pid not in (thread["pid"], tid):
            raise FileNotFoundError(errno.ENOENT, "no such thread")
        if name == "stat":
            flags = 0x00200000 if thread.get("kthread") else 0
            flags |= 0x04000000 if thread.get("per_cpu") else 0
            before = "0 " * 5 + f"{flags} " + "0 " * 12 + f"{thread['start']} " + "0 " * 16
            return f"{tid} ({thread['comm']}) S {before}{thread.get('cpu', 0)} " + "0 " * 13
        if name == "status":
            return f"Name:\t{thread['comm']}\nCpus_allowed_list:\t{thread['mask']}\n"
        if name == "cgroup":
            return f"0::/{thread['cgroup']}\n"
        raise FileNotFoundError(errno.ENOENT, name)

    def _read_cgroup(self, path: str) -> str:
        directory, _, name = path.rpartition("/")
        if path == "cpuset.cpus.effective":
            return f"{self.effective('')}\n"
        cgroup = self.state["cgroups"].get(directory, {} if not directory else None)
        if cgroup is None:
            raise FileNotFoundError(errno.ENOENT, "no such cgroup", path)
        if name == "cgroup.type":
            return f"{cgroup['type']}\n"
        if name == "cgroup.threads":
            inside = (t for t, v in self.state["threads"].items() if v["cgroup"] == directory)
            return "".join(f"{t}\n" for t in inside)
        if cgroup.get("cpus") is not None:
            if name == "cpuset.cpus":
                return f"{cgroup['cpus']}\n"
            if name == "cpuset.cpus.effective":
                return f"{self.effective(directory)}\n"
            if name == "cpuset.cpus.partition":
                return f"{cgroup.get('partition', 'member')}\n"
            if name == "cpuset.cpus.exclusive" and self.state["kernel"] != "6.1":
                return f"{cgroup.get('exclusive', '')}\n"
        raise FileNotFoundError(errno.ENOENT, "no such file", path)

    def effective(self, path: str) -> CpuSet:
        """CPUs of the cpuset that rules ``path``: a partition has its own, which all cgroups
        outside it lose."""
        cgroup = self.state["cgroups"].get(path, {})
        if cgroup.get("partition") == "root":
            cpus = CpuSet.parse(cgroup.get("exclusive") or cgroup["cpus"])
        elif path:
            above = self.effective(path.rpartition("/")[0])
            text = cgroup.get("cpus")
            cpus = (CpuSet.parse(text) & above or above) if text else above
        else:
            cpus = CpuSet.parse(self.state["online"])
        return cpus - self._partitioned(path) or cpus

    def _partitioned(self, path: str) -> CpuSet:
        """CPUs of the partitions that neither hold ``path`` nor are above it."""
        return CpuSet(
            cpu
            for name, cgroup in self.state["cgroups"].items()
            if cgroup.get("partition") == "root" and not f"{path}/".startswith(f"{name}/")
            for cpu in CpuSet.parse(cgroup.get("exclusive") or cgroup["cpus"])
        )

    # -- LiveCalls

    def write(self, path: str, text: str) -> None:
        with self._point(f"write {path} {text}"):
            if path.startswith("/proc/irq/"):
                self._set_irq(path.split("/")[3], text)
                return
            if "/queues/" in path:
                self._set_queue(*path.split("/")[4:7:2], text)
                return
            if path == RR_TIMESLICE:
                self.state["rr_timeslice"] = int(text)
                return
            if path == RT_RUNTIME:
                self._set_limit(int(text))
                return
            if path.startswith("/sys/class/net/"):
                self._set_device(*path.split("/")[4:6], int(text))
                return
            if path.startswith("/sys/devices/system/cpu/cpu"):
                self._set_online(int(path.split("/")[5].removeprefix("cpu")), text == "1")
                return
            directory, _, name = path.removeprefix("/sys/fs/cgroup/").rpartition("/")
            cgroup = self.state["cgroups"].get(directory)
            if cgroup is None:
                raise FileNotFoundError(errno.ENOENT, "no such cgroup", path)
            if name == "cpuset.cpus":
                self._set_cpuset(directory, text)
            elif name == "cgroup.type":
                cgroup["type"] = text
            elif name == "cgroup.threads":
                self._attach(int(text), directory)
            elif name == "cgroup.procs":
                assert self._thread(int(text))["kthread"], "all of QEMU was moved"
                self._thread(int(text))["cgroup"] = directory
                self._cut(text)
            elif name == "cpuset.cpus.exclusive":
                cgroup["exclusive"] = text
            elif name == "cpuset.cpus.partition":
                self._set_partition(directory, text)
            else:
                raise AssertionError(path)

    def mkdir(self, path: str) -> None:
        with self._point(f"mkdir {path}"):
            name = path.removeprefix("/sys/fs/cgroup/")
            above = self.state["cgroups"].get(name.rpartition("/")[0], TOP)
            threaded = above["type"] != "domain"
            self.state["cgroups"][name] = {
                "cpus": None if above["cpus"] is None else "",
                "type": "domain invalid" if threaded else "domain",
            }

    def rmdir(self, path: str) -> None:
        with self._point(f"rmdir {path}"):
            name = path.removeprefix("/sys/fs/cgroup/")
            if any(v["cgroup"] == name for v in self.state["threads"].values()):
                raise OSError(errno.EBUSY, "busy")
            if self.state["cgroups"].get(name, {}).get("partition") == "root":
                self._set_partition(name, "member")  # cpuset_css_offline
            if self.state["cgroups"].pop(name, None) is None:
                raise FileNotFoundError(errno.ENOENT, "no such cgroup")

    def set_affinity(self, tid: int, cpus: CpuSet) -> None:
        with self._point(f"affinity {tid} {cpus}"):
            self._set_affinity(tid, cpus)

    def set_sched(self, tid: int, sched: Sched) -> None:
        with self._point(f"sched {tid} {sched}"):
            self._set_sched(tid, sched)

    def pin(
        self,
        uuid: str,
        which: int | None,
        cpus: CpuSet,
        was: CpuSet | None = None,
        thread: ThreadKey | None = None,
    ) -> None:
        cgroup = "emulator" if which is None else f"vcpu{which}"
        domain = self.state["domains"][uuid]
        tid = domain["threads"][cgroup]
        if str(tid) not in self.state["threads"]:
            raise VanishedError("domain is not running", where=uuid)
        path = f"{domain['path']}/{cgroup}"
        try:
            # Two steps of libvirtd, which may fail in between.
            with self._point(f"libvirt cpuset {cgroup} {cpus}"):
                if self.state["cgroups"][path]["cpus"] is not None:
                    self._set_cpuset(path, str(cpus))
            with self._point(f"libvirt affinity {tid} {cpus}"):
                self._set_affinity(tid, cpus)
        except OSError as error:
            raise WriteError(f"libvirt refused: {error}", where=uuid) from error
        domain["pins"][cgroup] = str(cpus)

    @contextmanager
    def _point(self, what: str) -> Iterator[None]:
        """One change of the host: hooks ahead and behind, then saved."""
        self.ahead(what)
        yield
        self.log.append(what)
        self.save()
        self.behind(what)

    # -- the kernel

    def _set_affinity(self, tid: int, cpus: CpuSet) -> None:
        """A DEADLINE thread keeps all CPUs of its root domain (dl_task_check_affinity)."""
        thread = self._thread(tid)
        mask = cpus & self.effective(thread["cgroup"])
        if not mask:
            raise OSError(errno.EINVAL, "invalid argument")
        budget = decode(Sched, thread["sched"]).cls is SchedClass.DEADLINE
        if budget and not self.root_domain(tid) <= mask:
            raise OSError(errno.EBUSY, "device or resource busy")
        thread["mask"], thread["user"] = str(mask), str(cpus)

    def _cut(self, tid: str) -> None:
        """A thread's cpuset has changed. The kernel leaves out its threads of one CPU
        (PF_NO_SETAFFINITY in update_tasks_cpumask), such as ksoftirqd."""
        thread = self.state["threads"][tid]
        if thread.get("per_cpu"):
            return
        allowed = self.effective(thread["cgroup"])
        if self.state["kernel"] == "6.1":
            thread["user"] = self.state["possible"]
        thread["mask"] = str(allowed & CpuSet.parse(thread["user"]) or allowed)

    def _set_cpuset(self, path: str, text: str) -> None:
        cpus, possible = CpuSet.parse(text), CpuSet.parse(self.state["possible"])
        if max(cpus, default=0) > max(possible):
            raise OSError(errno.ERANGE, "numerical result out of range")
        if not cpus <= possible:
            raise OSError(errno.EINVAL, "invalid argument")
        inside = any(v["cgroup"] == path for v in self.state["threads"].values())
        if inside and self.state["cgroups"][path]["cpus"] and not cpus:
            raise OSError(errno.ENOSPC, "no space left on device")
        self.state["cgroups"][path]["cpus"] = str(cpus)
        for tid, thread in self.state["threads"].items():
            if (thread["cgroup"] + "/").startswith(path + "/"):
                self._cut(tid)

    def _set_online(self, cpu: int, online: bool) -> None:
        """Threads whose cpuset loses or gets the CPU have their masks set anew."""
        before = {tid: self.effective(t["cgroup"]) for tid, t in self.state["threads"].items()}
        now = CpuSet.parse(self.state["online"])
        one = CpuSet.single(cpu)
        self.state["online"] = str(now | one if online else now - one)
        for tid, allowed in before.items():
            if self.effective(self.state["threads"][tid]["cgroup"]) != allowed:
                self._cut(tid)

    def _attach(self, tid: int, path: str) -> None:
        if self.state["cgroups"][path]["type"] != "threaded":
            raise OSError(errno.EOPNOTSUPP, "operation not supported")
        self._thread(tid)["cgroup"] = path
        self._cut(str(tid))

    def _set_partition(self, path: str, text: str) -> None:
        """6.12's rules for lists of cgroups beside one that is to be a partition."""
        cgroup = self.state["cgroups"][path]
        cpus = CpuSet.parse(cgroup.get("exclusive") or cgroup["cpus"])
        beside = [
            CpuSet.parse(v.get("exclusive") or v["cpus"] or "")
            for c, v in self.state["cgroups"].items()
            if c != path and c.rpartition("/")[0] == path.rpartition("/")[0]
        ]
        if text == "root" and any(not b.isdisjoint(cpus) for b in beside):
            text = "root invalid (Cpu list in cpuset.cpus not exclusive)"
        for thread in self.state["threads"].values():
            inside = (thread["cgroup"] + "/").startswith(path + "/")
            if inside and decode(Sched, thread["sched"]).cls is SchedClass.DEADLINE:
                self.state["miscounted"] = True
        before = {tid: self.effective(t["cgroup"]) for tid, t in self.state["threads"].items()}
        cgroup["partition"] = text
        for tid, allowed in before.items():
            if self.effective(self.state["threads"][tid]["cgroup"]) != allowed:
                self._cut(tid)
        # Root domains are built anew, from the threads that are DEADLINE.
        self.state["leaked"] = 0

    def root_domain(self, tid: int) -> CpuSet:
        """CPUs of the partition above a thread; without one, of the CPUs isolated at boot if it
        is bound there, otherwise all CPUs but these and those of partitions."""
        thread = self._thread(tid)
        path = thread["cgroup"]
        while path:
            cgroup = self.state["cgroups"].get(path, {})
            if cgroup.get("partition") == "root":
                return CpuSet.parse(cgroup.get("exclusive") or cgroup["cpus"])
            path = path.rpartition("/")[0]
        isolated = CpuSet.parse(self.state.get("isolated", ""))
        if CpuSet.parse(thread["mask"]) <= isolated:
            return isolated
        return CpuSet.parse(self.state["online"]) - isolated - self._partitioned("")

    def booked(self) -> dict[CpuSet, int]:
        """The bandwidth of DEADLINE threads by root domain, in units of 1/2**20 CPU."""
        found: dict[CpuSet, int] = {}
        for tid, thread in self.state["threads"].items():
            sched = thread["sched"]
            if sched["cls"] == SchedClass.DEADLINE.value:
                domain = self.root_domain(int(tid))
                share = (sched["runtime_ns"] << 20) // sched["period_ns"]
                found[domain] = found.get(domain, 0) + share
        return found

    def admitted(self, domain: CpuSet) -> int | None:
        """The most that __dl_overflow admits in a root domain, without the fair_server's share
        (from 6.12 on 5 % of each CPU); None without limit."""
        runtime = int(self.state.get("rt_runtime", 950_000))
        if runtime < 0:
            return None
        own = 0 if self.state["kernel"] == "6.1" else (50 << 20) // 1000
        return ((runtime << 20) // 1_000_000 - own) * len(domain)

    def _set_limit(self, runtime: int) -> None:
        """sched_dl_global_validate: what is booked must fit."""
        before, self.state["rt_runtime"] = self.state["rt_runtime"], runtime
        for domain, booked in self.booked().items():
            most = self.admitted(domain)
            if most is not None and booked > most:
                self.state["rt_runtime"] = before
                raise OSError(errno.EBUSY, "device or resource busy")

    def _set_sched(self, tid: int, sched: Sched) -> None:
        """DEADLINE needs the whole root domain in the mask, of the CPU last used, and room in it;
        leaving it asleep keeps the bandwidth booked."""
        thread = self._thread(tid)
        encoded = thread["sched"]
        old = decode(Sched, encoded)
        mask = CpuSet.parse(thread["mask"])
        if sched.cls is SchedClass.DEADLINE:
            domain = self.root_domain(tid)
            if not domain <= mask or thread.get("cpu", 0) not in domain:
                raise OSError(errno.EPERM, "operation not permitted")
            thread["sched"] = encode(sched)
            most = self.admitted(domain)
            if most is not None and self.booked()[domain] > most:
                thread["sched"] = encoded
                raise OSError(errno.EBUSY, "device or resource busy")
        elif old.cls is SchedClass.DEADLINE:
            leaked = old.runtime_ns * (1 << 20) // old.period_ns
            self.state["leaked"] = self.state.get("leaked", 0) + leaked
        thread["sched"] = encode(sched)

    def _set_irq(self, number: str, text: str) -> None:
        """write_irq_affinity, without its special case of an empty mask."""
        irq = self.state["irqs"].get(number)
        if irq is None:
            raise FileNotFoundError(errno.ENOENT, "no such interrupt")
        if irq.get("managed"):
            raise OSError(errno.EIO, "input/output error")
        if not CpuSet.parse(text) & CpuSet.parse(self.state["online"]):
            raise OSError(errno.EINVAL, "invalid argument")
        irq["mask"] = text
        if "effective" in irq:
            # It stays on its CPU while the mask has that.
            now = CpuSet.parse(irq["effective"]) & CpuSet.parse(text)
            irq["effective"] = str(now or CpuSet([CpuSet.parse(text).first()]))

    def _set_queue(self, name: str, queue: str, mask: str) -> None:
        queues = self.state["devices"].get(name, {}).get("queues", {})
        if queue not in queues:
            raise FileNotFoundError(errno.ENOENT, "no such queue")
        queues[queue] = str(CpuSet.from_mask(mask))

    def _set_device(self, name: str, attribute: str, value: int) -> None:
        device = self.state["devices"].get(name)
        if device is None:
            raise FileNotFoundError(errno.ENOENT, "no such device")
        if attribute == "threaded" and "threaded" not in device:
            raise OSError(errno.EOPNOTSUPP, "no NAPI")
        device[attribute] = value


class Killed(BaseException):
    """Stands for the end of the process."""


def failing_at(n: int, error: Callable[[], BaseException]) -> Step:
    """A hook that raises at the nth call, and only then."""
    left = n

    def step(_what: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error()

    return step


def without_lists(host: FakeKernel) -> None:
    """Take the cpuset controller away."""
    for cgroup in host.state["cgroups"].values():
        cgroup["cpus"] = None


def without_rights(*tids: int) -> Step:
    """A hook for which the classes of these threads cannot be set: CAP_SYS_NICE is missing."""

    def step(what: str) -> None:
        if what.startswith(tuple(f"sched {tid} " for tid in tids)):
            raise OSError(errno.EPERM, "Operation not permitted")

    return step


def _row(guest: int, pid: int, comm: str, cgroup: str, **other: Any) -> dict[str, Any]:
    base = {
        "guest": guest,
        "pid": pid,
        "start": 5000 + pid,
        "comm": comm,
        "cgroup": cgroup,
        "mask": "0-3",
        "user": "0-3",
        "sched": encode(Sched()),
    }
    return base | other


def make_host(kernel: str) -> FakeKernel:
    """Four CPUs; a libvirt guest vr1 with two vcpus and two workers, whose QEMU has a
    thread with a mask of its own; a plain QEMU vr2 in a service."""
    kthreads = kernel == "6.1"
    emulator = f"{LIBVIRT}/emulator"
    nice = encode(Sched(nice=-5))
    threads = {
        "1000": _row(1000, 1000, "qemu-system-x86", emulator),
        "1001": _row(1000, 1000, "call_rcu", emulator),
        "1002": _row(1000, 1000, "IO) mon_iothr(", emulator, mask="2", user="2"),
        "1010": _row(1000, 1000, "CPU 0/KVM", f"{LIBVIRT}/vcpu0"),
        "1011": _row(1000, 1000, "CPU 1/KVM", f"{LIBVIRT}/vcpu1", sched=nice),
        "2000": _row(2000, 2000, "qemu-system-x86", PLAIN),
        "2010": _row(2000, 2000, "CPU 0/KVM", PLAIN, mask="0-1", user="0-1"),
    }
    threads["3000"] = _row(0, 3000, "napi/eth0-8193", "", kthread=True)
    for tid, own in ((1020, {}), (1021, {"mask": "1-3", "user": "1-3"})):
        pid = tid if kthreads else 1000
        threads[str(tid)] = _row(1000, pid, "vhost-1000", emulator, **own)
    for tid in (1020, 1021):
        threads[str(tid)]["start"] = 7000 + tid
    cgroups = {
        "machine.slice": ("", "domain"),
        SCOPE: ("", "domain"),
        LIBVIRT: ("", "domain threaded"),
        emulator: ("", "threaded"),
        f"{LIBVIRT}/vcpu0": ("", "threaded"),
        f"{LIBVIRT}/vcpu1": ("0-2", "threaded"),
        "system.slice": (None, "domain"),
        PLAIN: (None, "domain"),
    }
    state: dict[str, Any] = {
        "kernel": kernel,
        "possible": "0-3",
        "online": "0-3",
        "threads": threads,
        "cgroups": {name: {"cpus": c, "type": t} for name, (c, t) in cgroups.items()},
        "domains": {
            UUID: {
                "path": LIBVIRT,
                "threads": {"emulator": 1000, "vcpu0": 1010, "vcpu1": 1011},
                "pins": {},
            },
        },
        "irqs": {
            "41": {"guest": 0, "actions": "eth0-rx-0", "mask": "0-3"},
            "42": {"guest": 0, "actions": "eth0-tx-0", "mask": "2"},
        },
        "devices": {
            "eth0": {
                "guest": 0,
                "ifindex": 2,
                "tx_queue_len": 1000,
                "queues": {"rx-0": "", "tx-0": "1-3"},
            },
            "macvtap0": {"guest": 1000, "ifindex": 7, "tx_queue_len": 500, "threaded": 0},
            "tap1": {"guest": 2000, "ifindex": 8, "tx_queue_len": 500},
        },
    }
    state["threads"]["1011"]["mask"] = "0-2"
    return FakeKernel(state)


def key(host: FakeKernel, tid: int) -> ThreadKey:
    """The identity of a thread of the host."""
    thread = host.state["threads"][str(tid)]
    return ThreadKey(thread["pid"], tid, thread["start"])


def make_plan(host: FakeKernel) -> Plan:
    """Every kind of action, on both guests and the host itself, interleaved."""
    fifo = Sched(SchedClass.FIFO, 10, reset_on_fork=True)
    one, two = CpuSet([1]), CpuSet([2])

    def k(tid: int) -> ThreadKey:
        return key(host, tid)

    wanted: list[tuple[Target, Value]] = [
        (IrqAffinity(HOST_REF, 41, "eth0-rx-0"), one),
        (QueueCpus(HOST_REF, "eth0", 2, "rx-0"), one),
        (CgroupDir("vr1", OURS), True),
        (ThreadCgroup("vr1", k(1020), "vhost 0"), OURS),
        (ThreadCgroup("vr1", k(1021), "vhost 1"), OURS),
        (EmulatorPin("vr1", UUID, k(1000)), Pin(CpuSet([0]), "0")),
        (ThreadAffinity("qemu:vr2", k(2010), "vcpu 0"), CpuSet([3])),
        (VcpuPin("vr1", UUID, 0, k(1010)), Pin(one, "1")),
        (VcpuPin("vr1", UUID, 1, k(1011)), Pin(two, "2")),
        (ThreadAffinity("vr1", k(1020), "vhost 0"), one),
        (ThreadAffinity("vr1", k(1021), "vhost 1"), two),
        (ThreadSched("vr1", k(1010), "vcpu 0"), fifo),
        (ThreadSched("vr1", k(1011), "vcpu 1"), fifo),
        (ThreadSched("qemu:vr2", k(2010), "vcpu 0"), fifo),
        (ThreadSched("vr1", k(1020), "vhost 0"), fifo),
        (ThreadSched("vr1", k(1021), "vhost 1"), fifo),
        (TxQueueLen("vr1", "macvtap0", 7), 100),
        (TxQueueLen("qemu:vr2", "tap1", 8), 1000),
        (NapiThreaded("vr1", "macvtap0", 7), 1),
    ]
    ops = host.clone().ops()
    return Plan(tuple(Action(t, ops.read(t), v, "test") for t, v in wanted))


def releases(journal: Journal, *guests: str) -> Plan:
    """The releases of everything, or of everything of these guests."""
    back = (undo_action(entry) for entry in undo_order(journal.entries(frozenset(guests) or None)))
    return Plan(tuple(replace(action, release=True) for action in back))


def replan(host: FakeKernel, plan: Plan) -> Plan:
    """What is left of ``plan`` on the host as it is, without vanished targets."""
    ops = host.clone().ops()
    actions = []
    for action in plan.actions:
        try:
            now = ops.read(action.target)
        except VanishedError:
            continue
        if now != action.after:
            actions.append(Action(action.target, now, action.after, action.reason))
    return Plan(tuple(actions))
