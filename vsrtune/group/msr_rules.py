"""The nftables rules of a balancer, as text for ``nft -f`` in its guest. Pure.

Frames never reach the guest's own stack. On the outside:
- All routers get broadcast and multicast, unchanged, and ARP to our MAC, which may be the answer
  to any of them. Each router gets this ARP with its own MAC, because a Linux guest that hears an
  answer to somebody else takes it for a rumour and soon asks again. Routers that get no frames now
  are included: one that joins finds its neighbours while the balancers get their new rules one
  after the other.
- IPv4 goes to one router, by a hash of addresses and, if a datagram is whole, ports. The first
  side hashes incoming frames as they are, the other sides with source and destination swapped,
  all with one seed. A flow between the first side and another therefore meets one router both
  ways, also through two balancers. The seed is the group's own, because routers in a row must not
  all divide alike.
On the inside everything that routers send leaves with our MAC, also inside ARP.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from vsrtune.attach.plan.model import AttachHostState
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import printable
from vsrtune.group import msr, scale
from vsrtune.group.members import members_of
from vsrtune.group.msr_links import Side
from vsrtune.group.parser import Group
from vsrtune.group.schema import MSR


def text(
    group: str, balancer: str, sides: Sequence[Side], routers: Sequence[str], use: Collection[str]
) -> str:
    """The rules of one balancer. ``sides`` are all sides of the group in their order, ``routers``
    the names of all routers, ``use`` the names of those that get frames: one at least."""
    own = [(number, side) for number, side in enumerate(sides) if side.balancer == balancer]
    used = [n for n, router in enumerate(routers) if router in use]
    names = ", ".join(routers[n] for n in used)
    lines = [
        f"# Balancer {printable(balancer)} of the group {group}: frames to {printable(names)}.",
        "# Name the devices below as they are called in this guest (ip link), by their MACs, then",
        "# load it: nft -f FILE. It replaces what it was before, at once. IPv4 only.",
        *_defines([side for _, side in own]),
        "",
        # One transaction replaces the table, whether it exists or not.
        f"table netdev vsrtune_{group}",
        f"delete table netdev vsrtune_{group}",
        f"table netdev vsrtune_{group} {{",
    ]
    seed = f"0x{zlib.crc32(group.encode()):08x}"
    for number, side in own:
        lines += _side(side, used, routers, seed, turned=number > 0)
    return "\n".join([*lines, "}", ""])


def _inside(side: Side, router: int) -> str:
    """The variable of the internal interface that leads to a router."""
    return f"int_{side.name}_{router + 1}" if side.each else f"int_{side.name}"


def _defines(sides: Sequence[Side]) -> Iterator[str]:
    wanted = [(f"ext_{side.name}", side.mac, side.lower) for side in sides]
    for side in sides:
        wanted += [(_inside(side, n), *inner) for n, inner in enumerate(side.inner)]
    for number, (variable, mac, lower) in enumerate(wanted):
        yield f"define {variable} = eth{number}    # {mac}   on {printable(lower)}"


def _side(
    side: Side, used: Sequence[int], routers: Sequence[str], seed: str, *, turned: bool
) -> Iterator[str]:
    everyone = range(len(routers))
    ends = list(dict.fromkeys(_inside(side, n) for n in everyone))
    yield "\t# What all routers must hear."
    yield from _chain(f"to_{side.name}_all", _to_each([f"to ${end}" for end in ends]))
    # Each rule ends with its verdict, so its MAC is set for that frame alone.
    each = [(side.routers[n], f"to ${_inside(side, n)}") for n in everyone]
    told = [f"ether daddr set {mac} {way}" for (mac, _), way in
            zip(each, _to_each([to for _, to in each]), strict=True)]  # fmt: skip
    yield from _chain(f"to_{side.name}_each", told)
    for n in used:
        mac, to = each[n]
        yield f"\t# {printable(routers[n])}"
        yield from _chain(f"to_{side.name}_{n + 1}", [f"ether daddr set {mac} fwd {to}"])
    yield from _chain(f"ext_{side.name}", [
        f"type filter hook ingress device $ext_{side.name} priority 0; policy drop;",
        f"ether type {{ arp, ip }} meta pkttype {{ broadcast, multicast }} goto to_{side.name}_all",
        f"ether daddr != {side.mac} drop",
        f"ether type arp goto to_{side.name}_each",
        *_spread(side.name, used, seed, turned=turned),
    ])  # fmt: skip
    inner = [_inside(side, n) for n in range(len(side.inner))]
    devices = ", ".join(f"${end}" for end in inner)
    leave = f"ether saddr set {side.mac} fwd to $ext_{side.name}"
    yield from _chain(f"int_{side.name}", [
        f"type filter hook ingress devices = {{ {devices} }} priority 0; policy drop;",
        f"ether type arp arp saddr ether set {side.mac} {leave}",
        f"ether type ip {leave}",
    ])  # fmt: skip


def _to_each(ways: Sequence[str]) -> list[str]:
    """Copies for all but the last, which gets the frame itself."""
    return [f"{'fwd' if n == len(ways) else 'dup'} {way}" for n, way in enumerate(ways, 1)]


def _spread(side: str, used: Sequence[int], seed: str, *, turned: bool) -> Iterator[str]:
    """Send IPv4 to one of the routers."""
    if len(used) == 1:
        yield f"ether type ip goto to_{side}_{used[0] + 1}"
        return
    pairs = [("ip saddr", "ip daddr"), ("th sport", "th dport")]
    addresses, ports = (" . ".join(reversed(p) if turned else p) for p in pairs)
    ways = ", ".join(f"{n} : goto to_{side}_{router + 1}" for n, router in enumerate(used))
    choose = f"mod {len(used)} seed {seed} vmap {{ {ways} }}"
    whole = "meta l4proto { tcp, udp } ip frag-off & 0x3fff == 0"
    yield f"ether type ip {whole} jhash {addresses} . {ports} {choose}"
    yield f"ether type ip jhash {addresses} {choose}"


def _chain(name: str, rules: Sequence[str]) -> Iterator[str]:
    yield f"\tchain {name} {{"
    yield from (f"\t\t{rule}" for rule in rules)
    yield "\t}"


@dataclass(frozen=True, slots=True)
class Rulebook:
    """A multistage router. ``routers`` are the names of all its routers, ``plugged`` the names of
    those that get frames now."""

    group: str
    sides: tuple[Side, ...]
    routers: tuple[str, ...]
    plugged: tuple[str, ...]

    def text(
        self, balancer: str | None = None, count: int | None = None, without: Collection[str] = ()
    ) -> str:
        """The rules for one balancer, which needs no name if it is the only one. ``count`` selects
        the first routers, plugged in or not. Raises VsrtuneError."""
        use = [r for r in self._first(count) if r not in without]
        for name in without:
            if name not in self.routers:
                raise self._unknown("router", name, self.routers)
        if not use:
            raise VsrtuneError(
                "no router would be left to forward", where=self.group,
                hint="--routers N gives the rules for the first N",
            )  # fmt: skip
        return text(self.group, self._balancer(balancer), self.sides, self.routers, use)

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


def of_group(name: str, wanted: Group | None, host: AttachHostState) -> Rulebook:
    """The Rulebook of a created group, or of the file of a group that was not created
    (``wanted``). Raises VsrtuneError."""
    if wanted is None:
        routers, sides = msr.created(name, host)
        plugged = scale.plugged(members_of(host.groups[name]), host)
        return Rulebook(name, sides, routers, tuple(r for r in plugged if r in routers))
    if wanted.kind != MSR:
        raise VsrtuneError(
            "a group of this kind has no balancers", where=wanted.at("group", "kind"),
            hint=f"rules are for groups of kind {MSR}",
        )  # fmt: skip
    return Rulebook(name, msr.planned(wanted, host), wanted.members, wanted.members)
