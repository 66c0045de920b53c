# SPDX-License-Identifier: GPL-2.0-or-later
"""The processes of a host, kept between passes, so that a pass reads new ones only.

A process that was read twice and is still the same one, by its identity in /proc, is not read
again: a kernel thread keeps its name, and a QEMU its command line. This misses a process that
becomes a QEMU later (``exec`` in a script that waited); ``forget`` makes the next pass read
everything.
"""

from __future__ import annotations

import errno
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vsrtune.host.filesystem import MOST_ARGUMENTS, HostRoot
from vsrtune.host.libvirt import DomainText
from vsrtune.host.procfs import (
    DAEMONS,
    Stat,
    is_qemu,
    napi_device,
    parse_stat,
    parse_status_uids,
    worker_owner,
)
from vsrtune.host.qemu_cmdline import QemuArgs
from vsrtune.host.qemu_cmdline import parse as parse_args
from vsrtune.observe.trust import Decision, Judge, Standing

_SOFTIRQ = re.compile(r"ksoftirqd/(\d+)", re.ASCII)

# Bytes of a guest's name: libvirt names files after its guests (NAME_MAX). Every line of the
# journal has the name.
_MOST_NAME = 255
# Characters of a UUID, without which QEMU ends (qemu_uuid_parse).
_UUID = 36


@dataclass(frozen=True, slots=True)
class QemuProcess(Decision):
    """One believed QEMU that runs a guest, and its command line."""

    args: QemuArgs = field(kw_only=True)

    @property
    def named(self) -> tuple[str, str, str]:
        """Source, name and UUID of its guest when no libvirt of this host runs it. The VMID and
        KubeVirt's name are proven; all else is what the process says."""
        if self.machine:
            return "kubevirt", self.machine, ""
        if self.vmid is not None:
            return "proxmox", str(self.vmid), ""
        return "qemu", self.args.name or self.args.uuid or f"pid-{self.pid}", self.args.uuid

    @property
    def by_libvirt(self) -> bool:
        """Whether a libvirt started it and no cgroup tells which guest it is."""
        return self.args.libvirt and self.vmid is None and not self.machine


@dataclass(frozen=True, slots=True)
class Processes:
    """The result of one pass over /proc. ``qemus`` are the believed QEMUs, in pid order,
    ``strangers`` other processes with an executable of such a name. ``daemons`` are the name and
    pid of those of DAEMONS that root runs, ``workers`` holds the vhost
    kernel threads: owner's tid to their tids; ``softirq`` the ksoftirqd threads: CPU to tid;
    ``napi`` the NAPI kernel threads: device, as they name it, to tids; ``oldest`` has the pid of
    the oldest QEMU in the scope of each libvirt domain, by the domain's id."""

    qemus: tuple[QemuProcess, ...]
    workers: dict[int, tuple[int, ...]]
    daemons: tuple[tuple[str, int], ...]
    softirq: tuple[tuple[int, int], ...] = ()
    napi: dict[str, tuple[int, ...]] = field(default_factory=dict)
    strangers: tuple[Decision, ...] = ()
    oldest: dict[int, int] = field(default_factory=dict)

    def qemu(self, pid: int) -> QemuProcess | None:
        """The believed QEMU of a pid; None when there is none."""
        found = bisect_left(self.qemus, pid, key=lambda p: p.pid)
        return next((p for p in self.qemus[found : found + 1] if p.pid == pid), None)


@dataclass(slots=True)
class _Entry:
    """``decision`` is None for a process without a QEMU's executable, ``argv`` is empty for one
    that is not believed, ``qemu`` is the parsed command line; ``sure``: it was read twice;
    ``daemon``: it is one of DAEMONS."""

    identity: int
    stat: Stat
    decision: Decision | None
    argv: tuple[str, ...]
    qemu: QemuProcess | None = None
    sure: bool = False
    daemon: bool = False

    def process(self, decision: Decision) -> QemuProcess:
        """The QEMU of the process. Its command line is long, so it is parsed once."""
        if self.qemu is None:
            d = decision
            self.qemu = QemuProcess(
                d.pid,
                d.start_time,
                d.uid,
                d.standing,
                vmid=d.vmid,
                machine=d.machine,
                scopes=d.scopes,
                args=parse_args(self.argv),
            )
        return self.qemu


class ProcessTable:
    """Reads the processes of one host repeatedly."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def forget(self) -> None:
        """Make the next scan read every process."""
        for entry in self._entries.values():
            entry.sure = False

    def scan(self, root: HostRoot, judge: Judge | None = None) -> Processes:
        """One pass over /proc: QEMU guests, vhost kernel threads and known daemons. Without
        ``judge``, plain QEMUs are guests if they are root's.

        A process that vanishes meanwhile is not in the result. Raises OSError when /proc itself
        cannot be listed.
        """
        judge = Judge(root) if judge is None else judge
        before, self._entries = self._entries, {}
        for name, identity in root.processes():
            known = before.get(name)
            if known is not None and known.identity == identity:
                if known.sure:
                    self._entries[name] = known
                    continue
            else:
                known = None
            entry = _read(root, name, identity, judge)
            if entry is not None:
                if known is not None and _outlives(known, entry):
                    entry = known
                elif known is not None and _same(known, entry):
                    entry.qemu, entry.sure = known.qemu, True
                self._entries[name] = entry
        return _sorted(list(self._entries.values()))


def _sorted(entries: list[_Entry]) -> Processes:
    workers: dict[int, list[int]] = {}
    daemons: list[tuple[str, int]] = []
    softirq: list[tuple[int, int]] = []
    napi: dict[str, list[int]] = {}
    qemus: dict[int, tuple[_Entry, Decision]] = {}
    strangers: list[Decision] = []
    for entry in entries:
        stat = entry.stat
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
        elif entry.daemon:
            daemons.append((stat.comm, stat.tid))
        elif entry.decision is not None and not entry.decision.believed:
            strangers.append(entry.decision)
        elif entry.decision is not None and entry.argv:
            qemus[stat.tid] = entry, entry.decision
    # A QEMU whose parent is a QEMU is a helper (a fork about to exec, the cleanup process of
    # -run-with async-teardown), not a guest.
    found = []
    for _, (entry, decision) in sorted(qemus.items()):
        if entry.stat.ppid in qemus:
            continue
        process = entry.process(decision)
        if why := _misnamed(process.args):
            strangers.append(replace(decision, standing=Standing.STRANGER, why=why))
        elif process.args.guest:
            found.append(process)
    young = sorted(found, key=lambda p: (p.start_time, p.pid), reverse=True)
    return Processes(
        tuple(found),
        {owner: tuple(sorted(tids)) for owner, tids in workers.items()},
        tuple(sorted(daemons)),
        tuple(sorted(softirq)),
        {device: tuple(sorted(tids)) for device, tids in napi.items()},
        tuple(sorted(strangers, key=lambda s: s.pid)),
        {domain: p.pid for p in young for domain in p.scopes},
    )


def _misnamed(args: QemuArgs) -> str:
    """Why no guest can have its name or UUID; "" when one can."""
    if len(args.name.encode(errors="replace")) > _MOST_NAME:
        return f"its name is longer than {_MOST_NAME} bytes: start it with a shorter -name"
    if args.uuid and len(args.uuid) != _UUID:
        return f"its UUID has {len(args.uuid)} characters, not {_UUID}"
    return ""


def _outlives(known: _Entry, now: _Entry) -> bool:
    """Whether the main thread of a believed QEMU has ended, and with it all that tells what it is,
    while others of its threads run on."""
    zombie = now.stat.state == "Z" and now.stat.threads > 1
    return zombie and known.decision is not None and known.decision.believed


def _same(one: _Entry, other: _Entry) -> bool:
    """Whether two readings of a process agree."""
    stats = (one.stat, other.stat)
    comms, starts = {s.comm for s in stats}, {s.start_time for s in stats}
    same = len(comms) == len(starts) == 1
    return same and one.argv == other.argv and one.decision == other.decision


def _read(root: HostRoot, name: str, identity: int, judge: Judge) -> _Entry | None:
    try:
        stat = parse_stat(root.read(f"/proc/{name}/stat"))
        # Every process chooses its name, a QEMU too.
        decision = _decision(root, stat, judge) if not stat.kthread else None
        daemon = decision is None and not stat.kthread and _is_daemon(root, stat)
    except (OSError, ValueError):
        return None
    argv: tuple[str, ...] = ()
    if decision is not None and decision.believed:
        try:
            text = root.read(f"/proc/{stat.tid}/cmdline")
            argv = tuple(text.removesuffix("\0").split("\0")) if text else ()
        except OSError as error:
            if error.errno == errno.E2BIG:
                why = f"its command line is longer than {MOST_ARGUMENTS >> 20} MiB"
                decision = replace(decision, standing=Standing.STRANGER, why=why)
    return _Entry(identity, stat, decision, argv, daemon=daemon)


def _is_daemon(root: HostRoot, stat: Stat) -> bool:
    if stat.comm not in DAEMONS:
        return False
    uids = parse_status_uids(root.read(f"/proc/{stat.tid}/task/{stat.tid}/status"))
    return uids == (0, 0, 0)


def _decision(root: HostRoot, stat: Stat, judge: Judge) -> Decision | None:
    """None for a process without a QEMU's executable."""
    try:
        exe = root.readlink(f"/proc/{stat.tid}/exe")
    except PermissionError:
        if not is_qemu(stat.comm):
            return None
        why = "its executable is not ours to see: run vsrtune as root"
        return Decision(stat.tid, stat.start_time, -1, Standing.STRANGER, why)
    except OSError:
        return None
    return judge.decide(stat.tid, stat.start_time, exe) if is_qemu(exe) else None


# Identity of a process: pid and start time.
Identity = tuple[int, int]

# The number that libvirt gives a domain at each start.
_ID = re.compile(r"<domain\b[^>]*\bid=['\"]([0-9]{1,9})['\"]", re.ASCII)


def _number(domain: DomainText) -> int:
    """The domain's id; -1 when the XML has none, as that of a domain that does not run."""
    found = _ID.search(domain.live_xml)
    return int(found[1]) if found is not None else -1


NO_PROCESS = "has no QEMU process"


# By pid, the domain of its guest.
Owned = dict[int, DomainText]


class Joiner:
    """Joins the processes of one pass with libvirt's domains. ``texts`` is libvirt's last
    description of the domain of each process that it confirmed."""

    def __init__(self, judge: Judge, texts: Mapping[Identity, DomainText]) -> None:
        self._judge = judge
        self._texts = texts

    def join(
        self,
        processes: Processes,
        domains: Sequence[DomainText] | None,
        ask: Callable[[str], DomainText | None],
    ) -> tuple[tuple[QemuProcess, ...], Owned, list[tuple[DomainText, str]]]:
        """Join them. ``domains`` is None when libvirt does not answer. ``ask`` gives the domain of
        that name, if one has started since. Returns the processes with their standing, in pid
        order, their domains, and the domains without a process that can be believed, each with
        the reason."""
        owned: Owned = {}
        missing = []
        for domain in domains or ():
            process, why = self.process_of(processes, domain)
            if process is None:
                missing.append((domain, why))
            else:
                owned[process.pid] = domain
        if domains is None:
            self._keep(processes.qemus, owned)
        else:
            self._started_since(processes, owned, ask)
        qemus = tuple(
            replace(p, standing=self._standing(p, owned, silent=domains is None))
            for p in processes.qemus
        )
        return qemus, owned, missing

    def process_of(
        self, processes: Processes, domain: DomainText
    ) -> tuple[QemuProcess | None, str]:
        """The process of a domain that libvirt lists; otherwise None and the reason."""
        pid, why = self._judge.process_of(domain.name)
        if not self._judge.pid_files:
            pid = processes.oldest.get(_number(domain))
        if pid is None:
            return None, why
        process = processes.qemu(pid)
        if process is not None:
            if process.standing is not Standing.PLAIN:
                return replace(process, standing=Standing.LISTED), ""
            return None, f"its process {pid} runs in no cgroup of libvirt's"
        for stranger in processes.strangers:
            if stranger.pid == pid:
                return None, f"its process {pid} is not believed: {stranger.why}"
        return None, NO_PROCESS

    def runs(self, process: QemuProcess, domain: DomainText) -> bool:
        """Whether a process still belongs to its domain, according to libvirt's pid file or
        scope."""
        if not self._judge.pid_files:
            return _number(domain) in process.scopes
        return self._judge.process_of(domain.name)[0] == process.pid

    def _keep(self, qemus: Iterable[QemuProcess], owned: Owned) -> None:
        """Keep what libvirt confirmed while it is silent, for the very same process only."""
        for process in qemus:
            text = self._texts.get((process.pid, process.start_time))
            if text is not None and process.standing is not Standing.PLAIN:
                owned[process.pid] = text

    def _started_since(
        self,
        processes: Processes,
        owned: Owned,
        ask: Callable[[str], DomainText | None],
    ) -> None:
        for process in processes.qemus:
            if process.pid not in owned and self._written_down(process):
                domain = ask(process.args.name)
                if domain is None:
                    continue
                found, _ = self.process_of(processes, domain)
                if found is not None and found.pid == process.pid:
                    owned[process.pid] = domain

    def _standing(self, process: QemuProcess, owned: Owned, *, silent: bool) -> Standing:
        if process.pid in owned:
            return Standing.LISTED
        if process.standing is Standing.PLAIN:
            # Root, or a user who may have plain guests, runs another libvirt.
            return Standing.FOREIGN if process.by_libvirt else Standing.PLAIN
        if silent and self._written_down(process):
            return Standing.UNKNOWN
        return Standing.FOREIGN

    def _written_down(self, process: QemuProcess) -> bool:
        """Whether our libvirt may have started this process for a domain of the name on its
        command line. The name is a hint; the pid file or the scope confirms it."""
        if process.standing is Standing.PLAIN or not process.args.name:
            return False
        if not self._judge.pid_files:
            return bool(process.scopes)
        return self._judge.process_of(process.args.name)[0] == process.pid
