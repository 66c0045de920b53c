"""Plugs in the number of members of groups that a configuration asks for, and puts it back.

The steps are those of ``vsrtune group scale``, with its ledger: whoever switches next takes an
interrupted step back, and a put-back here does this first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vsrtune.attach.host import LiveHost
from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.plan.model import AttachHostState
from vsrtune.attach.survey import survey
from vsrtune.attach.transaction import Switcher
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.journal import DEFAULT_PATH as JOURNAL
from vsrtune.group import scale as group_scale
from vsrtune.group.members import members_of, of_group
from vsrtune.host.filesystem import boot_id

KIND = "scale"
# The ledger of `vsrtune group`.
LEDGER = Path("/var/lib/vsrtune/attach.jsonl")

# Members plugged in, by the group's name.
Members = Mapping[str, int]


def check(wanted: Members, uri: str) -> None:
    """Refuse numbers that these groups cannot have. Changes nothing; raises VsrtuneError."""
    if wanted:
        with _opened(uri) as (_, host):
            for name, count in wanted.items():
                group_scale.scale(name, count, host)


def present(names: Mapping[str, Any], uri: str) -> dict[str, int]:
    """How many members of each group are plugged in now. Raises VsrtuneError when these are
    not the first ones, because then no number would tell what to put back."""
    with _opened(uri) as (_, host):
        return {name: _first_ones(name, host) for name in names}


def scale(wanted: Members, uri: str) -> None:
    """Plug in this many members of each group. Raises VsrtuneError, with a group as it was."""
    with _opened(uri) as (switcher, host):
        for name, count in wanted.items():
            switch = group_scale.scale(name, count, host)
            if not switch.steps:
                continue
            failed = switcher.carry_out(switch).failed
            if failed:
                raise failed[0]


def put_back(data: Mapping[str, Any]) -> None:
    """Plug in as many members as before. A group that was deleted meanwhile needs nothing.
    Raises VsrtuneError."""
    uri = str(data["uri"])
    with _opened(uri) as (_, host):
        there = {name: count for name, count in data["members"].items() if name in host.groups}
    scale(there, uri)


def _first_ones(name: str, host: AttachHostState) -> int:
    origins = members_of(of_group(name, host))
    plugged, members = group_scale.plugged(origins, host), group_scale.names(origins)
    if plugged != members[: len(plugged)]:
        raise VsrtuneError(
            f"{', '.join(plugged) or 'no member'} of {', '.join(members)} is plugged in, and a "
            "bench can only put back the first ones",
            where=name,
            hint=f"vsrtune group scale {name} {len(members)}",
        )
    return len(plugged)


@contextlib.contextmanager
def _opened(uri: str) -> Iterator[tuple[Switcher, AttachHostState]]:
    """The host as it is, with no switch unfinished."""
    live = LiveHost(uri)
    with contextlib.closing(live), AttachLedger.open(LEDGER) as ledger:
        switcher = Switcher(live, ledger, boot_id())
        if switcher.unfinished() and (failures := switcher.recover()):
            raise failures[0]
        yield switcher, survey(live, switcher.origins(), JOURNAL)
