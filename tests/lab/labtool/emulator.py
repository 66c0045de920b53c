"""The QEMU that emulates labs: 11.1 of Debian 13's backports, whatever this machine runs.

QEMU 7.2, Debian 12's, may go on executing an instruction that another CPU has just
replaced. A Linux that turns a static key, as each start of a trace does, then traps
on an int3 that is no longer there, and panics: seen within 100 flips of sched_switch,
and not within 800 under later ones. QEMU 8.1 and later lock a page while translating it.

QEMU 10.0, Debian 13's, changes a CPU's pending interrupts with a plain read and write
when a guest is entered or left (VMRUN and #VMEXIT, svm_helper.c), beside other threads
that set them: one that comes in between is lost. 11.1 does it atomically.

Two defects of both are mended in the machine code; see _MENDS.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import cache, hosttools, progress
from .errors import LabError
from .releases import RELEASES

_RELEASE = RELEASES["backports"]
_PACKAGE = "qemu-system-x86"
_PROGRAM = "usr/bin/qemu-system-x86_64"
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_DATA = ("usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu")

# By function, the instruction that is to go, as the machine code of x86-64.
_MENDS = {
    # Whenever a thread restores its FPU state, on any CPU, QEMU clears IGNNE in the flags of
    # CPU 0: a plain read and write beside those of CPU 0's own thread, whose changes of other
    # flags are undone. VMRUN then enters a guest without nested paging, which ends in the guest's
    # triple fault; or CPU 0 takes interrupts that it has disabled, or none at all any more.
    # Linux never sets IGNNE. "and dword [rax + hflags2], ~HF2_IGNNE_MASK":
    "cpu_clear_ignne": rb"\x81\xa0..\x00\x00\x7f\xff\xff\xff",
    # VMRUN delivers an interrupt that is to be injected, and leaves its number as that of an
    # exception that is due: when another thread asks the CPU to leave its loop, it is delivered a
    # second time, whatever the guest does by then. "mov [rbx + exception_index], vector", before
    # exception_is_int = 0, exception_next_eip = -1, a test of the log's level, and is_hw = 1:
    "helper_vmrun": rb"\x89[\x80-\xbf]..\xff\xff"
    rb"(?=\xc7[\x80-\xbf]..\x00\x00\x00\x00\x00\x00\x48\xc7[\x80-\xbf]..\x00\x00\xff\xff\xff\xff"
    rb"\xf6\x05.....\x0f\x85....\xba\x01\x00\x00\x00)",
}
_NOP = b"\x90"


@dataclass(frozen=True)
class Emulator:
    """QEMU with all it needs, in a directory of its own."""

    place: Path

    @property
    def command(self) -> list[str]:
        """How to start it: with its own loader and libraries, not this machine's."""
        libraries = self.place / _LIBRARIES
        command = [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries)]
        command += [str(self.place / _PROGRAM)]
        for directory in _DATA:
            command += ["-L", str(self.place / directory)]
        return command


def get() -> Emulator:
    """The emulator, fetched if need be."""
    parts = [_RELEASE.backports_suite.encode(), _PACKAGE.encode(), *_MENDS.values()]
    key = cache.digest(parts)
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
    program = place / _PROGRAM
    code, missed = mended(program.read_bytes())
    program.write_bytes(code)
    for function in missed:
        progress.step(f"{function} is not the one that _MENDS of {__file__} knows: left as it is")


def mended(code: bytes) -> tuple[bytes, list[str]]:
    """A QEMU without the instructions of _MENDS, and the functions whose instruction is not there
    exactly once, which stay as they are."""
    missed = []
    for function, pattern in _MENDS.items():
        without, times = re.subn(pattern, lambda m: _NOP * len(m[0]), code, flags=re.DOTALL)
        if times == 1:
            code = without
        else:
            missed.append(function)
    return code, missed
