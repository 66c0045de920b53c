"""The working tree as a Debian package, built once for each state of the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from . import cache, hosttools, progress
from .errors import LabError

_TREE = Path(__file__).resolve().parents[3]

# All that the package is made from; nothing else makes it be built again.
_SOURCES = (
    "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "setup.cfg", "pyproject.toml",
    "debian", "docs", "kmod", "policies", "units", "vsrtune",
)  # fmt: skip
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "results")
_TIMEOUT = 300


def get() -> Path:
    """The .deb of the working tree; beside it is that of the module's source. Raises LabError
    with the end of the build's log."""
    parts = [Path("/etc/os-release").read_bytes(), Path(__file__).read_bytes()]
    for path in _files():
        parts += [str(path.relative_to(_TREE)).encode(), path.read_bytes()]
    place = cache.entry("packages", "vsrtune", cache.digest(parts), _build)
    return next(place.glob("vsrtune_*.deb"))


def _files() -> list[Path]:
    found: list[Path] = []
    for name in _SOURCES:
        top = _TREE / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            inside = path.relative_to(_TREE).parts
            hidden = any(part.startswith(".") for part in inside)
            if path.is_file() and not hidden and not {"__pycache__", "results"} & set(inside):
                found.append(path)
    return found


def _build(scratch: Path) -> None:
    hosttools.ensure(hosttools.PACKAGE)
    progress.step("building the package")
    source = scratch / "source"
    source.mkdir()
    for name in _SOURCES:
        if (_TREE / name).is_dir():
            shutil.copytree(_TREE / name, source / name, ignore=_IGNORED)
        else:
            shutil.copy(_TREE / name, source)
    log = scratch / "log"
    # Debian's own Python, whatever else stands first on the PATH.
    environment = {**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
    with log.open("w") as output:
        status = subprocess.run(
            ["dpkg-buildpackage", "-b", "-us", "-uc"],
            cwd=source,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=_TIMEOUT,
            check=False,
        ).returncode
    if status != 0 or not list(scratch.glob("vsrtune_*.deb")):
        progress.block("package build", log.read_text(errors="replace").splitlines()[-40:])
        raise LabError(f"the package could not be built, status {status}")
    shutil.rmtree(source)
