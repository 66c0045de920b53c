# SPDX-License-Identifier: GPL-2.0-or-later
"""Values for guests that are made from a template: the guests, the inputs of their plan, and its
steps (see steps.py), each of which makes something or takes it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar


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
    """A guest that vsrtune made for a group, and every file that it made for it. ``uri`` names its
    libvirt, "" in ledgers that do not tell."""

    group: str
    guest: str
    uuid: str
    template: str
    files: tuple[File, ...]
    uri: str = ""


@dataclass(frozen=True, slots=True)
class Template:
    """A persistent definition, secrets included, of which clones are made. ``saved``: libvirt
    keeps its memory, so its disks are those of a guest in the middle of its work. ``machine`` is
    this host's machine id, which makes UUIDs and MACs the same in each plan and different on each
    host. ``taken`` tells whether there is a file of that path."""

    name: str
    uuid: str
    definition: str
    saved: bool = False
    machine: str = ""
    taken: Callable[[str], bool] = lambda _path: False


@dataclass(frozen=True, slots=True)
class CloneFiles:
    """Make the files of a clone's own, none of which may exist; or, unless ``on``, remove those
    that were made."""

    guest: str
    files: tuple[File, ...]
    on: bool = True
    kind: ClassVar[str] = "clone-files"

    def __str__(self) -> str:
        if self.on:
            return f"make for {self.guest}: {', '.join(map(str, self.files))}"
        return f"remove of {self.guest}: {', '.join(f.path for f in self.files)}"


@dataclass(frozen=True, slots=True)
class CloneDefinition:
    """Define a new guest; or, unless ``on``, undefine it."""

    guest: str
    uuid: str
    template: str
    xml: str
    on: bool = True
    kind: ClassVar[str] = "clone-definition"

    def __str__(self) -> str:
        if self.on:
            return f"define {self.guest} as a clone of {self.template} (UUID {self.uuid})"
        return f"undefine {self.guest}"


@dataclass(frozen=True, slots=True)
class CloneRun:
    """Start the guest, and check that it runs; or, unless ``on``, end it at once, as `virsh
    destroy` does."""

    guest: str
    uuid: str
    on: bool = True
    kind: ClassVar[str] = "clone-run"

    def __str__(self) -> str:
        return f"{'start' if self.on else 'end'} {self.guest}"


CloneStep = CloneFiles | CloneDefinition | CloneRun
