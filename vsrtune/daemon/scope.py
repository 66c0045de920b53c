# SPDX-License-Identifier: GPL-2.0-or-later
"""The scope of a pass: some guests, or everything."""

from __future__ import annotations

from dataclasses import dataclass

from vsrtune.model.plan import Place


@dataclass(frozen=True, slots=True)
class Scope:
    """``guests`` are libvirt domain names whose threads, devices or pins may have changed,
    or that came or went. ``host`` is True when the host or something unknown may have
    changed: the pass then reads everything, whatever ``guests`` says. ``unannounced`` asks
    for the periodic check for changes without events. ``hurried``: only ``guests`` are read, even
    where reading everything would cost little, and what else is dirty waits. ``places`` is what
    has changed of ``guests``, and all of it; empty where that is not known."""

    guests: frozenset[str] = frozenset()
    host: bool = False
    unannounced: bool = False
    hurried: bool = False
    places: frozenset[Place] = frozenset()

    @classmethod
    def of(cls, guest: str | None) -> Scope:
        """The scope of one guest; None stands for the host or something unknown."""
        return FULL if guest is None else cls(frozenset([guest]))

    def merge(self, other: Scope) -> Scope:
        """Both scopes together."""
        if not (self and other):
            return self or other
        return Scope(
            self.guests | other.guests,
            self.host or other.host,
            self.unannounced or other.unannounced,
            self.hurried and other.hurried,
            self.places | other.places if self.places and other.places else frozenset(),
        )

    def __str__(self) -> str:
        if self.host:
            return "everything"
        named = [*sorted(self.guests), *(["unannounced changes"] if self.unannounced else [])]
        return ", ".join(named) or "nothing"

    def __bool__(self) -> bool:
        """False when there is nothing to read."""
        return self.host or self.unannounced or bool(self.guests)


NOTHING = Scope()
FULL = Scope(host=True)
UNANNOUNCED = Scope(unannounced=True)
