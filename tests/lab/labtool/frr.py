"""Routers with FRR, a firewall, SSH and SNMP, whose packages no image has (`lab --frr`)."""

from __future__ import annotations

from pathlib import Path

from . import chroot
from .image import Image

_SCRIPT = Path(__file__).resolve().parent.parent / "inimage/pack-frr"


def get(image: Image) -> Path:
    """A directory with the tree `root` of its peers and router.cpio, packed if need be."""
    return chroot.output(image, "frr", _SCRIPT)
