"""Compose the readers into one Snapshot; a reader that fails is recorded, and hides
nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from vsrtune.cgroup import CpusetReader
from vsrtune.cpuset import CpuSet
from vsrtune.cpuset_tree import read_tree
from vsrtune.deadline_books import read_books
from vsrtune.errors import ObserveError, VsrtuneError
from vsrtune.guests import GuestReader, VcpuFinder
from vsrtune.hostinfo import read_cpus
from vsrtune.irq import read_names
from vsrtune.model import (
    Cpu,
    Guest,
    Host,
    Nic,
    Problem,
    Role,
    SchedClass,
    Snapshot,
    SoftirqThread,
    ThreadKey,
)
from vsrtune.neighbours import read_neighbours
from vsrtune.net import NetReader
from vsrtune.proc import CLOCK_TICKS, Processes, QemuProcess, read_thread, scan
from vsrtune.rootfs import HostRoot, LiveRoot
from vsrtune.seen import DEFAULT_PATH, SeenMemory, SeenNic, SeenWorker
from vsrtune.trace import Devices, Tracer, rx_cpus, sender_device
from vsrtune.virt import DEFAULT_URI, DomainText, LibvirtSource, VirtSource

T = TypeVar("T")

_KERNEL = "/proc/sys/kernel"


class Observer:
    """Observes one host as often as asked.

    ``virt`` None means a host without libvirt. Without ``memory`` what the host
    itself remembers (/run/vsrtune/seen.json) is used and never written. Without
    ``tracer`` a trace that is asked for is a recorded Problem.
    """

    def __init__(
        self,
        root: HostRoot,
        virt: VirtSource | None,
        memory: SeenMemory | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._root = root
        self._virt = virt
        self._memory = memory if memory is not None else _memory_of(root)
        self._tracer = tracer
        self._vcpus = VcpuFinder()

    def observe(self, trace_seconds: float = 0.0) -> Snapshot:
        """The host now. With ``trace_seconds`` the kernel first counts for so long who
        transmits and where frames are received, which makes the mapping of busy
        vhost workers EXACT."""
        snapshot = _Pass(self._root, self._virt, self._memory, self._vcpus).run()
        if trace_seconds <= 0:
            return snapshot
        problems = self._trace(snapshot, trace_seconds)
        snapshot = _Pass(self._root, self._virt, self._memory, self._vcpus).run()
        return replace(snapshot, problems=snapshot.problems + problems)

    def _trace(self, snapshot: Snapshot, seconds: float) -> tuple[Problem, ...]:
        if self._tracer is None:
            return (Problem("trace", "this host cannot be traced"),)
        interfaces = [i for guest in snapshot.guests for i in guest.interfaces]
        devices = Devices(
            macvtaps=_names(i.target for i in interfaces if i.kind.rings),
            taps=_names(i.target for i in interfaces if not i.kind.rings),
            lowers=_names(lower for i in interfaces for lower in i.lower),
        )
        if not interfaces:
            return ()
        try:
            traced = self._tracer.trace(devices, seconds)
            self._memory.remember(
                [w for guest in snapshot.guests for w in _seen_workers(guest, traced.sent)],
                _seen_nics(snapshot.host.nics, traced.received),
                alive=[t.key for guest in snapshot.guests for t in guest.threads],
            )
        except ObserveError as error:
            return (Problem("trace", str(error)),)
        return ()


def live_observer(uri: str = DEFAULT_URI) -> Observer:
    """Observer of this host. That libvirt is missing or does not run is a recorded
    Problem; plain QEMU is found all the same."""
    return Observer(LiveRoot(), LibvirtSource(uri), SeenMemory(), Tracer())


def _memory_of(root: HostRoot) -> SeenMemory:
    try:
        return SeenMemory(None, root.read(str(DEFAULT_PATH)))
    except OSError:
        return SeenMemory(None)


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


def _seen_workers(guest: Guest, sent: Mapping[tuple[str, int], int]) -> list[SeenWorker]:
    ifindexes = {i.target: i.ifindex for i in guest.interfaces}
    found = []
    for thread in guest.by_role(Role.VHOST):
        device = sender_device(sent, thread.key.tid, ifindexes)
        if device is not None:
            name, frames = device
            found.append(SeenWorker(thread.key, name, ifindexes[name], frames))
    return found


def _seen_nics(nics: Iterable[Nic], received: Mapping[tuple[str, int], int]) -> list[SeenNic]:
    found = []
    for nic in nics:
        cpus = rx_cpus(received, nic.name)
        if cpus is not None:
            found.append(SeenNic(nic.name, nic.ifindex, cpus))
    return found


class _Pass:
    """One pass over the host."""

    def __init__(
        self, root: HostRoot, virt: VirtSource | None, memory: SeenMemory, vcpus: VcpuFinder
    ) -> None:
        self._root = root
        self._virt = virt
        self._memory = memory
        self._vcpus = vcpus
        self._net = NetReader(root)
        self._problems: list[Problem] = []
        self._irq_names: Mapping[int, str] | None = None

    def run(self) -> Snapshot:
        boot_id = self._try("host", lambda: self._text(f"{_KERNEL}/random/boot_id"), "")
        self._memory.load(boot_id)
        cpus: tuple[Cpu, ...] = self._try("cpus", lambda: read_cpus(self._root), ())
        online = CpuSet(c.id for c in cpus if c.online)
        domains = self._domains()
        processes = self._try("proc", lambda: scan(self._root), Processes((), {}, ()))
        guests = self._guests(processes, domains, online)
        runtime = self._try("sched", lambda: self._number("sched_rt_runtime_us"), 0)
        threads = [t for g in guests for t in g.threads]
        cpusets = read_tree(self._root, (t.cgroup for t in threads))
        budgets = any(t.sched.cls is SchedClass.DEADLINE for t in threads)
        partitions = any(c.partition != "member" for c in cpusets)
        host = Host(
            boot_id=boot_id,
            kernel=self._try("host", lambda: self._text(f"{_KERNEL}/osrelease"), ""),
            clock_ticks=CLOCK_TICKS,
            cpus=cpus,
            nics=self._nics(guests),
            sched_rt_runtime_us=runtime,
            sched_rt_period_us=self._try("sched", lambda: self._number("sched_rt_period_us"), 0),
            neighbours=read_neighbours(self._root, processes.daemons, runtime),
            softirq=self._softirq(processes),
            cpusets=cpusets,
            deadline=read_books(self._root, online, totals=budgets or partitions),
        )
        return Snapshot(host, guests, tuple(self._problems))

    def _softirq(self, processes: Processes) -> tuple[SoftirqThread, ...]:
        found = []
        for cpu, tid in processes.softirq:
            thread = self._try("proc", partial(read_thread, self._root, tid, tid), None)
            if thread is not None:
                found.append(SoftirqThread(thread.key, cpu, thread.sched))
        return tuple(found)

    def _try(self, reader: str, read: Callable[[], T], default: T) -> T:
        """``read``'s result; when it fails, a Problem of ``reader`` and ``default``."""
        try:
            return read()
        except VsrtuneError as error:
            what = str(error)
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        except (ValueError, LookupError) as error:
            what = f"unexpected content: {error}"
        self._problems.append(Problem(reader, what))
        return default

    def _text(self, path: str) -> str:
        return self._root.read(path).strip()

    def _number(self, name: str) -> int:
        return int(self._root.read(f"{_KERNEL}/{name}"))

    def _domains(self) -> tuple[DomainText, ...]:
        virt = self._virt
        return self._try("libvirt", virt.domains, ()) if virt is not None else ()

    def _guests(
        self, processes: Processes, domains: Iterable[DomainText], online: CpuSet
    ) -> tuple[Guest, ...]:
        reader = GuestReader(
            root=self._root,
            net=self._net,
            cpusets=CpusetReader(self._root),
            online=online,
            workers=processes.workers,
            seen=self._memory.worker,
            vcpus=self._vcpus,
            napi=processes.napi,
        )
        owned = self._join(processes.qemus, domains)
        guests = []
        for process in processes.qemus:
            domain = owned.get(process.pid)
            name = f"guest {process.args.name or process.pid}"
            guest = self._try(name, partial(reader.read, process, domain), None)
            if guest is not None:
                guests.append(guest)
        self._vcpus.forget_all_but({(p.pid, p.start_time) for p in processes.qemus})
        return _one_owner(sorted(_unique(guests), key=lambda g: (g.source, g.name, g.pid)))

    def _join(
        self, qemus: Iterable[QemuProcess], domains: Iterable[DomainText]
    ) -> dict[int, DomainText]:
        """pid to libvirt domain. Both sides carry the domain's UUID."""
        owned: dict[int, DomainText] = {}
        # Someone may have copied a UUID into a QEMU of his own.
        candidates = sorted(qemus, key=lambda p: (not p.args.libvirt, p.pid))
        missing = []
        for domain in domains:
            match = next((p for p in candidates if p.args.uuid == domain.uuid), None)
            if match is not None:
                owned[match.pid] = domain
            else:
                missing.append(domain)
        if missing:
            # Most likely it ended after libvirt was asked.
            still = {d.uuid for d in self._domains()}
            for domain in missing:
                if domain.uuid in still:
                    what = f"{domain.name} runs according to libvirt, but has no QEMU process"
                    self._problems.append(Problem("libvirt", what))
        return owned

    def _nics(self, guests: Iterable[Guest]) -> tuple[Nic, ...]:
        """Lower devices of the guests, and the host's hardware NICs."""
        wanted = {lower for g in guests for i in g.interfaces for lower in i.lower}
        hardware: list[str] = self._try("net", self._net.hardware_names, [])
        wanted.update(hardware)
        nics = []
        for name in sorted(wanted):
            nic = self._try("net", partial(self._nic, name), None)
            if nic is not None:
                nics.append(nic)
        return tuple(nics)

    def _nic(self, name: str) -> Nic | None:
        return self._net.nic(name, self._names_of_irqs, self._memory.rx_cpus)

    def _names_of_irqs(self) -> Mapping[int, str]:
        if self._irq_names is None:
            names: Mapping[int, str] = self._try("irq", lambda: read_names(self._root), {})
            self._irq_names = names
        return self._irq_names


def _unique(guests: Iterable[Guest]) -> list[Guest]:
    """Mark guests that a policy cannot tell apart."""
    found = list(guests)
    count = Counter(g.ref for g in found)
    return [
        replace(g, problems=(*g.problems, f"{count[g.ref]} guests are named {g.ref}"))
        if count[g.ref] > 1
        else g
        for g in found
    ]


def _one_owner(guests: Iterable[Guest]) -> tuple[Guest, ...]:
    """Leave the NAPI thread of a device that guests share to the first of them, or
    each of their policies would have it for its own."""
    owner: dict[ThreadKey, str] = {}
    found = []
    for guest in guests:
        shared = [
            t for t in guest.by_role(Role.NAPI) if owner.setdefault(t.key, guest.ref) != guest.ref
        ]
        told = (
            f"{t.interface} is shared, its NAPI thread is shown with {owner[t.key]}" for t in shared
        )
        found.append(
            replace(
                guest,
                threads=tuple(t for t in guest.threads if t not in shared),
                problems=(*guest.problems, *told),
            )
            if shared
            else guest
        )
    return tuple(found)
