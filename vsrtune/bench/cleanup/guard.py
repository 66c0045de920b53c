"""The guard: a process that puts the host back when the bench cannot.

It has a session of its own and waits on a pipe whose other end only the bench holds.
However the bench ends, by itself, by an error or by SIGKILL, the pipe ends with it; the
guard then resolves the pending entries of the ledger. It holds the ledger's lock until it
is done, so no other bench begins on a host that is half put back.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import syslog
import time
from pathlib import Path

import vsrtune
from vsrtune.bench.cleanup.cleaners import CLEANERS
from vsrtune.bench.cleanup.ledger import BenchLedger
from vsrtune.core.closing import Closing
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.ledger import Failure

# Loading libvirt on a busy host takes its time.
_START_SECONDS = 60.0
# Putting attachments back waits for guests to release devices.
_STOP_SECONDS = 300.0
_READY = b"ready\n"


class RunGuard(Closing):
    """A running guard. Use as a context manager, or ``close``."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the guard: it resolves entries that are still pending, then exits. Raises
        VsrtuneError that names what could not be put back."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        assert self._process.stdout is not None
        output = _read(self._process.stdout.fileno(), _STOP_SECONDS)
        self._process.stdout.close()
        if output is None:
            raise VsrtuneError("the guard does not end", where=f"process {self.pid}")
        self._process.wait()
        failures = json.loads(output) if output else ["the guard ended too early"]
        if failures:
            raise VsrtuneError(
                "not everything was put back: " + "; ".join(failures),
                hint="`vsrtune bench clean` tries again",
            )


def start(ledger: BenchLedger) -> RunGuard:
    """Start a guard for the open ``ledger`` and return once it is ready. Call this before
    anything is changed. Raises VsrtuneError when it cannot be started."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(Path(vsrtune.__file__).parents[1])
    lock = ledger.lock_descriptor
    try:
        # Not our stderr: whoever reads that must not wait for the guard.
        with open(ledger.path.with_name("guard.log"), "wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "vsrtune.bench.cleanup.guard",
                    str(ledger.path),
                    str(lock),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,
                env=environment,
                cwd="/",
                bufsize=0,
            )
    except OSError as error:
        raise VsrtuneError(f"cannot start the guard: {error.strerror}") from error
    assert process.stdout is not None
    said = _read(process.stdout.fileno(), _START_SECONDS, len(_READY))
    if said != _READY:
        process.kill()
        process.wait()
        raise VsrtuneError(
            "the guard did not start; nothing was changed",
            where=str(ledger.path.with_name("guard.log")),
        )
    return RunGuard(process)


def clean(ledger: BenchLedger) -> list[Failure]:
    """Resolve what a killed run left (`vsrtune bench clean`, and each start)."""
    return ledger.resolve(CLEANERS)


def _read(descriptor: int, seconds: float, size: int = 1 << 20) -> bytes | None:
    """All output up to its end, or ``size`` bytes of it; None when neither came in time."""
    end = time.monotonic() + seconds
    output = b""
    while len(output) < size:
        (ready, _, _) = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        data = os.read(descriptor, size - len(output))
        if not data:
            break
        output += data
    return output


def main(path: str, lock: int) -> int:
    """Wait for the end of stdin, resolve the ledger, and print failures as JSON."""
    # Only the end of the bench ends the guard: a signal to the terminal's processes, or to
    # all of a service, reaches the bench as well.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.write(1, _READY)
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
        os.write(1, json.dumps(failures).encode())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
