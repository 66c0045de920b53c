"""The steps that make a guest from a template, and unmake it: see ``attach_steps``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vsrtune.attach.plan.clone_model import File


@dataclass(frozen=True, slots=True)
class MakeFiles:
    """Make the files of a clone's own, none of which may be there."""

    guest: str
    files: tuple[File, ...]
    kind: ClassVar[str] = "make-files"

    def inverse(self) -> CloneStep:
        return RemoveFiles(self.guest, self.files)

    def __str__(self) -> str:
        return f"make for {self.guest}: {', '.join(map(str, self.files))}"


@dataclass(frozen=True, slots=True)
class RemoveFiles:
    """Remove them, as far as they are what MakeFiles made."""

    guest: str
    files: tuple[File, ...]
    kind: ClassVar[str] = "remove-files"

    def inverse(self) -> CloneStep:
        return MakeFiles(self.guest, self.files)

    def __str__(self) -> str:
        return f"remove of {self.guest}: {', '.join(f.path for f in self.files)}"


@dataclass(frozen=True, slots=True)
class DefineGuest:
    """Define a guest that is not there."""

    guest: str
    uuid: str
    template: str
    xml: str
    kind: ClassVar[str] = "define-guest"

    def inverse(self) -> CloneStep:
        return UndefineGuest(self.guest, self.uuid, self.template, self.xml)

    def __str__(self) -> str:
        return f"define {self.guest} as a clone of {self.template} (UUID {self.uuid})"


@dataclass(frozen=True, slots=True)
class UndefineGuest:
    """Undefine it."""

    guest: str
    uuid: str
    template: str
    xml: str
    kind: ClassVar[str] = "undefine-guest"

    def inverse(self) -> CloneStep:
        return DefineGuest(self.guest, self.uuid, self.template, self.xml)

    def __str__(self) -> str:
        return f"undefine {self.guest}"


@dataclass(frozen=True, slots=True)
class StartGuest:
    """Start it, and see that it runs."""

    guest: str
    uuid: str
    kind: ClassVar[str] = "start-guest"

    def inverse(self) -> CloneStep:
        return StopGuest(self.guest, self.uuid)

    def __str__(self) -> str:
        return f"start {self.guest}"


@dataclass(frozen=True, slots=True)
class StopGuest:
    """End it at once, as `virsh destroy` does."""

    guest: str
    uuid: str
    kind: ClassVar[str] = "stop-guest"

    def inverse(self) -> CloneStep:
        return StartGuest(self.guest, self.uuid)

    def __str__(self) -> str:
        return f"end {self.guest}"


CloneStep = MakeFiles | RemoveFiles | DefineGuest | UndefineGuest | StartGuest | StopGuest
