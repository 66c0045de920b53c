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
    """``argv`` is empty for everything but QEMUs; ``sure`` when it was read twice."""

    identity: int
    stat: Stat
    argv: tuple[str, ...]
    sure: bool = False


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
        self._entries.clear()

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
                same = known is not None and (known.stat.comm, known.argv) == (
                    entry.stat.comm,
                    entry.argv,
                )
                entry.sure = same
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
        QemuProcess(pid, entry.stat.start_time, args)
        for pid, entry in sorted(qemus.items())
        if entry.stat.ppid not in qemus and (args := parse_args(list(entry.argv))).guest
    ]
    return Processes(
        tuple(found),
        {owner: tuple(sorted(tids)) for owner, tids in workers.items()},
        tuple(sorted(daemons, key=lambda d: (d.name, d.pid))),
        tuple(sorted(softirq)),
        {device: tuple(sorted(tids)) for device, tids in napi.items()},
    )


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
