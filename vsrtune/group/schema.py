# SPDX-License-Identifier: GPL-2.0-or-later
"""The JSON Schemas of group files, one for each kind. docs/groups.md describes the keys."""

from __future__ import annotations

from typing import Any

from vsrtune.policy.schema import DEVICE_PATTERN

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


def _text(expects: str, what: str = "", **limits: Any) -> dict[str, Any]:
    """A text; ``what`` says what a value that does not match the pattern is not."""
    return {"type": "string", "x-expects": expects, "x-pattern": what, **limits}


def _guests(most: int) -> dict[str, Any]:
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": most,
        "x-expects": f"up to {most} guests such as [vr1, vr2]",
        "items": _text("the guest's name as text", minLength=1, maxLength=255),
    }


def _one_of(*names: str) -> dict[str, Any]:
    words = ", ".join(names[:-1])
    return {"enum": list(names), "x-expects": f"{words} or {names[-1]}"}


_LOWER: dict[str, Any] = {
    "type": "object",
    "minProperties": 1,
    "patternProperties": {
        SIDE_PATTERN: _text(
            "a device of this host, such as eth0", "a name of a device", pattern=DEVICE_PATTERN
        )
    },
    "additionalProperties": False,
    "x-keys": "names of sides, up to 5 small letters or digits, such as {in: eth0, out: eth1}",
    "x-expects": "a mapping such as {in: eth0, out: eth1}",
}
_COMMON: dict[str, Any] = {
    "name": _text(
        "a small letter, then up to 8 small letters, digits or _",
        "a name of a group",
        pattern=NAME_PATTERN,
    ),
    "kind": _one_of(*KINDS),
    "lower": _LOWER,
}
_KEYS: dict[str, dict[str, Any]] = {
    PVR: {
        **_COMMON,
        "members": _guests(256),
        "template": _text(
            "the name of a libvirt guest that is shut off", minLength=1, maxLength=255
        ),
        "overlays": _text(
            "an absolute path such as /var/lib/libvirt/images", "an absolute path", pattern="^/"
        ),
    },
    MSR: {
        **_COMMON,
        "lower": {
            **_LOWER,
            "maxProperties": MOST_SIDES,
            "x-expects": f"up to {MOST_SIDES} sides, such as {{in: eth0, out: eth1}}",
        },
        "balancers": {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {
                "type": "array",
                "minItems": 1,
                "x-expects": "names of sides such as [in, out]",
                "items": _text(
                    "a side that stands under lower", "a name of a side", pattern=SIDE_PATTERN
                ),
            },
            "x-expects": "a mapping such as {lb1: [in], lb2: [out]}",
        },
        "routers": _guests(MOST_ROUTERS),
        "links": _one_of(*LINKS),
    },
}
_OPTIONAL = ("links", "template", "overlays")


def schema(kind: str) -> dict[str, Any]:
    """The schema of the files of one kind."""
    keys = _KEYS[kind]
    required = [key for key in keys if key not in _OPTIONAL]
    words = f"{', '.join(required[:-1])} and {required[-1]}"
    return {
        "type": "object",
        "required": ["group"],
        "additionalProperties": False,
        "x-expects": f"group: with the keys {words} below it",
        "properties": {
            "group": {
                "type": "object",
                "required": required,
                "additionalProperties": False,
                "x-expects": f"the keys {words}",
                "properties": keys,
            }
        },
    }
