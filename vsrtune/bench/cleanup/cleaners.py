# SPDX-License-Identifier: GPL-2.0-or-later
"""The cleaners, each of which takes back one kind of change that a bench makes to the host.

A bench writes every change into its ledger before making it. Whoever resolves the
ledger (the bench itself, its guard after a kill, ``vsrtune bench clean``) calls the
cleaner of the entry's kind with the entry's data, the latest entry first, and marks the
entry done when the cleaner returns.

A cleaner may be called at any time and any number of times: for a change that was never
made, was made in part, or is taken back already. It raises VsrtuneError when something
could not be taken back; the entry then stays.

The guard is a process with a session of its own that waits on a pipe whose other end only the
bench holds. However the bench ends, the pipe ends with it, and the guard resolves the ledger.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import syslog
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vsrtune.bench import children
from vsrtune.bench.children import AgentProcess
from vsrtune.bench.setup import attachments, scaling
from vsrtune.bench.setup.commands import run
from vsrtune.bench.traffic import pktgen
from vsrtune.core.errors import VsrtuneError, WriteError
from vsrtune.core.text import printable
from vsrtune.execute import executor
from vsrtune.execute.executor import Result
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.execute.jsonl_log import LogNames
from vsrtune.execute.ledger import Cleaner, Ledger
from vsrtune.host.filesystem import LiveRoot, boot_id
from vsrtune.host.procfs import parse_stat

DEFAULT_PATH = Path("/run/vsrtune/bench/ledger.jsonl")
AGENT = "agent"
TUNING = "tuning"
COMMAND = "command"
# An agent ends by itself once its bench is gone; otherwise it is killed.
_END_SECONDS = 5.0


class BenchLedger(Ledger):
    """The open ledger of the bench, of changes that must be put back on this host.

    The file is in /run: everything that a bench changes ends with a restart of the kernel, as
    does its ledger. The guard inherits the lock, so the lock is free only after the cleaning.
    """

    names = LogNames(
        "the ledger of the bench",
        "another bench is running, or is being cleaned up after: {process}",
        "wait for its end",
    )


def undo_journal(data: Mapping[str, Any]) -> None:
    """Put back every setting of the journal that a ``tuning`` entry names. Raises
    VsrtuneError."""
    with Journal.open(Path(data["journal"]), boot_id()) as journal:
        if journal.foreign is not None:
            raise journal.foreign
        ops = LiveSysOps(data["uri"], budgets_end=journal.budgets_end, original=journal.original)
        for note in settle(executor.undo(ops, journal)):
            syslog.syslog(syslog.LOG_WARNING, f"vsrtune bench: {note}")
            sys.stderr.write(f"vsrtune: {note}\n")


def settle(result: Result) -> tuple[str, ...]:
    """Notes for people on settings that others changed meanwhile. Raises WriteError when
    something could not be put back."""
    if result.failed:
        raise failure(result)
    return tuple(printable(str(left)) for left in result.left)


def failure(result: Result) -> VsrtuneError:
    """The first error of a result that has errors, because it says most."""
    action, error = result.failed[0]
    more = f" (and {len(result.failed) - 1} more)" if len(result.failed) > 1 else ""
    return WriteError(
        f"{error.what}{more}", where=str(action.target), hint=error.hint, lasting=error.lasting
    )


def note_agent(ledger: BenchLedger, pid: int, namespace: str | None, names: Sequence[str]) -> int:
    """Record an agent that was just started and has done nothing yet."""
    data = {
        "pid": pid,
        "start": _start_time(pid),
        "namespace": namespace,
        "names": list(names),
        "module": not os.path.isdir(pktgen.MODULE),
    }
    return ledger.add(AGENT, data)


def clean_agent(data: Mapping[str, Any]) -> None:
    """Wait for the agent's end, or kill it, and remove what it may have left."""
    pid, start = int(data["pid"]), data["start"]
    if not _ended(pid, start):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if not _ended(pid, start):
            raise WriteError("the agent of the bench does not end", where=f"process {pid}")
    with AgentProcess() as agent:
        agent.call("clean", namespace=data["namespace"], names=data["names"])
    if data["module"]:
        pktgen.unload_module()


def _ended(pid: int, start: int | None) -> bool:
    """Whether the process ends soon."""
    end = time.monotonic() + _END_SECONDS
    while start is not None and _start_time(pid) == start:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _start_time(pid: int) -> int | None:
    """Field 22 of the process's stat; None when it is gone, or only waits to be reaped."""
    try:
        text = LiveRoot().read(f"/proc/{pid}/stat")
    except OSError:
        return None
    return None if text.rpartition(")")[2].split()[0] == "Z" else parse_stat(text).start_time


CLEANERS: dict[str, Cleaner] = {
    AGENT: clean_agent,
    attachments.Attachments.kind: attachments.put_back,
    scaling.Members.kind: scaling.put_back,
    TUNING: undo_journal,
    COMMAND: lambda data: run(data["revert"]),
}


# Loading libvirt on a busy host takes its time.
_START_SECONDS = 60.0
# Putting attachments back waits for guests to release devices.
_STOP_SECONDS = 300.0


class RunGuard(children.Child):
    """A running guard. Use as a context manager, or ``close``."""

    def __init__(self, ledger: BenchLedger) -> None:
        """Start a guard for the open ``ledger`` and wait until it is ready. Call this before
        anything is changed. Raises VsrtuneError when it does not start."""
        lock = ledger.lock_descriptor
        path = ledger.path.with_name("guard.log")
        argv = children.module("vsrtune.bench.cleanup.cleaners", str(ledger.path), str(lock))
        # Not our stderr: whoever reads that must not wait for the guard.
        with path.open("wb") as log:
            super().__init__(argv, "the guard", stderr=log, pass_fds=(lock,), cwd="/")
        try:
            self.messages.next(_START_SECONDS)
        except (EOFError, TimeoutError):
            self.reap(0.0)
            raise VsrtuneError(
                "the guard did not start; nothing was changed", where=str(path)
            ) from None

    def close(self) -> None:
        """End the guard: it resolves entries that are still pending, then exits. Raises
        VsrtuneError that names what could not be put back."""
        if self.stdin.closed:
            return
        self.end_input()
        try:
            failures = self.messages.next(_STOP_SECONDS)
        except EOFError:
            failures = ["the guard ended too early"]
        except TimeoutError:
            raise VsrtuneError("the guard does not end", where=f"process {self.pid}") from None
        self.reap(_STOP_SECONDS)
        if failures:
            raise VsrtuneError(
                "not everything was put back: " + "; ".join(failures),
                hint="`vsrtune bench clean` tries again",
            )


def main(path: str, lock: int) -> int:
    """Wait for the end of stdin, resolve the ledger, and print failures as JSON."""
    # Only the end of the bench ends the guard: a signal to the terminal's processes, or to
    # all of a service, reaches the bench as well.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    children.send(1, "ready")
    while os.read(0, 4096):
        pass
    failures: list[str] = []
    try:
        with BenchLedger.open(Path(path), lock=lock) as ledger:
            failures = [str(failure) for failure in ledger.resolve(CLEANERS)]
    except VsrtuneError as error:
        failures = [str(error)]
    for what in failures:
        syslog.syslog(syslog.LOG_ERR, f"vsrtune bench: not put back: {what}")
    with contextlib.suppress(OSError):
        children.send(1, failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
