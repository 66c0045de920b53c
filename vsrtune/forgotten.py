"""Macvtaps that a libvirtd left behind when it died while it was plugging them in."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection

from vsrtune import link_writes
from vsrtune.host import netlink


def drop_macvtaps(mac: str, known: Collection[str]) -> bool:
    """Remove the macvtaps of that MAC that are none of ``known`` (device names) and that
    nobody holds open; whether there were any. A lower device takes no other of the same MAC
    beside one. Raises OSError."""
    forgotten = [
        link.index
        for link in netlink.links()
        if link.kind == "macvtap"
        and link.mac == mac
        and link.name not in known
        and not _held(f"/dev/tap{link.index}")
    ]
    for index in forgotten:
        link_writes.remove(index)
    return bool(forgotten)


def _held(path: str) -> bool:
    """Whether any process has that file open."""
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) == path:
                return True
        except OSError:
            continue  # it is gone by now
    return False
