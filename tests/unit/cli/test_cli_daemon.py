"""A daemon that reads its policies again and again does not grow by what that leaves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from vsrtune.cli import daemon
from vsrtune.core.errors import PolicyError
from vsrtune.observe.config_files import load_dirs
from vsrtune.policy.model import Policy

GOOD = "guest: vr1\ncpus: {vcpu: 1, vhost: 2}\nprofile: none\n"


@pytest.fixture
def by_hand() -> Iterator[None]:
    """Nothing is collected by chance."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("text", [GOOD, "guest: vr1\ncpus: 7\n", "guest: [\n"])
def test_reading_policies_leaves_nothing_to_collect(
    tmp_path: Path, by_hand: None, text: str
) -> None:
    (tmp_path / "vr1.yaml").write_text(text)

    def read() -> tuple[Policy, ...]:
        try:
            return load_dirs([tmp_path])
        except PolicyError:
            assert text != GOOD
            return ()

    read()
    gc.collect()
    read()
    left = gc.collect()
    assert left > 0, "nothing to tidy: then daemon.tidy can go"
    tidied = daemon.tidy(read)
    for _ in range(3):
        tidied()
    assert gc.collect() == 0
