"""The guardian: what is not kept is put back, however the command ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vsrtune.cli.options import StatePlaces
from vsrtune.cli.trial import guardian
from vsrtune.core.errors import VsrtuneError


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal's place, and guardians that are threads of this process; what they put back is
    the file ``changed`` beside it."""
    monkeypatch.setattr(guardian, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(guardian.TrialGuard, "spawn", lambda _guard, _variables: None)
    return tmp_path / "journal.jsonl"


@pytest.fixture
def sampled_guest(journal: Path) -> Iterator[Callable[[], threading.Thread]]:
    """Starts a guardian of the journal's trial."""
    threads: list[threading.Thread] = []

    def undo() -> int:
        changed(journal).unlink()
        return 0

    def begin() -> threading.Thread:
        work = lambda: guardian.watch(guardian.trial_file(journal), undo)  # noqa: E731
        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return threads[-1]

    yield begin
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def changed(journal: Path) -> Path:
    """Stands for what the command has changed on the host."""
    return journal.with_name("changed")


def start(journal: Path) -> guardian.TrialGuard:
    guard = guardian.start(StatePlaces(journal, journal.with_name("attach"), "test:///default"))
    changed(journal).touch()
    return guard


def left(journal: Path) -> list[str]:
    return sorted(p.name for p in journal.parent.iterdir())


def test_closed_without_keeping_it_is_back(
    journal: Path, sampled_guest: Callable[[], threading.Thread], capsys: pytest.CaptureFixture[str]
) -> None:
    with start(journal) as guard:
        sampled_guest()
        time.sleep(0.05)
        assert guard.waits
        assert changed(journal).exists()
    assert left(journal) == []
    assert not guard.kept
    assert capsys.readouterr().out == "Everything is put back.\n"


def test_kept_it_stays(journal: Path, sampled_guest: Callable[[], threading.Thread]) -> None:
    with start(journal) as guard:
        sampled_guest()
        assert guard.keep()
    assert guard.kept
    assert left(journal) == ["changed"]


def test_confirmed_by_another_session_it_stays(
    journal: Path, sampled_guest: Callable[[], threading.Thread]
) -> None:
    with start(journal) as guard:
        sampled_guest()
        with pytest.raises(VsrtuneError, match="still at work"):
            guardian.confirm(journal)
        guard.ask(100.0)
        guardian.confirm(journal)
        assert guard.kept
    assert left(journal) == ["changed"]
    with pytest.raises(VsrtuneError, match="nothing waits"):
        guardian.confirm(journal)


def test_at_the_deadline_it_is_back_though_the_command_hangs(
    journal: Path, sampled_guest: Callable[[], threading.Thread]
) -> None:
    guard = start(journal)
    thread = sampled_guest()
    guard.ask(0.1)
    thread.join(10)
    assert left(journal) == []
    assert not guard.waits
    assert not guard.keep()
    guard.close()
    assert not guard.kept


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_killed_command(
    journal: Path, sampled_guest: Callable[[], threading.Thread], number: signal.Signals
) -> None:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            # Under nohup the signal would be ignored.
            signal.signal(number, signal.SIG_DFL)
        start(journal)
        signal.pause()
        os._exit(1)
    while not changed(journal).exists():
        time.sleep(0.01)
    thread = sampled_guest()
    time.sleep(0.1)
    assert changed(journal).exists()
    os.kill(pid, number)
    os.waitpid(pid, 0)
    thread.join(10)
    assert left(journal) == []


def test_a_guardian_that_dies_while_it_puts_back_is_followed_by_another(
    journal: Path, sampled_guest: Callable[[], threading.Thread]
) -> None:
    guard = start(journal)
    guardian.trial_file(journal).rename(journal.with_name("journal.jsonl.trial.back"))
    sampled_guest()
    guard.close()
    assert left(journal) == []


def test_one_at_a_time_and_what_nobody_guards_is_no_obstacle(journal: Path) -> None:
    guard = start(journal)
    with pytest.raises(VsrtuneError, match="not over yet"):
        start(journal)
    os.close(guard._fd)  # both killed
    guard = start(journal)
    assert guard.keep()
    guard.close()


def test_what_fails_is_said(journal: Path) -> None:
    guard = start(journal)
    work = threading.Thread(target=guardian.watch, args=(guardian.trial_file(journal), lambda: 1))
    work.start()
    with pytest.raises(VsrtuneError, match="not everything could be put back"):
        guard.close()
    work.join()


def test_a_trial_of_another_boot_is_none(journal: Path) -> None:
    data = {"boot": "another", "pid": 1, "deadline": 5.0}
    guardian.trial_file(journal).write_text(json.dumps(data))
    with pytest.raises(VsrtuneError, match="nothing waits"):
        guardian.confirm(journal)


def test_without_a_guardian_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(VsrtuneError, match="does not start, so nothing was changed"):
        guardian.start(
            StatePlaces(tmp_path / "journal.jsonl", tmp_path / "attach.jsonl", "test:///default")
        )
    assert left(tmp_path / "journal.jsonl") == []


def test_a_real_guardian_outlives_the_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without systemd; on an untouched host undo has nothing to do."""
    if Path("/run/systemd/system").is_dir():
        pytest.skip("this host has systemd; the lab tests kill there")
    journal = tmp_path / "journal.jsonl"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        guardian.start(StatePlaces(journal, tmp_path / "attach.jsonl", "test:///default"))
        os.write(writing, b"guarded")
        signal.pause()
        os._exit(1)
    os.close(writing)
    assert os.read(reading, 8) == b"guarded"
    os.close(reading)
    assert guardian.trial_file(journal).exists()
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    end = time.monotonic() + 60
    while left(journal):
        assert time.monotonic() < end, left(journal)
        time.sleep(0.1)
