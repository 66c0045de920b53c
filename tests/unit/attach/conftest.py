"""What tests of switches begin with: a host, and the place of its ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
from attach_host import FakeAttachHost


@pytest.fixture
def host(request: pytest.FixtureRequest) -> FakeAttachHost:
    """As the test's module makes it."""
    made: FakeAttachHost = request.module.fresh()
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attach.jsonl"
