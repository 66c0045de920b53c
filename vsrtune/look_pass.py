"""One look at the host: all of it, or some guests around what was seen before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from vsrtune import cpuset_groups
from vsrtune.attempts import Attempts
from vsrtune.cgroup import CpusetReader
from vsrtune.cpuset import CpuSet
from vsrtune.cpuset_groups import CpusetGroup
from vsrtune.cpuset_tree import read_tree
from vsrtune.domain_process import process_of, without_copies
from vsrtune.guests import GuestReader, VcpuFinder
from vsrtune.host_reader import HostReader, lower_devices
from vsrtune.known_guests import Held, Known, listed, places, relisted
from vsrtune.model import (
    Guest,
    Host,
    NicKind,
    Problem,
    Role,
    SchedClass,
    Snapshot,
    WorkerKind,
)
from vsrtune.net import NetReader
from vsrtune.part import Part
from vsrtune.proc import Processes, QemuProcess, parse_stat
from vsrtune.process_table import ProcessTable
from vsrtune.rootfs import HostRoot
from vsrtune.seen import SeenMemory
from vsrtune.virt import DomainText, VirtSource

_LIBVIRT = re.compile(r"(.+)/libvirt/\w+", re.ASCII)


class NotAlone(Exception):
    """The guests cannot be looked at without the rest of the host."""


class LookPass:
    """One pass over a host, with readers that read each device and cgroup once."""

    def __init__(
        self,
        root: HostRoot,
        virt: VirtSource | None,
        memory: SeenMemory,
        vcpus: VcpuFinder,
        table: ProcessTable,
        known: Known | None = None,
    ) -> None:
        self._root = root
        self._virt = virt
        self._memory = memory
        self._vcpus = vcpus
        self._table = table
        self._last = known
        self._net = NetReader(root, known.devices if known is not None else {})
        self._cpusets = CpusetReader(root)

    # -- everything

    def whole(self) -> Known:
        """Look at everything."""
        attempts = Attempts()
        host = HostReader(self._root, self._net, self._memory, attempts)
        boot_id = host.boot_id()
        self._memory.load(boot_id)
        cpus = host.cpus()
        online = CpuSet(c.id for c in cpus if c.online)
        domains = self._domains(attempts)
        empty = Processes((), {}, ())
        processes = attempts.attempt("proc", lambda: self._table.scan(self._root), empty)
        owned = self._join(processes.qemus, domains or (), attempts)
        qemus = tuple(without_copies(self._root, processes.qemus, owned.keys()))
        foreign = self._foreign(qemus, owned, attempts) if domains is not None else frozenset()
        before = len(attempts.problems)
        held = {
            p.pid: self._read(p, owned.get(p.pid), processes, online, foreign=p.pid in foreign)
            for p in qemus
        }
        self._vcpus.forget_all_but({(p.pid, p.start_time) for p in processes.qemus})
        guests = listed(held)
        seen = host.host(boot_id, cpus, processes, guests, self._tree(guests))
        problems = (tuple(attempts.problems[:before]), tuple(attempts.problems[before:]))
        own = (p for h in held.values() for p in h.problems)
        snapshot = Snapshot(seen, guests, (*problems[0], *own, *problems[1]))
        return Known(
            snapshot,
            processes,
            held,
            {h.domain: pid for pid, h in held.items() if h.domain is not None},
            *problems,
            places(guests),
            Counter(h.parent for h in held.values()),
            self._net.known([n.name for n in seen.nics]),
            any(c.special for c in seen.cpusets),
            Part(snapshot),
        )

    def _domains(self, attempts: Attempts) -> tuple[DomainText, ...] | None:
        """Those that run; None when libvirt does not answer, or there is none."""
        virt = self._virt
        return attempts.attempt("libvirt", virt.domains, None) if virt is not None else None

    def _foreign(
        self, qemus: Iterable[QemuProcess], owned: dict[int, DomainText], attempts: Attempts
    ) -> frozenset[int]:
        """pids of QEMUs that a libvirt started of which ours, that answers, knows nothing.
        One that has started since it was asked joins ``owned``."""
        virt = self._virt
        uuids = {d.uuid for d in owned.values()}
        found = []
        for process in qemus:
            if process.pid in owned or not process.args.libvirt or virt is None:
                continue
            domain = None
            if process.args.uuid not in uuids:
                ask = partial(virt.domain, process.args.name)
                problems = len(attempts.problems)
                domain = attempts.attempt("libvirt", ask, None)
                if len(attempts.problems) > problems:
                    return frozenset()
            if domain is not None and domain.uuid == process.args.uuid:
                owned[process.pid] = domain
            else:
                found.append(process.pid)
        return frozenset(found)

    def _join(
        self, qemus: Iterable[QemuProcess], domains: Iterable[DomainText], attempts: Attempts
    ) -> dict[int, DomainText]:
        """pid to libvirt domain. Both sides carry the domain's UUID."""
        owned: dict[int, DomainText] = {}
        by_uuid: dict[str, list[QemuProcess]] = {}
        for process in qemus:
            by_uuid.setdefault(process.args.uuid, []).append(process)
        missing = []
        for domain in domains:
            match = process_of(self._root, by_uuid.get(domain.uuid, ()), domain.name)
            if match is not None:
                owned[match.pid] = domain
            else:
                missing.append(domain)
        if missing:
            # Most likely it ended after libvirt was asked.
            still = {d.uuid for d in self._domains(attempts) or ()}
            for domain in missing:
                if domain.uuid in still:
                    what = f"{domain.name} runs according to libvirt, but has no QEMU process"
                    attempts.problems.append(Problem("libvirt", what))
        return owned

    def _read(
        self,
        process: QemuProcess,
        domain: DomainText | None,
        processes: Processes,
        online: CpuSet,
        *,
        foreign: bool = False,
    ) -> Held:
        reader = GuestReader(
            root=self._root,
            net=self._net,
            cpusets=self._cpusets,
            online=online,
            workers=processes.workers,
            seen=self._memory.worker,
            vcpus=self._vcpus,
            napi=processes.napi,
        )
        attempts = Attempts()
        name = f"guest {process.args.name or process.pid}"
        # Counted first: a thread that comes meanwhile makes a difference next time.
        threads = thread_links(self._root, process.pid)
        guest = attempts.attempt(name, partial(reader.read, process, domain, foreign=foreign), None)
        named = domain.name if domain is not None else None
        home = _home(guest) if guest is not None else ""
        return Held(process, named, guest, tuple(attempts.problems), threads, home)

    # -- some guests

    def some(self, names: frozenset[str], pids: frozenset[int]) -> Known:
        """Look at the guests that have these libvirt names or QEMU processes, and at what
        of the host depends on them. Raises NotAlone when that does not tell everything."""
        known, virt = self._last, self._virt
        if known is None or any(p.reader == "libvirt" for p in known.before):
            raise NotAlone
        if names and virt is None:
            raise NotAlone
        self._memory.load(known.snapshot.host.boot_id)
        wanted = dict.fromkeys(names)
        plain: list[int] = []
        for pid in pids:
            last = known.held.get(pid)
            if last is not None and last.domain is not None:
                wanted[last.domain] = None
            else:
                plain.append(pid)
        domains = {n: virt.domain(n) for n in wanted} if virt is not None else {}
        processes = self._processes(known, domains, plain)
        due, gone = _due(known, processes, domains, plain)
        fresh = [self._read(p, d, processes, known.snapshot.host.online) for p, d in due]
        return self._joined(known, processes, fresh, gone, names)

    def _joined(
        self,
        known: Known,
        processes: Processes,
        fresh: list[Held],
        gone: list[Held],
        names: frozenset[str],
    ) -> Known:
        """What was known, with guests that were read anew and without those that are gone."""
        held, by_name, parents = dict(known.held), dict(known.names), Counter(known.parents)
        before = [held[h.process.pid] for h in fresh if h.process.pid in held] + gone
        for old in before:
            parents[old.parent] -= 1
            by_name.pop(old.domain or "", None)
        for old in gone:
            del held[old.process.pid]
        for new in fresh:
            parents[new.parent] += 1
            held[new.process.pid] = new
            if new.domain is not None:
                by_name[new.domain] = new.process.pid
        if len(before) != len(fresh) or gone:
            held = dict(sorted(held.items()))
        last = known.snapshot
        guests, places, spots = relisted(known, held, fresh, gone)
        attempts = Attempts()
        attempts.problems += known.after
        host, partitioned = self._around(known, guests, before, fresh, parents, attempts)
        if len(attempts.problems) != len(known.after):
            raise NotAlone
        problems = last.problems
        if [h.problems for h in before if h.problems] != [h.problems for h in fresh if h.problems]:
            own = (p for h in held.values() for p in h.problems)
            problems = (*known.before, *own, *known.after)
        guests_of = (h.guest for h in (*before, *fresh))
        looked = names.union(g.ref for g in guests_of if g is not None)
        snapshot = Snapshot(host, guests, problems)
        part = Part(snapshot, looked, spots or ())
        if spots is None or looked != {g.ref for g in part.guests}:
            part = Part.of(snapshot, looked)
        return replace(
            known,
            snapshot=snapshot,
            processes=processes,
            held=held,
            names=by_name,
            places=places,
            parents=parents,
            partitioned=partitioned,
            looked=part,
        )

    def _processes(
        self, known: Known, domains: dict[str, DomainText | None], plain: list[int]
    ) -> Processes:
        """The processes, read again unless the guests' own are known to be all there is."""
        for name, domain in domains.items():
            held = known.held.get(known.names.get(name, -1))
            if domain is None or held is None or not self._alone(held, domain):
                return self._table.scan(self._root)
        return self._table.scan(self._root) if plain else known.processes

    def _alone(self, held: Held, domain: DomainText) -> bool:
        """Whether a QEMU runs on, and has all its workers among its own threads."""
        process, guest = held.process, held.guest
        if guest is None or process.args.uuid != domain.uuid:
            return False
        tasks = [t.worker is WorkerKind.TASK for t in guest.threads if t.role is Role.VHOST]
        napi = any(i.kind is NicKind.NAPI_MACVTAP for i in guest.interfaces)
        if not tasks or not all(tasks) or napi:
            return False
        try:
            stat = parse_stat(self._root.read(f"/proc/{process.pid}/stat"))
        except OSError:
            return False
        return stat.start_time == process.start_time

    def _around(
        self,
        known: Known,
        guests: tuple[Guest, ...],
        before: list[Held],
        fresh: list[Held],
        parents: Counter[str],
        attempts: Attempts,
    ) -> tuple[Host, bool]:
        """The host, with what depends on the guests that were looked at, and whether it has
        partitions."""
        host, partitioned = known.snapshot.host, known.partitioned
        reader = HostReader(self._root, self._net, self._memory, attempts)
        cpusets = self._beside(known, before, fresh, parents)
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
        return read_tree(self._root, self._cpusets, used)

    def _beside(
        self, known: Known, before: list[Held], fresh: list[Held], parents: Counter[str]
    ) -> tuple[CpusetGroup, ...] | None:
        """The host's cpusets, for which only the guests' own were looked at; None when that
        does not tell everything."""
        cpusets = known.snapshot.host.cpusets
        homes = {h.home for h in (*before, *fresh)}
        read = {h.home: h.guest for h in fresh if h.guest is not None}
        # What is beside a guest's cgroup matters as long as some guest is there.
        same = all(bool(parents[h.parent]) == bool(known.parents[h.parent]) for h in before)
        same = same and all(known.parents[h.parent] for h in fresh)
        apart = all(home and _inside(home, guest) for home, guest in read.items())
        alone = len(homes) == len({h.process.pid for h in (*before, *fresh)})
        if not (same and apart and alone) or "" in homes or known.partitioned:
            return None
        for home in sorted(homes):
            guest = read.get(home)
            used = (t.cgroup for t in guest.threads) if guest is not None else ()
            groups = read_tree(self._root, self._cpusets, used, home) if guest is not None else ()
            if any(c.special for c in groups):
                return None
            if groups != cpuset_groups.below(cpusets, home):
                cpusets = cpuset_groups.put(cpusets, home, groups)
        return cpusets


def thread_links(root: HostRoot, pid: int) -> int:
    """What tells that a process has another number of threads; -1 when it is gone."""
    try:
        return root.link_count(f"/proc/{pid}/task")
    except OSError:
        return -1


def _one_of(domain: DomainText, processes: Processes) -> QemuProcess | None:
    """The one QEMU of a domain; None when there is none. Raises NotAlone when it is not
    sure which."""
    found = [p for p in processes.qemus if p.args.uuid == domain.uuid]
    if len(found) > 1 or not all(p.args.libvirt for p in found):
        raise NotAlone
    return found[0] if found else None


def _home(guest: Guest) -> str:
    main = next((t.cgroup for t in guest.threads if t.role is Role.EMULATOR), "")
    match = _LIBVIRT.fullmatch(main)
    return match[1] if match is not None else main


def _inside(home: str, guest: Guest) -> bool:
    return all(
        t.cgroup == home or t.cgroup.startswith(f"{home}/") or t.role is Role.NAPI
        for t in guest.threads
    )


def _due(
    known: Known,
    processes: Processes,
    domains: dict[str, DomainText | None],
    plain: list[int],
) -> tuple[list[tuple[QemuProcess, DomainText | None]], list[Held]]:
    """The processes to be read, each with its domain, and those that are gone. Raises
    NotAlone when other processes came or went."""
    gone: dict[int, Held] = {}
    due: dict[int, tuple[QemuProcess, DomainText | None]] = {}
    by_pid = {} if processes is known.processes else {p.pid: p for p in processes.qemus}
    for name, domain in domains.items():
        old = known.names.get(name)
        process = None
        if domain is not None and processes is known.processes and old is not None:
            process = known.held[old].process
        elif domain is not None:
            process = _one_of(domain, processes)
        if old is not None and (process is None or process.pid != old):
            gone[old] = known.held[old]
        if process is not None:
            due[process.pid] = process, domain
    for pid in plain:
        process = by_pid.get(pid)
        if process is None and pid in known.held:
            gone[pid] = known.held[pid]
        elif process is not None:
            if process.args.libvirt:
                raise NotAlone
            due[pid] = process, None
    if by_pid and by_pid.keys() != (known.held.keys() - gone.keys()) | due.keys():
        raise NotAlone
    return list(due.values()), list(gone.values())
