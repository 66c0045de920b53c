# SPDX-License-Identifier: GPL-2.0-or-later
"""The guard: a process that puts the host back when the bench cannot.

It has a session of its own and waits on a pipe whose other end only the bench holds.
However the bench ends, by itself, by an error or by SIGKILL, the pipe ends with it; the
guard then resolves the pending entries of the ledger. It holds the ledger's lock until it
is done, so no other bench begins on a host that is half put back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import syslog
from pathlib import Path

from vsrtune.bench import children
from vsrtune.bench.cleanup.cleaners import CLEANERS, BenchLedger
from vsrtune.core.errors import VsrtuneError

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
        argv = children.module("vsrtune.bench.cleanup.guard", str(ledger.path), str(lock))
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
