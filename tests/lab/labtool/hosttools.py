"""Programs of the machine the tool runs on, installed when they are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import cache, progress
from .errors import LabError

_APT_TIMEOUT = 1200
_BUILD_TIMEOUT = 1800
_UNWANTED = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*", "/usr/share/info/*")

# Program, or file, and the Debian package it comes in.
IMAGE = {
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "zstd": "zstd",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
}
BOOT = {
    "setpriv": "util-linux",
    "/bin/busybox": "busybox-static",
}
# By what dpkg knows, since dpkg-buildpackage asks it: some of them have no file of their own.
PACKAGE = {
    f"/var/lib/dpkg/info/{package}.list": package
    for package in (
        "debhelper",
        "dh-dkms",
        "dh-python",
        "dpkg-dev",
        "pybuild-plugin-pyproject",
        "python3-all",
        "python3-setuptools",
    )
}


def ensure(needed: dict[str, str]) -> None:
    """Install what is missing on this machine. Raises LabError."""
    if all(_present(what) for what in needed):
        return
    # apt refuses a second one of itself.
    with cache.lock("apt", "another installation"):
        _ensure(needed)


def _ensure(needed: dict[str, str]) -> None:
    missing = sorted({package for what, package in needed.items() if not _present(what)})
    if not missing:
        return
    command = f"apt-get install --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise LabError(f"missing on this machine: {', '.join(missing)}", hint=f"run: {command}")
    progress.step(f"installing on this machine: {' '.join(missing)}")
    if not _apt("install", *missing):
        # A fresh machine has no package lists, an old one has stale ones.
        _apt("update")
        if not _apt("install", *missing):
            raise LabError(f"'{command}' failed", hint="run it by hand and see why")


def mmdebstrap(
    suite: str,
    root: Path,
    packages: Sequence[str],
    sources: Sequence[str],
    log: Path,
    *options: str,
) -> None:
    """Make a tree of Debian packages in `root`, without what nobody reads there."""
    command = ["mmdebstrap", "--mode=root", f"--include={','.join(packages)}"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in _UNWANTED]
    command += ['--aptopt=Acquire::Languages "none"', "--aptopt=Acquire::Retries 3"]
    run_logged([*command, *options, suite, str(root), *sources], log)


def run_logged(command: list[str], log: Path) -> None:
    """Run a long command with its output in `log`, shown only when it fails."""
    with log.open("a") as output:
        print("+", *command, file=output, flush=True)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_BUILD_TIMEOUT,
        )
    if done.returncode != 0:
        lines = log.read_text(errors="replace").splitlines()
        progress.block(f"output of {command[0]}", lines[-40:])
        raise LabError(f"{command[0]} failed with status {done.returncode}")


def _present(what: str) -> bool:
    if what.startswith("/"):
        return Path(what).exists()
    return shutil.which(what) is not None


def _apt(verb: str, *packages: str) -> bool:
    options = ["-y", "-q", "--no-install-recommends"] if verb == "install" else ["-q"]
    done = subprocess.run(
        ["apt-get", *options, verb, *packages],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_APT_TIMEOUT,
    )
    if done.returncode != 0:
        progress.block(f"apt-get {verb}", (done.stdout + done.stderr).splitlines()[-15:])
    return done.returncode == 0
