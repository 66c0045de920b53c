"""A sparse that understands the newest kernel: Debian unstable's.

Debian 13's, 0.6.4, does not know __typeof_unqual__, which the headers of 7.3 are written in.
The program needs nothing but a C library as new as Debian 13's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from . import cache, hosttools, progress
from .releases import MIRROR

_SUITE = "sid"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def get() -> Path:
    """The program, fetched if need be."""
    key = cache.digest([_SUITE.encode(), Path(__file__).read_bytes()])
    return cache.entry("tools", "sparse", key, _fetch) / "sparse"


def _fetch(place: Path) -> None:
    hosttools.ensure({_KEYRING: "debian-archive-keyring"})
    progress.step(f"fetching sparse of {_SUITE}")
    apt, log = place / "apt", place / "log"
    for directory in ("state/lists/partial", "cache/archives/partial", "etc"):
        (apt / directory).mkdir(parents=True)
    sources = apt / "etc/sources.list"
    sources.write_text(f"deb [signed-by={_KEYRING}] {MIRROR} {_SUITE} main\n")
    # Lists of its own: this machine's are not concerned.
    settings = {
        "Dir::State": apt / "state",
        "Dir::State::Status": "/dev/null",
        "Dir::Cache": apt / "cache",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "APT::Sandbox::User": "root",
        "APT::Architecture": "amd64",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    options = [f"-o{name}={value}" for name, value in settings.items()]
    hosttools.run_logged(["apt-get", *options, "-q", "update"], log)
    unpack = 'cd "$1" && shift && apt-get "$@" -q download sparse && dpkg-deb -x sparse_*.deb tree'
    hosttools.run_logged(["sh", "-c", unpack, "fetch", str(place), *options], log)
    shutil.move(place / "tree/usr/bin/sparse", place / "sparse")
    shutil.rmtree(place / "tree")
    shutil.rmtree(apt)
