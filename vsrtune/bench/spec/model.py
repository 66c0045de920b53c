# SPDX-License-Identifier: GPL-2.0-or-later
"""Requests and results of a bench: frozen values, JSON in and out.

Rates are frames per second (pps), over all routers and directions of a trial
unless a name says otherwise; times are seconds; frame sizes are bytes without
the frame check sequence, as pktgen counts them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vsrtune.bench.spec import keys
from vsrtune.bench.spec.keys import keys_of
from vsrtune.core.cpuset import MAX_CPU
from vsrtune.policy.subschemas import FLAG, by_name, choice, mapping, sequence, short_text, whole

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

    device: str = field(metadata=keys.DEVICE)
    namespace: str | None = field(default=None, metadata=keys.NAMESPACE)
    host: str | None = field(default=None, metadata=keys.HOST)
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

    mac: str = field(metadata=keys.MAC)
    source: str = field(metadata=keys.ADDRESS)
    destination: str = field(metadata=keys.ADDRESS)


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

    size: Size = field(default=60, metadata=keys.SIZE)
    flows: int = field(default=1, metadata=whole(1, keys.MAX_FLOWS))
    bidirectional: bool = field(default=False, metadata=FLAG)
    destinations: int = field(default=1, metadata=whole(1, keys.MAX_DESTINATIONS))
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
    cpus: str | None = field(default=None, metadata=keys.CPUS)
    apply: tuple[str, ...] = field(default=(), metadata=keys.COMMAND)
    revert: tuple[str, ...] = field(default=(), metadata=keys.COMMAND)
    attachment: BenchAttachment = field(
        default=BenchAttachment.AS_IS, metadata=choice(*map(str, BenchAttachment))
    )
    vhost: bool | None = field(default=None, metadata=FLAG)
    queues: int | None = field(default=None, metadata=whole(1, keys.MAX_QUEUES))
    ring: int | None = field(default=None, metadata=choice(256, 512, 1024, type="integer"))
    mergeable: bool | None = field(default=None, metadata=FLAG)
    scale: Mapping[str, int] = field(
        default_factory=dict,
        metadata=by_name(
            whole(1, keys.MAX_MEMBERS), "a number of members by the group's name, such as {edge: 2}"
        ),
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that no run may exceed: offered pps and seconds of one trial."""

    pps: int = field(default=2_000_000, metadata=keys.RATE)
    seconds: float = field(default=3600.0, metadata=keys.DURATION)


@dataclass(frozen=True, slots=True)
class Method:
    """The trials to make: ``kind`` is sweep, ndr, pdr or fairness.

    sweep: ``rates``, ``repeats``. ndr/pdr: ``low``..``high``, loss threshold ``loss``
    (share, 0 for ndr), ``precision`` (share of the rate), ``trials`` per rate, of which the
    worst decides. fairness: each of ``rates`` to each router, or flow, ``repeats``. With
    ``sizes`` a sweep tries each rate with frames of each of these sizes instead of
    ``Traffic.size``.
    """

    kind: str = field(default="sweep", metadata=choice(*keys.KINDS))
    rates: tuple[int, ...] = field(default=(), metadata=keys.RATES)
    seconds: float = field(default=2.0, metadata=keys.DURATION)
    repeats: int = field(default=1, metadata=whole(1, 1000))
    low: int = field(default=0, metadata=whole(0, keys.MAX_PPS))
    high: int = field(default=0, metadata=whole(1, keys.MAX_PPS))
    loss: float = field(default=0.0, metadata=keys.SHARE)
    precision: float = field(default=0.05, metadata=keys.PRECISION)
    trials: int = field(default=1, metadata=whole(1, 100))
    # In results of earlier versions.
    duration: float = 0.0
    # fairness: pps by router name, where they are not equal.
    by_router: Mapping[str, int] = field(
        default_factory=dict,
        metadata=by_name(keys.RATE, "rates by router name such as {vr1: 8000}"),
    )
    latency: bool = field(default=False, metadata=FLAG)
    reordering: bool = field(default=False, metadata=FLAG)
    sizes: tuple[Size, ...] = field(
        default=(), metadata=sequence(keys.SIZE, "a list of sizes such as [60, 508, 1496]")
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
            maxItems=keys.MAX_MEMBERS,
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
    warmup: float = field(default=0.5, metadata=keys.DURATION)
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
