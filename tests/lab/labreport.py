"""What each boot of the matrix reported, gathered for the end of the run."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

REPORTS: dict[str, list[tuple[str, str, str]]] = {}

# Labs that booted again, and what the kernels of labs complained of.
TROUBLES: list[str] = []


def read_report(boot: str, path: Path) -> dict[str, int]:
    """Keep every test of one boot's JUnit file as (outcome, name, reason)."""
    rows: list[tuple[str, str, str]] = []
    for case in ET.parse(path).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                reason = (child.get("message") or "").strip().splitlines()[0:1]
                reason = reason[0] if reason else ""
        rows.append((outcome, name, reason))
    REPORTS[boot] = rows
    return {o: sum(r[0] == o for r in rows) for o in ("passed", "failed", "skipped")}
