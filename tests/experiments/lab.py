"""Boots labs for the runs that are still to be made, and keeps their raw results."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import psutil

from experiments.plan import TREE, Boot, Figure, Run

LAB = Path("tests/lab/lab")
TIME_UP = 75
# The command's own limit is beyond the budget, by the longest run there is.
_GRACE = 600
_ATTEMPTS = 6


def missing(figures: Iterable[Figure], raw: Path) -> list[tuple[str, Run]]:
    """Runs without a result, in order: (key, run)."""
    found = []
    for figure in figures:
        for run in figure.runs:
            key = f"{figure.id}/{run.name}"
            if not (raw / f"{key}.json").exists():
                found.append((key, run))
    return found


def make(figures: Sequence[Figure], raw: Path, budget: int) -> bool:
    """Make what is missing, lab by lab, ``budget`` seconds of runs in each boot at most.
    False when a run failed or a lab could not be had."""
    # Once: what is edited meanwhile must not cost a boot its results.
    commit = rules()
    good = True
    for boot in dict.fromkeys(run.boot for _, run in missing(figures, raw)):
        good &= _boot_until_done(boot, figures, raw, budget, commit)
    return good


def rules() -> str:
    """The commit of the rules in the tree. Raises SystemExit when they differ from it: a rule is
    committed before what it judges is measured."""
    git = ["git", "-C", str(TREE)]
    changed = _output([*git, "status", "--porcelain", "--", "tests/experiments"])
    if changed:
        raise SystemExit(f"results: commit the rules before measuring by them; changed:\n{changed}")
    return _output([*git, "log", "-1", "--format=%h", "--", "tests/experiments"])


def _output(words: Sequence[str]) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def _boot_until_done(
    boot: Boot, figures: Sequence[Figure], raw: Path, budget: int, commit: str
) -> bool:
    for _ in range(_ATTEMPTS):
        left = [(key, run) for key, run in missing(figures, raw) if run.boot == boot]
        if not left:
            return True
        status = _boot(boot, left, raw, budget, commit)
        still = [key for key, run in missing(figures, raw) if run.boot == boot]
        if len(still) == len(left) or status == 1:
            # Nothing came of a whole boot, or a run failed: again would be the same.
            for key in still:
                print(f"results: {key} was not measured", file=sys.stderr)
            return not still
    return False


def _boot(boot: Boot, runs: Sequence[tuple[str, Run]], raw: Path, budget: int, commit: str) -> int:
    # A run that alone is longer than the budget still gets its boot.
    enough = max(budget, round(runs[0][1].expected_seconds) + 60)
    with tempfile.TemporaryDirectory(prefix="vsrtune-results-") as name, _tree(boot) as tree:
        share = Path(name)
        (share / "todo.json").write_text(json.dumps(_todo(boot, runs, enough), indent=1))
        # What rates of other runs are taken from.
        if raw.is_dir():
            shutil.copytree(raw, share / "raw")
        command = [str(tree / LAB), "run", "--release", boot.release, "--cpus", str(boot.cpus)]
        command += ["--guests", str(len(boot.guests)), "--nic", boot.nic]
        command += ["--frr"] if boot.frr else []
        command += ["--share", name, "--quiet-failure"]
        command += ["--timeout", str(enough + _GRACE), "--"]
        command += ["python3", "/mnt/tests/experiments/inlab.py"]
        with Others(command) as others:
            status = others.lab.wait()
        for key, _ in runs:
            made = share / "raw" / f"{key}.json"
            if made.exists():
                _keep(made, raw / f"{key}.json", {"rules": commit, "others": others.during(made)})
            for text in (share / "raw" / key).parent.glob(f"{Path(key).name}.*.txt"):
                shutil.copy(text, raw / Path(key).parent)
        logs = share / "log"
        if logs.is_dir() and status not in (0, TIME_UP):
            for log in sorted(logs.rglob("*.log")):
                print(f"--- {log.relative_to(logs)}", file=sys.stderr)
                print(
                    "\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr
                )
        return status


@contextlib.contextmanager
def _tree(boot: Boot) -> Iterator[Path]:
    """The tree, or a copy of its last commit with the boot's patch."""
    if boot.patch is None:
        yield TREE
        return
    with tempfile.TemporaryDirectory(prefix="vsrtune-patched-") as name:
        made = subprocess.run(
            ["git", "-C", str(TREE), "archive", "HEAD"], check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-xC", name], check=True, input=made.stdout)
        patch = TREE / "tests/experiments" / boot.patch
        subprocess.run(["git", "-C", name, "apply", str(patch)], check=True)
        yield Path(name)


def _todo(boot: Boot, runs: Sequence[tuple[str, Run]], budget: int) -> dict[str, Any]:
    listed = []
    for key, run in runs:
        data = asdict(run)
        del data["boot"]
        listed.append({**data, "key": key, "expected": run.expected_seconds})
    return {
        "guests": [asdict(guest) for guest in boot.guests],
        "native_routes": boot.native_routes,
        "budget": budget,
        "runs": listed,
    }


class Others:
    """Runs a lab's command, and samples what is not the lab's of the work of this machine's CPUs. A
    context manager."""

    EVERY = 2.0

    def __init__(self, command: Sequence[str]) -> None:
        self.lab = psutil.Popen(command)
        # When, the CPUs' time by then, and what of it others had.
        self._samples: list[tuple[float, float, float]] = []
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._ended.wait(self.EVERY):
            times = psutil.cpu_times()
            # Guests' time is in user's, as psutil knows; proc_stat(5).
            total = sum(times[: times._fields.index("steal") + 1])
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = [self.lab, *self.lab.children(recursive=True)]
                own = sum(t.user + t.system for t in (p.cpu_times() for p in tree))
                self._samples.append((time.time(), total, total - times.idle - times.iowait - own))

    def during(self, made: Path) -> float | None:
        """Their share of the CPUs' time from the begin of a run, which its result tells, to the
        writing of that; None where too little was sampled. The kernel counts a process and the CPUs
        in different ways, so it may be a few percent too low."""
        begin = datetime.fromisoformat(json.loads(made.read_text())["started"]).timestamp()
        end = made.stat().st_mtime
        inside = [sample for sample in self._samples if begin <= sample[0] <= end]
        if len(inside) < 2:
            return None
        (_, total, others), (_, last_total, last_others) = inside[0], inside[-1]
        return round(max(0.0, (last_others - others) / (last_total - total)), 4)


def _keep(source: Path, target: Path, head: dict[str, Any]) -> None:
    """Store a result with one trial on a line: small, and a diff shows what changed. ``head`` has the
    commit by whose rules it will be judged, and what more is known of the run."""
    data = json.loads(source.read_text(encoding="utf-8")) | head
    trials = data.pop("trials")
    head = json.dumps(data, ensure_ascii=False, sort_keys=True, indent=1)
    lines = ",\n".join(json.dumps(t, ensure_ascii=False, sort_keys=True) for t in trials)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = head.removesuffix("\n}") + f',\n "trials": [\n{lines}\n ]\n}}\n'
    target.write_text(text, encoding="utf-8")
