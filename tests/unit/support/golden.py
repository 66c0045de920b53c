"""Golden files: compare, or rewrite them when VSRTUNE_REGENERATE=1 is set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REGENERATE = os.environ.get("VSRTUNE_REGENERATE") == "1"


def matches(path: Path, text: str) -> None:
    """Assert that the file holds ``text``; write it instead when regenerating."""
    if REGENERATE:
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def keys(data: Any) -> str:
    """The keys of a JSON value with dots between them, a line each; ``[]`` is any element of a
    list, and stands at the end where a list is empty."""

    def below(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict):
            for key, one in value.items():
                yield from below(one, f"{path}.{key}")
        elif isinstance(value, list):
            for one in value or [None]:
                yield from below(one, f"{path}[]")
        else:
            yield path.removeprefix(".")

    return "\n".join([*sorted(set(below(data, ""))), ""])


def cases(directory: Path) -> list[Path]:
    """The cases, one file each, sorted by name."""
    return sorted(directory.glob("*.yaml"), key=lambda path: path.stem)
