# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads the host for the planning of a switch: guests, links, and our devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from vsrtune.attach.host import LiveHost
from vsrtune.attach.ledger import ORIGIN
from vsrtune.attach.plan.clone_model import Clone, Template
from vsrtune.attach.plan.model import AttachHostState
from vsrtune.attach.plan.steps import Origin
from vsrtune.core.codec import decode
from vsrtune.core.errors import ObserveError, VanishedError
from vsrtune.execute.journal import read_entries
from vsrtune.execute.ledger import read_pending
from vsrtune.host.filesystem import boot_id
from vsrtune.model.host import Link
from vsrtune.model.targets import TxQueueLen


def survey(
    host: LiveHost,
    origins: Collection[Origin],
    journal: Path,
    clones: Iterable[Clone] = (),
    template: Template | None = None,
) -> AttachHostState:
    """Read the host. Raises VsrtuneError."""
    try:
        links = host.links().values()
    except OSError as error:
        raise ObserveError(
            f"network devices cannot be read: {error.strerror}", hint="run as root"
        ) from error
    texts = {clone: _definition(host, clone) for clone in clones}
    return AttachHostState(host.guests(), links, origins, _kept(journal), texts, template)


def known_origins(ledger: Path) -> tuple[Origin, ...]:
    """The Origins of our devices in the ledger, read without its lock. Raises VsrtuneError."""
    return tuple(decode(Origin, e.data) for e in read_pending(ledger) if e.kind == ORIGIN)


def _definition(host: LiveHost, clone: Clone) -> str:
    try:
        return host.definition(clone.uuid)
    except VanishedError:
        return ""


def _kept(journal: Path) -> Callable[[Link], int]:
    """A function that gives the queue length for a new device: the original of a length that
    vsrtune had set, because the journal forgets it with the old device; otherwise the present
    length."""
    originals: dict[tuple[int, object], int] = {}
    for entry in read_entries(journal, boot_id()):
        if isinstance(entry.target, TxQueueLen) and isinstance(entry.original, int):
            originals[entry.target.ifindex, entry.written] = entry.original
    return lambda link: originals.get((link.index, link.queue), link.queue)


MACHINE_ID = Path("/etc/machine-id")


def template_of(host: LiveHost, name: str) -> Template | None:
    """The guest of that name as a template; None when it is not defined. Raises VsrtuneError."""
    found = next((g for g in host.guests() if g.name == name), None)
    if found is None:
        return None
    try:
        text, saved = host.definition(found.uuid), host.saved(found.uuid)
    except VanishedError:
        return None
    try:
        machine = MACHINE_ID.read_text().strip()
    except OSError as error:
        raise ObserveError(
            "the machine id cannot be read, of which the UUIDs and MACs of clones are made",
            where=str(MACHINE_ID),
            hint="systemd-machine-id-setup",
        ) from error
    return Template(found.name, found.uuid, text, saved, machine, os.path.lexists)
