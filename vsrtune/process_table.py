"""The processes of a host, kept between passes: only what is new is looked at.

A process that was looked at twice and is still the same one, by its identity in /proc, need
not be read again: a kernel thread keeps its name, and a QEMU its command line. What is kept
does not see a process that becomes a QEMU later than that (``exec`` in a script that waited);
``forget`` makes the next look a whole one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vsrtune.proc import (
    DAEMONS,
    Daemon,
    Processes,
    QemuProcess,
    Stat,
    is_qemu,
    napi_device,
    parse_stat,
    worker_owner,
)
from vsrtune.qemu_args import parse as parse_args
from vsrtune.rootfs import HostRoot

_SOFTIRQ = re.compile(r"ksoftirqd/(\d+)", re.ASCII)


@dataclass(slots=True)
class _Entry:
    """``argv`` is empty for everything but QEMUs, ``qemu`` what it says; ``sure`` when it was
    read twice."""

    identity: int
    stat: Stat
    argv: tuple[str, ...]
    qemu: QemuProcess | None = None
    sure: bool = False

    def process(self) -> QemuProcess:
        """What is known of a QEMU. Its command line is long, and is taken apart once."""
        if self.qemu is None:
            self.qemu = QemuProcess(self.stat.tid, self.stat.start_time, parse_args(self.argv))
        return self.qemu


def scan(root: HostRoot) -> Processes:
    """One pass over /proc: QEMU guests, vhost kernel threads and known daemons.

    A process that vanishes meanwhile is not in the result. Raises OSError when
    /proc itself cannot be listed.
    """
    return ProcessTable().scan(root)


class ProcessTable:
    """Looks at the processes of one host as often as asked."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def forget(self) -> None:
        """Look at everything next time."""
        for entry in self._entries.values():
            entry.sure = False

    def scan(self, root: HostRoot) -> Processes:
        """As ``scan``."""
        before, self._entries = self._entries, {}
        for name, identity in root.processes():
            known = before.get(name)
            if known is not None and known.identity == identity:
                if known.sure:
                    self._entries[name] = known
                    continue
            else:
                known = None
            entry = _read(root, name, identity)
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
    qemus: dict[int, _Entry] = {}
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
        elif entry.argv:
            qemus[stat.tid] = entry
    # A QEMU below a QEMU is a helper of it (a fork about to exec, the cleanup
    # process of -run-with async-teardown), not a guest.
    found = [
        process
        for _, entry in sorted(qemus.items())
        if entry.stat.ppid not in qemus and (process := entry.process()).args.guest
    ]
    return Processes(
        tuple(found),
        {owner: tuple(sorted(tids)) for owner, tids in workers.items()},
        tuple(sorted(daemons, key=lambda d: (d.name, d.pid))),
        tuple(sorted(softirq)),
        {device: tuple(sorted(tids)) for device, tids in napi.items()},
    )


def _same(one: _Entry, other: _Entry) -> bool:
    """Whether a process is what it was when it was read before."""
    stats = (one.stat, other.stat)
    comms, starts = {s.comm for s in stats}, {s.start_time for s in stats}
    return len(comms) == len(starts) == 1 and one.argv == other.argv


def _read(root: HostRoot, name: str, identity: int) -> _Entry | None:
    try:
        stat = parse_stat(root.read(f"/proc/{name}/stat"))
    except OSError:
        return None
    ours = not stat.kthread and stat.comm not in DAEMONS and _runs_qemu(root, stat)
    return _Entry(identity, stat, _argv(root, stat.tid) if ours else ())


def _runs_qemu(root: HostRoot, stat: Stat) -> bool:
    try:
        return is_qemu(root.readlink(f"/proc/{stat.tid}/exe"))
    except PermissionError:
        # Not root: the comm is cut to 15 characters, which is enough.
        return is_qemu(stat.comm)
    except OSError:
        return False


def _argv(root: HostRoot, pid: int) -> tuple[str, ...]:
    try:
        text = root.read(f"/proc/{pid}/cmdline")
    except OSError:
        return ()
    return tuple(text.removesuffix("\0").split("\0")) if text else ()
