"""Which files are generated, whole or between markers, and their contents."""

from __future__ import annotations

from pathlib import Path

from generate import man, promises, tables

DOCS = Path(__file__).resolve().parents[1]
_BEGIN = "<!-- generated: {} (make docs) -->\n"
_END = "<!-- end -->\n"


def contents() -> dict[str, str]:
    """Path below docs/ to the text it should have."""
    return {
        "policy-reference.md": tables.policy_reference(),
        "metrics.md": _between("metrics.md", "metrics", tables.metrics()),
        "doctor.md": _between("doctor.md", "checks", tables.checks()),
        "reliability.md": _between("reliability.md", "promises", promises.tables()),
        "troubleshooting.md": _between("troubleshooting.md", "exit codes", tables.exit_codes()),
        "man/vsrtune.8": man.command_page(),
        "man/vsrtune-policy.5": man.policy_page(),
    }


def _between(path: str, name: str, text: str) -> str:
    """The file with ``text`` between the markers of that name."""
    old = (DOCS / path).read_text("utf-8")
    begin = _BEGIN.format(name)
    before, found, rest = old.partition(begin)
    _, closed, after = rest.partition(_END)
    if not found or not closed:
        raise ValueError(f"docs/{path} has no markers of {name}")
    return f"{before}{begin}{text}{_END}{after}"
