"""What the matrix consists of: labs, runs in them, and figures made of the runs.

A run is one `vsrtune bench run` or `compare` and leaves one JSON file. It is known by
"figure/name"; a figure may draw on the runs of others (native forwarding stands in
every plot).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import Data

TREE = Path(__file__).resolve().parents[2]

# Frames per second offered: below, around and far above what an untuned router of the
# lab can forward.
RATES = (16000, 32000, 64000)
PAIRS = 9
NATIVE = "native"
# What vsrtune calls the lab's first router while it runs as in a pod of KubeVirt.
POD = "kubevirt:routers/edge"


@dataclass(frozen=True)
class Guest:
    """How a router of a lab differs from the lab's usual one. ``routes`` is None for a
    routing table as it is, else how many prefixes (a power of two) below 10.128.0.0/9 it
    is given beside that one, which all lead to the sink. ``like`` is the number of a router
    whose addresses it has too, on interfaces with that one's MACs and on its own: it may be
    in a group with it. ``busy`` is how many processes spin in it. ``rules`` is how many routing
    rules every frame is compared with: a slow router, whose overload a slow machine can send."""

    vcpus: int = 1
    queues: int = 1
    routes: int | None = None
    rules: int = 0
    like: int | None = None
    busy: int = 0


@dataclass(frozen=True)
class Boot:
    """One kind of lab; all runs of a kind are made in one boot if nothing interrupts."""

    name: str
    release: str = "trixie"
    cpus: int = 2
    guests: tuple[Guest, ...] = (Guest(),)
    # What p0 and p1 are, as the lab knows it.
    nic: str = "veth"
    # Prefixes below 10.128.0.0/9 that this host, as the native router, has.
    native_routes: int | None = None
    # The routers have FRR, with peers outside (the lab's --frr).
    frr: bool = False
    # A file beside this one: what the lab's tree differs by.
    patch: str | None = None


@dataclass(frozen=True)
class Run:
    """One measurement. With several ``configurations`` they are compared, the first one
    being the baseline.

    A configuration is the mapping of a spec file with a ``name`` more, and the text of
    its policy under ``policy``. ``scaled`` takes the rates from another run: the highest
    median rate forwarded there, times each factor, rounded to hundreds. With ``by_router``
    several routers are loaded at once, each with its own factor of that rate; ``router``
    and the factors of ``scaled`` then say nothing. The routers of ``together`` are instead
    loaded alike with ``rates``. With ``sizes`` each rate is tried with each.

    With a ``group``, what a group's file says below `group:`, that is made before and ended
    after, its balancers too, and all its ``guests`` are the router, addressed as the first of
    them. ``router`` is then the one whose addresses it has.

    With ``sessions`` those of its router, which has FRR, are watched (sessions.py). With
    ``latency`` probes are sent beside the load, for the delay; with ``reordering`` the order of frames
    within a flow is looked at.

    With a ``bed`` it is not a run of the bench but one of namespace routers (nslab), whose
    topology and method it describes; a configuration then names a kind of virtual device.
    """

    name: str
    boot: Boot
    configurations: tuple[Mapping[str, Any], ...]
    rates: tuple[int, ...] = RATES
    scaled: tuple[str, tuple[float, ...]] | None = None
    router: str = "vr1"
    by_router: Mapping[str, float] = field(default_factory=dict)
    together: tuple[str, ...] = ()
    group: Mapping[str, Any] = field(default_factory=dict)
    guests: tuple[str, ...] = ()
    destination: str | None = None
    sizes: tuple[int, ...] = ()
    traffic: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 1.5
    pairs: int = PAIRS
    seed: int = 1
    latency: bool = False
    reordering: bool = False
    # Command lines around it, for what is not running in a lab by itself.
    before: tuple[tuple[str, ...], ...] = ()
    after: tuple[tuple[str, ...], ...] = ()
    sessions: bool = False
    bed: Mapping[str, Any] | None = None

    @property
    def trials(self) -> int:
        if self.bed is not None:
            loads = len(self.bed.get("factors", (1,))) + self.bed.get("more_loads", 0)
            return loads * self.pairs * len(self.configurations)
        count = len(self.rates) if self.scaled is None else len(self.scaled[1])
        if self.by_router:
            count = 1
        return count * max(1, len(self.sizes)) * self.pairs * len(self.configurations)

    @property
    def expected_seconds(self) -> float:
        """A guess at how long it takes, for the time budget alone."""
        if self.bed is not None:
            return 15 + self.trials * (self.seconds + 0.7)
        changes = self.pairs * len(self.configurations) if len(self.configurations) > 1 else 1
        slow = any("attachment" in c for c in self.configurations)
        made = 60 if self.group else 0
        made += 30 * self.trials if self.sessions else 0
        made += (
            10 * self.pairs * len({str(c["scale"]) for c in self.configurations if "scale" in c})
        )
        return made + 8 + self.trials * (self.seconds + 1.1) + changes * (8.0 if slow else 1.5)


@dataclass(frozen=True)
class Verdict:
    """``answer`` is agrees, differs, open (not shown), refused (the trials decide nothing), stood
    still (a router did) or missing (nothing was measured); ``text`` says by which figures."""

    answer: str
    text: str


@dataclass(frozen=True)
class Claim:
    """One point that the paper makes (in our words), and how ours is judged."""

    text: str
    judge: Callable[[Data], Verdict]
    why: Callable[[Data], str] | None = None


@dataclass(frozen=True)
class Figure:
    """One figure of a paper. ``lines`` of a plot are (label, run, configuration)."""

    id: str
    title: str
    paper: str
    ours: str
    runs: tuple[Run, ...]
    claims: tuple[Claim, ...]
    plots: Callable[[Data], Mapping[str, Any]] | None = None
    # Drawn beside: "figure/run" of native forwarding.
    native: str | None = "native/sweep"
    tables: Callable[[Data], list[str]] | None = None


def untuned(name: str = "untuned", **more: Any) -> dict[str, Any]:
    return {"name": name, "tuning": "untuned", **more}


def policy(name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "tuning": "policy", "policy": text, **more}


def libvirt_pins(name: str, cpus: str) -> dict[str, Any]:
    return {"name": name, "tuning": "libvirt-pins", "cpus": cpus}


def shipped(name: str) -> str:
    """The text of a policy that is shipped."""
    return (TREE / "policies" / f"{name}.yaml").read_text(encoding="utf-8")


def fifo(vcpu: int, vhost: int, *, queue: int | None = None, guest: str = "vr*") -> str:
    """A policy: every thread off the interrupt CPU, FIFO with these priorities, although
    they share one: what the papers did."""
    text = (
        f'guest: "{guest}"\n'
        "standstill: accept\n"
        "cpus: {irq: auto, vcpu: auto, vhost: auto, emulator: auto}\n"
        "scheduler:\n"
        f"  vcpu: {{class: fifo, priority: {vcpu}}}\n"
        f"  vhost: {{class: fifo, priority: {vhost}}}\n"
        f"  softirq: {{class: fifo, priority: {max(vcpu, vhost)}}}\n"
    )
    return text if queue is None else f"{text}queue: {{macvtap: {queue}}}\n"


FIFO = "{class: fifo, priority: 10}"


def budget(runtime: float, period: float = 200.0) -> str:
    """Class deadline in a policy: so many milliseconds of CPU time in every period."""
    return f"{{class: deadline, runtime: {runtime:g}ms, period: {period:g}ms}}"


def placed(
    vcpu: str, vhost: str, *, cpus: tuple[int, int] = (1, 1), queue: int | None = None
) -> str:
    """A policy with these schedulers for vcpu and vhost, on these CPUs. They are written
    as numbers because a budget belongs to a CPU: threads of the same number share one."""
    text = (
        'guest: "vr*"\n'
        "standstill: accept\n"
        f"cpus: {{irq: auto, vcpu: {cpus[0]}, vhost: {cpus[1]}, emulator: auto}}\n"
        "scheduler:\n"
        f"  vcpu: {vcpu}\n"
        f"  vhost: {vhost}\n"
        f"  softirq: {FIFO}\n"
    )
    return text if queue is None else f"{text}queue: {{macvtap: {queue}}}\n"


PINS_ONLY = (
    'guest: "vr*"\nprofile: none\ncpus: {irq: auto, vcpu: auto, vhost: auto, emulator: auto}\n'
)

BASE = Boot("base")
BARE = Boot("bare", guests=())
BOOKWORM = Boot("bookworm", release="bookworm")
ROUTES = Boot(
    "routes",
    guests=(Guest(routes=0), Guest(routes=262144)),
    native_routes=0,
)
THREADS = Boot("threads", guests=(Guest(), Guest(vcpus=2), Guest(vcpus=2, queues=2)))
# A CPU each for the vcpu and for vhost, beside the one of interrupts and generator.
THREE = Boot("three", cpus=3)
PAIR = Boot("pair", guests=(Guest(), Guest()))
# Four that can be one router.
GROUP = Boot("group", guests=(Guest(), Guest(like=1), Guest(like=1), Guest(like=1)))
# Two that can be routers of one multistage router.
PAIR_ALIKE = Boot("pair-alike", guests=(Guest(), Guest(like=1)))
