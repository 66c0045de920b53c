"""The container image of the working tree, and what a lab is brought to run it."""

from __future__ import annotations

from pathlib import Path

from . import cache, chroot, hosttools
from .image import Image

_KUBERNETES = Path(__file__).resolve().parents[3] / "units" / "kubernetes"
_BUILD = _KUBERNETES / "build-image"
_FETCH = Path(__file__).resolve().parent.parent / "inimage/fetch-crun"


def get(deb: Path) -> Path:
    """The image with this package, an archive of the OCI layout. Raises LabError with the end of
    the build's log."""

    def build(scratch: Path) -> None:
        hosttools.ensure(hosttools.IMAGE | {"umoci": "umoci"})
        command = [str(_BUILD), str(deb), str(scratch / "vsrtune-image.tar")]
        hosttools.run_logged(command, scratch / "log")

    key = cache.digest([deb.parent.name.encode(), _BUILD.read_bytes()])
    return cache.entry("containers", "vsrtune", key, build) / "vsrtune-image.tar"


def brought(disk: Image, deb: Path) -> dict[str, Path]:
    """What a lab finds in /run/lab, by name: the image, the packages of what runs it, and the
    manifests."""
    return {
        "container.tar": get(deb),
        "container-debs": chroot.output(disk, "crun", _FETCH),
        "container-base": _KUBERNETES / "base",
    }
