"""What tests of groups begin with: a host, and the place of its ledger."""

from __future__ import annotations

from pathlib import Path

import clone_group
import msr_group
import pvr_group
import pytest
from attach_host import FakeAttachHost

HOSTS = {
    "test_group_clones": clone_group.fresh,
    "test_group_msr": msr_group.fresh,
    "test_group_pvr": pvr_group.fresh,
}


@pytest.fixture
def host(request: pytest.FixtureRequest) -> FakeAttachHost:
    """That of the kind of group which the test's module is about."""
    return HOSTS[request.module.__name__]()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attach.jsonl"
