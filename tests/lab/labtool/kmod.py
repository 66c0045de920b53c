"""The kernel module of the working tree, built and checked for the kernels of the images."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from . import cache, chroot, progress, sparse
from .debugkernel import DebugImage
from .errors import LabError
from .image import Image
from .releases import RELEASES

_TREE = Path(__file__).resolve().parents[3]
_SOURCE = _TREE / "kmod"
_SCRIPTS = Path(__file__).resolve().parent.parent / "inimage"

# What builds leave beside the sources.
_BUILT = shutil.ignore_patterns(
    "*.ko", "*.o", "*.mod", "*.mod.c", ".*", "Module.symvers", "modules.order"
)
_WARNING = re.compile(r"\bwarning\b", re.IGNORECASE)
_TAIL = 60


def present() -> bool:
    """Whether the tree has a kernel module at all."""
    return (_SOURCE / "Kbuild").exists()


def get(image: Image) -> Path:
    """What a lab lays over /lib/modules: VERSION/updates/*.ko and modprobe's indexes.

    Built natively inside the image and cached. Raises LabError with the end of the build's
    output; warnings are shown and do no harm here, see `check`.
    """

    def build(scratch: Path) -> None:
        progress.step(f"building the kernel module for {_name(image)}")
        output = _run("build-module", image, scratch)
        for line in _warnings(output):
            progress.step(line)

    return _entry("kmod", "build-module", image, build) / "out"


def check(image: Image) -> None:
    """Compiler and sparse must be silent, the debug build and dkms must work.

    Raises LabError with what is wrong. A success is cached.
    """

    def build(scratch: Path) -> None:
        progress.step(f"checking the kernel module for {_name(image)}")
        if RELEASES[_name(image)].backports:
            shutil.copy(sparse.get(), scratch)
        output = _run("check-module", image, scratch)
        if warnings := _warnings(output):
            progress.block("warnings", warnings)
            raise LabError(
                f"the kernel module builds with {len(warnings)} warnings for {_name(image)}",
                hint="the supported kernels must all be silent, see kmod/compat-include",
            )

    _entry("kmod-checks", "check-module", image, build)


def module(overlay: Path) -> Path:
    """The module itself in what `get` returned."""
    return next(overlay.glob("*/updates/*.ko"))


def _entry(kind: str, script: str, image: Image, build: cache.Build) -> Path:
    built = image.built.parent if isinstance(image, DebugImage) else image.place
    parts = [built.name.encode(), (_SCRIPTS / script).read_bytes()]
    parts += [Path(file).read_bytes() for file in (__file__, chroot.__file__)]
    with tempfile.TemporaryDirectory() as place:
        # Of the sources alone, so that a build by hand changes nothing.
        copy = Path(shutil.copytree(_SOURCE, Path(place) / "kmod", ignore=_BUILT))
        for path in sorted(path for path in copy.rglob("*") if path.is_file()):
            parts += [str(path.relative_to(copy)).encode(), path.read_bytes()]
    return cache.entry(kind, _name(image), cache.digest(parts), build)


def _run(script: str, image: Image, scratch: Path) -> str:
    """Run a script of inimage/ in `image`; its output, which is kept as `scratch`/log too."""
    shutil.copytree(_SOURCE, scratch / "kmod", ignore=_BUILT)
    shutil.copy(_SCRIPTS / script, scratch / "run")
    if isinstance(image, DebugImage):
        for name in ("release", "build.tar", "modules.builtin", "modules.builtin.modinfo"):
            shutil.copy(image.built / name, scratch)
    (status, output) = chroot.run(image.disk, scratch)
    shutil.rmtree(scratch / "kmod")
    (scratch / "log").write_text(output)
    if status != 0:
        progress.block(script, output.splitlines()[-_TAIL:])
        raise LabError(
            f"{script} for {_name(image)} ended with status {status}",
            hint="--no-kmod runs a lab without the module",
        )
    return output


def _warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if _WARNING.search(line)]


def _name(image: Image) -> str:
    return image.place.name.rpartition("-")[0]
