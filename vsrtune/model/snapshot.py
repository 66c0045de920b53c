# SPDX-License-Identifier: GPL-2.0-or-later
"""The host and its guests at one moment, and slices of such a snapshot."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from vsrtune.core.codec import encode
from vsrtune.model.guest import Guest
from vsrtune.model.host import Host

SNAPSHOT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """A reader that failed; the rest of the snapshot stands."""

    reader: str
    what: str


@dataclass(frozen=True, slots=True)
class Stranger:
    """A process whose executable has the name of a QEMU but which is not believed; ``why`` is the
    reason. ``uid`` is its real user, -1 when that is not known."""

    pid: int
    start_time: int
    uid: int
    why: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole observation. Guests are sorted by (source, name). ``strangers`` holds the first
    ones in pid order."""

    host: Host
    guests: tuple[Guest, ...]
    problems: tuple[Problem, ...] = ()
    version: int = SNAPSHOT_VERSION
    strangers: tuple[Stranger, ...] = ()

    def to_json(self, indent: int | None = 2) -> str:
        """JSON text; ``decode`` of its value gives an equal Snapshot."""
        return json.dumps(encode(self), indent=indent, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class SnapshotSlice:
    """A snapshot and some of its guests. ``names`` are their names and those of guests that are
    gone; None means all guests. ``places`` are their positions in the snapshot, in its order."""

    snapshot: Snapshot
    names: frozenset[str] | None = None
    places: tuple[int, ...] = ()

    @classmethod
    def of(cls, snapshot: Snapshot, names: frozenset[str] | None) -> SnapshotSlice:
        """The slice of the guests with these names; None means all."""
        if names is None:
            return cls(snapshot)
        places = (place for place, guest in enumerate(snapshot.guests) if guest.ref in names)
        return cls(snapshot, names, tuple(places))

    @property
    def guests(self) -> tuple[Guest, ...]:
        """The guests, in the snapshot's order."""
        if self.names is None:
            return self.snapshot.guests
        return tuple(self.snapshot.guests[place] for place in self.places)

    def covers(self, name: str) -> bool:
        """Whether a guest of this name is among the guests, or was and is gone."""
        return self.names is None or name in self.names

    def alone(self) -> Snapshot:
        """The snapshot without the other guests."""
        if self.names is None:
            return self.snapshot
        return replace(self.snapshot, guests=self.guests)

    def around(self, alone: Snapshot) -> Snapshot:
        """The whole snapshot, with the host and these guests taken from ``alone``, which has the
        same guests in the same order."""
        if self.names is None:
            return alone
        guests = list(self.snapshot.guests)
        for place, guest in zip(self.places, alone.guests, strict=True):
            guests[place] = guest
        return replace(alone, guests=tuple(guests))

    def earlier(self, snapshot: Snapshot) -> tuple[Guest, ...]:
        """The guests of these names in an earlier snapshot."""
        if self.names is None:
            return snapshot.guests
        return tuple(g for g in snapshot.guests if g.ref in self.names)
