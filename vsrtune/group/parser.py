# SPDX-License-Identifier: GPL-2.0-or-later
"""Parses group files: YAML text to a frozen Group, every error with its line.

A group is several guests that are one router. pvr.py and msr.py judge everything that depends on
the host (guests that run, devices that exist).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vsrtune.core.errors import PolicyError, VsrtuneError
from vsrtune.core.text import parse_time, time_text
from vsrtune.group.health import HealthCheck
from vsrtune.group.schema import BRIDGE, KINDS, MSR, PVR, schema
from vsrtune.policy.model import WITHOUT_LIBVIRT, PolicyErrors
from vsrtune.policy.validation import line_of, located, structural
from vsrtune.policy.yaml_reader import KeyPath, read

# Seconds. A router that returns sooner than it needs to configure itself loses frames.
_HEALTH_BOUNDS = {"leave": (1, 60), "return": (1, 600)}
_RETURN = "10s"

# Key path below ``group``, what is wrong, and a hint.
_Mistake = tuple[KeyPath, str, str]


@dataclass(frozen=True, slots=True)
class Group:
    """One group file. ``members`` are libvirt names in the order in which they are plugged in (of
    a multistage router its routers), ``lowers`` pairs of a side's name and the device below it,
    ``balancers`` pairs of a libvirt name and the sides that it serves, ``links`` the kind of links
    between balancers and routers (schema.LINKS). Missing members are made from ``template``, with
    their overlays in the directory ``overlays``, "" for beside the template's disks. ``health`` is
    None when nobody watches the routers."""

    path: str
    name: str
    members: tuple[str, ...]
    lowers: tuple[tuple[str, str], ...]
    kind: str
    lines: Mapping[KeyPath, int]
    balancers: tuple[tuple[str, tuple[str, ...]], ...]
    links: str
    template: str
    overlays: str
    health: HealthCheck | None = None

    def at(self, *keys: str) -> str:
        """``file:line`` of a key, or of the nearest key above it that is written."""
        return f"{self.path}:{line_of(self.lines, keys)}"

    def at_member(self, number: int) -> str:
        """``file:line`` of a member."""
        return self.at("group", _members(self.kind), str(number))

    def device(self, side: str) -> str:
        """The name of the device of a side that all members of a pvr share."""
        return f"{self.name}-{side}"

    def balancer(self, side: str) -> str:
        """The balancer that serves a side of a multistage router."""
        return next(name for name, sides in self.balancers if side in sides)


def parse(text: str, path: str) -> Group:
    """Read one group file's text; ``path`` is used in messages and ``Group.path``. Raises
    PolicyErrors with every error found."""
    document = read(text, path, "group")
    if document.errors:
        raise PolicyErrors(document.errors)
    if not isinstance(document.data, dict):
        what, hint = "the file holds no group", "write group: and its keys below (docs/groups.md)"
        raise PolicyErrors([PolicyError(what, where=f"{path}:1", hint=hint)])
    inside: Any = document.data.get("group")
    kind = _kind(inside)
    errors = [problem for _, problem in structural(document, path, schema(kind))]
    if not errors:
        found = [(("group", *keys), what, hint) for keys, what, hint in _mistakes(kind, inside)]
        errors += located(found, document.lines, path)
    if errors:
        raise PolicyErrors(errors)
    return Group(
        path=path,
        name=inside["name"],
        members=tuple(inside[_members(kind)]),
        lowers=tuple(inside["lower"].items()),
        kind=kind,
        lines=document.lines,
        balancers=tuple((name, tuple(of)) for name, of in inside.get("balancers", {}).items()),
        links=inside.get("links", BRIDGE),
        template=inside.get("template", ""),
        overlays=inside.get("overlays", ""),
        health=_health(inside["health"]) if "health" in inside else None,
    )


def _health(found: dict[str, str]) -> HealthCheck:
    return HealthCheck(
        parse_time(found["leave"]) / 1e9, parse_time(found.get("return", _RETURN)) / 1e9
    )


def _kind(inside: object) -> str:
    """The kind against whose keys the file is checked, also when it names no known kind."""
    if not isinstance(inside, dict):
        return PVR
    if inside.get("kind") in KINDS:
        return str(inside["kind"])
    return MSR if {"balancers", "routers", "links"} & set(inside) else PVR


def _members(kind: str) -> str:
    """The key of the members."""
    return "routers" if kind == MSR else "members"


def _mistakes(kind: str, inside: dict[str, Any]) -> Iterator[_Mistake]:
    """Errors that no schema finds."""
    key = _members(kind)
    members: list[str] = inside[key]
    balancers: dict[str, list[str]] = inside.get("balancers", {})
    for number, name in enumerate(members):
        if name in members[:number]:
            yield (key, str(number)), f"{name!r} stands here twice", "name each guest once"
    guests = [(key, str(number), name) for number, name in enumerate(members)]
    for above, below, name in [*guests, *(("balancers", name, name) for name in balancers)]:
        if name.startswith(WITHOUT_LIBVIRT):
            what = "plain QEMU cannot be given other interfaces"
            yield (above, below), what, "name libvirt guests"
    sides: dict[str, str] = {}
    for side, lower in inside["lower"].items():
        if lower in sides.values():
            what = f"{lower} is the device of another side too"
            yield ("lower", side), what, "a device for each side"
        sides[side] = lower
    if inside.get("template") in members:
        what = "the template cannot be a member, for it may not run beside its clones"
        yield ("template",), what, "name another guest"
    for which, text in inside.get("health", {}).items():
        yield from _bounded(which, text)
    if kind == MSR:
        yield from _balancing(balancers, members, list(sides))


def _bounded(which: str, text: str) -> Iterator[_Mistake]:
    low, high = _HEALTH_BOUNDS[which]
    try:
        time = parse_time(text)
    except VsrtuneError as error:
        yield ("health", which), error.what, error.hint
        return
    if not low * 10**9 <= time <= high * 10**9:
        hint = f"a time from {low}s to {high}s"
        yield ("health", which), f"{time_text(time)} is outside the bounds", hint


def _balancing(
    balancers: dict[str, list[str]], routers: list[str], known: list[str]
) -> Iterator[_Mistake]:
    """Errors unless every side has exactly one balancer, which is no router."""
    served: dict[str, str] = {}
    for name, sides in balancers.items():
        if name in routers:
            what = f"{name!r} is a router of the group too"
            yield ("balancers", name), what, "two guests are needed"
        for number, side in enumerate(sides):
            place = ("balancers", name, str(number))
            if side not in known:
                what = f"there is no side {side!r} under lower"
                yield place, what, f"the sides are {', '.join(known)}"
            elif side in served:
                what = f"the side {side!r} is served by {served[side]!r} already"
                yield place, what, "one balancer for each side"
            served.setdefault(side, name)
    for side in known:
        if side not in served:
            what = f"no balancer serves the side {side!r}"
            yield ("balancers",), what, "name it once, as in {lb1: [in, out]}"
