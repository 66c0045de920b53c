"""A template, as the planning of its clones wants it."""

from __future__ import annotations

from pathlib import Path

from vsrtune import overlays
from vsrtune.attach_host import LiveHost
from vsrtune.clone_model import Cloning, Template
from vsrtune.core.errors import ObserveError, VanishedError

MACHINE_ID = Path("/etc/machine-id")


def cloning(host: LiveHost, name: str) -> Cloning | None:
    """None when there is no guest of that name that is defined. Raises VsrtuneError."""
    found = next((g for g in host.guests() if g.name == name), None)
    if found is None:
        return None
    try:
        text = host.definition(found.uuid)
        template = Template(found.name, found.uuid, text, host.saved(found.uuid))
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
    return Cloning(template, machine, overlays.there)
