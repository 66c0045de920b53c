"""What each boot of the matrix reported, gathered for the end of the run and for the next one."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# In the directory of a run (../run).
SUMMARY = "labs.json"
_TREE = Path(__file__).resolve().parents[2]
_PROMISES = _TREE / "docs/promises.yaml"
# In what a lab left that passed: the tree it was made of, and what was asked of it.
_PASSED_ON = "passed-on"
# What no lab reads.
_NOT_READ = (
    "docs/results", "docs/images", "docs/reliability.md", "CHANGELOG.md", "tests/unit/*/test_*.py",
    "tests/browser", "tests/experiments", "tests/fuzz", "tests/mutants", "tests/netns",
    "tests/scale", "tests/screenshots",
)  # fmt: skip
_INSIDE = "tests/lab/inside/"
_IMPORT = re.compile(r"^(?:from|import) (test_\w+)", re.MULTILINE)
# Less than this many seconds more, or less than half as much again, is chance.
_SLOWER = 20.0


@dataclass
class LabReport:
    """Every test of one lab's JUnit file: outcome, name, reason. Durations are in seconds."""

    boots: int
    seconds: float
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    durations: dict[str, float] = field(default_factory=dict)

    def count(self, outcome: str) -> int:
        return sum(row[0] == outcome for row in self.rows)


REPORTS: dict[str, LabReport] = {}

# Labs that booted again, and what the kernels of labs complained of.
TROUBLES: list[str] = []


def read_report(boot: str, path: Path, boots: int = 1) -> LabReport:
    """Keep what one lab's JUnit file says; ``boots`` is how often the lab booted."""
    suites = ET.parse(path).getroot()
    seconds = sum(float(suite.get("time", "0")) for suite in suites.iter("testsuite"))
    report = REPORTS[boot] = LabReport(boots, seconds)
    for case in suites.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                reason = ((child.get("message") or "").strip().splitlines() or [""])[0]
        report.rows.append((outcome, name, reason))
        report.durations[name] = float(case.get("time", "0"))
    return report


@functools.cache
def _sums() -> dict[str, str]:
    """The checksum of each file that a lab may read, by its path. Empty where git does not know the
    tree."""
    excluded = (f":(exclude){path}" for path in _NOT_READ)
    words = ["git", "-C", str(_TREE), "ls-files", "-co", "--exclude-standard", "-z", *excluded]
    names = subprocess.run(words, check=False, capture_output=True).stdout.decode().split("\0")
    return {
        name: hashlib.sha256((_TREE / name).read_bytes()).hexdigest()
        for name in sorted(filter(None, names))
        if (_TREE / name).is_file()
    }


def _with_imports(files: Iterable[str]) -> set[str]:
    """These files of tests in a lab, and those that they import."""
    found: set[str] = set()
    more = set(files)
    while more:
        found |= more
        texts = [(_TREE / _INSIDE / name).read_text() for name in more]
        more = {f"{name}.py" for text in texts for name in _IMPORT.findall(text)} - found
    return found


def this_run(files: Iterable[str]) -> str:
    """The tier of this run, and a checksum of what a lab reads that runs these ``files`` of tests.
    Ask before a lab starts, for the tree may change meanwhile. Empty where git does not know the
    tree."""
    run = {f"{_INSIDE}{name}" for name in _with_imports(files)}
    read = (
        f"{name} {digest}\n"
        for name, digest in _sums().items()
        if not name.startswith(f"{_INSIDE}test_") or name in run
    )
    return f"{hashlib.sha256(''.join(read).encode()).hexdigest()} {tier()}\n" if _sums() else ""


def tier() -> str:
    """What the labs are asked to run."""
    asked = ("LAB_TIER", "LAB_STRIDE", "LAB_PYTEST", "LAB_RANDOM")
    return " ".join(f"{name}={os.environ[name]}" for name in asked if os.environ.get(name))


def passed(share: Path, files: Iterable[str]) -> None:
    """Keep that this lab, which runs these files of tests, passed on this tree."""
    (share / _PASSED_ON).write_text(this_run(files))


def passed_before(place: Path, boot: str, files: Iterable[str]) -> Path | None:
    """With LAB_RESUME, what the lab left in an earlier run that it passed on what it reads now."""
    now = this_run(files)
    if not os.environ.get("LAB_RESUME") or not now:
        return None
    for path in sorted(place.parent.glob(f"*/{boot}/{_PASSED_ON}"), reverse=True):
        if path.read_text() == now:
            return path.parent
    return None


def write_summary(run: Path, tier: str, elsewhere: dict[str, bool]) -> dict[str, Any]:
    """Keep durations, boots and skipped promises of this run, and return them. ``tier`` says what
    the labs were asked to run, ``elsewhere`` whether a test outside them was skipped."""
    labs: dict[str, Any] = {
        name: {"boots": report.boots, "seconds": report.seconds, "tests": report.durations}
        for name, report in REPORTS.items()
    }
    summary = {"tier": tier, "labs": labs, "skipped": _skipped(elsewhere)}
    (run / SUMMARY).write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
    return summary


def _skipped(elsewhere: dict[str, bool]) -> list[str]:
    """Tests of promises that this run skipped, and ran nowhere."""
    ran: dict[str, bool] = {}
    for test, skipped in elsewhere.items():
        name = test.partition("[")[0]
        ran[name] = ran.get(name, False) or not skipped
    for outcome, name, _ in (row for report in REPORTS.values() for row in report.rows):
        file, _, function = name.partition("[")[0].rpartition("::")
        name = f"{file.rpartition('.')[2]}.py::{function}"
        ran[name] = ran.get(name, False) or outcome != "skipped"
    promised = re.findall(r"^ +- (\S+::test_\w+)$", _PROMISES.read_text(), re.MULTILINE)
    return sorted({test for test in promised if ran.get(test) is False})


def last_summary(run: Path, tier: str) -> dict[str, Any]:
    """What the runs of the same tier before this one say: of each lab its last run."""
    last: dict[str, Any] = {"labs": {}, "skipped": []}
    for path in sorted(run.parent.glob(f"*/{SUMMARY}")):
        summary = json.loads(path.read_text())
        if path.parent.name < run.name and summary["tier"] == tier:
            last = {"labs": last["labs"] | summary["labs"], "skipped": summary["skipped"]}
    return last


def compare(now: dict[str, Any], last: dict[str, Any]) -> Iterator[str]:
    """In lines: each lab's boots and duration, and what is slower or skipped since the last run."""
    for name, lab in now["labs"].items():
        before = last["labs"].get(name)
        line = f"{name}: boots {lab['boots']}, tests {lab['seconds']:.0f} s"
        if before is None:
            yield f"{line}; there is no earlier run"
            continue
        yield f"{line}; last run: boots {before['boots']}, tests {before['seconds']:.0f} s"
        for test, seconds in lab["tests"].items():
            was = before["tests"].get(test, seconds)
            if seconds > max(was + _SLOWER, 1.5 * was):
                yield f"  SLOWER {test}: {seconds:.0f} s, last {was:.0f} s"
    for test in now["skipped"]:
        since = "" if test in last["skipped"] else ", unlike in the last run"
        yield f"SKIPPED PROMISE {test}{since}"
