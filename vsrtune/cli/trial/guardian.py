# SPDX-License-Identifier: GPL-2.0-or-later
"""Puts the host back when the command that changed it cannot: killed, hung up, out of time.

The trial file stands beside the journal from before the first write until the change is kept
or put back. The command holds an flock on it, which the kernel drops however the command ends.

* Unlinking the file keeps the change. Whoever unlinks it first wins: the command, or
  `vsrtune confirm`.
* The guardian is a process of its own. When the lock is free, or the deadline in the file has
  passed, it renames the file, so that nobody can keep the change any more, runs `vsrtune undo`,
  writes the exit code into the file, and unlinks it.

With systemd the guardian is a transient service, outside the session and the process group of the
command; the same program is its ExecStopPost, so that a new guardian replaces a killed one.
Without systemd it is a process with a session of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import syslog
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

import vsrtune
from vsrtune.cli.options import StatePlaces
from vsrtune.core.closing import Closing
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.jsonl_log import holder
from vsrtune.host.filesystem import boot_id

# The longest trial, and the longest wait for a confirmation, in seconds.
LONGEST = 600.0
POLL_SECONDS = 0.2
# Putting attachments back waits for guests to release devices.
BACK_SECONDS = 300.0
# Loading libvirt on a busy host takes its time.
_START_SECONDS = 60.0
# A journal that is still held, or a libvirt that is away, may be free again.
_RETRY_SECONDS = 60.0
_READY = b"ready\n"


class TrialGuard(Closing):
    """The command's side of a guarded change. ``close`` returns once the change is kept, or
    the host is back; it raises VsrtuneError when not everything could be put back."""

    def __init__(self, path: Path, fd: int) -> None:
        """Use ``start``."""
        self._path = path
        self._fd = fd
        self._stays = False
        self._child: subprocess.Popen[bytes] | None = None

    def spawn(self, variables: Mapping[str, str]) -> None:
        """Start the guardian and return once it is ready. Raises VsrtuneError."""
        self._child = _spawn(variables)

    @property
    def waits(self) -> bool:
        """Whether the change is neither kept nor being put back."""
        return _links(self._fd) > 0 and _content(self._fd).startswith(b"{")

    @property
    def kept(self) -> bool:
        """Whether the change stays; final once closed."""
        if self._fd < 0:
            return self._stays
        return _links(self._fd) == 0 and _content(self._fd).startswith(b"{")

    def ask(self, seconds: float) -> None:
        """Let `vsrtune confirm` keep the change, and put it back after ``seconds``."""
        _write(self._fd, time.monotonic() + seconds)

    def keep(self) -> bool:
        """Keep the change; False when it is too late."""
        if not self.kept:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
        return self.kept

    def close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
            end = time.monotonic() + BACK_SECONDS
            while (links := _links(fd)) > 0 and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
            code = _content(fd)
        finally:
            os.close(fd)
        if self._child is not None:
            self._child.wait(BACK_SECONDS)
        self._stays = code.startswith(b"{") and links == 0
        if self._stays:
            return
        if code != b"0":
            raise VsrtuneError(
                "not everything could be put back",
                where=str(self._path),
                hint="run `vsrtune undo`, which says what is in the way",
            )
        click.echo("Everything is put back.")


def start(places: StatePlaces) -> TrialGuard:
    """Guard the change that this process is about to make, until ``TrialGuard.keep``. Call it with
    the journal open, so that one process at a time guards a change. Raises VsrtuneError when
    another guarded change is not over, or no guardian can be started; nothing was changed then."""
    path = trial_file(places.journal)
    for left in (path, _back(path)):
        _remove_left_over(left)
    new = path.with_name(path.name + ".new")
    try:
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        _write(fd, None)
        new.rename(path)
    except OSError as error:
        raise VsrtuneError(
            f"the trial file cannot be written: {error.strerror}; nothing was changed",
            where=str(new),
            hint="free space on that file system, or run as root",
        ) from error
    guard = TrialGuard(path, fd)
    try:
        guard.spawn(
            {
                "VSRTUNE_JOURNAL": str(places.journal.absolute()),
                "VSRTUNE_ATTACH_LEDGER": str(places.ledger.absolute()),
                "VSRTUNE_CONNECT": places.uri,
            }
        )
    except BaseException:
        guard.keep()
        guard.close()
        raise
    return guard


def confirm(journal: Path) -> None:
    """Keep the change that waits for a confirmation. Raises VsrtuneError when none does."""
    path = trial_file(journal)
    try:
        found = json.loads(path.read_bytes())
        if found["boot"] != boot_id():
            raise FileNotFoundError
        if found["deadline"] is None:
            raise VsrtuneError(
                f"process {found['pid']} is still at work, or is a trial that ends by itself",
                where=str(path),
                hint="confirm when `vsrtune apply --confirm` asks for it",
            )
        path.unlink()
    except (FileNotFoundError, ValueError):
        over = ": the time was over, and everything is being put back"
        raise VsrtuneError(
            "nothing waits for a confirmation" + (over if _back(path).exists() else ""),
            where=str(path),
            hint="begin with `vsrtune apply --confirm 60s`",
        ) from None


def trial_file(journal: Path) -> Path:
    """The trial file of a journal."""
    return journal.with_name(journal.name + ".trial")


def unit(pid: int) -> str:
    """The service that guards the change of process ``pid``."""
    return f"vsrtune-trial-{pid}"


def watch(path: Path, undo: Callable[[], int]) -> int:
    """The guardian's side: return when the change is kept, or ``undo`` has put it back. The
    exit code of ``undo``, 0 when the change is kept."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        try:
            # Another guardian was killed while it put the host back.
            fd = os.open(_back(path), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
    else:
        if not _over(path, fd):
            return 0
    os.ftruncate(fd, 0)
    code = undo()
    os.pwrite(fd, str(code).encode(), 0)
    _back(path).unlink()
    os.close(fd)
    return code


def _over(path: Path, fd: int) -> bool:
    """Wait until the change is kept, or has to be put back. True when it has to be put back;
    nobody can keep it then."""
    while _links(fd) > 0:
        if _free(fd) or time.monotonic() >= _deadline(fd):
            try:
                path.rename(_back(path))
            except FileNotFoundError:
                break
            return True
        time.sleep(POLL_SECONDS)
    return False


def undo_until_done(journal: Path) -> int:
    """Run `vsrtune undo` on the files that the environment names, and return its exit code. Try
    again for a minute while the journal is in use or something fails."""
    from vsrtune.cli.main import run

    end = time.monotonic() + _RETRY_SECONDS
    while True:
        while holder(journal) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        # The journal is made before the host is changed: without one nothing was changed.
        code = run(["undo"]) if journal.exists() else 0
        if code == 0 or time.monotonic() >= end:
            return code
        time.sleep(1.0)


def main() -> int:
    """The guardian. The environment names what it guards."""
    # Import before use: by then the host may be too busy, or the package removed.
    from vsrtune.cli import apply  # noqa: F401
    from vsrtune.daemon.systemd import Notifier

    journal = Path(os.environ["VSRTUNE_JOURNAL"])
    Notifier().ready()
    os.write(1, _READY)
    if "NOTIFY_SOCKET" not in os.environ:
        # The command that reads this may be gone before the next output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = watch(trial_file(journal), lambda: undo_until_done(journal))
    if code:
        syslog.syslog(syslog.LOG_ERR, "not everything could be put back: run `vsrtune undo`")
    return code


def _spawn(variables: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Start a guardian. Return its process when it is our child. Raises VsrtuneError."""
    command = [sys.executable, "-P", "-m", "vsrtune.cli.trial.guardian"]
    variables = {**variables, "PYTHONPATH": str(Path(vsrtune.__file__).parents[1])}
    try:
        if Path("/run/systemd/system").is_dir():
            _service(command, variables)
            return None
        return _process(command, variables)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise VsrtuneError(
            f"the guardian does not start, so nothing was changed: {said.strip()}",
            where=unit(os.getpid()),
            hint=f"`journalctl -u {unit(os.getpid())}` may say more",
        ) from error


def _service(command: list[str], variables: Mapping[str, str]) -> None:
    """Start the guardian as a transient service."""
    quoted = " ".join(f'"{word}"' for word in command)
    properties = (
        "Description=Put the host back when a trial of vsrtune ends",
        "After=libvirtd.service virtqemud.service",
        f"TimeoutStartSec={_START_SECONDS:g}",
        f"TimeoutStopSec={LONGEST + BACK_SECONDS:g}",
        f"ExecStopPost={quoted}",
    )
    subprocess.run(
        [
            "systemd-run", "--quiet", "--collect", f"--unit={unit(os.getpid())}",
            "--service-type=notify",
            *(f"--property={one}" for one in properties),
            *(f"--setenv={name}={value}" for name, value in variables.items()),
            "--", *command,
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * _START_SECONDS,
        check=True,
    )  # fmt: skip


def _process(command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the guardian as a process in a session of its own."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **variables},
        cwd="/",
        bufsize=0,
    )
    assert process.stdout is not None
    with process.stdout as said:
        ready = select.select([said], [], [], _START_SECONDS)[0]
        if ready and said.read(len(_READY)) == _READY:
            return process
    process.kill()
    raise subprocess.CalledProcessError(process.wait(), command)


def _remove_left_over(path: Path) -> None:
    """Remove a trial file that nobody guards any more. Raises VsrtuneError when somebody does."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not _free(fd):
            raise VsrtuneError(
                "another guarded change is not over yet, or is being put back",
                where=str(path),
                hint="`vsrtune confirm` keeps it; otherwise wait until it is back",
            )
        path.unlink()
    finally:
        os.close(fd)


def _back(path: Path) -> Path:
    """The trial file's name while the change is put back."""
    return path.with_name(path.name + ".back")


def _free(fd: int) -> bool:
    """Try to take the lock; True on success."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _links(fd: int) -> int:
    return os.fstat(fd).st_nlink


def _content(fd: int) -> bytes:
    return os.pread(fd, 4096, 0)


def _deadline(fd: int) -> float:
    """The deadline on the clock of time.monotonic; infinity while there is none."""
    try:
        found: dict[str, Any] = json.loads(_content(fd))
    except ValueError:
        return float("inf")  # it is being written
    return float("inf") if found["deadline"] is None else float(found["deadline"])


def _write(fd: int, deadline: float | None) -> None:
    data = {"boot": boot_id(), "pid": os.getpid(), "deadline": deadline}
    # Padded to one length, so that nothing of an earlier write stays behind.
    os.pwrite(fd, json.dumps(data).encode().ljust(256), 0)


if __name__ == "__main__":
    sys.exit(main())
