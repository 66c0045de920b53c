# SPDX-License-Identifier: GPL-2.0-or-later
"""One guest from its QEMU process: threads with their roles, interfaces, workers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from xml.etree.ElementTree import Element

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError, VsrtuneError
from vsrtune.core.retry import Pause
from vsrtune.host.cgroupfs import Cpuset, CpusetReader, libvirt_role
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.libvirt import DomainText
from vsrtune.host.netdev import GOING, NetReader
from vsrtune.host.procfs import (
    MOST_THREADS,
    RawThread,
    read_kvm_vcpus,
    read_thread,
    read_threads,
    worker_owner,
)
from vsrtune.model import domain_xml
from vsrtune.model.guest import (
    CarriedPin,
    Guest,
    Interface,
    OtherNic,
    Role,
    Thread,
    ThreadKey,
    WorkerKind,
)
from vsrtune.observe.qemu_processes import Processes, QemuProcess
from vsrtune.observe.tap_backends import (
    Backend,
    Descriptors,
    backends,
    read_descriptors,
    read_napi_threads,
)
from vsrtune.observe.trust import Judge, Standing
from vsrtune.observe.vhost_mapping import (
    UNMAPPED,
    KnownQueue,
    Slot,
    WorkerMapping,
    age,
    assign,
    told,
)
from vsrtune.policy.matching import QemuFilter

# With debug-threads=on, QEMU names its threads "CPU 0/KVM" and "IO iothread1". The monitor's own
# thread, "IO mon_iothread" (monitor_init_globals), is not an iothread of the guest.
_VCPU_NAME = re.compile(r"CPU (\d+)/\w+", re.ASCII)
_IOTHREAD_NAME = re.compile(r"IO (?!mon_iothread).*?(\d*)", re.ASCII)

# By tid, the role and the number of each thread of a guest.
Roles = dict[int, tuple[Role, int | None]]

# Seconds until a busy monitor is asked again.
_QMP_RETRY_FIRST, _QMP_RETRY_LONGEST = 4.0, 60.0
# Seconds for all monitors together in one pass; a later pass asks the others. So however many
# monitors are silent, also after a restart, a pass goes on.
MONITORS_SECONDS = 1.0

# The most vcpus and workers of one guest that vsrtune tunes. A plan's time grows with their square,
# and whoever runs a QEMU decides how many it has.
MOST_DATA_PLANE = 1024

NO_VCPUS = (
    "vcpu threads are not known: start QEMU with -name NAME,debug-threads=on, "
    "or with a monitor of ours, -qmp unix:PATH,server=on,wait=off"
)
NOT_ASKED = "vcpu threads are not known: no policy names it, so its monitor is left alone"
NO_TIME = "vcpu threads are not known: other monitors were slow, its own is asked in a later pass"
NOT_LISTED = "started by libvirt, which does not list it now: its pins are not known"
FOREIGN = "started by another libvirt (a session's, a pod's), ours does not list it: left alone"


class VcpuFinder:
    """Finds the vcpu threads of plain QEMUs that do not name them, through QMP.

    It keeps an answer while the process has the same threads, so that it does not disturb a
    monitor at every pass. ``qemu_filter`` says which QEMUs it may ask, ``unanswered`` are the pids
    of those that have other threads than at their last answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.qemu_filter = QemuFilter()
        self._left = MONITORS_SECONDS
        self.unanswered: frozenset[int] = frozenset()
        self._known: dict[tuple[int, int], tuple[frozenset[ThreadKey], dict[int, int]]] = {}
        # When to ask again, and what was wrong.
        self._failed: dict[tuple[int, int], tuple[Pause, str]] = {}

    def update(self, qemu_filter: QemuFilter) -> None:
        """Begin a pass."""
        self.qemu_filter = qemu_filter
        self._left = MONITORS_SECONDS

    def find(
        self, root: HostRoot, process: QemuProcess, threads: frozenset[ThreadKey], judge: Judge
    ) -> tuple[dict[int, int], str]:
        """tid to vcpu number, and a problem ("" when they are known). While the monitor does not
        answer, threads that were vcpus at its last answer and live stay that."""
        if not process.args.qmp and process.vmid is None:
            return {}, NO_VCPUS
        identity = (process.pid, process.start_time)
        known, numbers = self._known.get(identity, (frozenset(), {}))
        self.unanswered -= {process.pid}
        if known == threads:
            return numbers, ""
        if not self.qemu_filter.asks(process.uid, *process.named):
            return {}, NOT_ASKED
        vcpus, problem = self._ask(root, process, identity, judge)
        if problem:
            self.unanswered |= {process.pid}
            # A thread that ended may have left its tid to another one.
            kept = {t.tid: numbers[t.tid] for t in known & threads if t.tid in numbers}
            return kept, f"new {problem}" if kept else problem
        tids = {t.tid for t in threads}
        numbers = {tid: index for index, tid in vcpus.items() if tid in tids}
        self._known[identity] = (threads, numbers)
        return numbers, ""

    def _ask(
        self, root: HostRoot, process: QemuProcess, identity: tuple[int, int], judge: Judge
    ) -> tuple[dict[int, int], str]:
        """vcpu number to tid, and why the monitor does not tell it."""
        pause, problem = self._failed.get(identity, (Pause(), ""))
        begin = self._clock()
        if pause.left(begin) > 0:
            return {}, problem
        if self._left <= 0:
            return {}, NO_TIME
        try:
            # The first socket is enough: all of them lead to the same QEMU.
            vmid = process.vmid
            socket = process.args.qmp[0] if vmid is None else judge.monitor(vmid)
            vcpus = root.qmp_vcpus(process.pid, socket, self._left)
        except ObserveError as error:
            problem = f"vcpu threads are not known: {error}"
        else:
            self._failed.pop(identity, None)
            return vcpus, ""
        finally:
            self._left -= self._clock() - begin
        # A QEMU that is just starting answers soon; one whose monitor is taken does not.
        pause = pause.longer(self._clock(), _QMP_RETRY_FIRST, _QMP_RETRY_LONGEST)
        self._failed[identity] = (pause, problem)
        return {}, problem

    def forget_all_but(self, alive: set[tuple[int, int]]) -> None:
        """Forget all processes that are not ``alive``, given as (pid, start time)."""
        self._known = {k: v for k, v in self._known.items() if k in alive}
        self._failed = {k: v for k, v in self._failed.items() if k in alive}
        self.unanswered &= {pid for pid, _ in alive}


@dataclass(frozen=True, slots=True)
class GuestReader:
    """Reads guests in one pass. ``traced`` gives the (device, ifindex) on which a trace found a
    worker transmitting."""

    root: HostRoot
    net: NetReader
    cpusets: CpusetReader
    online: CpuSet
    processes: Processes
    traced: Callable[[ThreadKey], tuple[str, int] | None]
    vcpus: VcpuFinder
    judge: Judge

    def read(self, process: QemuProcess, domain: DomainText | None) -> Guest | None:
        """The guest; None when its process ended meanwhile. Raises OSError when the process cannot
        be read, ObserveError for unreadable domain XML."""
        standing = process.standing
        try:
            raw = read_threads(self.root, process.pid)
            tree = domain_xml.parse(domain.live_xml) if domain is not None else None
            nics = domain_xml.nics(tree, texts=False) if tree is not None else ()
            declared = [nic for nic in nics if nic.on_host]
            for nic in declared:
                self.net.expect(nic.device)
            descriptors = read_descriptors(self.root, self.net, process)
        except (FileNotFoundError, ProcessLookupError):
            return None
        if process.machine:
            # Its devices are the pod's, and may have names of this host's.
            descriptors = replace(descriptors, taps={})
        main = next((t for t in raw if t.key.tid == process.pid), None)
        if main is None or main.key.start_time != process.start_time:
            return None  # the decision was on another process
        raw += self._kernel_workers(raw)
        libvirt = domain is not None or standing is not Standing.PLAIN
        foreign = standing is Standing.FOREIGN
        # The most vcpus that the guest can have; None when that is not known.
        most = process.args.vcpus if standing is Standing.PLAIN else None
        if tree is not None:
            most = domain_xml.parse_vcpus(tree)
        roles, problems = self._roles(process, raw, libvirt)
        problems += _beyond(raw, roles, most, descriptors)
        if descriptors.others:
            problems.append(_not_its_own(process, descriptors.others))
        if libvirt and domain is None:
            problems.append(FOREIGN if foreign else NOT_LISTED)
        found = backends(process, domain is not None, declared, descriptors)
        interfaces, slots = self._interfaces(found)
        visible = {i.target for i in interfaces}
        workers = [t.key for t in raw if roles[t.key.tid][0] is Role.VHOST]
        known, unused = told(interfaces, workers)
        napi, unknown = read_napi_threads(self.root, interfaces, self.processes.napi)
        problems += [*unused, *unknown]
        carried: tuple[CarriedPin, ...] = ()
        if domain is not None and tree is not None:
            tune = _cputune(tree)
            carried = tune.carried()
            problems += [tune.problem] if tune.problem else []
            # vcpuPinInfo answers for as many vcpus as are online, from 0 on: any may be offline.
            beyond = range(len(domain.vcpu_pins), domain_xml.parse_vcpus(tree))
            pins = (tune.pins.get(n, tune.general or self.online) for n in beyond)
            domain = replace(domain, vcpu_pins=(*domain.vcpu_pins, *pins))
        mapped, problem = assign(
            workers,
            slots,
            first_vcpu=min(
                (t.key for t in raw if roles[t.key.tid][0] is Role.VCPU),
                key=age,
                default=None,
            ),
            others=descriptors.vhost_other,
            known=self._seen(workers) | known,
        )
        problems += [problem] if problem and not process.machine else []
        source, name, uuid = process.named
        others = [
            OtherNic(n.kind, n.backend, n.mac, n.model, n.device)
            for n in nics
            if not n.on_host or n.device not in visible
        ]
        if process.machine:
            others.append(OtherNic("pod", "", "all", ""))
        return Guest(
            name=domain.name if domain is not None else name,
            uuid=domain.uuid if domain is not None else uuid,
            source="foreign" if foreign else "libvirt" if libvirt else source,
            pid=process.pid,
            start_time=process.start_time,
            threads=(
                *(self._thread(t, *roles[t.key.tid], mapped, domain) for t in raw),
                *(
                    replace(
                        self._thread(t, Role.NAPI, None, mapped, None),
                        interface=device,
                        confidence=sure,
                    )
                    for t, device, sure in napi
                ),
            ),
            interfaces=interfaces,
            problems=tuple(problems),
            busy=domain is not None and domain.busy,
            carried=carried,
            uid=process.uid if standing is Standing.PLAIN and not process.machine else 0,
            unconfirmed=standing is Standing.UNKNOWN,
            other_nics=tuple(others),
            passed=descriptors.passed,
        )

    def _kernel_workers(self, threads: Sequence[RawThread]) -> list[RawThread]:
        tids = (
            (tid, owner.key)
            for owner in threads
            for tid in self.processes.workers.get(owner.key.tid, ())
        )
        found = []
        for tid, owner in islice(tids, MOST_THREADS):
            worker = read_thread(self.root, tid, tid)
            # One that is older is of a process that had the number before, and may live on.
            if (
                worker is not None
                and worker_owner(worker.name) == owner.tid
                and worker.key.start_time >= owner.start_time
            ):
                found.append(worker)
        return found

    def _roles(
        self, process: QemuProcess, threads: Sequence[RawThread], libvirt: bool
    ) -> tuple[Roles, list[str]]:
        tids = frozenset(t.key.tid for t in threads)
        roles = {t.key.tid: _role(t, process.pid, tids, libvirt) for t in threads}
        if process.machine:
            return roles, self._by_kvm(process, threads, roles)
        _one_thread_per_vcpu(threads, roles)
        if any(role is Role.VCPU for role, _ in roles.values()):
            return roles, []
        if libvirt:
            # Asking libvirt's own monitor would taint the domain.
            return roles, ["vcpu threads are not known: neither cgroups nor names tell"]
        own = frozenset(t.key for t in threads if t.key.pid == process.pid)
        numbers, problem = self.vcpus.find(self.root, process, own, self.judge)
        roles.update((tid, (Role.VCPU, numbers[tid])) for tid in tids if tid in numbers)
        return roles, [problem] if problem else []

    def _by_kvm(
        self, process: QemuProcess, threads: Sequence[RawThread], roles: Roles
    ) -> list[str]:
        """Give the roles of a process in a pod that the kernel knows, and no others. Returns why
        it knows no vcpu."""
        proven = (Role.VHOST, Role.EMULATOR)
        others = [tid for tid, (role, _) in roles.items() if role not in proven]
        roles.update(dict.fromkeys(others, (Role.WORKER, None)))
        try:
            vcpus = read_kvm_vcpus(self.root, process.pid)
        except (OSError, ValueError) as error:
            return [f"vcpu threads are not known ({error}): they need debugfs and kernel 6.0"]
        own = {t.key.tid for t in threads if t.key.pid == process.pid} - {process.pid}
        found = own & vcpus.keys()
        roles.update((tid, (Role.VCPU, vcpus[tid])) for tid in found)
        return [] if found else ["vcpu threads are not known: none of its vcpus has run yet"]

    def _interfaces(self, backends: Sequence[Backend]) -> tuple[tuple[Interface, ...], list[Slot]]:
        interfaces = []
        slots = []
        for backend in backends:
            device = self.net.device(backend.target)
            if device is None:
                continue
            counters = self.net.counters(device)
            drops = counters.rx_dropped_ring_full if counters is not None else None
            try:
                interface = Interface(
                    target=backend.target,
                    ifindex=device.ifindex,
                    kind=device.kind,
                    mac=backend.mac,
                    model=backend.model,
                    vhost=backend.vhost,
                    queues=backend.queues,
                    ring_drops=self.net.ring_drops(device) if drops is None else drops,
                    lower=self.net.lower_chain(backend.target),
                    alias=backend.alias,
                    counters=counters,
                    **self.net.numbers(device),
                )
            except OSError as error:
                if error.errno not in GOING:
                    raise
                continue
            interfaces.append(interface)
            if backend.vhost:
                slots += [
                    Slot(interface.target, interface.ifindex, queue, backend.cold)
                    for queue in range(backend.queues)
                ]
        return tuple(interfaces), slots

    def _seen(self, workers: Sequence[ThreadKey]) -> dict[ThreadKey, KnownQueue]:
        return {
            key: KnownQueue(*device) for key in workers if (device := self.traced(key)) is not None
        }

    def _thread(
        self,
        raw: RawThread,
        role: Role,
        index: int | None,
        mapped: Mapping[ThreadKey, WorkerMapping],
        domain: DomainText | None,
    ) -> Thread:
        vhost = role is Role.VHOST
        slot, confidence = mapped[raw.key] if vhost else UNMAPPED
        cgroup = raw.cgroup
        cpuset = self.cpusets.read(cgroup) if cgroup is not None else Cpuset()
        return Thread(
            key=raw.key,
            name=raw.name,
            role=role,
            sched=raw.sched,
            # /proc shows the whole mask, sched_getaffinity(2) only its online CPUs.
            affinity=raw.affinity & self.online,
            last_cpu=raw.last_cpu,
            cpu_ns=raw.cpu_ns,
            cgroup=cgroup or "",
            cpuset_cpus=cpuset.cpus,
            cpuset_effective=cpuset.effective,
            cpuset_limit=cpuset.limit,
            index=index,
            worker=(WorkerKind.KTHREAD if raw.kthread else WorkerKind.TASK) if vhost else None,
            interface=slot.interface if slot is not None else None,
            queue=slot.queue if slot is not None else None,
            confidence=confidence if vhost else None,
            pin=_pin(domain, role, index),
        )


def _role(
    thread: RawThread, pid: int, tids: frozenset[int], libvirt: bool
) -> tuple[Role, int | None]:
    if thread.by_kernel and worker_owner(thread.name) in tids:
        return Role.VHOST, None
    if thread.key.tid == pid:
        return Role.EMULATOR, None
    placed = libvirt_role(thread.cgroup) if libvirt else None
    if placed is not None and placed[1] is not None:
        return Role.VCPU if placed[0] == "vcpu" else Role.IOTHREAD, placed[1]
    if placed is not None:
        return Role.WORKER, None  # libvirt's cgroup decides, not the name
    vcpu = _VCPU_NAME.fullmatch(thread.name)
    if vcpu is not None:
        return Role.VCPU, int(vcpu[1])
    iothread = _IOTHREAD_NAME.fullmatch(thread.name)
    if iothread is not None:
        return Role.IOTHREAD, int(iothread[1]) if iothread[1] else None
    return Role.WORKER, None


def _one_thread_per_vcpu(threads: Sequence[RawThread], roles: Roles) -> None:
    """Keep the role for one thread of each vcpu cgroup. KVM starts its page recovery thread
    (``kvm-nx-lpage-recovery``, a user worker since 6.13 and in 6.12.x) from the vcpu, whose cgroup
    it inherits. The name decides; without names, the oldest thread is the vcpu."""
    groups: dict[int, list[RawThread]] = {}
    for thread in threads:
        role, index = roles[thread.key.tid]
        if role is Role.VCPU and index is not None:
            groups.setdefault(index, []).append(thread)
    for index, group in groups.items():
        named = [t for t in group if t.name == f"CPU {index}/KVM"]
        vcpu = min(named or group, key=lambda t: (t.key.start_time, t.key.tid))
        for other in group:
            if other is not vcpu:
                roles[other.key.tid] = (Role.WORKER, None)


def _beyond(
    threads: Sequence[RawThread],
    roles: Roles,
    most_vcpus: int | None,
    descriptors: Descriptors,
) -> list[str]:
    """Keep the roles for no more threads than the guest can have. Returns problems about the
    others. A QEMU that an attacker took over names its threads at will."""
    problems = []
    if most_vcpus is not None:
        vcpus = [tid for tid, (role, _) in roles.items() if role is Role.VCPU]
        beyond = [tid for tid in vcpus if (roles[tid][1] or 0) >= most_vcpus]
        roles.update(dict.fromkeys(beyond, (Role.WORKER, None)))
        if beyond:
            problems.append(
                f"{len(beyond)} threads call themselves vcpus beyond its {most_vcpus}: left alone"
            )
    workers = sorted((t.key for t in threads if roles[t.key.tid][0] is Role.VHOST), key=age)
    most = descriptors.vhost_net + descriptors.vhost_other
    roles.update((key.tid, (Role.WORKER, None)) for key in workers[most:])
    if len(workers) > most:
        problems.append(
            f"{len(workers)} threads call themselves vhost workers, for {most} vhost "
            f"descriptors: the youngest {len(workers) - most} are left alone"
        )
    # The vcpus first, by their age too: those that were tuned before stay.
    plane = sorted(
        (roles[t.key.tid][0] is Role.VHOST, age(t.key), t.key.tid)
        for t in threads
        if roles[t.key.tid][0] in (Role.VCPU, Role.VHOST)
    )
    left = [tid for _, _, tid in plane[MOST_DATA_PLANE:]]
    roles.update(dict.fromkeys(left, (Role.WORKER, None)))
    if left:
        problems.append(
            f"{len(plane)} vcpus and vhost workers, of which vsrtune tunes {MOST_DATA_PLANE}: the "
            f"youngest {len(left)} are left alone; start it with fewer queues or vcpus"
        )
    return problems


def _not_its_own(process: QemuProcess, others: Sequence[str]) -> str:
    names = ", ".join(others[:3]) + (", ..." if others[3:] else "")
    hint = f" (ip tuntap add dev NAME mode tap user {process.uid})" if process.uid else ""
    return (
        f"{names}: this host's device of that name is not the one that it holds, and left alone; "
        f"its own must be in this network namespace, a tap its user's{hint}"
    )


def _pin(domain: DomainText | None, role: Role, index: int | None) -> CpuSet | None:
    if domain is None:
        return None
    if role is Role.EMULATOR:
        return domain.emulator_pin
    if role is Role.VCPU and index is not None and index < len(domain.vcpu_pins):
        return domain.vcpu_pins[index]
    return None


def _cputune(domain: Element) -> domain_xml.Cputune:
    """The pins in a domain. Unreadable ones count as none and set ``problem``."""
    try:
        return domain_xml.parse_cputune(domain)
    except (ValueError, VsrtuneError) as error:
        problem = f"the pins in its domain XML make no sense: {error}"
        return domain_xml.Cputune({}, None, {}, problem)
