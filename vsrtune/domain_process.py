"""Which QEMU is that of a libvirt domain: what libvirt answers, and what it wrote down.

A command line can be copied, with the UUID and with what libvirt leaves in it. So a domain's
process is the one that its pid file names, and only when that one runs in libvirt's cgroups.
Where others than root can write pid files it is the oldest QEMU in the domain's systemd scope:
what a QEMU starts is younger, and no other process gets there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vsrtune.host.filesystem import HostRoot
from vsrtune.host.libvirt import DomainText
from vsrtune.process_table import Processes, QemuProcess
from vsrtune.trust import Judge, Standing

# Identity of a process: pid and start time.
Identity = tuple[int, int]

# The number that libvirt gives a domain at each start.
_ID = re.compile(r"<domain\b[^>]*\bid=['\"]([0-9]{1,9})['\"]", re.ASCII)

NO_PROCESS = "has no QEMU process"


@dataclass(slots=True)
class Joined:
    """``qemus`` as they stand, in pid order; ``owned``: pid to domain; ``missing``: domains
    without a process that can be believed, each with the reason."""

    qemus: tuple[QemuProcess, ...] = ()
    owned: dict[int, DomainText] = field(default_factory=dict)
    missing: list[tuple[DomainText, str]] = field(default_factory=list)


class Joiner:
    """Joins the processes of one look with libvirt's domains. ``texts`` is what libvirt said
    last of the domains of processes that it confirmed."""

    def __init__(self, root: HostRoot, judge: Judge, texts: Mapping[Identity, DomainText]) -> None:
        self._root = root
        self._judge = judge
        self._texts = texts

    def join(
        self,
        processes: Processes,
        domains: Sequence[DomainText] | None,
        ask: Callable[[str], DomainText | None],
    ) -> Joined:
        """``domains`` are None when libvirt does not answer. ``ask`` gives the domain of that
        name, if one has started since."""
        joined = Joined()
        for domain in domains or ():
            process, why = self.process_of(processes, domain)
            if process is None:
                joined.missing.append((domain, why))
            else:
                joined.owned[process.pid] = domain
        if domains is None:
            self._keep(processes.qemus, joined)
        else:
            self._started_since(processes, joined, ask)
        joined.qemus = tuple(
            p.stands(self._standing(p, joined, silent=domains is None)) for p in processes.qemus
        )
        return joined

    def process_of(
        self, processes: Processes, domain: DomainText
    ) -> tuple[QemuProcess | None, str]:
        """The process of a domain that libvirt lists; else None, and why there is none."""
        if not self._root.owners_told:
            return _by_uuid(processes.qemus, domain)
        pid, why = self._judge.process_of(domain.name)
        if not self._judge.pid_files:
            pid = self._oldest(processes.qemus, domain)
        if pid is None:
            return None, why
        for process in processes.qemus:
            if process.pid == pid:
                if process.decision.standing is not Standing.PLAIN:
                    return process.stands(Standing.OURS), ""
                return None, f"its process {pid} runs in no cgroup of libvirt's"
        for stranger in processes.strangers:
            if stranger.pid == pid:
                return None, f"its process {pid} is not believed: {stranger.why}"
        return None, NO_PROCESS

    def runs(self, process: QemuProcess, domain: DomainText) -> bool:
        """Whether a process that was a domain's still is by what libvirt wrote down."""
        if not self._root.owners_told:
            return process.args.uuid == domain.uuid
        if not self._judge.pid_files:
            return self._in_scope(process, domain)
        return self._judge.process_of(domain.name)[0] == process.pid

    def _oldest(self, qemus: Iterable[QemuProcess], domain: DomainText) -> int | None:
        there = [(p.start_time, p.pid) for p in qemus if self._in_scope(p, domain)]
        return min(there)[1] if there else None

    def _in_scope(self, process: QemuProcess, domain: DomainText) -> bool:
        number = _ID.search(domain.live_xml)
        if number is None or process.decision.standing is Standing.PLAIN:
            return False
        return self._judge.in_scope(process.pid, int(number[1]))

    def _keep(self, qemus: Iterable[QemuProcess], joined: Joined) -> None:
        """What libvirt has confirmed stays so while it is silent: the very same process."""
        for process in qemus:
            text = self._texts.get((process.pid, process.start_time))
            if text is not None and process.decision.standing is not Standing.PLAIN:
                joined.owned[process.pid] = text

    def _started_since(
        self,
        processes: Processes,
        joined: Joined,
        ask: Callable[[str], DomainText | None],
    ) -> None:
        for process in processes.qemus:
            if process.pid not in joined.owned and self._written_down(process):
                domain = ask(process.args.name)
                if domain is None:
                    continue
                found, _ = self.process_of(processes, domain)
                if found is not None and found.pid == process.pid:
                    joined.owned[process.pid] = domain

    def _standing(self, process: QemuProcess, joined: Joined, *, silent: bool) -> Standing:
        if process.pid in joined.owned:
            return Standing.OURS
        if process.decision.standing is Standing.PLAIN:
            # Root, or who may have plain guests, runs a libvirt of his own.
            return Standing.FOREIGN if process.args.libvirt else Standing.PLAIN
        if silent and (not self._root.owners_told or self._written_down(process)):
            return Standing.UNKNOWN
        return Standing.FOREIGN

    def _written_down(self, process: QemuProcess) -> bool:
        """Whether our libvirt may have started this process for a domain of the name that its
        command line has: a hint, which the pid file or the scope makes sure."""
        if process.decision.standing is Standing.PLAIN or not process.args.name:
            return False
        if not self._judge.pid_files:
            return self._judge.in_scope(process.pid)
        return self._judge.process_of(process.args.name)[0] == process.pid


def _by_uuid(qemus: Iterable[QemuProcess], domain: DomainText) -> tuple[QemuProcess | None, str]:
    for process in qemus:
        if process.args.uuid == domain.uuid and process.decision.standing is not Standing.PLAIN:
            return process.stands(Standing.OURS), ""
    return None, NO_PROCESS
