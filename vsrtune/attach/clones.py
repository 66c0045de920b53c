# SPDX-License-Identifier: GPL-2.0-or-later
"""Makes and ends the clones of a switch.

Every method first checks what exists, so all of them may be repeated.
"""

from __future__ import annotations

from vsrtune.attach.host import LiveHost
from vsrtune.attach.libvirt_hotplug import RefusedError
from vsrtune.attach.plan.clone_model import (
    Clone,
    CloneDefinition,
    CloneFiles,
    CloneRun,
    CloneStep,
    File,
)
from vsrtune.core.errors import VanishedError
from vsrtune.model import domain_xml


class Clones:
    """The clones of a host."""

    def __init__(self, host: LiveHost) -> None:
        self._host = host

    def do(self, step: CloneStep) -> None:
        """Carry out one step. Raises RefusedError if it has done nothing, otherwise WriteError."""
        match step:
            case CloneFiles(on=True):
                self._make(step.files)
            case CloneFiles():
                for file in step.files:
                    self._host.remove_file(file)
            case CloneDefinition(on=True):
                self._host.define(step.xml, step.guest)
            case CloneDefinition():
                self._host.undefine_guest(step.uuid)
            case CloneRun(on=True):
                self._host.start_guest(step.uuid)
            case CloneRun():
                self._host.stop_guest(step.uuid)

    def end(self, clone: Clone) -> list[str]:
        """Undefine a clone and remove its files. Returns what was done. Leaves a file that is not
        the one that was made, or that another guest names."""
        self._host.stop_guest(clone.uuid)
        self._host.undefine_guest(clone.uuid)
        did = [f"undefined {clone.guest}"]
        for file in clone.files:
            user = self._user(file)
            if user:
                did.append(f"left {file.path}: {user} names it")
                continue
            there = self._host.file_there(file.path)
            left = self._host.remove_file(file)
            if left or there:
                did.append(left or f"removed {file.path}")
        return did

    def _make(self, files: tuple[File, ...]) -> None:
        for file in files:
            if self._host.file_there(file.path):
                raise RefusedError(
                    "there is a file of that name", where=file.path,
                    hint="remove it if nothing needs it, or name another directory (overlays:)",
                )  # fmt: skip
        for file in files:
            self._host.make_file(file)

    def _user(self, file: File) -> str:
        """The guest whose definition names the file, "" when there is none."""
        for guest in self._host.guests():
            try:
                if file.path in domain_xml.own_files(self._host.definition(guest.uuid)):
                    return guest.name
            except VanishedError:
                continue
        return ""
