"""Which rules a balancer is given: those for the routers that are plugged in, or asked
for. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from vsrtune import group_msr, group_rules, group_scale
from vsrtune.attach.plan.model import Host
from vsrtune.core.errors import VsrtuneError
from vsrtune.group_members import members_of
from vsrtune.group_rules import Side
from vsrtune.group_schema import MSR
from vsrtune.groups import Group


@dataclass(frozen=True, slots=True)
class Rulebook:
    """A multistage router: ``routers`` are the names of all, ``plugged`` those of the ones
    that get frames as it is now."""

    group: str
    sides: tuple[Side, ...]
    routers: tuple[str, ...]
    plugged: tuple[str, ...]

    def text(
        self, balancer: str | None = None, count: int | None = None, without: Collection[str] = ()
    ) -> str:
        """The rules for one balancer, which needs no name when it is the only one; ``count``
        is for the first routers, plugged in or not. Raises VsrtuneError."""
        use = [r for r in self._first(count) if r not in without]
        for name in without:
            if name not in self.routers:
                raise self._unknown("router", name, self.routers)
        if not use:
            raise VsrtuneError(
                "no router would be left to forward", where=self.group,
                hint="--routers N gives the rules for the first N",
            )  # fmt: skip
        return group_rules.text(self.group, self._balancer(balancer), self.sides, self.routers, use)

    def _first(self, count: int | None) -> tuple[str, ...]:
        if count is None:
            return self.plugged
        if count > len(self.routers):
            raise VsrtuneError(
                f"it has {len(self.routers)} routers, not {count}", where=self.group,
                hint=f"a number from 1 to {len(self.routers)}",
            )  # fmt: skip
        return self.routers[:count]

    def _balancer(self, name: str | None) -> str:
        known = list(dict.fromkeys(side.balancer for side in self.sides))
        if name is None and len(known) == 1:
            return known[0]
        if name is None:
            raise VsrtuneError(
                "it has several balancers", where=self.group, hint=f"name one: {', '.join(known)}"
            )
        if name not in known:
            raise self._unknown("balancer", name, known)
        return name

    def _unknown(self, what: str, name: str, known: Collection[str]) -> VsrtuneError:
        return VsrtuneError(
            f"it is no {what} of the group {self.group}", where=name,
            hint=f"its {what}s: {', '.join(known)}",
        )  # fmt: skip


def of_group(name: str, wanted: Group | None, host: Host) -> Rulebook:
    """That of a group which was created, or of the file of one that was not (``wanted``).
    Raises VsrtuneError."""
    if wanted is None:
        routers, sides = group_msr.created(name, host)
        plugged = group_scale.plugged(members_of(host.groups[name]), host)
        return Rulebook(name, sides, routers, tuple(r for r in plugged if r in routers))
    if wanted.kind != MSR:
        raise VsrtuneError(
            "a group of this kind has no balancers", where=wanted.at("group", "kind"),
            hint=f"rules are for groups of kind {MSR}",
        )  # fmt: skip
    return Rulebook(name, group_msr.planned(wanted, host), wanted.members, wanted.members)
