"""Made-up bench results: a router that saturates at 20,000 pps untuned, 40,000 tuned."""

from __future__ import annotations

from vsrtune.bench.spec.model import (
    Configuration,
    Endpoint,
    Latency,
    Leg,
    Load,
    Method,
    Outcome,
    Router,
    Spec,
    Trial,
    Tuning,
)

POLICY = 'guest: "vr1"\ncpus: {vcpu: 1}\nprofile: none\n'
UNTUNED = Configuration("untuned")
TUNED = Configuration("tuned", Tuning.POLICY, POLICY, "policies/tuned.yaml")
RATES = (8000, 16000, 32000, 64000)

SPEC = Spec(
    name="overload",
    left=Endpoint("g0", "gen"),
    right=Endpoint("s0", "sink"),
    routers=(Router("vr1", Leg("02:76:72:00:01:00", "10.10.1.2", "10.20.1.100")),),
    method=Method(rates=RATES, seconds=2.0, repeats=3),
    configuration=UNTUNED,
)

BLOCK = {
    "label": "one machine, veth and pktgen",
    "kernel": "6.12.57",
    "guests": {
        "vr1": {
            "vhost": "task",
            "threads": [{"thread": "vcpu 0", "cpus": "0-1", "class": "other"}],
            "interfaces": [{"target": "macvtap0", "txqueuelen": 500, "vhost": True}],
        }
    },
    "neighbours": [],
}


def trial(configuration: str, rate: int, forwarded_pps: float, *, late: bool = False) -> Trial:
    """Two seconds; what is lost is lost in the tap's ring."""
    sent, forwarded = rate * 2, round(forwarded_pps * 2)
    return Trial(
        configuration=configuration,
        load=Load({"vr1": float(rate)}, 2.0),
        seconds=2.0,
        sent=sent,
        forwarded=forwarded,
        drops={"nic": 0, "softnet_backlog": 0, "macvtap_ring": sent - forwarded, "elsewhere": 0},
        sent_by={"vr1": sent},
        forwarded_by={"vr1": forwarded},
        cpu_seconds={"vcpu": 0.8, "vhost": 1.0, "ksoftirqd": 0.1, "softirq": 0.5, "idle": 0.2},
        switches={"vcpu": 500, "vhost": 1500},
        migrations={"vcpu": 4, "vhost": 6},
        latency=Latency(100, 1, 0.0002, 0.0004, 0.0009) if late else None,
    )


def trials(configuration: str, peak: float) -> list[Trial]:
    """Three at each rate, the second at 90 % and the third at 110 % of the peak."""
    return [
        trial(configuration, rate, min(rate, peak * share))
        for rate in RATES
        for share in (1.0, 0.9, 1.1)
    ]


def outcome(method: str = "sweep") -> Outcome:
    """The sweep of one configuration, or of two as a comparison has them."""
    both = method == "compare"
    made = trials("untuned", 20000)
    environment = {"untuned": BLOCK}
    if both:
        made += trials("tuned", 40000)
        policy = {"sha256": "ab" * 32, "file": "policies/tuned.yaml", "text": POLICY}
        environment["tuned"] = {**BLOCK, "policy": policy}
    return Outcome(
        spec=SPEC,
        method=method,
        configurations=(UNTUNED, TUNED) if both else (UNTUNED,),
        trials=tuple(made),
        summary={},
        environment=environment,
        seed=7,
        started="2026-11-21T12:00:00+00:00",
        version="0.1.0",
    )
