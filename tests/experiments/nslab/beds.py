"""The measured topologies. Only the kind of the virtual devices differs between two beds.

    cases          gen         host                       namespaces r0..r(n-1)
                   w1 ======= l1 --- MACs of n devices --- i1 [       ]
                   w2 ======= l2 ------------------------- i2 [ router] o --- dummy (host)
                   w3 ======= l3 ------------------------- i3 [       ]

    interfaces     the same with one router and one NIC, with n devices on the NIC and n on
                   the dummy

    chains         wa ==== la -- i [ a1 ] o --.        .-- i [ a2 ] dummy
                                               lower l
                   wb ==== lb -- i [ b1 ] o --'        '-- i [ b2 ] dummy

`===` is a NIC (nic.py), the others are devices of the kind on the lower device they lead
to. Kind plain has no virtual devices: its one router owns the NICs and the dummy. All
frames of a chain go from guest to guest on one lower device (once for each stage after the
first), which for macvlan is through the backlog of the CPU, shared by all chains.
Neighbours and routes are static, and no device needs an address to be routed through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import nic, spaces
from .counters import Place
from .nic import Nic
from .spaces import HOST, attribute, batch, command, inside, write
from .traffic import Stream, last_address

PLAIN, MACVLAN, OURS = "plain", "macvlan", "napi_macvlan"
_NEXT_HOP = "10.8.0.2"
_SOMEBODY = "02:76:72:fe:ff:01"
_EVERYBODY = "ff:ff:ff:ff:ff:ff"
NETWORK = "10.9.0.0/16"


@dataclass(frozen=True)
class Kind:
    """A configuration: its devices, and whether their own NAPI has a thread."""

    name: str
    kind: str
    threaded: bool = False


@dataclass
class Bed:
    """One topology, standing. ``ends`` are the devices through which a stream leaves, by
    its name; ``virtual`` all devices of the kind."""

    kind: Kind
    nics: list[Nic]
    streams: list[Stream]
    ends: dict[str, Place]
    virtual: list[Place] = field(default_factory=list)


def mac(bed: int, group: int, number: int) -> str:
    """Addresses of a group are consecutive."""
    return f"02:76:{bed:02x}:{group:02x}:{number >> 8:02x}:{number & 255:02x}"


def build(number: int, kind: Kind, wanted: Mapping[str, Any], cpu: int) -> Bed:
    """Bed ``number`` of a run; ``wanted`` is the plan's ``bed``."""
    topology = wanted["topology"]
    if kind.kind == OURS:
        command("modprobe", OURS)
    if topology == "chains":
        return _chains(number, kind, wanted["stages"], cpu, flood=wanted.get("flood", False))
    if topology == "interfaces":
        return _interfaces(number, kind, wanted["count"])
    if "lowers" in wanted:
        taken = nic.take(wanted["lowers"][kind.kind], cpu, 0)
        return _routers(number, kind, [taken], 1)
    return _cases(number, kind, wanted["nics"], wanted["routers"])


def _lower(name: str) -> list[str]:
    return [f"link add {name} type dummy", f"link set {name} up"]


def _device(kind: str, lower: str, space: str, name: str, address: str) -> str:
    # iproute2 does not know the modes of ours, whose default is bridge.
    mode = " mode bridge" if kind == MACVLAN else ""
    return f"link add link {lower} name {name} address {address} netns {space} type {kind}{mode}"


def _way(device: str, hop: str, address: str, network: str = NETWORK) -> list[str]:
    return [
        f"neigh add {hop} lladdr {address} nud permanent dev {device}",
        f"route add {network} via {hop} dev {device} onlink",
    ]


def _cases(number: int, kind: Kind, nics: int, routers: int) -> Bed:
    prefix = f"nb{number}"
    plain = kind.kind == PLAIN
    space = f"nb-{number}r0" if plain else HOST
    if plain:
        spaces.add([space])
    made = [Nic(f"{prefix}l{i}", f"{prefix}w{i}", space) for i in range(nics)]
    nic.make(made)
    if plain:
        end = f"{prefix}e"
        batch([*_lower(end), *_way(end, _NEXT_HOP, _SOMEBODY)], space)
        with inside(space):
            macs = [_address(n.device) for n in made]
        streams = [Stream(f"in{i}", n.wire, macs[i]) for i, n in enumerate(made)]
        ends = {s.name: Place(space, end) for s in streams}
        return Bed(kind, made, streams, ends)
    return _routers(number, kind, made, routers)


def _routers(number: int, kind: Kind, made: list[Nic], routers: int) -> Bed:
    """Namespaces with a virtual device on each NIC and one on a dummy."""
    names = [f"nb-{number}r{r}" for r in range(routers)]
    spaces.add(names)
    end = f"nb{number}e"
    lines = _lower(end)
    virtual = []
    for r, space in enumerate(names):
        for i, one in enumerate(made):
            lines.append(_device(kind.kind, one.device, space, f"i{i}", mac(number, i, r)))
            virtual.append(Place(space, f"i{i}"))
        lines.append(_device(kind.kind, end, space, "o", mac(number, 100, r)))
        virtual.append(Place(space, "o"))
    batch(lines)
    for space in names:
        up = [f"link set i{i} up" for i in range(len(made))] + ["link set o up"]
        batch(up + _way("o", _NEXT_HOP, _SOMEBODY), space)
    streams = [
        Stream(f"in{i}", n.wire, mac(number, i, 0), macs=routers) for i, n in enumerate(made)
    ]
    ends = {s.name: Place(HOST, end) for s in streams}
    return Bed(kind, made, streams, ends, virtual)


def _interfaces(number: int, kind: Kind, count: int) -> Bed:
    """``count`` virtual interfaces, half of them in and half out; as many routes."""
    prefix = f"nb{number}"
    half = count // 2
    plain = kind.kind == PLAIN
    space = f"nb-{number}r0"
    spaces.add([space])
    one = Nic(f"{prefix}l0", f"{prefix}w0", space if plain else HOST)
    nic.make([one])
    end = f"{prefix}e"
    targets = [last_address("10.9.0.1", j + 1) for j in range(half)]
    if plain:
        batch(_lower(end), space)
        lines = [f"neigh add {_NEXT_HOP} lladdr {_SOMEBODY} nud permanent dev {end}"]
        lines += [f"route add {t}/32 via {_NEXT_HOP} dev {end} onlink" for t in targets]
        batch(lines, space)
        with inside(space):
            stream = Stream("in0", one.wire, _address(one.device), addresses=half)
        return Bed(kind, [one], [stream], {"in0": Place(space, end)})
    lines = _lower(end)
    for j in range(half):
        lines.append(_device(kind.kind, one.device, space, f"i{j}", mac(number, 0, j)))
        lines.append(_device(kind.kind, end, space, f"o{j}", mac(number, 100, j)))
    batch(lines)
    lines = []
    for j, target in enumerate(targets):
        lines += [f"link set i{j} up", f"link set o{j} up"]
        lines += _way(f"o{j}", _NEXT_HOP, _SOMEBODY, f"{target}/32")
    batch(lines, space)
    virtual = [Place(space, f"{d}{j}") for d in "io" for j in range(half)]
    stream = Stream("in0", one.wire, mac(number, 0, 0), macs=half, addresses=half)
    return Bed(kind, [one], [stream], {"in0": Place(HOST, end)}, virtual)


def _chains(number: int, kind: Kind, stages: int, cpu: int, *, flood: bool) -> Bed:
    prefix = f"nb{number}"
    lower = f"{prefix}l"
    names = {(c, s): f"nb-{number}{c}{s}" for c in "ab" for s in range(stages)}
    spaces.add(list(names.values()))
    nics = [Nic(f"{prefix}l{c}", f"{prefix}w{c}") for c in "ab"]
    bus = [Nic(lower, f"{prefix}w")] if flood else []
    nic.make(nics + bus)
    lines = [] if flood else _lower(lower)
    virtual = []
    for group, one in enumerate(nics):
        c = "ab"[group]
        for s in range(stages):
            space = names[c, s]
            below = one.device if s == 0 else lower
            lines.append(_device(kind.kind, below, space, "i", mac(number, group, s)))
            virtual.append(Place(space, "i"))
            if s < stages - 1:
                lines.append(_device(kind.kind, lower, space, "o", mac(number, group + 100, s)))
                virtual.append(Place(space, "o"))
    batch(lines)
    bed = Bed(
        kind, nics + bus,
        [Stream(c, n.wire, mac(number, g, 0)) for g, (c, n) in enumerate(zip("ab", nics, strict=True))],
        {c: Place(names[c, stages - 1], "end") for c in "ab"},
        virtual,
    )  # fmt: skip
    if flood:
        bed.streams.append(Stream("flood", bus[0].wire, _EVERYBODY))
    if kind.threaded:
        _thread(bed, cpu)
    for (c, s), space in names.items():
        last = s == stages - 1
        lines = _lower("end") if last else ["link set o up"]
        hop = _SOMEBODY if last else mac(number, "ab".index(c), s + 1)
        batch(["link set i up", *lines, *_way("end" if last else "o", _NEXT_HOP, hop)], space)
    return bed


def _thread(bed: Bed, cpu: int) -> None:
    """NAPI of every device that hears from siblings in a thread, on ``cpu``."""
    for place in bed.virtual:
        write(attribute(place.space, place.device, "threaded"), "1")


def _address(device: str) -> str:
    """Of a device in the namespace of the caller."""
    return command("ip", "-br", "link", "show", "dev", device).split()[2]
