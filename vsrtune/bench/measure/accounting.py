# SPDX-License-Identifier: GPL-2.0-or-later
"""Accounts for the frames of a trial, from counters before and after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vsrtune.bench.spec.model import Latency, Load, Trial
from vsrtune.bench.traffic.pktgen import Sent

FlowKey = tuple[str, int | None]

# Lost frames so far: ``refused`` by devices that should send, ``missed`` by NICs without free
# descriptors, lost in the ``backlog`` of a CPU, and in the ``ring`` of a guest's tap.
Losses = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters at one moment, of every machine that takes part. ``counted`` is frames
    at the sink by stream ("router/forth") and flow (None where flows are not counted one by
    one). Two that are equal say that no frame is under way any more."""

    counted: Mapping[FlowKey, int]
    lost: Losses


@dataclass(frozen=True, slots=True)
class Effort:
    """The work of the host between the counters; see Trial."""

    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    switches: Mapping[str, int] = field(default_factory=dict)
    migrations: Mapping[str, int] = field(default_factory=dict)
    missing: int = 0


def account(
    configuration: str,
    load: Load,
    flows: int,
    sent: Sequence[Sent],
    before: Counts,
    after: Counts,
    effort: Effort,
    probes: Latency | None = None,
) -> Trial:
    """The trial. Probes are frames like the others: they count as sent, and as
    forwarded unless they were lost, because the drop counters include lost ones."""
    seconds = max((stream.seconds for stream in sent), default=0.0)
    sent_by = Counter[str]()
    for stream in sent:
        sent_by[router_of(stream.key)] += stream.frames
    forwarded_by = Counter(dict.fromkeys(sent_by, 0))
    by_flow = Counter[str]()
    for (key, flow), count in after.counted.items():
        frames = count - before.counted.get((key, flow), 0)
        forwarded_by[router_of(key)] += frames
        if flow is not None:
            # The numbers of the way back continue those of the way forth.
            number = flow + (flows if key.endswith("/back") else 0)
            by_flow[f"{router_of(key)}/{number}"] += frames
    total, forwarded = sent_by.total(), forwarded_by.total()
    missing = effort.missing
    notes = [f"{missing} threads came or went during the trial"] if missing else []
    if probes is not None:
        total += probes.sent
        forwarded += probes.sent - probes.lost
    drops = _drops(before.lost, after.lost)
    drops["elsewhere"] = total - forwarded - sum(drops.values())
    if drops["elsewhere"] < 0:
        notes.append(
            f"{-drops['elsewhere']} more frames were counted than sent: "
            "other traffic went through the same queues"
        )
    return Trial(
        configuration=configuration,
        load=load,
        seconds=seconds,
        sent=total,
        forwarded=forwarded,
        drops=drops,
        sent_by=dict(sent_by),
        forwarded_by=dict(forwarded_by),
        forwarded_by_flow=dict(by_flow),
        cpu_seconds=effort.cpu_seconds,
        switches=effort.switches,
        migrations=effort.migrations,
        latency=probes,
        notes=tuple(notes),
    )


def router_of(key: str) -> str:
    """The router of a stream's key; names may hold slashes."""
    return key.rpartition("/")[0]


def _drops(before: Losses, after: Losses) -> dict[str, int]:
    lost = {kind: count - before.get(kind, 0) for kind, count in after.items()}
    # A veth whose peer's backlog is full counts the frame as refused as well.
    refused = max(0, lost["refused"] - lost["backlog"])
    return {
        "nic": refused + lost["missed"],
        "softnet_backlog": lost["backlog"],
        "macvtap_ring": lost["ring"],
    }
