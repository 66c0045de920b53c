"""Kernels with the kernel's own detectors, of each release's linux-source: what the module is run on
to find what no counter shows.

`kasan` has memory, locks, RCU and object life under watch, and can be refused memory; `kcsan` has
variables that two CPUs touch at once. Neither has KVM, so their labs have no guests.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from . import cache, chroot, cpio, progress
from .errors import LabError
from .image import Image

_LAB = Path(__file__).resolve().parent.parent
_SCRIPT = _LAB / "inimage/build-debug-kernel"
_FRAGMENTS = _LAB / "kernels"
KINDS = ("kasan", "kcsan")
# Two cores compile one in some ten minutes.
_BUILD_TIMEOUT = 3 * 3600
_TAIL = 40


@dataclass(frozen=True)
class DebugImage(Image):
    """An image whose lab boots another kernel; `built` has what `_SCRIPT` leaves."""

    built: Path

    @property
    def vmlinux(self) -> Path:
        return self.built / "bzImage"

    @property
    def boot_modules(self) -> Path:
        return self.built / "boot-modules.cpio"


def get(image: Image, kind: str) -> DebugImage:
    """The image with a kernel of that kind, which is built if need be. Raises LabError."""
    release = image.place.name.rpartition("-")[0]
    fragments = [_FRAGMENTS / f"{name}.config" for name in ("base", kind)]

    def build(scratch: Path) -> None:
        progress.step(f"building a {kind} kernel for {release}: some ten minutes")
        for path in (*fragments, Path("/etc/resolv.conf")):
            shutil.copy(path, scratch)
        shutil.copy(_SCRIPT, scratch / "run")
        (scratch / "kind").write_text(f"{kind}\n")
        status, output = chroot.run(image.disk, scratch, _BUILD_TIMEOUT)
        (scratch / "log").write_text(output)
        if status != 0:
            progress.block(_SCRIPT.name, output.splitlines()[-_TAIL:])
            raise LabError(f"the {kind} kernel for {release} does not build, status {status}")
        # The last of two files of one name counts: no module of the other kernel is loaded.
        nothing = cpio.Archive()
        nothing.file("modules/order", b"")
        nothing.write(scratch / "out/order.cpio")
        early = image.boot_modules.read_bytes() + (scratch / "out/order.cpio").read_bytes()
        (scratch / "out/boot-modules.cpio").write_bytes(early)

    parts = [image.place.name.encode(), _SCRIPT.read_bytes(), Path(__file__).read_bytes()]
    parts += [path.read_bytes() for path in fragments]
    place = cache.entry("debug-kernels", f"{release}-{kind}", cache.digest(parts), build)
    return DebugImage(image.place, place / "out")
