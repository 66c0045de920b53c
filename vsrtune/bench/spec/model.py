# SPDX-License-Identifier: GPL-2.0-or-later
"""Requests and results of a bench: frozen values, JSON in and out.

Rates are frames per second (pps), over all routers and directions of a trial
unless a name says otherwise; times are seconds; frame sizes are bytes without
the frame check sequence, as pktgen counts them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vsrtune.core.cpuset import MAX_CPU
from vsrtune.policy.schema import DEVICE_PATTERN, MAC_PATTERN
from vsrtune.policy.subschemas import (
    FLAG,
    by_name,
    choice,
    mapping,
    sequence,
    short_text,
    text,
    whole,
)

MIN_SIZE = 60
MAX_SIZE = 1514
MAX_FLOWS = 1_000_000
MAX_DESTINATIONS = 65536
# The smallest frames on a 100 Gbit/s line; a greater number is a typing error.
MAX_PPS = 150_000_000
MAX_QUEUES = 256
MAX_MEMBERS = 256
KINDS = ("sweep", "ndr", "pdr", "fairness")
DURATION_PATTERN = r"^\s*([0-9]+(\.[0-9]*)?|\.[0-9]+)\s*(ms|s|min)\s*$"

_IPV4 = r"^[0-9]{1,3}(\.[0-9]{1,3}){3}$"

DEVICE = short_text("a device name such as eth1", DEVICE_PATTERN, "a device name")
NAMESPACE = short_text(
    "the name of a namespace of ip netns", r"^[^/\s]+$", "the name of a namespace"
)
HOST = short_text("an ssh destination such as user@box", r"^[^\s-]\S*$", "an ssh destination")
MAC = short_text("a MAC address such as 52:54:00:00:01:01", MAC_PATTERN, "a MAC address")
ADDRESS = short_text("an address such as 10.10.1.2", _IPV4, "an IPv4 address")

RATE = whole(1, MAX_PPS, " of frames per second")
DURATION = {
    "type": ["number", "string"],
    "minimum": 0,
    "maximum": 30 * 86400,
    "pattern": DURATION_PATTERN,
    "x-pattern": "a duration",
    "x-expects": "a number of seconds, or a number with ms, s or min such as 500ms",
}
SIZE = {
    "type": ["integer", "string"],
    "minimum": MIN_SIZE,
    "maximum": MAX_SIZE,
    "pattern": "^imix$",
    "x-pattern": "a frame size",
    "x-expects": f"imix, or a number of bytes from {MIN_SIZE} to {MAX_SIZE}",
}
SHARE = {"type": "number", "minimum": 0, "maximum": 0.5, "x-expects": "a share such as 0.005"}
PRECISION = {
    **SHARE,
    "minimum": 0.001,
    "x-expects": "a share from 0.001 to 0.5, such as 0.05",
}
RATES = sequence(RATE, "a list of frames per second such as [4000, 16000]")
COMMAND = sequence(
    text("text, in quotes where YAML needs them"),
    "a command as a list, such as [tuned-adm, profile, virtual-host]",
)
CPUS = {
    "type": ["integer", "string"],
    "minimum": 0,
    "maximum": MAX_CPU,
    "x-expects": "a CPU number or a CPU list such as 1-2,5",
}


def keys_of(part: type, expects: str, *required: str) -> dict[str, Any]:
    """The schema of a mapping with the keys that a part of a specification has."""
    keys = {f.name: dict(f.metadata) for f in fields(part) if f.metadata}
    return mapping(expects, keys, required)


# The usual simple IMIX: size without FCS, and its weight.
IMIX_WEIGHTS = ((60, 7), (566, 4), (1514, 1))

# Below this share of the load asked for, the generator is the limit.
SENT_ENOUGH = 0.97

Place = tuple[str | None, str | None]
Size = int | Literal["imix"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A device that sends and counts. ``namespace`` is a name of `ip netns`, None for
    the host's own; ``host`` an ssh destination, None for this machine; ``cpu`` the CPU
    whose pktgen thread sends."""

    device: str = field(metadata=DEVICE)
    namespace: str | None = field(default=None, metadata=NAMESPACE)
    host: str | None = field(default=None, metadata=HOST)
    cpu: int = field(default=0, metadata=whole(0, MAX_CPU))

    @property
    def place(self) -> Place:
        """The network namespace: its machine, and its name there."""
        return self.host, self.namespace

    def __str__(self) -> str:
        where = f"{self.namespace}/" if self.namespace else ""
        return f"{self.host}:{where}{self.device}" if self.host else f"{where}{self.device}"


@dataclass(frozen=True, slots=True)
class Leg:
    """One direction through one router: frames to ``mac`` with these IPv4 addresses
    (text). ``destination`` is the first of ``Traffic.destinations``."""

    mac: str = field(metadata=MAC)
    source: str = field(metadata=ADDRESS)
    destination: str = field(metadata=ADDRESS)


@dataclass(frozen=True, slots=True)
class Router:
    """A router under test. ``name`` is the guest's, or any name when ``native`` (this
    host itself forwards). ``back`` is the leg from right to left, None without one.
    ``members`` are the guests of a router that is a group; their names, joined by +, are
    its name."""

    name: str
    forth: Leg
    back: Leg | None = None
    native: bool = False
    members: tuple[str, ...] = ()

    @property
    def guests(self) -> tuple[str, ...]:
        """The guests that are this router; none when this host itself forwards."""
        return () if self.native else self.members or (self.name,)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The frames to send. ``size`` is bytes, or "imix". ``flows`` is per router and
    direction (1 to 1,000,000); UDP ports distinguish flows. Frames go to
    ``destinations`` addresses in turn, from a leg's first on; flows should be a multiple
    of it."""

    size: Size = field(default=60, metadata=SIZE)
    flows: int = field(default=1, metadata=whole(1, MAX_FLOWS))
    bidirectional: bool = field(default=False, metadata=FLAG)
    destinations: int = field(default=1, metadata=whole(1, MAX_DESTINATIONS))
    # Seconds of twice the rate before as many of a pause, in results of earlier versions.
    burst: float = 0.0


class Tuning(enum.StrEnum):
    UNTUNED = "untuned"
    LIBVIRT_PINS = "libvirt-pins"
    POLICY = "policy"
    COMMAND = "command"


class BenchAttachment(enum.StrEnum):
    AS_IS = "as-is"
    MACVTAP = "macvtap"
    NAPI_MACVTAP = "napi-macvtap"
    BRIDGE = "bridge"
    OPENVSWITCH = "openvswitch"


@dataclass(frozen=True, slots=True)
class Configuration:
    """A way to run the routers.

    ``policy`` is the text of a policy file, for Tuning.POLICY; it may hold several policies,
    separated by ``---``, and name guests by pattern. ``apply`` and ``revert`` are command
    lines (argv): they are the whole of Tuning.COMMAND (which measures a peer such as TuneD),
    and run after any other tuning (for a setting that no policy has). ``vhost``, ``queues``,
    ``ring`` (slots of a receive ring) and ``mergeable`` (receive buffers) of None leave the
    guest's interfaces as they are. ``scale`` is the number of members plugged in, by name of
    their group (docs/groups.md); other groups stay as they are.
    """

    name: str
    tuning: Tuning = field(default=Tuning.UNTUNED, metadata=choice(*map(str, Tuning)))
    # The key is the path.
    policy: str | None = field(default=None, metadata=short_text("a path such as router.yaml"))
    policy_path: str | None = None
    cpus: str | None = field(default=None, metadata=CPUS)
    apply: tuple[str, ...] = field(default=(), metadata=COMMAND)
    revert: tuple[str, ...] = field(default=(), metadata=COMMAND)
    attachment: BenchAttachment = field(
        default=BenchAttachment.AS_IS, metadata=choice(*map(str, BenchAttachment))
    )
    vhost: bool | None = field(default=None, metadata=FLAG)
    queues: int | None = field(default=None, metadata=whole(1, MAX_QUEUES))
    ring: int | None = field(default=None, metadata=choice(256, 512, 1024, type="integer"))
    mergeable: bool | None = field(default=None, metadata=FLAG)
    scale: Mapping[str, int] = field(
        default_factory=dict,
        metadata=by_name(
            whole(1, MAX_MEMBERS), "a number of members by the group's name, such as {edge: 2}"
        ),
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that no run may exceed: offered pps and seconds of one trial."""

    pps: int = field(default=2_000_000, metadata=RATE)
    seconds: float = field(default=3600.0, metadata=DURATION)


@dataclass(frozen=True, slots=True)
class Method:
    """The trials to make: ``kind`` is sweep, ndr, pdr or fairness.

    sweep: ``rates``, ``repeats``. ndr/pdr: ``low``..``high``, loss threshold ``loss``
    (share, 0 for ndr), ``precision`` (share of the rate), ``trials`` per rate, of which the
    worst decides. fairness: each of ``rates`` to each router, or flow, ``repeats``. With
    ``sizes`` a sweep tries each rate with frames of each of these sizes instead of
    ``Traffic.size``.
    """

    kind: str = field(default="sweep", metadata=choice(*KINDS))
    rates: tuple[int, ...] = field(default=(), metadata=RATES)
    seconds: float = field(default=2.0, metadata=DURATION)
    repeats: int = field(default=1, metadata=whole(1, 1000))
    low: int = field(default=0, metadata=whole(0, MAX_PPS))
    high: int = field(default=0, metadata=whole(1, MAX_PPS))
    loss: float = field(default=0.0, metadata=SHARE)
    precision: float = field(default=0.05, metadata=PRECISION)
    trials: int = field(default=1, metadata=whole(1, 100))
    # In results of earlier versions.
    duration: float = 0.0
    # fairness: pps by router name, where they are not equal.
    by_router: Mapping[str, int] = field(
        default_factory=dict,
        metadata=by_name(RATE, "rates by router name such as {vr1: 8000}"),
    )
    latency: bool = field(default=False, metadata=FLAG)
    reordering: bool = field(default=False, metadata=FLAG)
    sizes: tuple[Size, ...] = field(
        default=(), metadata=sequence(SIZE, "a list of sizes such as [60, 508, 1496]")
    )


_ENDPOINT = keys_of(Endpoint, "keys such as device: g0", "device")
_LEG = keys_of(Leg, "{source: 10.10.1.2, destination: 10.20.1.100}", "source", "destination")
_ROUTER = mapping(
    "a mapping with the keys guest and forth",
    {
        "guest": short_text("the guest's name"),
        "guests": sequence(
            short_text("the guest's name as text"),
            "a list of guests such as [vr1, vr2]",
            maxItems=MAX_MEMBERS,
        ),
        "native": short_text("any name"),
        "forth": _LEG,
        "back": _LEG,
    },
    ("forth",),
)


@dataclass(frozen=True, slots=True)
class Spec:
    """One specification file, whole and checked."""

    name: str = field(metadata=short_text("a name"))
    left: Endpoint = field(metadata=_ENDPOINT)
    right: Endpoint = field(metadata=_ENDPOINT)
    routers: tuple[Router, ...] = field(
        metadata=sequence(_ROUTER, "a list of mappings with the keys guest and forth")
    )
    traffic: Traffic = field(default=Traffic(), metadata=keys_of(Traffic, "keys such as size: 60"))
    method: Method = field(
        default=Method(), metadata=keys_of(Method, "keys such as kind: sweep", "kind")
    )
    configuration: Configuration = field(
        default_factory=lambda: Configuration("untuned"),
        metadata=keys_of(Configuration, "keys such as tuning: untuned"),
    )
    limits: Limits = field(default=Limits(), metadata=keys_of(Limits, "keys such as pps: 200000"))
    warmup: float = field(default=0.5, metadata=DURATION)
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one trial: pps to each router by name (sum of both directions), for
    ``seconds``. ``size`` is the frames' size, None for the size of the spec."""

    pps: Mapping[str, float]
    seconds: float
    latency: bool = False
    size: Size | None = None
    # Of a burst, in results of earlier versions.
    frames: int | None = None

    @property
    def total(self) -> float:
        return sum(self.pps.values())


@dataclass(frozen=True, slots=True)
class Latency:
    """One-way latency of probes, seconds; None when none came. ``lost`` of ``sent`` never came.
    ``p999`` needs 1000 that came. ``jitter`` is the packet delay variation of RFC 5481: the 99th
    percentile of what each took longer than the fastest."""

    sent: int
    lost: int
    p50: float | None
    p90: float | None
    p99: float | None
    p999: float | None = None
    jitter: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one load. Counts are frames over all directions.

    sent = forwarded + the sum of ``drops``; ``drops`` has the keys nic,
    softnet_backlog, macvtap_ring, elsewhere. ``sent_by`` and ``forwarded_by`` are by
    router, ``forwarded_by_flow`` by "router/flow number" where flows are few (<= 16).
    ``cpu_seconds``, ``switches`` (voluntary and not) and ``migrations`` are by thread
    role: vcpu, vhost, napi, emulator, other (of the guests), ksoftirqd, and for CPU
    seconds also softirq and idle (of the whole host). Of ``sampled`` frames, ``reordered`` came
    after one of their flow that was sent later (RFC 4737); 0 of 0 where nobody looked.
    """

    configuration: str
    load: Load
    seconds: float
    sent: int
    forwarded: int
    drops: Mapping[str, int]
    sent_by: Mapping[str, int] = field(default_factory=dict)
    forwarded_by: Mapping[str, int] = field(default_factory=dict)
    forwarded_by_flow: Mapping[str, int] = field(default_factory=dict)
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    switches: Mapping[str, int] = field(default_factory=dict)
    migrations: Mapping[str, int] = field(default_factory=dict)
    latency: Latency | None = None
    sampled: int = 0
    reordered: int = 0
    notes: tuple[str, ...] = ()

    @property
    def pps(self) -> float:
        """Forwarded frames per second."""
        return self.forwarded / self.seconds if self.seconds > 0 else 0.0

    @property
    def sent_pps(self) -> float:
        return self.sent / self.seconds if self.seconds > 0 else 0.0

    @property
    def loss(self) -> float:
        """Share of the sent frames that were not forwarded, 0 to 1."""
        return max(0.0, 1.0 - self.forwarded / self.sent) if self.sent else 0.0

    @property
    def fell_short(self) -> bool:
        """Whether the generator sent clearly less than it was asked to send: it is the limit
        then, not the router."""
        return self.sent_pps < SENT_ENOUGH * self.load.total


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that one bench run found, ready for JSON and the reports.

    ``method`` is "sweep", "ndr", "compare", ... ``summary`` is the method's own result as
    plain JSON data (see methods.py and compare.py). ``environment`` holds the environment
    block by configuration name.
    """

    spec: Spec
    method: str
    configurations: tuple[Configuration, ...]
    trials: tuple[Trial, ...]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    seed: int | None = None
    started: str = ""
    version: str = ""
    # Why the run ended before its method did; "" for a complete run.
    unfinished: str = ""
