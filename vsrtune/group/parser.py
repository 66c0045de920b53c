"""Parses group files: YAML text to a frozen Group, every error with its line.

A group is several guests that are one router. pvr.py and msr.py judge everything that depends on
the host (guests that run, devices that exist).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vsrtune.core.errors import PolicyError
from vsrtune.group.schema import BRIDGE, KINDS, MSR, PVR, schema
from vsrtune.policy.model import PolicyErrors
from vsrtune.policy.validation import line_of, structural
from vsrtune.policy.yaml_reader import KeyPath, dotted, read

_Error = Callable[[KeyPath, str, str], PolicyError]


@dataclass(frozen=True, slots=True)
class Group:
    """One group file. ``members`` are libvirt names in the order in which they are plugged in (of
    a multistage router its routers), ``lowers`` pairs of a side's name and the device below it,
    ``balancers`` pairs of a libvirt name and the sides that it serves, ``links`` the kind of links
    between balancers and routers (schema.LINKS). Missing members are made from ``template``, with
    their overlays in the directory ``overlays``, "" for beside the template's disks."""

    path: str
    name: str
    members: tuple[str, ...]
    lowers: tuple[tuple[str, str], ...]
    kind: str = PVR
    lines: tuple[tuple[KeyPath, int], ...] = ()
    balancers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    links: str = ""
    template: str = ""
    overlays: str = ""

    def at(self, *keys: str) -> str:
        """``file:line`` of a key, or of the nearest key above it that is written."""
        return f"{self.path}:{line_of(dict(self.lines), keys)}"

    def at_member(self, number: int) -> str:
        """``file:line`` of a member."""
        return self.at("group", "routers" if self.kind == MSR else "members", str(number))

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
    data = document.data

    def error(keys: KeyPath, what: str, hint: str) -> PolicyError:
        where = f"{path}:{line_of(document.lines, keys)}"
        return PolicyError(f"{dotted(keys)}: {what}", where=where, hint=hint)

    if not isinstance(data, dict):
        what, hint = "the file holds no group", "write group: and its keys below (docs/groups.md)"
        raise PolicyErrors([PolicyError(what, where=f"{path}:1", hint=hint)])
    inside: Any = data.get("group")
    kind = _kind(inside)
    errors = [problem for _, problem in structural(document, path, schema(kind))]
    if errors:
        raise PolicyErrors(errors)
    key = "routers" if kind == MSR else "members"
    members, lowers = tuple(inside[key]), tuple(inside["lower"].items())
    errors = [*_guests(key, members, error), *_lowers(lowers, error)]
    balancers = tuple((name, tuple(sides)) for name, sides in inside.get("balancers", {}).items())
    if kind == MSR:
        errors += _balancers(balancers, members, lowers, error)
    template = inside.get("template", "")
    if template in members:
        what = "the template cannot be a member, for it may not run beside its clones"
        errors.append(error(("group", "template"), what, "name another guest"))
    if errors:
        raise PolicyErrors(errors)
    links = inside.get("links", BRIDGE) if kind == MSR else ""
    lines = tuple(document.lines.items())
    return Group(
        path, inside["name"], members, lowers, kind, lines, balancers, links,
        template, inside.get("overlays", ""),
    )  # fmt: skip


def _kind(inside: object) -> str:
    """The kind against whose keys the file is checked, also when it names no known kind."""
    if not isinstance(inside, dict):
        return PVR
    if inside.get("kind") in KINDS:
        return str(inside["kind"])
    return MSR if {"balancers", "routers", "links"} & set(inside) else PVR


def _guests(key: str, names: tuple[str, ...], error: _Error) -> Iterator[PolicyError]:
    for number, name in enumerate(names):
        here = ("group", key, str(number))
        if name in names[:number]:
            yield error(here, f"{name!r} stands here twice", "name each guest once")
        yield from _libvirt(here, name, error)


def _libvirt(here: KeyPath, name: str, error: _Error) -> Iterator[PolicyError]:
    if name.startswith("qemu:"):
        yield error(here, "plain QEMU cannot be given other interfaces", "name libvirt guests")


def _lowers(lowers: tuple[tuple[str, str], ...], error: _Error) -> Iterator[PolicyError]:
    for number, (side, lower) in enumerate(lowers):
        if lower in [other for _, other in lowers[:number]]:
            what = f"{lower} is the device of another side too"
            yield error(("group", "lower", side), what, "a device for each side")


def _balancers(
    balancers: tuple[tuple[str, tuple[str, ...]], ...],
    routers: tuple[str, ...],
    lowers: tuple[tuple[str, str], ...],
    error: _Error,
) -> Iterator[PolicyError]:
    """Errors unless every side has exactly one balancer, which is no router."""
    known = [side for side, _ in lowers]
    served: dict[str, str] = {}
    for name, sides in balancers:
        here = ("group", "balancers", name)
        yield from _libvirt(here, name, error)
        if name in routers:
            yield error(here, f"{name!r} is a router of the group too", "two guests are needed")
        for number, side in enumerate(sides):
            place = (*here, str(number))
            if side not in known:
                what = f"there is no side {side!r} under lower"
                yield error(place, what, f"the sides are {', '.join(known)}")
            elif side in served:
                what = f"the side {side!r} is served by {served[side]!r} already"
                yield error(place, what, "one balancer for each side")
            served.setdefault(side, name)
    for side in known:
        if side not in served:
            what = f"no balancer serves the side {side!r}"
            hint = "name it once, as in {lb1: [in, out]}"
            yield error(("group", "balancers"), what, hint)
