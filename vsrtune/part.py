"""Some guests of a snapshot, taken out and put back without going through all the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vsrtune.model import Guest, Snapshot


@dataclass(frozen=True, slots=True)
class Part:
    """A snapshot, and the guests of it that something is about. ``names`` are theirs, with
    those of guests that are gone, ``places`` where in the snapshot they stand, in its order.
    ``names`` None: all guests."""

    snapshot: Snapshot
    names: frozenset[str] | None = None
    places: tuple[int, ...] = ()

    @classmethod
    def of(cls, snapshot: Snapshot, names: frozenset[str]) -> Part:
        """The guests of these names, wherever they stand."""
        places = (place for place, guest in enumerate(snapshot.guests) if guest.ref in names)
        return cls(snapshot, names, tuple(places))

    @property
    def guests(self) -> tuple[Guest, ...]:
        """The guests, in the snapshot's order."""
        if self.names is None:
            return self.snapshot.guests
        return tuple(self.snapshot.guests[place] for place in self.places)

    def alone(self) -> Snapshot:
        """The snapshot without all other guests."""
        if self.names is None:
            return self.snapshot
        return replace(self.snapshot, guests=self.guests)

    def around(self, alone: Snapshot) -> Snapshot:
        """The snapshot, with what became of these guests and of the host: ``alone`` has the
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
        if len(snapshot.guests) == len(self.snapshot.guests):
            found = tuple(snapshot.guests[place] for place in self.places)
            if all(a.ref == b.ref for a, b in zip(found, self.guests, strict=True)):
                return found
        return tuple(g for g in snapshot.guests if g.ref in self.names)
