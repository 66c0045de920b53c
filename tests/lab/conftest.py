"""Lists at the end what every boot of the matrix passed, failed and skipped."""

from __future__ import annotations

import pytest
from labreport import CRASHES, REPORTS

collect_ignore = ["inside"]


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
