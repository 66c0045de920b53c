"""Builds the labs' images and the module and starts the labs beside the other tests, and lists at the
end what every boot of the matrix passed, failed and skipped."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from labreport import (
    REPORTS,
    TROUBLES,
    compare,
    last_summary,
    passed_before,
    tier,
    write_summary,
)
from labruns import LabRuns

collect_ignore = ["inside"]

LAB = Path(__file__).parent / "lab"


RUNS = pytest.StashKey[LabRuns]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to build what the selected labs need, and the labs themselves: the tests before
    them keep one of two cores busy, and a lab waits most of the time.

    Whoever wants an image that is being built waits for it; what goes wrong here goes
    wrong there again, and is told there.
    """
    boots = _boots(session)
    if not boots or os.geteuid() != 0 or session.config.option.collectonly:
        return
    releases = dict.fromkeys(boot.release for boot in boots)
    subprocess.Popen(
        ["nice", "sh", "-c", _builds(list(releases))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    # Python would end at once, and the labs would run on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = _place(session.config)
    commands = {b.id: b.command for b in boots if not passed_before(place, b.id, b.files)}
    session.config.stash[RUNS] = LabRuns(commands, place)


def _place(config: pytest.Config) -> Path:
    """Where the labs leave their logs and reports: beside pytest's own, as `tests/run` asks for."""
    report = config.option.xmlpath
    return Path(report or tempfile.mkdtemp(prefix="vsrtune-labs-") + "/junit.xml").absolute().parent


def _builds(releases: list[str]) -> str:
    """A script that makes what the labs need, the first ones' first: two images at a time,
    as they wait for the network and the disk, then the rest, then the module's checks."""
    lab = shlex.quote(str(LAB))
    first = " & ".join(f"{lab} build --release {name}" for name in releases[:2])
    rest = [f"{lab} build --release {name}" for name in releases[2:]]
    checks = [f"{lab} kmod --release {name}" for name in releases]
    return "; ".join([f"{first} & wait", *rest, *checks])


def _boots(session: pytest.Session) -> list[Any]:
    """The labs that were selected, in order."""
    calls = (getattr(item, "callspec", None) for item in session.items)
    return [call.params["boot"] for call in calls if call is not None and "boot" in call.params]


@pytest.fixture(scope="session")
def lab_runs(pytestconfig: pytest.Config) -> LabRuns:
    """The selected labs, running."""
    if RUNS not in pytestconfig.stash:
        pytest.skip("building and booting a lab needs root")
    return pytestconfig.stash[RUNS]


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what still runs when the tests were interrupted."""
    runs = config.stash.get(RUNS, None)
    if runs is not None:
        runs.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what every boot passed, failed and skipped, since a skip is never silent, and what
    differs from the last run."""
    if not REPORTS and not TROUBLES:
        return
    terminalreporter.section("inside the labs")
    for boot, report in REPORTS.items():
        passed, failed, skipped = map(report.count, ("passed", "failed", "skipped"))
        terminalreporter.write_line(f"{boot}: {passed} passed, {failed} failed, {skipped} skipped")
        for outcome, name, reason in report.rows:
            if outcome != "passed":
                terminalreporter.write_line(f"  {outcome.upper()} {name}: {reason}")
    runs = terminalreporter.config.stash.get(RUNS, None)
    if runs is not None:
        stats = terminalreporter.stats
        skipped = {
            r.nodeid: o == "skipped" for o in ("skipped", "passed") for r in stats.get(o, ())
        }
        for line in compare(
            write_summary(runs.place, tier(), skipped), last_summary(runs.place, tier())
        ):
            terminalreporter.write_line(line)
        seconds = sum(report.seconds for report in REPORTS.values())
        terminalreporter.write_line(f"labs: {len(REPORTS)}, their tests {seconds:.0f} s in all")
    for trouble in TROUBLES:
        terminalreporter.write_line(trouble, red=True)
