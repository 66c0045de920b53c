"""What a pass has to look at anew: some guests, or everything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scope:
    """``guests`` are libvirt domain names whose threads, devices or pins may have changed,
    or that came or went. ``host`` is True when something of the host or something unknown
    may have: then everything is to be looked at, whatever ``guests`` says. ``turns`` is
    the look from time to time for what has no event."""

    guests: frozenset[str] = frozenset()
    host: bool = False
    turns: bool = False

    @classmethod
    def of(cls, guest: str | None) -> Scope:
        """One guest; None is the host, or that nobody knows."""
        return FULL if guest is None else cls(frozenset([guest]))

    def merge(self, other: Scope) -> Scope:
        """What both ask for."""
        return Scope(self.guests | other.guests, self.host or other.host, self.turns or other.turns)

    def __str__(self) -> str:
        if self.host:
            return "everything"
        named = [*sorted(self.guests), *(["others in turns"] if self.turns else [])]
        return ", ".join(named) or "nothing"

    def __bool__(self) -> bool:
        """False when there is nothing to look at."""
        return self.host or self.turns or bool(self.guests)


NOTHING = Scope()
FULL = Scope(host=True)
TURNS = Scope(turns=True)
