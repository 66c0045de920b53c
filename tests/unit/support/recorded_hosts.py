"""The recorded hosts of tests/hosts."""

from __future__ import annotations

from pathlib import Path

from vsrtune.core.codec import decode
from vsrtune.host.recorded import load
from vsrtune.model.snapshot import Snapshot

PLACE = Path(__file__).resolve().parents[2] / "hosts"
FILES = sorted(PLACE.glob("*.json"))


def file(name: str) -> Path:
    """Where that host is recorded."""
    return PLACE / f"{name}.json"


def shown(path: Path) -> Snapshot:
    """What the recording says that it shows."""
    return decode(Snapshot, load(path).snapshot)
