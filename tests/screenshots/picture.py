"""A picture that was made: told, and refused when it is too large."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
# More than this would weigh on every clone.
MOST = 200_000


def check(path: Path) -> None:
    """Print what it weighs. Raises SystemExit when that is too much."""
    size = path.stat().st_size
    if size > MOST:
        raise SystemExit(f"{path.name} has {size} bytes, more than {MOST}")
    print(f"{path.relative_to(REPO)}: {size} bytes")
