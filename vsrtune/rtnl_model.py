"""A network device as route netlink describes it, and the modes of the macvlan kinds."""

from __future__ import annotations

from dataclasses import dataclass

# What the macvlan kinds call their modes in netlink (enum macvlan_mode), by libvirt's
# words for them.
MODES = {"private": 1, "vepa": 2, "bridge": 4, "passthrough": 8}


def mode_name(number: int) -> str:
    """libvirt's word for a mode; its default, bridge, for none of these."""
    return next((word for word, one in MODES.items() if one == number), "bridge")


@dataclass(frozen=True, slots=True)
class Link:
    """One network device. ``kind`` is that of `ip -d link` ("" for hardware), ``lower``
    the index of the device it stands on (0: none, or in another namespace), ``master``
    that of the bridge or bond it is in (0: none), ``mode`` as in MODES (0: has none),
    ``queue`` its txqueuelen in frames."""

    index: int
    name: str
    kind: str = ""
    lower: int = 0
    master: int = 0
    mode: int = 0
    mac: str = ""
    mtu: int = 0
    queue: int = 0
    up: bool = False
