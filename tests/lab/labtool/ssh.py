"""What a lab needs to be reached by SSH: packages that no image has, for only pairs want them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from . import cache, chroot, hosttools, progress
from .errors import LabError
from .image import Image

_SCRIPT = Path(__file__).resolve().parent.parent / "inimage/fetch-ssh"
_TOOLS = {"ssh": "openssh-client", "ssh-keygen": "openssh-client"}
_TAIL = 40


def packages(image: Image) -> Path:
    """A directory of .debs that the image lacks, fetched if need be."""

    def fetch(scratch: Path) -> None:
        progress.step("fetching the packages of sshd")
        shutil.copy(_SCRIPT, scratch / "run")
        shutil.copy("/etc/resolv.conf", scratch)
        status, output = chroot.run(image.disk, scratch)
        (scratch / "log").write_text(output)
        if status != 0:
            progress.block(_SCRIPT.name, output.splitlines()[-_TAIL:])
            raise LabError(f"the packages of sshd could not be fetched, status {status}")

    parts = [image.place.name.encode(), _SCRIPT.read_bytes(), Path(__file__).read_bytes()]
    return (
        cache.entry("ssh", image.place.name.rpartition("-")[0], cache.digest(parts), fetch) / "out"
    )


def key(path: Path) -> None:
    """A new pair of keys: `path` and `path`.pub."""
    hosttools.ensure(_TOOLS)
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(path)]
    subprocess.run(words, check=True)
