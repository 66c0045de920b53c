"""The processes of a host, kept between passes: only what is new is looked at.

A process that was looked at twice and is still the same one, by its identity in /proc, need
not be read again: a kernel thread keeps its name, and a QEMU its command line. What is kept
does not see a process that becomes a QEMU later than that (``exec`` in a script that waited);
``forget`` makes the next look a whole one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from vsrtune.host.filesystem import HostRoot
from vsrtune.host.procfs import (
    DAEMONS,
    Daemon,
    Stat,
    is_qemu,
    napi_device,
    parse_stat,
    worker_owner,
)
from vsrtune.host.qemu_cmdline import QemuArgs
from vsrtune.host.qemu_cmdline import parse as parse_args
from vsrtune.trust import Decision, Judge, Standing

_SOFTIRQ = re.compile(r"ksoftirqd/(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class QemuProcess:
    """One QEMU that runs a guest, and that is believed."""

    decision: Decision
    args: QemuArgs

    @property
    def pid(self) -> int:
        """Its process."""
        return self.decision.pid

    @property
    def start_time(self) -> int:
        """When it started, in clock ticks."""
        return self.decision.start_time

    def stands(self, standing: Standing) -> QemuProcess:
        """The same, of which more is known."""
        if self.decision.standing is standing:
            return self
        return replace(self, decision=replace(self.decision, standing=standing))


@dataclass(frozen=True, slots=True)
class Processes:
    """Result of one pass over /proc. ``qemus`` are those that are believed, ``strangers`` what
    else has an executable of such a name. ``workers`` holds the vhost kernel threads:
    owner's tid to their tids; ``softirq`` the ksoftirqd threads: CPU to tid; ``napi``
    the NAPI kernel threads: device, as they name it, to tids."""

    qemus: tuple[QemuProcess, ...]
    workers: dict[int, tuple[int, ...]]
    daemons: tuple[Daemon, ...]
    softirq: tuple[tuple[int, int], ...] = ()
    napi: dict[str, tuple[int, ...]] = field(default_factory=dict)
    strangers: tuple[Decision, ...] = ()


@dataclass(slots=True)
class _Entry:
    """``decision`` is None for everything that has no QEMU's executable, ``argv`` empty for what
    is not believed, ``qemu`` what it says; ``sure`` when it was read twice."""

    identity: int
    stat: Stat
    decision: Decision | None
    argv: tuple[str, ...]
    qemu: QemuProcess | None = None
    sure: bool = False

    def process(self, decision: Decision) -> QemuProcess:
        """What is known of a QEMU. Its command line is long, and is taken apart once."""
        if self.qemu is None:
            self.qemu = QemuProcess(decision, parse_args(self.argv))
        return self.qemu


def scan(root: HostRoot, judge: Judge | None = None) -> Processes:
    """One pass over /proc: QEMU guests, vhost kernel threads and known daemons. Without
    ``judge``, plain QEMUs are guests if they are root's.

    A process that vanishes meanwhile is not in the result. Raises OSError when
    /proc itself cannot be listed.
    """
    return ProcessTable().scan(root, judge)


class ProcessTable:
    """Looks at the processes of one host as often as asked."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def forget(self) -> None:
        """Look at everything next time."""
        for entry in self._entries.values():
            entry.sure = False

    def scan(self, root: HostRoot, judge: Judge | None = None) -> Processes:
        """As ``scan``."""
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
                if known is not None and _same(known, entry):
                    entry.qemu, entry.sure = known.qemu, True
                self._entries[name] = entry
        return _sorted(list(self._entries.values()))


def _sorted(entries: list[_Entry]) -> Processes:
    workers: dict[int, list[int]] = {}
    daemons: list[Daemon] = []
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
        elif stat.comm in DAEMONS:
            daemons.append(Daemon(stat.comm, stat.tid))
        elif entry.decision is not None and not entry.decision.believed:
            strangers.append(entry.decision)
        elif entry.decision is not None and entry.argv:
            qemus[stat.tid] = entry, entry.decision
    # A QEMU below a QEMU is a helper of it (a fork about to exec, the cleanup
    # process of -run-with async-teardown), not a guest.
    found = [
        process
        for _, (entry, decision) in sorted(qemus.items())
        if entry.stat.ppid not in qemus and (process := entry.process(decision)).args.guest
    ]
    return Processes(
        tuple(found),
        {owner: tuple(sorted(tids)) for owner, tids in workers.items()},
        tuple(sorted(daemons, key=lambda d: (d.name, d.pid))),
        tuple(sorted(softirq)),
        {device: tuple(sorted(tids)) for device, tids in napi.items()},
        tuple(sorted(strangers, key=lambda s: s.pid)),
    )


def _same(one: _Entry, other: _Entry) -> bool:
    """Whether a process is what it was when it was read before."""
    stats = (one.stat, other.stat)
    comms, starts = {s.comm for s in stats}, {s.start_time for s in stats}
    same = len(comms) == len(starts) == 1
    return same and one.argv == other.argv and one.decision == other.decision


def _read(root: HostRoot, name: str, identity: int, judge: Judge) -> _Entry | None:
    try:
        stat = parse_stat(root.read(f"/proc/{name}/stat"))
        ours = not stat.kthread and stat.comm not in DAEMONS
        decision = _decision(root, stat, judge) if ours else None
    except (OSError, ValueError):
        return None
    believed = decision is not None and decision.believed
    return _Entry(identity, stat, decision, _argv(root, stat.tid) if believed else ())


def _decision(root: HostRoot, stat: Stat, judge: Judge) -> Decision | None:
    """None for what has no QEMU's executable."""
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


def _argv(root: HostRoot, pid: int) -> tuple[str, ...]:
    try:
        text = root.read(f"/proc/{pid}/cmdline")
    except OSError:
        return ()
    return tuple(text.removesuffix("\0").split("\0")) if text else ()
