"""The ledger in its own right: several entries at once, formats, and not growing for ever."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from vsrtune.core.errors import JournalError
from vsrtune.execute.jsonl_log import TINY, LockedError
from vsrtune.execute.ledger import Ledger, read_pending


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_several_are_done_by_one_line_or_none(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ids = [ledger.add("a", {"n": n}) for n in range(4)]
        ledger.done(*ids[:3], 99)
    whole = path.read_bytes()
    assert whole.count(b"\n") == 6
    assert [e.data["n"] for e in read_pending(path)] == [3]
    path.write_bytes(whole[:-2])
    assert [e.data["n"] for e in read_pending(path)] == [0, 1, 2, 3]


def test_what_cannot_be_put_back_stays_and_keeps_no_other_from_it(path: Path) -> None:
    put_back = []

    def cleaner(data: dict[str, Any]) -> None:
        if data["n"] == 1:
            raise ValueError("no such device")
        put_back.append(data["n"])

    with Ledger.open(path) as ledger:
        for n in range(3):
            ledger.add("device", {"n": n})
        ledger.add("of a later version", {"n": 3})
        failures = ledger.resolve({"device": cleaner})
    assert put_back == [2, 0]
    told = [(f.entry.data["n"], f.what) for f in failures]
    assert told == [(3, "nothing in this version knows how to undo it"), (1, "no such device")]
    assert [e.data["n"] for e in read_pending(path)] == [1, 3]


def test_a_grown_file_is_written_anew(path: Path) -> None:
    with Ledger.open(path) as ledger:
        kept = ledger.add("kept", {"text": "x" * 100})
        for _ in range(300):
            ledger.done(ledger.add("gone", {"text": "y" * 300}))
            assert path.stat().st_size < 3 * TINY
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        new = ledger.add("new", {})
        assert new > kept
    assert [e.kind for e in read_pending(path)] == ["kept", "new"]


def test_a_unit_asks_whether_there_is_anything(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.done(ledger.add("step", {}))
        assert path.read_bytes() == b""
        ledger.add("step", {})
    assert path.read_text().splitlines()[0] == '{"r":"header","version":1}'


def test_every_torn_ledger_is_read(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ids = [ledger.add("step", {"n": n}) for n in range(3)]
        ledger.done(ids[0])
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        pending = [0, 0, 1, 2, 3, 2][whole[:size].count(b"\n")]
        with Ledger.open(path) as ledger:
            assert len(ledger.pending()) == pending, size
            ledger.add("new", {})
        assert len(read_pending(path)) == pending + 1, size


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"junk", "line 1 is corrupt"),
        (b'{"r":"header","version":1}\n[]\n', "line 2 is corrupt"),
        (b'{"add": 1, "kind": "a", "data": {}}\n', "line 1 is corrupt"),
        (b'{"r":"header","version":1}\n{"done"\n', "line 2 is corrupt"),
        (b'{"r":"header","version":2}\n{"later":1}\n', "version 2 of the ledger's format"),
    ],
)
def test_what_cannot_be_read_stays_as_it_is(path: Path, data: bytes, message: str) -> None:
    path.write_bytes(data)
    # The failed attempt holds no lock.
    for attempt in (lambda: Ledger.open(path, wait=0),) * 2 + (lambda: read_pending(path),):
        with pytest.raises(JournalError, match=message) as caught:
            attempt()
        assert not isinstance(caught.value, LockedError)
    assert path.read_bytes() == data


def test_looking_needs_no_lock_and_no_file(path: Path) -> None:
    assert read_pending(path) == []
    with Ledger.open(path) as ledger:
        ledger.add("a", {})
        assert [e.kind for e in read_pending(path)] == ["a"]
        with pytest.raises(LockedError, match=f"process {os.getpid()} .* is using the ledger"):
            Ledger.open(path, wait=0)
