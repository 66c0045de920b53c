# SPDX-License-Identifier: GPL-2.0-or-later
"""Puts the host back when the command that changed it cannot: killed, hung up, out of time.

The guardian is a transient service of systemd, so that pid 1, which nobody can kill, runs
`vsrtune undo`. The command locks a file beside the journal with flock, and the kernel drops the
lock however the command ends:

* at work it holds the lock exclusively; the service waits for a shared lock;
* while it asks for a confirmation it shares the lock; the service waits for an exclusive one,
  at most as long as an answer may take.

Then the service runs `vsrtune undo`, for a minute again if that fails or is killed. A kill of
flock(1) ends only its wait. To stop the service before its undo has begun keeps the change; whoever
stops it holds the journal, without which undo changes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

import vsrtune
from vsrtune.cli.options import StatePlaces
from vsrtune.core.closing import Closing
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.journal import Journal
from vsrtune.host.state_files import open_private

UNIT = "vsrtune-trial.service"


class Service:
    """The transient service."""

    def __init__(self) -> None:
        self._job: subprocess.Popen[str] | None = None

    def start(self, waits: Sequence[Sequence[str]], command: Sequence[str]) -> None:
        """Have systemd run ``waits`` one after the other, whatever becomes of each, and then
        ``command``. Returns once it waits. Raises OSError or CalledProcessError."""
        properties = (
            "Description=Put the host back when a trial of vsrtune ends",
            *("ExecStartPre=-" + " ".join(f'"{word}"' for word in words) for words in waits),
            # A journal that is in use, or a libvirt that is away, may be free again.
            "Restart=on-failure",
            "RestartSec=5",
            "StartLimitIntervalSec=600",
            "StartLimitBurst=12",
        )
        # It ends with the job that starts the service, and tells its result.
        self._job = subprocess.Popen(
            [
                "systemd-run", "--quiet", "--collect", f"--unit={UNIT}", "--service-type=oneshot",
                f"--setenv=PYTHONPATH={Path(vsrtune.__file__).parents[1]}",
                *(f"--property={one}" for one in properties),
                "--", *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )  # fmt: skip
        while _shown("SubState") != "start-pre":
            if self._job.poll() is not None:
                said = self._job.communicate()[1]
                raise subprocess.CalledProcessError(self._job.returncode, "systemd-run", "", said)
            time.sleep(0.05)

    def poll(self) -> int | None:
        """None while it waits or is at work, then 0 when the host is back."""
        assert self._job is not None
        return self._job.poll()

    def wait(self) -> int:
        """Wait until it is over. 0 when the host is back."""
        assert self._job is not None
        return self._job.wait()

    def waiting(self) -> bool:
        """Whether it has not begun its undo yet. After an undo that failed it waits once more."""
        return _shown("SubState") == "start-pre" and _shown("NRestarts") == "0"

    def active(self) -> bool:
        """Whether it is at work, or will try again."""
        return _shown("ActiveState") != "inactive"

    def stop(self) -> bool:
        """Stop it; False when there is none."""
        stop = ["systemctl", "stop", UNIT]
        return subprocess.run(stop, capture_output=True, check=False).returncode == 0


def _shown(name: str) -> str:
    """A property of the service; "" when systemd does not tell."""
    show = ["systemctl", "show", f"--property={name}", "--value", UNIT]
    return subprocess.run(show, capture_output=True, text=True, check=False).stdout.strip()


class TrialGuard(Closing):
    """The command's side of a guarded change. ``close`` returns once the change is kept, or
    the host is back; it raises VsrtuneError when not everything could be put back."""

    def __init__(self, lock: int, service: Service) -> None:
        """Use ``start``."""
        self._lock = lock
        self._service = service

    @property
    def over(self) -> bool:
        """Whether the change is kept, or the guardian has done what it could."""
        return self._service.poll() is not None

    @property
    def kept(self) -> bool:
        """Whether the change stays."""
        return self._service.poll() not in (None, 0) and not self._service.active()

    def ask(self) -> None:
        """Let the time for a confirmation begin."""
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def keep(self) -> None:
        """Keep the change. Call it with the journal open. Raises VsrtuneError when systemd does not
        stop the guardian."""
        if not self._service.stop():
            raise VsrtuneError(
                "the guardian cannot be stopped, so the host is put back",
                where=UNIT,
                hint="see: systemctl status vsrtune-trial; journalctl -u vsrtune-trial",
            )

    def close(self) -> None:
        if self._lock < 0:
            return
        os.close(self._lock)
        self._lock = -1
        if self._service.wait() == 0:
            click.echo("Everything is put back.")
        elif not self.kept:
            raise VsrtuneError(
                "not everything could be put back; it is tried again for a minute",
                where=UNIT,
                hint="run `vsrtune undo`, which says what is in the way",
            )


def start(places: StatePlaces, seconds: float = 0.0) -> TrialGuard:
    """Guard the change that this process is about to make, until ``TrialGuard.keep``. A
    confirmation may take ``seconds`` once ``TrialGuard.ask`` asks for it. Call it with the journal
    open. Raises VsrtuneError when another guarded change is not over, or no guardian can be
    started; nothing was changed then."""
    path = _lock_file(places.journal)
    waits = [
        ["/usr/bin/flock", "--shared", str(path), "/usr/bin/true"],
        ["/usr/bin/flock", f"--timeout={seconds:g}", str(path), "/usr/bin/true"],
    ]
    command = [
        sys.executable, "-P", "-m", "vsrtune", "undo",
        "--journal", str(places.journal.absolute()),
        "--attach-ledger", str(places.ledger.absolute()),
        "--connect", places.uri,
    ]  # fmt: skip
    service = Service()
    lock = _lock(path, os.O_CREAT)
    try:
        service.start(waits, command)
    except (OSError, subprocess.SubprocessError) as error:
        os.close(lock)
        said = getattr(error, "stderr", None) or str(error)
        raise VsrtuneError(
            f"the guardian does not start, so nothing was changed: {said.strip()}",
            where=UNIT,
            hint="it is a service of systemd, so run this where systemd runs",
        ) from error
    return TrialGuard(lock, service)


def check_over(journal: Path) -> None:
    """Raise VsrtuneError when a guarded change is not over: its guardian would also undo what is
    set beside it. Call it with the journal open, so that no guarded change begins meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        os.close(_lock(_lock_file(journal)))


def _lock_file(journal: Path) -> Path:
    # Not the directory: whoever may read it may lock it.
    return journal.absolute().with_name(f"{journal.name}.guard")


def _lock(path: Path, create: int = 0) -> int:
    """The exclusive lock. Raises OSError, and VsrtuneError when a guarded change has it."""
    lock = open_private(path, os.O_RDWR | create)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        raise VsrtuneError(
            "another guarded change is not over yet",
            where=str(path),
            hint="`vsrtune confirm` keeps it; otherwise wait until it is back",
        ) from error
    return lock


def confirm(journal: Path, boot: str) -> None:
    """Keep the change that waits for a confirmation. Raises VsrtuneError when none does, and when
    it is too late: the guardian has begun to put the host back."""
    if journal.exists():
        service = Service()
        with Journal.open(journal, boot):
            # Its undo cannot begin now.
            if service.waiting() and service.stop():
                return
        if service.active():
            raise VsrtuneError(
                "the time for a confirmation is over, and the host is being put back",
                where=UNIT,
                hint="`vsrtune status` says what is set; begin again with `vsrtune apply --confirm "
                "60s`",
            )
    raise VsrtuneError(
        "nothing waits for a confirmation",
        where=UNIT,
        hint="begin with `vsrtune apply --confirm 60s`",
    )
