"""Group files: YAML text to a frozen Group, every error with its line.

A group is several guests that are one router. What depends on the host (guests that run,
devices that exist) is ``group_plan``'s to judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vsrtune.errors import PolicyError
from vsrtune.policy import PolicyErrors
from vsrtune.policy_messages import line_of, structural
from vsrtune.policy_schema import DEVICE_PATTERN
from vsrtune.policy_yaml import KeyPath, dotted, read

PVR = "pvr"
# With a dash between them a device's name, of which the kernel takes 15 characters.
NAME_PATTERN = r"^[a-z][a-z0-9_]{0,8}$"
SIDE_PATTERN = r"^[a-z][a-z0-9]{0,4}$"

# Of every kind whose members can be made from a definition.
CLONING: dict[str, Any] = {
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

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://vsrtune.invalid/schema/group.json",
    "title": "vsrtune group",
    "type": "object",
    "required": ["group"],
    "additionalProperties": False,
    "x-expects": "group: with the keys name, kind, members and lower below it",
    "properties": {
        "group": {
            "description": "Guests that are one router together.",
            "type": "object",
            "required": ["name", "kind", "members", "lower"],
            "additionalProperties": False,
            "x-expects": "the keys name, kind, members and lower",
            "properties": {
                "name": {
                    "description": "The group's name; its devices are called NAME-SIDE.",
                    "type": "string",
                    "pattern": NAME_PATTERN,
                    "x-pattern": "a name of a group",
                    "x-expects": "a small letter, then up to 8 small letters, digits or _",
                },
                "kind": {
                    "description": "pvr: Parallel Virtual Routers, which share one "
                    "napi_macvtap device on each side.",
                    "enum": [PVR],
                    "x-expects": PVR,
                },
                "members": {
                    "description": "libvirt guests, by name. The MACs of the first are those of "
                    "the group, the template's when it is made from one.",
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 256,
                    "x-expects": "guests such as [vr1, vr2]",
                    "items": {
                        "type": "string",
                        "minLength": 1,
                        "maxLength": 255,
                        "x-expects": "the guest's name as text",
                    },
                },
                **CLONING,
                "lower": {
                    "description": "The device below each side of the router.",
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
                    "x-keys": "names of sides, up to 5 small letters or digits, such as "
                    "{in: eth0, out: eth1}",
                    "x-expects": "a mapping such as {in: eth0, out: eth1}",
                },
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class Group:
    """One group file. ``members`` are libvirt names in the order in which they are plugged
    in, ``lowers`` pairs of a side's name and the device below it. Members that are not there
    are made from ``template``, their overlays in the directory ``overlays``, "" for beside
    the template's disks."""

    path: str
    name: str
    members: tuple[str, ...]
    lowers: tuple[tuple[str, str], ...]
    kind: str = PVR
    lines: tuple[tuple[KeyPath, int], ...] = ()
    template: str = ""
    overlays: str = ""

    def at(self, *keys: str) -> str:
        """``file:line`` of a key, or of the nearest key above it that is written."""
        return f"{self.path}:{line_of(dict(self.lines), keys)}"

    def device(self, side: str) -> str:
        """The name of the device of a side."""
        return f"{self.name}-{side}"


def parse(text: str, path: str) -> Group:
    """Read one group file's text; ``path`` is used in messages and ``Group.path``. Raises
    PolicyErrors with every error found."""
    document = read(text, path, "group")
    if document.errors:
        raise PolicyErrors(document.errors)
    data = document.data

    def error(keys: KeyPath, what: str, hint: str) -> PolicyError:
        where = f"{path}:{line_of(document.lines, keys)}"
        return PolicyError(f"{dotted(keys)}: {what}", where=where, hint=hint)

    if not isinstance(data, dict):
        what, hint = "the file holds no group", "write group: and its keys below (docs/groups.md)"
        raise PolicyErrors([PolicyError(what, where=f"{path}:1", hint=hint)])
    inside = data.get("group")
    if isinstance(inside, dict) and inside.get("kind") == "msr":
        # Its other keys are not known yet, so nothing is said of them.
        what = "the multistage router (msr) is not supported yet"
        raise PolicyErrors([error(("group", "kind"), what, f"write {PVR}, or wait")])
    errors = [problem for _, problem in structural(document, path, SCHEMA)]
    if errors:
        raise PolicyErrors(errors)
    members, lowers = tuple(inside["members"]), tuple(inside["lower"].items())  # type: ignore[index]
    for number, member in enumerate(members):
        here = ("group", "members", str(number))
        if member in members[:number]:
            errors.append(error(here, f"{member!r} stands here twice", "name each guest once"))
        if member.startswith("qemu:"):
            what = "plain QEMU cannot be given other interfaces"
            errors.append(error(here, what, "name libvirt guests"))
    if inside.get("template") in members:  # type: ignore[union-attr]
        what = "the template cannot be a member, for it may not run beside its clones"
        errors.append(error(("group", "template"), what, "name another guest"))
    for number, (side, lower) in enumerate(lowers):
        if lower in [other for _, other in lowers[:number]]:
            what = f"{lower} is the device of another side too"
            errors.append(error(("group", "lower", side), what, "a device for each side"))
    if errors:
        raise PolicyErrors(errors)
    lines = tuple(document.lines.items())
    cloning = (inside.get("template", ""), inside.get("overlays", ""))  # type: ignore[union-attr]
    return Group(path, inside["name"], members, lowers, inside["kind"], lines, *cloning)  # type: ignore[index]
