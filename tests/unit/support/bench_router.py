"""A made-up router with a known peak, which answers loads with exact trials."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from vsrtune.bench.spec.model import (
    Configuration,
    Endpoint,
    Latency,
    Leg,
    Load,
    Method,
    Router,
    Spec,
    Traffic,
    Trial,
)


def spec(method: Method, *, routers: int = 1, traffic: Traffic | None = None) -> Spec:
    return Spec(
        name="made-up",
        left=Endpoint("g0", "gen"),
        right=Endpoint("s0", "sink"),
        routers=tuple(
            Router(f"vr{n}", Leg("02:00:00:00:00:01", f"10.10.{n}.2", f"10.20.{n}.100"))
            for n in range(1, routers + 1)
        ),
        traffic=traffic or Traffic(),
        method=method,
        configuration=Configuration("untuned"),
    )


@dataclass
class FakeRouter:
    """Forwards up to ``peak`` pps; of what is offered above the peak, ``hurt`` of it is taken
    away from the rest. ``noise`` is the spread of the peak from trial to trial; the generator
    sends at most ``most`` pps."""

    peak: float
    hurt: float = 0.0
    noise: float = 0.0
    most: float = 1e12
    source: random.Random = field(default_factory=lambda: random.Random(1))
    loads: list[Load] = field(default_factory=list)

    def trial(self, load: Load, configuration: str = "untuned") -> Trial:
        self.loads.append(load)
        rate = min(load.total, self.most)
        sent = round(rate * load.seconds)
        peak = self.peak * self.source.lognormvariate(0.0, self.noise)
        rate_through = max(0.0, peak - self.hurt * max(0.0, rate - peak))
        seconds = sent / rate
        forwarded = min(sent, int(rate_through * seconds))
        names = list(load.pps)
        return Trial(
            configuration=configuration,
            load=load,
            seconds=seconds,
            sent=sent,
            forwarded=forwarded,
            drops={"nic": 0, "softnet_backlog": 0, "macvtap_ring": sent - forwarded, "elsewhere": 0},
            sent_by={name: sent // len(names) for name in names},
            forwarded_by={name: forwarded // len(names) for name in names},
            latency=Latency(100, 0, 1e-4, 2e-4, rate * 1e-8) if load.latency else None,
        )  # fmt: skip
