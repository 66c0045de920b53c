# SPDX-License-Identifier: GPL-2.0-or-later
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

import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vsrtune.attach.plan.model import AttachHostState
from vsrtune.attach.plan.steps import MsrRole, Origin, Stage
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import printable
from vsrtune.group import members, planner, scale
from vsrtune.group.parser import Group
from vsrtune.group.schema import MSR

# One transaction replaces the table, whether it exists or not.
_TABLE = """\
# Balancer {balancer} of the group {group}: frames to {names}.
# Name the devices below as they are called in this guest (ip link), by their MACs, then
# load it: nft -f FILE. It replaces what it was before, at once. IPv4 only.
{defines}

table netdev vsrtune_{group}
delete table netdev vsrtune_{group}
table netdev vsrtune_{group} {{
{chains}
}}
"""
_SIDE = """\
	# What all routers must hear.
	chain to_{side}_all {{
{all}
	}}
	chain to_{side}_each {{
{each}
	}}
{routers}
	chain ext_{side} {{
		type filter hook ingress device $ext_{side} priority 0; policy drop;
		ether type {{ arp, ip }} meta pkttype {{ broadcast, multicast }} goto to_{side}_all
		ether daddr != {mac} drop
		ether type arp goto to_{side}_each
{spread}
	}}
	chain int_{side} {{
		type filter hook ingress devices = {{ {inner} }} priority 0; policy drop;
		ether type arp arp saddr ether set {mac} ether saddr set {mac} fwd to $ext_{side}
		ether type ip ether saddr set {mac} fwd to $ext_{side}
	}}"""
_ROUTER = """\
	# {name}
	chain {chain} {{
		ether daddr set {mac} fwd {way}
	}}"""

# A guest says what its interfaces are called. Nothing but a name gets into the rules.
_INTERFACE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,14}", re.ASCII)
# Of what a guest lists. With \s, which matches line ends, empty lines would take quadratic time.
_CHOOSER = re.compile(r"^[ \t]*chain (to_[a-z0-9]+_[0-9]+) \{", re.ASCII | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a multistage router. ``mac`` is the balancer's on the device ``lower``.
    ``inner`` has the MAC and the lower device of each of its internal interfaces: one for all
    routers, or, with ``each``, one for every router. ``routers`` are the routers' MACs there."""

    name: str
    lower: str
    balancer: str
    mac: str
    inner: tuple[tuple[str, str], ...]
    each: bool
    routers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rulebook:
    """A multistage router. ``sides`` are in their order, ``routers`` the names of all its routers,
    ``plugged`` the names of those that get frames now."""

    group: str
    sides: tuple[Side, ...]
    routers: tuple[str, ...]
    plugged: tuple[str, ...]

    def text(
        self,
        balancer: str | None = None,
        count: int | None = None,
        without: Collection[str] = (),
        called: Mapping[str, str] | None = None,
    ) -> str:
        """The rules for one balancer, which needs no name if it is the only one. ``count`` selects
        the first routers, plugged in or not. ``called`` are the names of the guest's interfaces by
        MAC; without, somebody has to edit the text. Raises VsrtuneError."""
        known = list(dict.fromkeys(side.balancer for side in self.sides))
        if balancer is None and len(known) > 1:
            raise self._refused("it has several balancers", f"name one: {', '.join(known)}")
        balancer = known[0] if balancer is None else balancer
        lookups = [("balancer", balancer, known), *(("router", r, self.routers) for r in without)]
        for what, name, among in lookups:
            if name not in among:
                hint = f"its {what}s: {', '.join(among)}"
                raise self._refused(f"it is no {what} of the group {self.group}", hint, name)
        most = len(self.routers)
        if count is not None and count > most:
            raise self._refused(f"it has {most} routers, not {count}", f"a number from 1 to {most}")
        first = self.plugged if count is None else self.routers[:count]
        used = [n for n, r in enumerate(self.routers) if r in first and r not in without]
        if not used:
            raise self._refused(
                "no router would be left to forward", "--routers N gives the rules for the first N"
            )
        own = [(n, side) for n, side in enumerate(self.sides) if side.balancer == balancer]
        seed = f"0x{zlib.crc32(self.group.encode()):08x}"
        chains = [_side(side, used, self.routers, seed, turned=n > 0) for n, side in own]
        return _TABLE.format(
            balancer=printable(balancer),
            group=self.group,
            names=printable(", ".join(self.routers[n] for n in used)),
            defines="\n".join(_defines([side for _, side in own], called)),
            chains="\n".join(chains),
        )

    def _refused(self, what: str, hint: str, where: str = "") -> VsrtuneError:
        return VsrtuneError(what, where=where or self.group, hint=hint)


def of_group(name: str, wanted: Group | None, host: AttachHostState) -> Rulebook:
    """The Rulebook of a created group, or of the file of a group that was not created
    (``wanted``): what its create would make. A router that somebody undefined, from which
    somebody took a side, or to which none of a balancer's interfaces leads any more, is in no
    rules. Raises VsrtuneError."""
    if wanted is None:
        origins = members.of_group(name, host)
        where = name
    else:
        where = wanted.at("group", "kind")
        origins = planner.create(wanted, host).origins if wanted.kind == MSR else ()
    by_side: dict[str, list[tuple[Stage, Origin]]] = {}
    for origin in origins:
        if origin.stage is not None:
            by_side.setdefault(origin.stage.side, []).append((origin.stage, origin))
    if not by_side:
        raise VsrtuneError(
            "a group of this kind has no balancers", where=where,
            hint=f"rules are for groups of kind {MSR}",
        )  # fmt: skip
    on = [{o.guest: o.device.mac for s, o in pairs if s.role is MsrRole.ROUTER}
          for pairs in by_side.values()]  # fmt: skip
    # Where each router has an interface of the balancer's, somebody may have taken that, too.
    ends_to = [{s.router for s, _ in pairs if s.role is MsrRole.BALANCER}
               for pairs in by_side.values()]  # fmt: skip
    routers = tuple(
        guest
        for guest in on[0]
        if all(guest in macs for macs in on) and all(ends & {guest, ""} for ends in ends_to if ends)
    )
    sides = []
    for (side, pairs), macs in zip(by_side.items(), on, strict=True):
        ends = [(s, o) for s, o in pairs if s.role is MsrRole.BALANCER]
        guest = host.by_uuid.get(ends[0][1].uuid) if ends else None
        if guest is None:
            raise VsrtuneError(
                "the balancer is gone", where=f"{name}: {side}",
                hint=f"vsrtune group delete {name}",
            )  # fmt: skip
        stage = ends[0][0]
        outer = members.one_on(name, guest, stage.outside, host)
        each = bool(stage.router)
        inner = tuple((o.device.mac, o.device.lower) for s, o in ends
                      if s.router in routers or not each)  # fmt: skip
        own = tuple(macs[router] for router in routers)
        sides.append(Side(side, stage.outside, guest.name, outer.mac, inner, each, own))
    plugged = scale.plugged(members.members_of(origins), host) if wanted is None else routers
    return Rulebook(name, tuple(sides), routers, tuple(r for r in plugged if r in routers))


def _inside(side: Side, router: int) -> str:
    """The variable of the internal interface that leads to a router."""
    return f"int_{side.name}_{router + 1}" if side.each else f"int_{side.name}"


def choosers(text: str) -> frozenset[str]:
    """The chains in rules, or in what nft lists of them, that lead to one router each."""
    return frozenset(_CHOOSER.findall(text))


def _defines(sides: Sequence[Side], called: Mapping[str, str] | None) -> Iterator[str]:
    wanted = [(f"ext_{side.name}", side.mac, side.lower) for side in sides]
    for side in sides:
        wanted += [(_inside(side, n), *inner) for n, inner in enumerate(side.inner)]
    for number, (variable, mac, lower) in enumerate(wanted):
        name = f"eth{number}" if called is None else called.get(mac, "")
        if not _INTERFACE.fullmatch(name):
            raise VsrtuneError(
                f"the balancer has no interface with the MAC {mac} whose name nftables takes",
                where=lower, hint="see, in the guest: ip link",
            )  # fmt: skip
        yield f"define {variable} = {name}    # {mac}   on {printable(lower)}"


def _side(
    side: Side, used: Sequence[int], routers: Sequence[str], seed: str, *, turned: bool
) -> str:
    everyone = range(len(routers))
    ways = [f"to ${_inside(side, n)}" for n in everyone]
    # Each rule ends with its verdict, so its MAC is set for that frame alone.
    told = zip(side.routers, _to_each(ways), strict=True)
    return _SIDE.format(
        side=side.name,
        mac=side.mac,
        all=_lines(_to_each(list(dict.fromkeys(ways)))),
        each=_lines(f"ether daddr set {mac} {way}" for mac, way in told),
        routers="\n".join(
            _ROUTER.format(
                name=printable(routers[n]),
                chain=f"to_{side.name}_{n + 1}",
                mac=side.routers[n],
                way=ways[n],
            )
            for n in used
        ),
        spread=_lines(_spread(side.name, used, seed, turned=turned)),
        inner=", ".join(f"${_inside(side, n)}" for n in range(len(side.inner))),
    )


def _lines(rules: Iterable[str]) -> str:
    return "\n".join(f"\t\t{rule}" for rule in rules)


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
