# SPDX-License-Identifier: GPL-2.0-or-later
"""cpusets of cgroups, sorted by path.

Their number grows with the number of guests. The order makes it possible to find a cgroup, or to
replace those of one guest, without scanning those of all others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from vsrtune.core.cpuset import CpuSet


@dataclass(frozen=True, slots=True)
class CpusetGroup:
    """A cgroup whose cpuset matters to guests: one above or beside their threads, or one with a
    setting of its own. ``path`` is below /sys/fs/cgroup. ``cpus`` and ``exclusive`` are the raw
    texts of ``cpuset.cpus`` and ``cpuset.cpus.exclusive`` (None before 6.7, where the file does
    not exist). ``partition`` is the text of ``cpuset.cpus.partition``: member, root, isolated, or
    one of these followed by ``invalid (reason)``."""

    path: str
    cpus: str
    effective: CpuSet
    partition: str = "member"
    exclusive: str | None = None
    populated: bool = True

    @property
    def valid(self) -> bool:
        """True when it is a partition root that is in force."""
        return self.partition in ("root", "isolated")

    @property
    def special(self) -> bool:
        """True when it is a partition or has exclusive CPUs; cgroups inside it may be special
        too."""
        return bool(self.exclusive) or self.partition != "member"


def upwards(path: str) -> Iterator[str]:
    """The cgroup of that path and those above it, without the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def at_or_below(path: str, top: str) -> bool:
    """Whether that is the cgroup ``top`` or one inside it."""
    return f"{path}/".startswith(f"{top}/")


_path = attrgetter("path")


def find(groups: Sequence[CpusetGroup], path: str) -> CpusetGroup | None:
    """The cgroup of that path, or None."""
    at = bisect_left(groups, path, key=_path)
    return groups[at] if at < len(groups) and groups[at].path == path else None


def below(groups: Sequence[CpusetGroup], path: str) -> tuple[CpusetGroup, ...]:
    """The cgroup of that path and all cgroups inside it."""
    own = find(groups, path)
    first, last = _inside(groups, path)
    return (*((own,) if own is not None else ()), *groups[first:last])


def put(
    groups: Sequence[CpusetGroup], path: str, new: Sequence[CpusetGroup]
) -> tuple[CpusetGroup, ...]:
    """Replace all that ``below`` gives by ``new``, whose cgroups must be at or below ``path``."""
    own = [g for g in new if g.path == path]
    inside = sorted((g for g in new if g.path != path), key=_path)
    at = bisect_left(groups, path, key=_path)
    after = at + (at < len(groups) and groups[at].path == path)
    first, last = _inside(groups, path)
    return (*groups[:at], *own, *groups[after:first], *inside, *groups[last:])


def changed(
    groups: Sequence[CpusetGroup], changes: Mapping[str, CpusetGroup | None]
) -> tuple[CpusetGroup, ...]:
    """Replace or add cgroups by path; None removes one."""
    found = list(groups)
    for path, group in changes.items():
        at = bisect_left(found, path, key=_path)
        after = at + (at < len(found) and found[at].path == path)
        found[at:after] = [] if group is None else [group]
    return tuple(found)


def _inside(groups: Sequence[CpusetGroup], path: str) -> tuple[int, int]:
    """Where the cgroups inside a cgroup begin and end. Others may stand between it and them: "a.b"
    comes between "a" and "a/b"."""
    # "0" follows "/" in ASCII.
    return bisect_left(groups, f"{path}/", key=_path), bisect_left(groups, f"{path}0", key=_path)
