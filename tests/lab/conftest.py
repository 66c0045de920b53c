"""Builds the labs' images beside the other tests, and lists at the end what every boot of
the matrix passed, failed and skipped."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from labreport import CRASHES, REPORTS

collect_ignore = ["inside"]

LAB = Path(__file__).parent / "lab"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to build what the selected labs need, while the tests before them run.

    Whoever wants an image that is being built waits for it; what goes wrong here goes
    wrong there again, and is told there.
    """
    labs = [item for item in session.items if "test_inside" in item.name]
    if len(labs) == len(session.items) or os.geteuid() != 0 or session.config.option.collectonly:
        return
    releases = dict.fromkeys(item.callspec.params["boot"].release for item in labs)  # type: ignore[attr-defined]
    builds = (shlex.join([str(LAB), "build", "--release", release]) for release in releases)
    subprocess.Popen(
        ["nice", "sh", "-c", " & ".join(builds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what every boot passed, failed and skipped: a skip is never silent."""
    if not REPORTS:
        return
    terminalreporter.section("inside the labs")
    for crash in CRASHES:
        terminalreporter.write_line(crash)
    for boot, rows in REPORTS.items():
        counts = {o: sum(r[0] == o for r in rows) for o in ("passed", "failed", "skipped")}
        terminalreporter.write_line(
            f"{boot}: {counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['skipped']} skipped"
        )
        for outcome, name, reason in rows:
            if outcome != "passed":
                terminalreporter.write_line(f"  {outcome.upper()} {name}: {reason}")
