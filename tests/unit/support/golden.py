"""Golden files: compare, or rewrite them when VSRTUNE_REGENERATE=1 is set."""

from __future__ import annotations

import os
from pathlib import Path

REGENERATE = os.environ.get("VSRTUNE_REGENERATE") == "1"


def matches(path: Path, text: str) -> None:
    """Assert that the file holds ``text``; write it instead when regenerating."""
    if REGENERATE:
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def cases(directory: Path) -> list[Path]:
    """The cases, one file each, sorted by name."""
    return sorted(directory.glob("*.yaml"), key=lambda path: path.stem)
