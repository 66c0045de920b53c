"""The guardian: what is not kept is put back, however the command ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import memory_cli
import pytest
import shell_samples as samples
from memory_cli import Pid1

from vsrtune.cli.options import StatePlaces
from vsrtune.cli.trial import guardian
from vsrtune.cli.trial.guardian import TrialGuard
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.journal import Journal
from vsrtune.execute.jsonl_log import LockedError

SECONDS = 0.5


class Changed:
    """A change that a guardian puts back: a file beside the journal."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = directory / "journal.jsonl"
        self.code = 0
        self._file = directory / "changed"
        self._monkeypatch = monkeypatch

    @contextlib.contextmanager
    def guarded(self) -> Iterator[Pid1]:
        with memory_cli.guarded(self._monkeypatch, self._undo) as pid1:
            yield pid1

    def _undo(self) -> int:
        self._file.unlink()
        return self.code

    def begin(self, seconds: float = 60.0) -> TrialGuard:
        with self._opened():
            places = StatePlaces(self.journal, self.journal.with_name("a"), "test:///default")
            guard = guardian.start(places, seconds)
            self._file.touch()
        return guard

    def keep(self, guard: TrialGuard) -> None:
        with self._opened():
            guard.keep()

    def _opened(self) -> Journal:
        return Journal.open(self.journal, samples.BOOT)

    @property
    def there(self) -> bool:
        return self._file.exists()


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Changed:
    return Changed(tmp_path, monkeypatch)


@pytest.fixture
def pid1(changed: Changed) -> Iterator[Pid1]:
    with changed.guarded() as found:
        yield found


def test_closed_without_keeping_it_is_back(
    changed: Changed, pid1: Pid1, capsys: pytest.CaptureFixture[str]
) -> None:
    with changed.begin() as guard:
        time.sleep(0.1)
        assert (guard.over, changed.there) == (False, True)
    assert (guard.over, guard.kept, changed.there) == (True, False, False)
    assert capsys.readouterr().out == "Everything is put back.\n"


def test_kept_it_stays(changed: Changed, pid1: Pid1) -> None:
    with changed.begin() as guard:
        changed.keep(guard)
    assert (guard.kept, changed.there) == (True, True)


def test_confirmed_by_another_session_it_stays(changed: Changed, pid1: Pid1) -> None:
    with changed.begin() as guard:
        guard.ask()
        guardian.confirm(changed.journal, samples.BOOT)
        assert guard.over
    assert (guard.kept, changed.there) == (True, True)
    with pytest.raises(VsrtuneError, match="nothing waits"):
        guardian.confirm(changed.journal, samples.BOOT)


def test_a_confirmation_is_too_late_once_the_undo_has_begun(changed: Changed, pid1: Pid1) -> None:
    """When the undo fails, systemd has the service for a minute, most of it between two tries."""
    changed.code = 1
    guard = changed.begin(SECONDS)
    guard.ask()
    assert pid1.wait() == 1
    assert pid1.active()
    with pytest.raises(VsrtuneError, match="the time for a confirmation is over"):
        guardian.confirm(changed.journal, samples.BOOT)
    assert pid1.active(), "it tries again"
    assert not guard.kept
    with pytest.raises(VsrtuneError, match="not everything could be put back"):
        guard.close()


SYSTEMCTL = """#!/bin/sh
case $1 in
show) sed -n "s/^${2#--property=}=//p" "$0.shown" ;;
stop) echo "$2" >>"$0.stopped" ;;
esac
"""


@pytest.mark.parametrize(
    ("shown", "kept", "said"),
    [
        ("SubState=start-pre\nNRestarts=0\nActiveState=activating\n", True, ""),
        ("SubState=start-pre\nNRestarts=1\nActiveState=activating\n", False, "is over"),
        ("SubState=auto-restart\nNRestarts=0\nActiveState=activating\n", False, "is over"),
        ("SubState=start\nNRestarts=0\nActiveState=activating\n", False, "is over"),
        ("SubState=dead\nNRestarts=0\nActiveState=inactive\n", False, "nothing waits"),
    ],
)
def test_only_a_service_that_waits_for_the_first_time_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, kept: bool, said: str
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    (tmp_path / "systemctl.shown").write_text(shown)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    journal = tmp_path / "journal.jsonl"
    Journal.open(journal, samples.BOOT).close()
    if kept:
        guardian.confirm(journal, samples.BOOT)
    else:
        with pytest.raises(VsrtuneError, match=said):
            guardian.confirm(journal, samples.BOOT)
    assert (tmp_path / "systemctl.stopped").exists() is kept


def test_at_the_deadline_it_is_back_though_the_command_hangs(changed: Changed, pid1: Pid1) -> None:
    guard = changed.begin(SECONDS)
    time.sleep(2 * SECONDS)
    assert changed.there, "the time begins when the command asks"
    guard.ask()
    pid1.wait()
    assert not changed.there
    with pytest.raises(VsrtuneError, match="nothing waits"):
        guardian.confirm(changed.journal, samples.BOOT)
    guard.close()
    assert not guard.kept


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_killed_command(
    changed: Changed, pid1: Pid1, number: signal.Signals, asked: bool
) -> None:
    guard = changed.begin()
    if asked:
        guard.ask()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            # Under nohup the signal would be ignored.
            signal.signal(number, signal.SIG_DFL)
        signal.pause()
        os._exit(1)
    os.close(guard._lock)  # only the child holds it
    time.sleep(0.1)
    assert changed.there
    os.kill(pid, number)
    os.waitpid(pid, 0)
    pid1.wait()
    assert not changed.there


def test_a_guardian_that_is_killed_while_it_waits(changed: Changed, pid1: Pid1) -> None:
    guard = changed.begin()
    for _ in pid1.waits:
        while pid1.at is None or pid1.at.poll() is not None:
            time.sleep(0.01)
        pid1.at.kill()
        pid1.at.wait()
    pid1.wait()
    assert not changed.there
    guard.close()
    assert not guard.kept


def test_while_the_journal_is_in_use_nobody_keeps_it(changed: Changed, pid1: Pid1) -> None:
    with (
        changed.begin(),
        Journal.open(changed.journal, samples.BOOT),
        pytest.raises(LockedError),
    ):
        guardian.confirm(changed.journal, samples.BOOT)


def test_one_at_a_time(changed: Changed, pid1: Pid1) -> None:
    with changed.begin(), pytest.raises(VsrtuneError, match="not over yet"):
        changed.begin()


def test_what_fails_is_said(changed: Changed, pid1: Pid1) -> None:
    changed.code = 1
    guard = changed.begin()
    with pytest.raises(VsrtuneError, match="not everything could be put back"):
        guard.close()


def test_without_systemd_nothing_begins(changed: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(VsrtuneError, match="does not start, so nothing was changed"):
        changed.begin()
    assert not changed.there


def test_nobody_else_can_hold_it_up(changed: Changed, pid1: Pid1) -> None:
    """Whoever may read the directory of the journal may lock it."""
    changed.journal.parent.chmod(0o755)
    theirs = os.open(changed.journal.parent, os.O_RDONLY)
    fcntl.flock(theirs, fcntl.LOCK_EX)
    guard = changed.begin(SECONDS)
    guard.ask()
    assert pid1.wait() == 0
    assert not changed.there
    guard.close()
    os.close(theirs)
    (lock,) = changed.journal.parent.glob("*.guard")
    assert lock.stat().st_mode & 0o077 == 0


def test_a_change_that_cannot_be_kept_is_not_told_as_kept(
    changed: Changed, pid1: Pid1, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pid1, "stop", lambda: False)
    with (
        pytest.raises(VsrtuneError, match="the guardian cannot be stopped"),
        changed.begin() as guard,
    ):
        changed.keep(guard)
    assert not changed.there
