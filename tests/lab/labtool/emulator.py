"""The QEMU that emulates labs: 11.1 of Debian 13's backports, whatever this machine runs.

QEMU 7.2, Debian 12's, may go on executing an instruction that another CPU has just
replaced. A Linux that turns a static key, as each start of a trace does, then traps
on an int3 that is no longer there, and panics: seen within 100 flips of sched_switch,
and not within 800 under later ones. QEMU 8.1 and later lock a page while translating it.

QEMU 10.0, Debian 13's, changes a CPU's pending interrupts with a plain read and write
when a guest is entered or left (VMRUN and #VMEXIT, svm_helper.c), beside other threads
that set them: one that comes in between is lost. 11.1 does it atomically. Even so, one
CPU has slept through its timers under it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import cache, hosttools, progress
from .errors import LabError
from .releases import RELEASES

_RELEASE = RELEASES["backports"]
_PACKAGE = "qemu-system-x86"
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_DATA = ("usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu")


@dataclass(frozen=True)
class Emulator:
    """QEMU with all it needs, in a directory of its own."""

    place: Path

    @property
    def command(self) -> list[str]:
        """How to start it: with its own loader and libraries, not this machine's."""
        libraries = self.place / _LIBRARIES
        command = [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries)]
        command += [str(self.place / "usr/bin/qemu-system-x86_64")]
        for directory in _DATA:
            command += ["-L", str(self.place / directory)]
        return command


def get() -> Emulator:
    """The emulator, fetched if need be."""
    key = cache.digest([_RELEASE.backports_suite.encode(), _PACKAGE.encode()])
    return Emulator(cache.entry("emulator", "qemu", key, _fetch))


def _fetch(place: Path) -> None:
    hosttools.ensure(hosttools.IMAGE)
    if os.geteuid() != 0:
        raise LabError("fetching the emulator needs root", hint="sudo lab build")
    progress.step(f"fetching the emulator: QEMU of {_RELEASE.backports_suite}")
    root = place / "root"
    newer = f'--aptopt=APT::Default-Release "{_RELEASE.backports_suite}"'
    hosttools.mmdebstrap(
        _RELEASE.suite, root, [_PACKAGE], _RELEASE.sources, place / "build.log",
        "--variant=extract", newer,
    )  # fmt: skip
    # What is wanted is in usr; the rest is apt's and of no use without a chroot.
    (root / "usr").rename(place / "usr")
    shutil.rmtree(root)
