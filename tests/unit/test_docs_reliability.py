"""Every test that docs/reliability.md promises by exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
NAMED = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (TREE / "docs" / "reliability.md").read_text())


def test_there_are_promises() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_the_test_exists(file: str, name: str) -> None:
    path = TREE / file if "/" in file else TREE / "tests" / "lab" / "inside" / file
    assert re.search(rf"^ *def {name}\(", path.read_text(), re.MULTILINE)
