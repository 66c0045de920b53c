"""What tests of passes begin with: a host in memory, and a journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import shell_samples as samples
from fake_host import FakeHost

from vsrtune.execute.journal import Journal


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.jsonl", samples.BOOT) as opened:
        yield opened
