"""The programs of Debian's package prometheus, which tests/promtool puts into the cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def program(name: str) -> str:
    """Where ``promtool`` or ``prometheus`` is; skips where it is not to be had."""
    found = shutil.which(name) or os.environ.get(name.upper(), "")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vsrtune" / name
    if not found and cache.exists():
        found = str(cache)
    if not found:
        pytest.skip(f"{name} is not there (Debian's package prometheus; `make setup` fetches it)")
    return found
