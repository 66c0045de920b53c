"""Values for guests that are made from a template: the guests, and the inputs of their plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class File:
    """A file of a clone's own: a qcow2 overlay of ``base``, which has the format ``format``, or a
    copy of it if that is ""."""

    path: str
    base: str
    format: str = ""

    def __str__(self) -> str:
        what = f"{self.format} overlay of" if self.format else "copy of"
        return f"{self.path} ({what} {self.base})"


@dataclass(frozen=True, slots=True)
class Clone:
    """A guest that vsrtune made for a group, and every file that it made for it."""

    group: str
    guest: str
    uuid: str
    template: str
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A persistent definition, secrets included. ``saved``: libvirt keeps its memory, so its
    disks are those of a guest in the middle of its work."""

    name: str
    uuid: str
    definition: str
    saved: bool = False


@dataclass(frozen=True, slots=True)
class Cloning:
    """The inputs for a plan of clones. ``machine`` is this host's machine id, which makes UUIDs
    and MACs the same in each plan and different on each host. ``taken`` tells whether there is a
    file of that path."""

    template: Template
    machine: str
    taken: Callable[[str], bool] = lambda _path: False
