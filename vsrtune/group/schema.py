"""The JSON Schemas of group files, one for each kind of group."""

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
# of the router (msr_links).
MOST_SIDES = 9
MOST_ROUTERS = 99

_GUEST = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "x-expects": "the guest's name as text",
}
_SIDE_KEYS = "names of sides, up to 5 small letters or digits, such as {in: eth0, out: eth1}"


def _guests(description: str, most: int) -> dict[str, Any]:
    return {
        "description": description,
        "type": "array",
        "minItems": 1,
        "maxItems": most,
        "x-expects": f"up to {most} guests such as [vr1, vr2]",
        "items": _GUEST,
    }


def _common(lower: str, most_sides: int | None = None) -> dict[str, Any]:
    sides = {
        "description": lower,
        "type": "object",
        "minProperties": 1,
        "patternProperties": {
            SIDE_PATTERN: {
                "type": "string",
                "pattern": DEVICE_PATTERN,
                "x-pattern": "a name of a device",
                "x-expects": "a device of this host, such as eth0",
            }
        },
        "additionalProperties": False,
        "x-keys": _SIDE_KEYS,
        "x-expects": "a mapping such as {in: eth0, out: eth1}",
    }
    if most_sides is not None:
        sides["maxProperties"] = most_sides
        sides["x-expects"] = f"up to {most_sides} sides, such as {{in: eth0, out: eth1}}"
    return {
        "name": {
            "description": "The group's name; its devices' names begin with it.",
            "type": "string",
            "pattern": NAME_PATTERN,
            "x-pattern": "a name of a group",
            "x-expects": "a small letter, then up to 8 small letters, digits or _",
        },
        "kind": {
            "description": "pvr: Parallel Virtual Routers, which share one napi_macvtap device "
            "on each side. msr: a multistage router, balancers in front of routers.",
            "enum": list(KINDS),
            "x-expects": " or ".join(KINDS),
        },
        "lower": sides,
    }


# Keys of a kind whose members can be made from a definition.
_CLONES: dict[str, Any] = {
    "template": {
        "description": "A libvirt guest that is shut off; members that are not there are made "
        "from its definition, with overlays of its disks.",
        "type": "string",
        "minLength": 1,
        "maxLength": 255,
        "x-expects": "the name of a libvirt guest that is shut off",
    },
    "overlays": {
        "description": "The directory of the overlays; beside the template's disks when it is "
        "not given.",
        "type": "string",
        "pattern": "^/",
        "x-pattern": "an absolute path",
        "x-expects": "an absolute path such as /var/lib/libvirt/images",
    },
}

_KEYS: dict[str, dict[str, Any]] = {
    PVR: {
        **_common("The device below each side of the router."),
        "members": _guests(
            "libvirt guests, by name. The MACs of the first are those of the group, the template's "
            "when it is made from one.",
            256,
        ),
        **_CLONES,
    },
    MSR: {
        **_common("The device below each side of the router, for its balancer.", MOST_SIDES),
        "balancers": {
            "description": "The libvirt guests that stand on the lower devices, and the sides "
            "that each serves. Every side has one.",
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {
                "type": "array",
                "minItems": 1,
                "x-expects": "names of sides such as [in, out]",
                "items": {
                    "type": "string",
                    "pattern": SIDE_PATTERN,
                    "x-pattern": "a name of a side",
                    "x-expects": "a side that stands under lower",
                },
            },
            "x-expects": "a mapping such as {lb1: [in], lb2: [out]}",
        },
        "routers": _guests("The libvirt guests that route, in order.", MOST_ROUTERS),
        "links": {
            "description": "What is between balancers and routers, on each side: one bridge, or "
            "for each router a hub or a VLAN of its own.",
            "enum": list(LINKS),
            "x-expects": ", ".join(LINKS[:-1]) + f" or {LINKS[-1]}",
        },
    },
}
_OPTIONAL = ("links", "template", "overlays")


def schema(kind: str) -> dict[str, Any]:
    """The schema of the files of one kind."""
    keys = _KEYS[kind]
    required = [key for key in keys if key not in _OPTIONAL]
    words = f"{', '.join(required[:-1])} and {required[-1]}"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://vsrtune.invalid/schema/group-{kind}.json",
        "title": f"vsrtune group of kind {kind}",
        "type": "object",
        "required": ["group"],
        "additionalProperties": False,
        "x-expects": f"group: with the keys {words} below it",
        "properties": {
            "group": {
                "description": "Guests that are one router together.",
                "type": "object",
                "required": required,
                "additionalProperties": False,
                "x-expects": f"the keys {words}",
                "properties": keys,
            }
        },
    }
