"""The steps that make a guest from a template, and remove it: see steps.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vsrtune.attach.plan.clone_model import File


@dataclass(frozen=True, slots=True)
class MakeFiles:
    """Make the files of a clone's own, none of which may exist."""

    guest: str
    files: tuple[File, ...]
    kind: ClassVar[str] = "make-files"

    def inverse(self) -> CloneStep:
        return RemoveFiles(self.guest, self.files)

    def __str__(self) -> str:
        return f"make for {self.guest}: {', '.join(map(str, self.files))}"


@dataclass(frozen=True, slots=True)
class RemoveFiles:
    """Remove those of the files that MakeFiles made."""

    guest: str
    files: tuple[File, ...]
    kind: ClassVar[str] = "remove-files"

    def inverse(self) -> CloneStep:
        return MakeFiles(self.guest, self.files)

    def __str__(self) -> str:
        return f"remove of {self.guest}: {', '.join(f.path for f in self.files)}"


@dataclass(frozen=True, slots=True)
class DefineGuest:
    """Define a new guest."""

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
    """Undefine the guest."""

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
    """Start the guest, and check that it runs."""

    guest: str
    uuid: str
    kind: ClassVar[str] = "start-guest"

    def inverse(self) -> CloneStep:
        return StopGuest(self.guest, self.uuid)

    def __str__(self) -> str:
        return f"start {self.guest}"


@dataclass(frozen=True, slots=True)
class StopGuest:
    """End the guest at once, as `virsh destroy` does."""

    guest: str
    uuid: str
    kind: ClassVar[str] = "stop-guest"

    def inverse(self) -> CloneStep:
        return StartGuest(self.guest, self.uuid)

    def __str__(self) -> str:
        return f"end {self.guest}"


CloneStep = MakeFiles | RemoveFiles | DefineGuest | UndefineGuest | StartGuest | StopGuest
