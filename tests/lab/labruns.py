"""Runs labs ahead of the tests that wait for them, several at once where that is asked.

A lab's tests keep one core busy, not two: they wait for guests, timers and each other. Two
labs on two cores that share their execution units took almost as long as one after the
other, so one is the default. But the next one boots while the last tests of the one before
run, and holds its own back until the file GO is on its share. Not earlier: a lab that waits
takes half a core, for its routers' clocks tick. The output of the lab whose turn it is comes
live, that of the others when theirs comes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from labtool.serial_log import complaints
from labtool.session import BOOTS, EMULATOR_DIED, KERNEL_CRASHED, KERNEL_WARNED, SERIAL, TIMED_OUT

# A lab whose emulator died, by proof, boots again; the end of the run says so. A lab whose kernel
# crashed or complained has failed. In the next boot, tests that had passed do not run again.
ATTEMPTS = 3
ENDED = {
    TIMED_OUT: "it took too long",
    EMULATOR_DIED: "its emulator died every time",
    KERNEL_CRASHED: "its kernel crashed",
    KERNEL_WARNED: "its tests passed, but its kernel complained",
}
GO = "go"
# Node ids of tests that need not run again, a line each; tests/lab/inside/conftest.py reads it.
PASSED = "passed"
_PAUSE = 0.2
# The next lab begins to boot when these percent of a lab's tests are done, or when no more
# than this many are left.
_NEARLY_DONE = 85
_FEW = 6
_COLLECTED = re.compile(r"^collect\w+ .*?collected (\d+) items?", re.MULTILINE)
_PERCENT = re.compile(r"\[ *(\d+)%\]")
_TAIL = 4096
# As pytest -v tells it; the lab calls them by another directory than pytest's root.
_LINE = re.compile(r"^(?:\S*/)?(test_\w+\.py::.+) PASSED\s+\[", re.MULTILINE)


def jobs() -> int:
    """How many labs may run at once: LAB_JOBS, else 1."""
    return max(1, int(os.environ.get("LAB_JOBS") or 1))


def nearly_done(log: Path) -> bool:
    """Whether few of the tests are left to ``pytest -v``, by its output."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return False
    done, tests = _PERCENT.findall(text[-_TAIL:]), _COLLECTED.findall(text)
    if not done:
        return False
    few = tests and round(int(tests[-1]) * (100 - int(done[-1])) / 100) <= _FEW
    return bool(few) or int(done[-1]) >= _NEARLY_DONE


def tests_passed(log: str) -> list[str]:
    """Node ids of the tests that passed, by the output of ``pytest -v``."""
    return list(dict.fromkeys(_LINE.findall(log)))


@dataclass
class LabRun:
    """One lab. ``status`` and the number of ``boots`` are known at its end; ``troubles`` says which
    boots broke, and what the kernel complained of."""

    name: str
    share: Path
    status: int = -1
    boots: int = 0
    troubles: list[str] = field(default_factory=list)

    @property
    def end(self) -> str:
        """How it ended, in words."""
        return ENDED.get(self.status, f"it ended with status {self.status}")


class LabRuns:
    """Starts labs as soon as there is room for them, in order. What a lab is to run waits
    for the file GO on its share."""

    def __init__(self, commands: Mapping[str, Callable[[Path], list[str]]], place: Path) -> None:
        self.place = place
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._turns = threading.Semaphore(jobs())
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(jobs() + 1)
        self._runs: dict[str, Future[LabRun]] = {}
        for number, (name, command) in enumerate(commands.items()):
            before = list(self._runs)[number - jobs()] if number >= jobs() else None
            self._runs[name] = self._pool.submit(self._run, name, command, before)

    def follow(self, name: str) -> LabRun:
        """Relay a lab's output from its beginning until its end."""
        future = self._runs[name]
        log = self._log(name)
        while not log.exists() and not future.done():
            time.sleep(_PAUSE)
        with log.open("r", errors="replace") as output:
            while True:
                ended = future.done()
                text = output.read()
                sys.stdout.write(text)
                sys.stdout.flush()
                if ended and not text:
                    return future.result()
                time.sleep(_PAUSE)

    def close(self) -> None:
        """End what still runs."""
        self._closed.set()
        for future in self._runs.values():
            future.cancel()
        for process in list(self._running.values()):
            process.terminate()
        self._pool.shutdown()

    def _log(self, name: str) -> Path:
        return self.place / f"{name}.log"

    def _until_nearly_done(self, name: str) -> None:
        while not self._runs[name].done() and not nearly_done(self._log(name)):
            if self._closed.wait(5 * _PAUSE):
                return

    def _run(self, name: str, command: Callable[[Path], list[str]], before: str | None) -> LabRun:
        if before is not None:
            self._until_nearly_done(before)
        run = LabRun(name, self.place / name)
        if self._closed.is_set():
            return run
        run.share.mkdir()
        with self._log(name).open("wb") as log:
            for attempt in range(1, ATTEMPTS + 1):
                process = subprocess.Popen(
                    command(run.share),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                self._running[name] = process
                with self._turns:
                    (run.share / GO).touch()
                    run.status = process.wait()
                del self._running[name]
                run.boots = attempt + (run.share / BOOTS).exists()
                said = _complaints(run.share)
                if run.status != EMULATOR_DIED:
                    run.troubles += [f"{name}: {text}" for text in said]
                    break
                # The last one runs again, so that there is something to run.
                passed = tests_passed(self._log(name).read_text(errors="replace"))[:-1]
                (run.share / PASSED).write_text("\n".join(passed))
                run.troubles.append(
                    f"{name}: emulator death, boot {attempt} of {ATTEMPTS}; "
                    f"{len(passed)} tests had passed; {'; '.join(said)}"
                )
        return run


def _complaints(share: Path) -> list[str]:
    """Why the lab booted twice, and what its kernel complained of."""
    boots, serial = share / BOOTS, share / SERIAL
    twice = [f"booted twice: {boots.read_text().strip()}"] if boots.exists() else []
    log = serial.read_text(errors="replace") if serial.exists() else ""
    return twice + [f"{c}; see {serial}" for c in complaints(log)]
