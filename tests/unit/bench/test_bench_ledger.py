"""The ledger survives kills, and its guard puts back what is pending."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vsrtune.bench.cleanup.ledger import BenchLedger
from vsrtune.core.errors import VsrtuneError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bench" / "ledger.jsonl"


def test_what_is_not_done_is_pending_after_a_restart(path: Path) -> None:
    with BenchLedger.open(path) as ledger:
        first = ledger.add("a", {"n": 1})
        second = ledger.add("b", {"n": 2})
        ledger.done(first)
    with BenchLedger.open(path) as ledger:
        assert [(e.id, e.kind, e.data) for e in ledger.pending()] == [(second, "b", {"n": 2})]
        assert ledger.add("c", {}) > second


def test_a_torn_last_line_is_cut_off(path: Path) -> None:
    with BenchLedger.open(path) as ledger:
        ledger.add("a", {})
    with path.open("ab") as file:
        file.write(b'{"add": 2, "ki')
    with BenchLedger.open(path) as ledger:
        ledger.add("b", {})
    with BenchLedger.open(path) as ledger:
        assert [e.kind for e in ledger.pending()] == ["a", "b"]


def test_every_prefix_of_the_file_can_be_read(path: Path) -> None:
    with BenchLedger.open(path) as ledger:
        ledger.done(ledger.add("a", {"x": "ü"}))
        ledger.add("b", {})
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with BenchLedger.open(path) as ledger:
            assert len(ledger.pending()) <= 1


def test_a_bad_line_in_the_middle_is_an_error(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('nonsense\n{"done": 1}\n')
    with pytest.raises(VsrtuneError, match=r"ledger\.jsonl: line 1 is corrupt"):
        BenchLedger.open(path)
    # The failed attempt holds no lock.
    path.unlink()
    BenchLedger.open(path, wait=0).close()


def test_one_bench_at_a_time(path: Path) -> None:
    with BenchLedger.open(path), pytest.raises(VsrtuneError, match="another bench is running"):
        BenchLedger.open(path, wait=0.2)
    BenchLedger.open(path, wait=0).close()


def test_resolving_goes_backwards_and_a_failure_hides_nothing(path: Path) -> None:
    seen: list[Any] = []

    def good(data: dict[str, Any]) -> None:
        seen.append(data["n"])

    def bad(data: dict[str, Any]) -> None:
        raise VsrtuneError("the guest holds on to it", where="vr1")

    with BenchLedger.open(path) as ledger:
        for n, kind in enumerate(("good", "bad", "unknown", "good")):
            ledger.add(kind, {"n": n})
        failures = ledger.resolve({"good": good, "bad": bad})
        assert seen == [3, 0]
        assert [str(f) for f in failures] == [
            "unknown: nothing in this version knows how to undo it",
            "bad: vr1: the guest holds on to it",
        ]
    with BenchLedger.open(path) as ledger:
        assert [e.kind for e in ledger.pending()] == ["bad", "unknown"]


BENCH = """
import os, signal, sys
from pathlib import Path
from vsrtune.bench.cleanup import guard
from vsrtune.bench.cleanup.ledger import BenchLedger
ledger = BenchLedger.open(Path(sys.argv[1]))
watch = guard.RunGuard(ledger)
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
