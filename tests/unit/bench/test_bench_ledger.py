"""The guard of a ledger puts back what is pending, however the bench ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import bench_samples as samples
import pytest

from vsrtune.bench.cleanup import cleaners
from vsrtune.bench.cleanup.cleaners import BenchLedger
from vsrtune.bench.setup.configurator import Configurator
from vsrtune.core.errors import JournalError, VsrtuneError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bench" / "ledger.jsonl"


BENCH = """
import os, signal, sys
from pathlib import Path
from vsrtune.bench.cleanup import cleaners
from vsrtune.bench.cleanup.cleaners import BenchLedger
ledger = BenchLedger.open(Path(sys.argv[1]))
watch = cleaners.RunGuard(ledger)
ledger.add("command", {"nobody": "knows"})
print(watch.pid, flush=True)
END
"""


def run_bench(path: Path, end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BENCH.replace("END", end), str(path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def lives(pid: int) -> bool:
    """Runs, and is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_guard_outlives_a_killed_bench_and_keeps_the_lock_until_it_is_done(path: Path) -> None:
    # An agent that does not end by itself: the guard must end it. Signals to the guard
    # change nothing; it waits for the bench.
    end = """
import subprocess
from vsrtune.bench.cleanup import cleaners
null = subprocess.DEVNULL
agent = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=null, stderr=null)
cleaners.note_agent(ledger, agent.pid, "no-such-namespace", [])
print(agent.pid, flush=True)
[ledger.done(e.id) for e in ledger.pending() if e.kind == "command"]
os.kill(watch.pid, signal.SIGTERM)
os.kill(watch.pid, signal.SIGINT)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_bench(path, end)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (guard, agent) = map(int, done.stdout.split())
    try:
        assert lives(guard)
        with pytest.raises(VsrtuneError, match="another bench is running"):
            BenchLedger.open(path, wait=0.5)
        with BenchLedger.open(path, wait=30) as ledger:
            assert ledger.pending() == []
        assert not lives(agent)
    finally:
        if lives(agent):
            os.kill(agent, signal.SIGKILL)


def test_stopping_the_guard_says_what_was_not_put_back(path: Path) -> None:
    done = run_bench(path, "ledger.add('unheard-of', {})\nwatch.close()")
    assert done.returncode == 1
    assert "not everything was put back: unheard-of: nothing in this version" in done.stderr


def test_stopping_the_guard_with_nothing_pending_is_silent(path: Path) -> None:
    done = run_bench(
        path, "[ledger.done(e.id) for e in ledger.pending()]\nwatch.close()\nwatch.close()"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_agent_that_does_not_end_stays_in_the_ledger(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for the kernel: no signal ends it, and it still sends."""
    monkeypatch.setattr(cleaners, "_END_SECONDS", 0.1)
    path.parent.mkdir()
    with subprocess.Popen(["sleep", "60"]) as agent:
        try:
            with BenchLedger.open(path) as ledger:
                cleaners.note_agent(ledger, agent.pid, None, [])
                with monkeypatch.context() as hung:
                    hung.setattr(cleaners.os, "kill", lambda *_: None)
                    (told,) = ledger.resolve(cleaners.CLEANERS)
                assert f"process {agent.pid}: the agent of the bench does not end" in str(told)
                assert [entry.kind for entry in ledger.pending()] == ["agent"]
        finally:
            agent.kill()


def test_a_host_that_another_version_has_tuned_is_not_untuned(path: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.write_bytes(b'{"version":99}\n')
    path.parent.mkdir()
    with BenchLedger.open(path) as ledger:
        for _ in range(2):
            with pytest.raises(JournalError, match="version 99 of the journal's format"):
                Configurator(samples.SPEC, ledger, uri="test:///", journal=journal).__enter__()
        ledger.add(cleaners.TUNING, {"journal": str(journal), "uri": "test:///"})
        (told,) = ledger.resolve(cleaners.CLEANERS)
        assert "version 99 of the journal's format" in str(told)
        assert [entry.kind for entry in ledger.pending()] == ["tuning"]
