"""Commands against a host in memory, with guardians that are threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
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


@contextlib.contextmanager
def guarded(journal: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trials of the journal have a guardian that is a thread (test_guardian.py has real ones)."""
    threads: list[threading.Thread] = []

    def spawn(_guard: guardian.TrialGuard, _variables: object) -> None:
        watch = lambda: guardian.watch(guardian.trial_file(journal), lambda: main.run(["undo"]))  # noqa: E731
        threads.append(threading.Thread(target=watch))
        threads[-1].start()

    monkeypatch.setattr(guardian, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(guardian.TrialGuard, "spawn", spawn)
    yield
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
