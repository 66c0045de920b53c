# SPDX-License-Identifier: GPL-2.0-or-later
"""One pass over the host: all of it, or some guests while the rest stays as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.cgroupfs import CpusetReader, read_tree
from vsrtune.host.cpus import read_cpus
from vsrtune.host.filesystem import HostRoot, boot_id
from vsrtune.host.libvirt import DomainText, VirtSource
from vsrtune.host.netdev import NetReader
from vsrtune.host.procfs import parse_stat
from vsrtune.model import cpuset_tree as cpuset_groups
from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.model.guest import Guest, NicKind, Role, SchedClass, WorkerKind
from vsrtune.model.host import Cpu, Host
from vsrtune.model.root_domains import within
from vsrtune.model.snapshot import Problem, Snapshot, SnapshotSlice, Stranger
from vsrtune.observe.guests import GuestReader, VcpuFinder
from vsrtune.observe.host import HostReader, ProblemLog, lower_devices
from vsrtune.observe.incremental import CachedQemu, ObservationCache, listed
from vsrtune.observe.qemu_processes import (
    NO_PROCESS,
    Identity,
    Joiner,
    Processes,
    ProcessTable,
    QemuProcess,
)
from vsrtune.observe.tracing import TraceMemory
from vsrtune.observe.trust import Judge, Standing

_LIBVIRT = re.compile(r"(.+)/libvirt/\w+", re.ASCII)

# The most threads that a pass reads of other libvirts' guests, which no policy reaches.
FOREIGN_THREADS = 8192
# The most strangers that a snapshot names.
MOST_STRANGERS = 16


class NotAlone(Exception):
    """The guests cannot be read without the rest of the host."""


@dataclass
class ObservationPass:
    """One pass over a host, with readers that read each device and cgroup once. ``texts`` is
    libvirt's last description of each domain that it confirmed; a pass updates it. ``last`` is the
    result of the pass before. The pass calls ``pulse`` again and again, to show that it moves
    on."""

    root: HostRoot
    virt: VirtSource | None
    memory: TraceMemory
    vcpus: VcpuFinder
    table: ProcessTable
    judge: Judge
    texts: dict[Identity, DomainText]
    last: ObservationCache | None = None
    pulse: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._joiner = Joiner(self.judge, self.texts)
        # Threads left for guests of other libvirts, which nobody confirms.
        self._foreign_threads = FOREIGN_THREADS
        self._net = NetReader(self.root, self.last.devices if self.last is not None else {})
        self._cpusets = CpusetReader(self.root)

    # -- everything

    def whole(self) -> ObservationCache:
        """Read everything."""
        problem_log = ProblemLog()
        host = HostReader(self.root, self._net, self.memory, problem_log)
        boot = problem_log.attempt("host", partial(boot_id, self.root), "")
        self.memory.load(boot)
        cpus: tuple[Cpu, ...] = problem_log.attempt("cpus", partial(read_cpus, self.root), ())
        online = CpuSet(c.id for c in cpus if c.online)
        domains = self._domains(problem_log)
        self.pulse()
        empty = Processes((), {}, ())
        processes = problem_log.attempt(
            "proc", lambda: self.table.scan(self.root, self.judge), empty
        )
        qemus, owned = self._join(processes, domains, problem_log)
        self.pulse()
        held = {p.pid: self._read(p, owned.get(p.pid), processes, online) for p in qemus}
        self.vcpus.forget_all_but({(p.pid, p.start_time) for p in processes.qemus})
        guests = listed(held)
        host_read = host.host(boot, cpus, processes, guests, self._tree(guests))
        problems = tuple(problem_log.problems)
        own = (p for h in held.values() for p in h.problems)
        snapshot = Snapshot(host_read, guests, (*problems, *own), strangers=_strangers(processes))
        return ObservationCache(
            snapshot,
            processes,
            held,
            problems,
            self._net.known([n.name for n in host_read.nics]),
            any(c.special for c in host_read.cpusets),
            SnapshotSlice(snapshot),
        )

    def host_differs(self) -> bool:
        """Whether the host is another than is known, apart from its guests and their cgroups."""
        last, guests = self._known.snapshot.host, self._known.snapshot.guests
        self.memory.load(last.boot_id)
        problem_log = ProblemLog()
        reader = HostReader(self.root, self._net, self.memory, problem_log)
        cpus: tuple[Cpu, ...] = problem_log.attempt("cpus", partial(read_cpus, self.root), ())
        now = reader.host(last.boot_id, cpus, self._scan(), guests, last.cpusets)
        return now != last

    def _domains(self, problem_log: ProblemLog) -> tuple[DomainText, ...] | None:
        """The domains that run; None when libvirt does not answer, or there is none."""
        virt = self.virt
        return problem_log.attempt("libvirt", virt.domains, None) if virt is not None else None

    def _domain(self, virt: VirtSource, name: str) -> DomainText | None:
        # libvirt may take seconds for each answer, and many may be asked for.
        self.pulse()
        return virt.domain(name)

    def _join(
        self,
        processes: Processes,
        domains: tuple[DomainText, ...] | None,
        problem_log: ProblemLog,
    ) -> tuple[tuple[QemuProcess, ...], dict[int, DomainText]]:
        """The processes with their standing, and the libvirt domain of each pid."""
        silent = False

        def ask(name: str) -> DomainText | None:
            nonlocal silent
            if silent or self.virt is None:
                return None
            problems = len(problem_log.problems)
            found = problem_log.attempt("libvirt", partial(self._domain, self.virt, name), None)
            silent = len(problem_log.problems) > problems
            return found

        qemus, owned, missing = self._joiner.join(processes, domains, ask)
        if silent:
            # libvirt has fallen silent: a guest that it did not list is unknown, not another's.
            qemus, owned, _ = self._joiner.join(processes, None, ask)
        elif missing:
            # Most likely the domain ended after libvirt was asked.
            still = {d.uuid for d in self._domains(problem_log) or ()}
            for domain, why in missing:
                if domain.uuid in still:
                    what = f"{domain.name} runs according to libvirt, but {why}"
                    # Not the reader of a libvirt that is silent.
                    problem_log.problems.append(Problem("domain", what))
        fresh = {(p.pid, p.start_time): owned[p.pid] for p in qemus if p.pid in owned}
        self.texts.clear()
        self.texts.update(fresh)
        return qemus, owned

    def _read(
        self,
        process: QemuProcess,
        domain: DomainText | None,
        processes: Processes,
        online: CpuSet,
    ) -> CachedQemu:
        reader = GuestReader(
            root=self.root,
            net=self._net,
            cpusets=self._cpusets,
            online=online,
            processes=processes,
            traced=self.memory.worker,
            vcpus=self.vcpus,
            judge=self.judge,
        )
        problem_log = ProblemLog()
        name = f"guest {process.args.name or process.pid}"
        # Counted first, so that the next pass notices a thread that starts meanwhile.
        threads = thread_links(self.root, process.pid)
        self.pulse()
        foreign = process.standing is Standing.FOREIGN
        if foreign:
            self._foreign_threads -= threads
        if foreign and self._foreign_threads < 0:
            what = f"more than {FOREIGN_THREADS} threads of other libvirts' guests: not read"
            problem_log.problems.append(Problem(name, what))
            guest = None
        else:
            guest = problem_log.attempt(name, partial(reader.read, process, domain), None)
        named = domain.name if domain is not None else None
        home = _home(guest) if guest is not None else ""
        return CachedQemu(process, named, guest, tuple(problem_log.problems), threads, home)

    # -- some guests

    @property
    def _known(self) -> ObservationCache:
        """The result of the pass before. Raises NotAlone without one."""
        if self.last is None:
            raise NotAlone
        return self.last

    def some(self, names: frozenset[str], pids: frozenset[int]) -> ObservationCache:
        """Re-read the guests that have these libvirt names or QEMU processes, and the host state
        that depends on them. Raises NotAlone when that does not suffice."""
        known, virt = self._known, self.virt
        if any(p.reader == "libvirt" for p in known.problems) or (names and virt is None):
            raise NotAlone
        self.memory.load(known.snapshot.host.boot_id)
        wanted = dict.fromkeys(names)
        plain: list[int] = []
        for pid in pids:
            last = known.held.get(pid)
            if last is not None and last.domain is not None:
                wanted[last.domain] = None
            else:
                plain.append(pid)
        last_pid = {h.domain: pid for pid, h in known.held.items()}
        domains = (
            [(self._domain(virt, n), last_pid.get(n)) for n in wanted] if virt is not None else []
        )
        processes = self._processes(domains, plain)
        due, vanished = self._due(processes, domains, plain)
        for process, domain in due:
            if domain is not None:
                self.texts[process.pid, process.start_time] = domain
        fresh = [self._read(p, d, processes, known.snapshot.host.online) for p, d in due]
        return self._joined(processes, fresh, vanished, names)

    def _due(
        self,
        processes: Processes,
        domains: list[tuple[DomainText | None, int | None]],
        plain: list[int],
    ) -> tuple[list[tuple[QemuProcess, DomainText | None]], list[CachedQemu]]:
        """The processes to read, each with its domain, and those that are gone. ``domains`` come
        with the pid that they had. Raises NotAlone when other processes came or went."""
        known = self._known
        vanished: dict[int, CachedQemu] = {}
        due: dict[int, tuple[QemuProcess, DomainText | None]] = {}
        by_pid = {} if processes is known.processes else {p.pid: p for p in processes.qemus}
        for domain, old in domains:
            process = None
            if domain is not None and processes is known.processes and old is not None:
                process = known.held[old].process
            elif domain is not None:
                process, why = self._joiner.process_of(processes, domain)
                if process is None and why != NO_PROCESS:
                    raise NotAlone
            if old is not None and (process is None or process.pid != old):
                vanished[old] = known.held[old]
            if process is not None:
                due[process.pid] = process, domain
        for pid in plain:
            process = by_pid.get(pid)
            if process is None and pid in known.held:
                vanished[pid] = known.held[pid]
            elif process is not None:
                if process.by_libvirt or process.standing is not Standing.PLAIN:
                    raise NotAlone
                due[pid] = process, None
        if by_pid and by_pid.keys() != (known.held.keys() - vanished.keys()) | due.keys():
            raise NotAlone
        return list(due.values()), list(vanished.values())

    def _joined(
        self,
        processes: Processes,
        fresh: list[CachedQemu],
        vanished: list[CachedQemu],
        names: frozenset[str],
    ) -> ObservationCache:
        """The cache with the guests that were re-read and without those that are gone."""
        known = self._known
        held = dict(known.held)
        before = [held[h.process.pid] for h in fresh if h.process.pid in held] + vanished
        for old in vanished:
            del held[old.process.pid]
        held.update((new.process.pid, new) for new in fresh)
        if len(before) != len(fresh) or vanished:
            held = dict(sorted(held.items()))
        last = known.snapshot
        guests = listed(held)
        problem_log = ProblemLog()
        host, partitioned = self._around(guests, before, fresh, held, problem_log)
        if problem_log.problems:
            raise NotAlone
        problems = last.problems
        if [h.problems for h in before if h.problems] != [h.problems for h in fresh if h.problems]:
            own = (p for h in held.values() for p in h.problems)
            problems = (*known.problems, *own)
        guests_of = (h.guest for h in (*before, *fresh))
        refreshed = names.union(g.ref for g in guests_of if g is not None)
        snapshot = Snapshot(host, guests, problems, strangers=_strangers(processes))
        return replace(
            known,
            snapshot=snapshot,
            processes=processes,
            held=held,
            partitioned=partitioned,
            refreshed=SnapshotSlice.of(snapshot, refreshed),
        )

    def _processes(
        self,
        domains: list[tuple[DomainText | None, int | None]],
        plain: list[int],
    ) -> Processes:
        """The processes, read again unless the cached ones are known to suffice for these
        guests."""
        known = self._known
        alone = (
            domain is not None and old is not None and self._alone(known.held[old], domain)
            for domain, old in domains
        )
        return known.processes if not plain and all(alone) else self._scan()

    def _scan(self) -> Processes:
        return self.table.scan(self.root, self.judge)

    def _alone(self, held: CachedQemu, domain: DomainText) -> bool:
        """Whether a QEMU still runs and has all its workers among its own threads."""
        process, guest = held.process, held.guest
        if guest is None or not self._joiner.runs(process, domain):
            return False
        tasks = [t.worker is WorkerKind.TASK for t in guest.threads if t.role is Role.VHOST]
        napi = any(i.kind is NicKind.NAPI_MACVTAP for i in guest.interfaces)
        if not tasks or not all(tasks) or napi:
            return False
        try:
            stat = parse_stat(self.root.read(f"/proc/{process.pid}/stat"))
        except OSError:
            return False
        return stat.start_time == process.start_time

    def _around(
        self,
        guests: tuple[Guest, ...],
        before: list[CachedQemu],
        fresh: list[CachedQemu],
        held: dict[int, CachedQemu],
        problem_log: ProblemLog,
    ) -> tuple[Host, bool]:
        """The host, with the state that depends on the re-read guests brought up to date, and
        whether it has partitions."""
        known = self._known
        host, partitioned = known.snapshot.host, known.partitioned
        reader = HostReader(self.root, self._net, self.memory, problem_log)
        cpusets = self._beside(before, fresh, held)
        if cpusets is None:
            cpusets = self._tree(guests)
            partitioned = any(c.special for c in cpusets)
        if cpusets is not host.cpusets:
            host = replace(host, cpusets=cpusets)
        old = [h.guest for h in before if h.guest is not None]
        new = [h.guest for h in fresh if h.guest is not None]
        touched = old + new
        used, lost = lower_devices(new), lower_devices(old) - lower_devices(new)
        if any(host.nic(name) is None for name in used) or (lost and lost - lower_devices(guests)):
            host = replace(host, nics=reader.nics(lower_devices(guests), known.processes))
        budgets = any(t.sched.cls is SchedClass.DEADLINE for g in touched for t in g.threads)
        if budgets or any(d.booked is not None for d in host.deadline):
            host = replace(host, deadline=reader.books(host.online, guests, host.cpusets))
        return host, partitioned

    def _tree(self, guests: tuple[Guest, ...]) -> tuple[CpusetGroup, ...]:
        used = (t.cgroup for g in guests for t in g.threads)
        return read_tree(self.root, self._cpusets, used)

    def _beside(
        self,
        before: list[CachedQemu],
        fresh: list[CachedQemu],
        held: dict[int, CachedQemu],
    ) -> tuple[CpusetGroup, ...] | None:
        """The host's cpusets, of which only the guests' own are re-read; None when that does not
        suffice."""
        known = self._known
        cpusets = known.snapshot.host.cpusets
        homes = {h.home for h in (*before, *fresh)}
        read = {h.home: h.guest for h in fresh if h.guest is not None}
        same = {h.home for h in before} == {h.home for h in fresh}
        if not same:
            # Cgroups beside a guest's matter as long as some guest is there.
            stay, were = ({h.parent for h in all_.values()} for all_ in (held, known.held))
            same = {h.parent for h in before} <= stay and {h.parent for h in fresh} <= were
        apart = all(home and _inside(home, guest) for home, guest in read.items())
        alone = len(homes) == len({h.process.pid for h in (*before, *fresh)})
        if not (same and apart and alone) or "" in homes or known.partitioned:
            return None
        for home in sorted(homes):
            guest = read.get(home)
            used = (t.cgroup for t in guest.threads) if guest is not None else ()
            groups = read_tree(self.root, self._cpusets, used, home) if guest is not None else ()
            if any(c.special for c in groups):
                return None
            if groups != cpuset_groups.below(cpusets, home):
                cpusets = cpuset_groups.put(cpusets, home, groups)
        return cpusets


def thread_links(root: HostRoot, pid: int) -> int:
    """A number that changes with the number of a process's threads; -1 when it is gone."""
    try:
        return root.link_count(f"/proc/{pid}/task")
    except OSError:
        return -1


def _home(guest: Guest) -> str:
    main = next((t.cgroup for t in guest.threads if t.role is Role.EMULATOR), "")
    match = _LIBVIRT.fullmatch(main)
    return match[1] if match is not None else main


def _inside(home: str, guest: Guest) -> bool:
    outside = (t for t in guest.threads if t.cgroup != home and not within(t.cgroup, home))
    return all(t.role is Role.NAPI for t in outside)


def _strangers(processes: Processes) -> tuple[Stranger, ...]:
    return tuple(
        Stranger(s.pid, s.start_time, s.uid, s.why) for s in processes.strangers[:MOST_STRANGERS]
    )


# On hosts with no more guests than this, a pass because of an event re-reads everything.
FEW = 16


def unannounced(
    known: ObservationCache, root: HostRoot, table: ProcessTable, judge: Judge
) -> frozenset[int]:
    """The pids of the QEMUs that came, that are gone, or that have another number of threads or
    other kernel workers than in ``known``. Raises NotAlone when that does not suffice, OSError
    when /proc cannot be listed."""
    processes = table.scan(root, judge)
    there = {p.pid: p.start_time for p in processes.qemus}
    found = set(there) ^ set(known.held)
    for pid, held in known.held.items():
        if pid in found:
            continue
        if there[pid] != held.process.start_time:
            raise NotAlone
        if thread_links(root, pid) != held.threads:
            found.add(pid)
    for kind in ("napi", "daemons", "strangers"):
        if getattr(processes, kind) != getattr(known.processes, kind):
            raise NotAlone
    if processes.workers != known.processes.workers:
        found |= _owners(known, processes.workers)
    return frozenset(found)


def _owners(known: ObservationCache, workers: dict[int, tuple[int, ...]]) -> set[int]:
    """The pids of the QEMUs whose vhost kernel threads changed."""
    before = known.processes.workers
    owners = {o for o in before.keys() | workers.keys() if before.get(o) != workers.get(o)}
    return {
        pid
        for pid, held in known.held.items()
        if held.guest is not None and any(t.key.tid in owners for t in held.guest.threads)
    }
