"""Commands against a host in memory, and an imitated systemd for their guardians."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fake_host import FakeHost

from vsrtune.cli import main
from vsrtune.cli.trial import guardian


class Cli:
    """Runs commands against a host in memory, with policies and journal in a directory."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.host = FakeHost()
        self.policies = directory / "policies"
        self.policies.mkdir()
        self.journal = directory / "journal.jsonl"
        self._capsys = capsys
        self.out = self.err = ""
        monkeypatch.setenv("VSRTUNE_POLICIES", str(self.policies))
        monkeypatch.setenv("VSRTUNE_JOURNAL", str(self.journal))

    def policy(self, text: str, name: str = "p.yaml") -> Path:
        path = self.policies / name
        path.write_text(text)
        return path

    def __call__(self, *words: str) -> int:
        code = main.run(words)
        captured = self._capsys.readouterr()
        self.out, self.err = captured.out, captured.err
        assert "Traceback" not in self.err
        return code


class Pid1:
    """Runs the guardian's service in a thread: what it waits for as it is, and in place of its
    command ``undo``."""

    def __init__(self, undo: Callable[[], int]) -> None:
        self.command: Sequence[str] = ()
        # What flock is asked for, the process that asks, whether the undo has begun, and whether
        # systemd has the service: from its start to a stop or an undo that succeeded.
        self.waits: Sequence[Sequence[str]] = ()
        self.at: subprocess.Popen[bytes] | None = None
        self.undoes = False
        self.loaded = False
        self.begun = threading.Event()
        self.code: int | None = None
        self._undo = undo
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self, waits: Sequence[Sequence[str]], command: Sequence[str]) -> None:
        self.waits, self.command = waits, command
        self.code, self.undoes, self.loaded = None, False, True
        self.begun.clear()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for words in self.waits:
            self.at = subprocess.Popen(words, start_new_session=True)
            self.begun.set()
            self.at.wait()
            if not self.loaded:
                self.at, self.code = None, 1
                return
        self.at, self.undoes = None, True
        code = self._undo()
        self.loaded = self.loaded and code != 0
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def wait(self) -> int:
        self._thread.join(60)
        assert self.code is not None
        return self.code

    def waiting(self) -> bool:
        return self.loaded and not self.undoes

    def active(self) -> bool:
        return self.loaded

    def stop(self) -> bool:
        """As systemd does it also between two tries of an undo that fails."""
        if not self.loaded:
            return False
        self.loaded = False
        assert self.begun.wait(10)
        if self.at is not None:
            self.at.kill()
        self._thread.join(10)
        return True


@contextlib.contextmanager
def guarded(
    monkeypatch: pytest.MonkeyPatch, undo: Callable[[], int] = lambda: main.run(["undo"])
) -> Iterator[Pid1]:
    """Guardians are services of an imitated systemd (tests/lab/inside/test_try.py has real ones)."""
    pid1 = Pid1(undo)
    monkeypatch.setattr(guardian, "Service", lambda: pid1)
    yield pid1
    if pid1.command:
        pid1.wait()
