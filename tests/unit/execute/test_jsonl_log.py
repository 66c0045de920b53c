"""The ledger in its own right: several at once, and not growing for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.jsonl_log import Ledger, read_pending


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_several_are_done_by_one_line_or_none(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ids = [ledger.add("a", {"n": n}) for n in range(4)]
        ledger.done(*ids[:3], 99)
    whole = path.read_bytes()
    assert whole.count(b"\n") == 5
    assert [e.data["n"] for e in read_pending(path)] == [3]
    path.write_bytes(whole[:-2])
    assert [e.data["n"] for e in read_pending(path)] == [0, 1, 2, 3]


def test_a_grown_file_is_written_anew(path: Path) -> None:
    with Ledger.open(path) as ledger:
        kept = ledger.add("kept", {"text": "x" * 100})
        for _ in range(300):
            ledger.done(ledger.add("gone", {"text": "y" * 300}))
    assert path.stat().st_size > 64 << 10
    with Ledger.open(path) as ledger:
        assert path.stat().st_size < 1000
        assert [e.id for e in ledger.pending()] == [kept]
        new = ledger.add("new", {})
        assert new > kept
    assert [e.kind for e in read_pending(path)] == ["kept", "new"]


def test_looking_needs_no_lock_and_no_file(path: Path) -> None:
    assert read_pending(path) == []
    with Ledger.open(path) as ledger:
        ledger.add("a", {})
        assert [e.kind for e in read_pending(path)] == ["a"]
        with pytest.raises(VsrtuneError, match="another process"):
            Ledger.open(path, wait=0)
