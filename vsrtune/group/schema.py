# SPDX-License-Identifier: GPL-2.0-or-later
"""The JSON Schemas of group files, one for each kind. docs/groups.md describes the keys."""

from __future__ import annotations

from typing import Any

from vsrtune.core.text import TIME_PATTERN
from vsrtune.policy.schema import DEVICE_PATTERN
from vsrtune.policy.subschemas import by_name, choice, mapping, sequence, short_text, text

PVR, MSR = "pvr", "msr"
KINDS = (PVR, MSR)
BRIDGE, HUB, VLAN = "bridge", "hub", "vlan"
LINKS = (BRIDGE, HUB, VLAN)

# A dash between both makes a device's name, for which the kernel takes 15 characters.
NAME_PATTERN = r"^[a-z][a-z0-9_]{0,8}$"
SIDE_PATTERN = r"^[a-z][a-z0-9]{0,4}$"
# The names of a multistage router's devices have the number of the side, a digit, and the number
# of the router (msr.name).
MOST_SIDES = 9
MOST_ROUTERS = 99


def _guests(most: int) -> dict[str, Any]:
    expects = f"up to {most} guests such as [vr1, vr2]"
    return sequence(short_text("the guest's name as text"), expects, maxItems=most)


_LOWER: dict[str, Any] = {
    "type": "object",
    "minProperties": 1,
    "patternProperties": {
        SIDE_PATTERN: text(
            "a device of this host, such as eth0", DEVICE_PATTERN, "a name of a device"
        )
    },
    "additionalProperties": False,
    "x-keys": "names of sides, up to 5 small letters or digits, such as {in: eth0, out: eth1}",
    "x-expects": "a mapping such as {in: eth0, out: eth1}",
}
_COMMON: dict[str, Any] = {
    "name": text(
        "a small letter, then up to 8 small letters, digits or _", NAME_PATTERN, "a name of a group"
    ),
    "kind": choice(*KINDS),
    "lower": _LOWER,
}
_SIDES = sequence(
    text("a side that stands under lower", SIDE_PATTERN, "a name of a side"),
    "names of sides such as [in, out]",
)
_TIME = text("a time such as 2s", TIME_PATTERN, "a time")
_HEALTH = mapping(
    "a mapping such as {leave: 2s, return: 10s}", {"leave": _TIME, "return": _TIME}, ("leave",)
)
_KEYS: dict[str, dict[str, Any]] = {
    PVR: {
        **_COMMON,
        "members": _guests(256),
        "template": short_text("the name of a libvirt guest that is shut off"),
        "overlays": text(
            "an absolute path such as /var/lib/libvirt/images", "^/", "an absolute path"
        ),
    },
    MSR: {
        **_COMMON,
        "lower": {
            **_LOWER,
            "maxProperties": MOST_SIDES,
            "x-expects": f"up to {MOST_SIDES} sides, such as {{in: eth0, out: eth1}}",
        },
        "balancers": by_name(_SIDES, "a mapping such as {lb1: [in], lb2: [out]}", minProperties=1),
        "routers": _guests(MOST_ROUTERS),
        "links": choice(*LINKS),
        "health": _HEALTH,
    },
}
_OPTIONAL = ("links", "health", "template", "overlays")


def schema(kind: str) -> dict[str, Any]:
    """The schema of the files of one kind."""
    keys = _KEYS[kind]
    required = [key for key in keys if key not in _OPTIONAL]
    words = f"{', '.join(required[:-1])} and {required[-1]}"
    group = mapping(f"the keys {words}", keys, tuple(required))
    return mapping(f"group: with the keys {words} below it", {"group": group}, ("group",))
