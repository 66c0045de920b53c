"""What a lab needs to be reached by SSH: packages that no image has, for only pairs want them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from . import chroot, hosttools
from .image import Image

_SCRIPT = Path(__file__).resolve().parent.parent / "inimage/fetch-ssh"
_TOOLS = {"ssh": "openssh-client", "ssh-keygen": "openssh-client"}


def packages(image: Image) -> Path:
    """A directory of .debs that the image lacks, fetched if need be."""
    return chroot.output(image, "ssh", _SCRIPT)


def key(path: Path) -> None:
    """A new pair of keys: `path` and `path`.pub."""
    hosttools.ensure(_TOOLS)
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(path)]
    subprocess.run(words, check=True)
