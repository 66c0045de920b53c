# SPDX-License-Identifier: GPL-2.0-or-later
"""Plugs in the number of members of groups that a configuration asks for, and puts it back.

The steps are those of ``vsrtune group scale``, with its ledger: whoever switches next takes an
interrupted step back, and a put-back here does this first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vsrtune.attach.plan.model import AttachHostState
from vsrtune.bench.setup.attachments import carry_out, opened
from vsrtune.bench.spec.model import Configuration
from vsrtune.core.errors import VsrtuneError
from vsrtune.group import scale as group_scale
from vsrtune.group.members import members_of, of_group


class Members:
    """The members of groups that are plugged in, as a layer of the Configurator. Groups that a
    configuration does not name are as they were. Every method may raise VsrtuneError."""

    kind = "scale"

    def __init__(self, uri: str) -> None:
        self._uri = uri
        # Members at first, by the group's name.
        self._first: dict[str, int] = {}

    def check(self, wanted: Configuration) -> None:
        """Refuse numbers that these groups cannot have, and groups whose plugged members are not
        the first ones, because then no number would tell what to put back. Changes nothing."""
        if not wanted.scale:
            return
        with opened(self._uri) as (_, host):
            for name, count in wanted.scale.items():
                self._first[name] = _first_ones(name, host)
                group_scale.scale(name, count, host)

    def state(self, wanted: Configuration) -> dict[str, int] | None:
        members = {**self._first, **wanted.scale}
        return None if members == self._first else members

    def record(self) -> dict[str, Any]:
        return {"uri": self._uri, "members": self._first}

    def switch(self, wanted: Configuration) -> None:
        _scale({**self._first, **wanted.scale}, self._uri)


def put_back(data: Mapping[str, Any]) -> None:
    """Plug in as many members as before. A group that was deleted meanwhile needs nothing.
    Raises VsrtuneError."""
    uri = str(data["uri"])
    with opened(uri) as (_, host):
        there = {name: count for name, count in data["members"].items() if name in host.groups}
    _scale(there, uri)


def _scale(wanted: Mapping[str, int], uri: str) -> None:
    with opened(uri) as (switcher, host):
        for name, count in wanted.items():
            carry_out(switcher, group_scale.scale(name, count, host))


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
