"""Small changes of the code, each of which a unit test should notice (CONTRIBUTING.md).

What was interrupted goes on. After a change of the tree everything is judged anew; with AGAIN=1 what
was killed counts as killed. equivalent.toml lists the changes that no test can notice."""

from __future__ import annotations

import ast
import gc
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tomllib
from bisect import bisect_right
from collections import Counter
from contextlib import suppress
from difflib import unified_diff
from functools import cache
from itertools import accumulate
from pathlib import Path
from xml.etree import ElementTree

# Each mutant's tests run in a fork, which has this already.
import hypothesis.internal.conjecture.engine  # noqa: F401
import jsonschema  # noqa: F401
import operators
import pyroute2  # noqa: F401
import pytest
import ruamel.yaml  # noqa: F401
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
from coverage import CoverageData

HERE = Path(__file__).resolve().parent
TREE, CACHE = HERE.parents[1], Path(sys.argv[1])
COPY, LINES, TIMES, OUTPUT = (CACHE / n for n in ("tree", "coverage", "times.xml", "output"))
SAMPLE, SEED = int(os.environ.get("SAMPLE") or 300), os.environ.get("SEED") or "1"
NEEDED = 0.85
MUTATED = (
    *("vsrtune/plan", "vsrtune/execute", "vsrtune/policy", "vsrtune/attach/plan"),
    *("vsrtune/core/stats.py", "tests/experiments/judge.py"),
)
# Those that are about it. Others execute much of it too, and take long.
TESTS = [
    "core",
    "policy",
    "plan",
    "execute",
    "attach/test_attach_plan.py",
    "attach/test_attach_trouble.py",
    "attach/test_transaction.py",
    "daemon/test_runs_the_plan.py",
    "project/test_experiment_pages.py",
]
# It needs a real-time class, which nothing gets here.
LEFT_OUT = "tests/unit/execute/test_host_writer.py::test_a_real_thread_takes_a_class"
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", f"--deselect={LEFT_OUT}"]


def copy_tree() -> str:
    """Copies the files that git knows or would add; returns a digest of those that matter."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=TREE, capture_output=True, check=True, text=True).stdout
    digest = hashlib.sha256(sys.version.encode())
    shutil.rmtree(COPY, ignore_errors=True)
    for name in sorted(n for n in names.split("\0") if n and (TREE / n).is_file()):
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(TREE / name, COPY / name)
        if name.startswith(("vsrtune/", "tests/unit/", "tests/plans/", "tests/experiments/")):
            digest.update(name.encode() + (TREE / name).read_bytes())
    return digest.hexdigest()


@cache
def statements(path: Path) -> tuple[dict[int, tuple[int, int]], set[tuple[int, int]]]:
    """By line, the first and last line of the statement there without the statements inside it; and
    each row and column within the type of a variable. Signatures, and what is for the type checker
    alone, are no statements: they do nothing."""
    spans, types = {}, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.stmt, ast.excepthandler)):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1 if body else node.end_lineno or 0)
            silent = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            silent |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            span = (0, -1) if silent else (node.lineno, last)
            spans.update(dict.fromkeys(range(node.lineno, last + 1), span))
        if isinstance(node, ast.AnnAssign):
            a = node.annotation
            types |= {(a.lineno, c) for c in range(a.col_offset, a.end_col_offset or 0)}
    return {line: span for line, span in spans.items() if span[0]}, types


def draw() -> list[WorkItem]:
    """The sample. A mutant is known by the text of its line and by what is done to it: after a
    change elsewhere the same ones are drawn."""
    modules = [p for m in MUTATED for p in (sorted(Path(m).rglob("*.py")) or [Path(m)])]
    everything = WorkDB(":memory:", WorkDB.Mode.create)
    init(modules, everything, {})
    texts = {path: path.read_text().splitlines() for path in modules}
    seen: Counter[str] = Counter()
    found = {}
    for mutant in (item.mutations[0] for item in everything.work_items):
        path, place = mutant.module_path, mutant.start_pos
        spans, types = statements(path)
        if place[0] in spans and place not in types:
            line = texts[path][place[0] - 1].strip()
            name = f"{SEED} {path} {mutant.definition_name} {mutant.operator_name} {line}"
            seen[name] += 1
            found[hashlib.sha256(f"{name} {seen[name]}".encode()).hexdigest()[:20]] = mutant
    print(f"mutants: {min(SAMPLE, len(found))} of {len(found)}, seed {SEED}", flush=True)
    return [WorkItem.single(key, mutant) for key, mutant in sorted(found.items())[:SAMPLE]]


def session(equivalent: set[tuple[str, ...]]) -> WorkDB:
    """The sample with the verdicts that still hold. The tests have run once as they are."""
    digest, known = copy_tree(), CACHE / "digest"
    os.chdir(COPY)
    operators.choose()
    same = known.exists() and known.read_text() == digest
    again = os.environ.get("AGAIN") == "1"
    db = WorkDB(str(CACHE / "session.sqlite"), WorkDB.Mode.create)
    kept = {
        item.job_id: result
        for item, result in db.completed_work_items
        if (word(result) == "killed" and (same or again))
        or (word(result) in ("survived", "timeout") and same and change(result) not in equivalent)
    }
    db.clear()
    db.add_work_items(draw())
    for item in db.work_items:
        if item.job_id in kept:
            db.set_result(item.job_id, kept[item.job_id])
    if not same:
        how = f"--cov --cov-context=test --cov-report= --cov-config={HERE}/coverage.rc --junitxml={TIMES}"
        tests = [f"tests/unit/{name}" for name in TESTS]
        command = [sys.executable, "-m", "pytest", *PYTEST, *how.split(), *tests]
        env = {**os.environ, "COVERAGE_FILE": str(LINES)}
        if subprocess.run(command, env=env, check=False).returncode != 0:
            raise SystemExit("mutants: a test fails without any change")
        known.write_text(digest)
    return db


@cache
def seconds() -> dict[str, float]:
    """How long each test takes, the quickest first."""
    found = {}
    for case in ElementTree.parse(TIMES).iter("testcase"):
        module, _, inside = case.attrib["classname"].partition(".Test")
        name = f"Test{inside}::{case.attrib['name']}" if inside else case.attrib["name"]
        found[f"{module.replace('.', '/')}.py::{name}"] = float(case.attrib["time"])
    return dict(sorted(found.items(), key=lambda f: (f[1], f[0])))


def tests_of(mutant: MutationSpec, data: CoverageData) -> list[str]:
    """The tests that execute the statement of ``mutant``, the quickest first, as many as end within
    a twentieth of the time that all tests take. What runs at import is for the tests that execute
    anything of its module."""
    found = data.contexts_by_lineno(str(COPY / mutant.module_path))
    first, last = statements(mutant.module_path)[0][mutant.start_pos[0]]
    executed = [names for line, names in found.items() if first <= line <= last]
    if executed and not any(map(any, executed)):
        executed = list(found.values())
    tests = {name.rpartition("|")[0] for names in executed for name in names}
    ordered = [name for name in seconds() if name in tests]
    spent = list(accumulate(seconds()[name] for name in ordered))
    return ordered[: bisect_right(spent, sum(seconds().values()) / 20)]


def run_tests(names: list[str]) -> int:
    """Runs the tests in a fork. Returns pytest's exit code, below 0 where the time limit ended it."""
    if (pid := os.fork()) == 0:
        os.setsid()
        sys.path.insert(0, str(COPY))
        sys.dont_write_bytecode = True
        limit = 30 + int(2 * sum(map(seconds().__getitem__, names)))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        signal.alarm(20 * limit)
        for stream in (1, 2):
            os.dup2(os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)
        os._exit(pytest.main([*PYTEST, "-p", "no:cov", "--hypothesis-profile=mutants", *names]))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return code


def judge(mutant: MutationSpec, data: CoverageData, equivalent: set[tuple[str, ...]]) -> WorkResult:
    operator, path = get_operator(mutant.operator_name)(), mutant.module_path
    with use_mutation(path, operator, mutant.occurrence) as (before, after):
        lines = list(unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[3:]
        was, now = (" ".join(" ".join(n[1:] for n in lines if n[0] == s).split()) for s in "-+")
        diff = f"{path}:{mutant.start_pos[0]}\n    - {was}\n    + {now}"
        skipped = WorkResult(WorkerOutcome.SKIPPED, diff=diff)
        if change(skipped) in equivalent:
            return skipped
        if not (names := tests_of(mutant, data)):
            diff += "\n    no test executes it"
            return WorkResult(WorkerOutcome.NO_TEST, "", TestOutcome.SURVIVED, diff)
        code = run_tests(names)
    if code < 0:
        return WorkResult(WorkerOutcome.ABNORMAL, "", TestOutcome.INCOMPETENT, diff)
    outcome = TestOutcome.SURVIVED if code == 0 else TestOutcome.KILLED
    return WorkResult(WorkerOutcome.NORMAL, OUTPUT.read_text()[-2000:], outcome, diff)


def change(result: WorkResult) -> tuple[str, ...]:
    """The file, the line and what it becomes, as in equivalent.toml."""
    where, was, now, *_ = str(result.diff).splitlines()
    return where.partition(":")[0], was.strip()[2:], now.strip()[2:]


def word(result: WorkResult) -> str:
    special = {WorkerOutcome.SKIPPED: "equivalent", WorkerOutcome.ABNORMAL: "timeout"}
    return special.get(result.worker_outcome) or ("killed" if result.is_killed else "survived")


def main() -> int:
    listed = tomllib.loads((HERE / "equivalent.toml").read_text())["mutant"]
    for entry in listed:
        if entry["line"] not in " ".join((TREE / entry["file"]).read_text().split()):
            raise SystemExit(f"equivalent.toml: {entry['file']} no longer has: {entry['line']}")
    equivalent = {(entry["file"], entry["line"], entry["becomes"]) for entry in listed}
    db, data = session(equivalent), CoverageData(str(LINES))
    data.read()
    gc.freeze()
    # One of each module. A test that fails here would kill every mutant.
    if run_tests(list({t.partition("::")[0]: t for t in reversed(seconds())}.values())) != 0:
        raise SystemExit(f"mutants: a test fails without any change\n{OUTPUT.read_text()}")
    for item in db.pending_work_items:
        result = judge(item.mutations[0], data, equivalent)
        db.set_result(item.job_id, result)
        where = (result.diff or "").partition("\n")[0]
        print(f"{db.num_results:4}/{db.num_work_items} {word(result):10} {where}", flush=True)
    results = [result for _, result in db.completed_work_items]
    for shown in ("timeout", "survived"):
        for text in sorted(str(r.diff) for r in results if word(r) == shown):
            print(f"{shown}: {text}")
    count = Counter(map(word, results))
    score = count["killed"] / max(1, count["killed"] + count["survived"])
    print(f"mutants: {dict(count)}, score {score:.3f}, {NEEDED} needed")
    return score < NEEDED


if __name__ == "__main__":
    raise SystemExit(main())
