"""Every test that docs/reliability.md and docs/hardening.md promise by exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[3]


def named(document: str) -> Iterator[tuple[str, str]]:
    """Files and tests; one without a file is in that of the one before."""
    last = ""
    for file, name in re.findall(
        r"`([\w/]+\.py)?::(test_\w+)`", (TREE / "docs" / document).read_text()
    ):
        last = file or last
        yield last, name


NAMED = [*named("reliability.md"), *named("hardening.md")]


def test_there_are_promises() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_the_test_exists(file: str, name: str) -> None:
    path = TREE / file if "/" in file else TREE / "tests" / "lab" / "inside" / file
    assert re.search(rf"^ *def {name}\(", path.read_text(), re.MULTILINE)
