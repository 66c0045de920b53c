"""The tables of docs/reliability.md: each promise, the tests that hold it, which command runs them
in which labs, and when they last passed.

promises.yaml is written by hand. Which command runs a test in a lab follows from the test's markers
and the matrix of labs. results/raw/green.json holds the dates: `python -m generate green [DIR]`
takes them from the JUnit reports of test runs.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ruamel.yaml import YAML

_ROOT = Path(__file__).resolve().parents[2]
if str(_ROOT / "tests/lab") not in sys.path:
    sys.path.append(str(_ROOT / "tests/lab"))

from labtool.releases import RELEASES  # noqa: E402
from test_lab import ELSEWHERE, MATRIX, Boot  # noqa: E402

PROMISES = _ROOT / "docs/promises.yaml"
GREEN = _ROOT / "docs/results/raw/green.json"
# Where tests/run leaves the reports of each run.
RUNS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vsrtune/runs"

# Test, as promises.yaml names it, to release to the day of its last run without a failure.
Record = dict[str, dict[str, str]]

# Of a reason to skip: a test that only a target of its own runs.
_TARGET = re.compile(r"make (\w+) runs it")


@dataclass(frozen=True)
class Promise:
    """A line of promises.yaml."""

    section: str
    text: str
    tests: tuple[str, ...]


def promises() -> list[Promise]:
    """All promises, in order."""
    sections = YAML(typ="safe").load(PROMISES.read_text("utf-8"))
    return [
        Promise(section, line["promise"], tuple(line["tests"] or ()))
        for section, lines in sections.items()
        for line in lines
    ]


# -- which command runs a test


def path(test: str) -> Path:
    """The file of a test that promises.yaml names."""
    file = test.partition("::")[0]
    return _ROOT / (file if "/" in file else f"tests/lab/inside/{file}")


def runs_in(test: str) -> dict[str, list[str]]:
    """Which target of make runs a test, and in which labs (none outside them). A later target
    runs what an earlier one runs, too; it is given only the labs that are new."""
    marks = _marks(test)
    if marks is None:
        return {}
    if "/" in test:
        return {"make test": []}
    reason = next((str(words[-1]) for name, words in marks if name == "skipif" and words), "")
    if target := _TARGET.search(reason):
        return {f"make {target[1]}": []}
    labs = [boot for boot in MATRIX if _includes(boot, test)]
    for name, words in marks:
        if name == "one_release":
            only = words[1] if len(words) > 1 else "bookworm"
            labs = [boot for boot in labs if _codename(boot) == only]
    # None is every release.
    core = {words[0] if words else None for name, words in marks if name == "core"}
    early = [b.id for b in labs if b.core and (None in core or _codename(b) in core)]
    late = [boot.id for boot in labs if boot.id not in early]
    return {t: found for t, found in (("make test", early), ("make test-all", late)) if found}


def _includes(boot: Boot, test: str) -> bool:
    file = test.partition("::")[0]
    return file not in ELSEWHERE if not boot.tests else bool({file, test} & {*boot.tests})


def _codename(boot: Boot) -> str:
    return RELEASES[boot.release].suite


def _marks(test: str) -> list[tuple[str, list[object]]] | None:
    """Names and words of a test's decorators and of its file's marks; None without the test."""
    functions, constants, marks = _read(path(test))
    decorators = functions.get(test.partition("::")[2])
    if decorators is None:
        return None
    calls = [call for call in (*marks, *decorators) if isinstance(call, ast.Call)]
    return [(ast.unparse(c.func).rpartition(".")[2], _words(c, constants)) for c in calls]


def _words(call: ast.Call, constants: dict[str, object]) -> list[object]:
    """Its arguments as far as they are constants."""
    values = (*call.args, *(keyword.value for keyword in call.keywords))
    words = (constants.get(v.id) if isinstance(v, ast.Name) else v for v in values)
    return [word.value if isinstance(word, ast.Constant) else word for word in words]


@cache
def _read(
    file: Path,
) -> tuple[dict[str, list[ast.expr]], dict[str, object], list[ast.expr]]:
    """Its functions with their decorators, its constants, and the marks of all its tests."""
    functions: dict[str, list[ast.expr]] = {}
    constants: dict[str, object] = {}
    marks: list[ast.expr] = []
    tree = ast.parse(file.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node.decorator_list
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if isinstance(node.value, ast.Constant):
                constants[name] = node.value.value
            elif name == "pytestmark":
                marks = node.value.elts if isinstance(node.value, ast.List) else [node.value]
    return functions, constants, marks


# -- when it was green


def record() -> Record:
    """What is recorded."""
    found: Record = json.loads(GREEN.read_text("utf-8")) if GREEN.exists() else {}
    return found


def take(reports: Iterable[Path]) -> list[str]:
    """Record what these JUnit reports say of the tests that are named, and forget other tests;
    the tests of which it knows a later day now."""
    tests = dict.fromkeys(test for promise in promises() for test in promise.tests)
    old = record()
    new = {test: dict(old.get(test, {})) for test in sorted(tests)}
    for report in sorted(reports):
        release, day, green = read_report(report)
        for test in green & new.keys():
            new[test][release] = max(day, new[test].get(release, ""))
    text = json.dumps({test: days for test, days in new.items() if days}, indent=1, sort_keys=True)
    GREEN.write_text(text + "\n", "utf-8")
    return [test for test in new if new[test] != old.get(test, {})]


def read_report(report: Path) -> tuple[str, str, set[str]]:
    """The release and the day of a JUnit report, and the tests of which a case passed and none
    failed. ValueError when the report does not tell the release.

    Its suite or, of older reports, its directory begins with the release. A lab that was booted
    again has named beside its report what had passed before.
    """
    suite = next(ET.parse(report).iter("testsuite"))
    release = (suite.get("name") or "").partition("-")[0]
    if release not in RELEASES:
        release = report.parent.name.partition("-")[0]
    if release not in RELEASES:
        raise ValueError(f"{report}: neither its suite nor its directory is named by a release")
    cases: dict[str, set[str]] = defaultdict(set)
    for case in suite.iter("testcase"):
        ends = {child.tag for child in case} & {"failure", "error", "skipped"} or {"passed"}
        cases[_named(case.get("classname", ""), case.get("name", ""))] |= ends
    before = report.with_name("passed")
    for line in before.read_text("utf-8").splitlines() if before.exists() else ():
        cases[line.partition("[")[0]].add("passed")
    green = {t for t, ends in cases.items() if "passed" in ends and not ends & {"failure", "error"}}
    return release, (suite.get("timestamp") or "")[:10], green


def _named(classname: str, name: str) -> str:
    """A case of a report as promises.yaml names its test; in a lab the files are in no folder."""
    file = re.match(r"(.*\.)?test_\w+", classname)
    path = (file[0] if file else classname).replace(".", "/")
    return f"{path}.py::{name.partition('[')[0]}"


# -- the tables


def tables() -> str:
    """A section with a table for each section of promises.yaml, a line for each test."""
    return "\n" + "".join(f"{line}\n" for line in _lines(record()))


def _lines(known: Record) -> Iterator[str]:
    section = None
    for promise in promises():
        if promise.section != section:
            yield from ([""] if section else [])
            section = promise.section
            yield from (f"## {section}", "")
            yield "| promise | test | runs in | last green |"
            yield "|---|---|---|---|"
        for number, test in enumerate(promise.tests):
            text = "" if number else f"{promise.text} "
            yield f"| {text}| `{test}` | {_said(runs_in(test))} | {_days(known.get(test, {}))} |"


def _said(runs: dict[str, list[str]]) -> str:
    return "; ".join(
        f"`{target}`{': ' if labs else ''}{', '.join(labs)}" for target, labs in runs.items()
    )


def _days(days: dict[str, str]) -> str:
    """Each day with its releases, the latest first."""
    releases: dict[str, list[str]] = defaultdict(list)
    for release, day in sorted(days.items()):
        releases[day].append(release)
    said = (f"{day} {', '.join(releases[day])}" for day in sorted(releases, reverse=True))
    return "; ".join(said) or "none"
