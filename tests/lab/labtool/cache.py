"""The cache of images and packages: entries appear whole, or not at all.

An entry is a directory named by a digest of what it is made from. It is built
beside its final place and renamed, under a lock of its own, so two tools that
want the same entry build it once and tools that want others do not wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from . import progress

# Fills the directory of a new entry.
Build = Callable[[Path], None]


def root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vsrtune" / "lab"


def digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(b"%d:" % len(part))
        total.update(part)
    return total.hexdigest()[:16]


def entry(kind: str, name: str, key: str, build: Build) -> Path:
    """The directory kind/name-key, made by `build` if it is not there.

    Older entries of the same kind and name are left alone: a lab may be running
    on one. `lab clean` removes them.
    """
    place = root() / kind / f"{name}-{key}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with _lock(place.with_suffix(".lock"), f"another build of {name}"):
        if not place.is_dir():
            with _scratch(place.parent, f".{name}-") as scratch:
                build(scratch)
                scratch.rename(place)
    return place


@contextlib.contextmanager
def lock(name: str, what: str) -> Iterator[None]:
    """One at a time, among all tools that use this cache; `what` is waited for."""
    root().mkdir(parents=True, exist_ok=True)
    with _lock(root() / f"{name}.lock", what):
        yield


def clean() -> None:
    shutil.rmtree(root(), ignore_errors=True)


@contextlib.contextmanager
def _scratch(parent: Path, prefix: str) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path, what: str) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.step(f"waiting for {what}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
