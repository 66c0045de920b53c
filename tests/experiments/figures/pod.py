"""A router in a pod as KubeVirt makes it: whether a policy of the node's gains anything, and whether
the vhost workers are better off on one CPU or on several.

The rules stand before any measurement, each by the whole interval. With each policy the router forwards
at least FLOOR of untuned at each load and more than untuned at the highest, and P99 of the delay is
lower at each load. With the pool it forwards more than with the housekeeping CPU at the highest load,
and P99 is lower at each.

The lab has three CPUs. One receives, and sends the load; the pod has the others. On two CPUs no policy
has a choice, because vsrtune leaves one without threads that it binds. Each configuration has the same two:
with a third for the pool, on a machine of two cores, the emulated CPUs would be compared and not the
placements. The router is a slow one, since this machine cannot send four times what a plain one
forwards on three emulated CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from experiments.data import Data
from experiments.figures import peers
from experiments.figures.no_harm import FLOOR
from experiments.judge import Judge, Place, above, causes, compared, sooner
from experiments.plan import POD, Boot, Claim, Figure, Guest, Run, Verdict, policy, untuned
from vsrtune.bench.report import plots
from vsrtune.bench.report.points import by_configuration

_TIMES = (1.0, 2.0, 4.0)
_PEAK, _RUN = "peak", "overload"
_UNTUNED, _HOUSEKEEPING, _POOL = "untuned", "housekeeping CPU", "pool"
# Of which four times what it forwards untuned can be sent.
_RULES = 800
_BOOT = Boot("pod", cpus=3, guests=(Guest(rules=_RULES),))
_LAUNCHER = ("python3", "-B", "/mnt/tests/lab/inside/launcherhelp.py")
_IN_A_POD: dict[str, Any] = {
    "router": POD,
    # The console's word for its rules.
    "before": ((*_LAUNCHER, "start", "tables are filled"),),
    "after": ((*_LAUNCHER, "stop"),),
    "traffic": {"size": 60},
}


def _policy(name: str, vhost: str) -> dict[str, Any]:
    cpus = f'{{irq: 0, vcpu: 1, vhost: "{vhost}", emulator: 2}}'
    return policy(name, f'guest: "{POD}"\ncpus: {cpus}\n')


_CONFIGURATIONS = (
    untuned(_UNTUNED),
    _policy(_HOUSEKEEPING, "2"),
    _policy(_POOL, "1-2"),
)
_PAIRS = ((_HOUSEKEEPING, _UNTUNED), (_POOL, _UNTUNED), (_POOL, _HOUSEKEEPING))


def _load(data: Data, times: float) -> float:
    return data.scaled(_RUN, _TIMES, times)


def _forwards(ours: str, theirs: str, times: float, least: float = 1.0) -> Judge:
    def judge(data: Data) -> Verdict:
        load = _load(data, times)
        return compared(above(least), [(Place(_RUN, ours, load), Place(_RUN, theirs, load))])(data)

    return judge


def _words(name: str) -> str:
    return "untuned" if name == _UNTUNED else f"with vhost on the {name}"


def _claims() -> tuple[Claim, ...]:
    most = _TIMES[-1]
    return (
        *(
            Claim(
                f"At {times:g} times the untuned peak, it forwards at least {FLOOR:g} of untuned {_words(ours)}.",
                _forwards(ours, _UNTUNED, times, FLOOR),
            )
            for ours in (_HOUSEKEEPING, _POOL)
            for times in _TIMES
        ),
        *(
            Claim(
                f"At {most:g} times it, it forwards more {_words(ours)} than {_words(theirs)}.",
                _forwards(ours, theirs, most),
                causes(_RUN, theirs, ours),
            )
            for ours, theirs in _PAIRS
        ),
        *(
            Claim(
                f"At {times:g} times it, P99 of the delay is lower {_words(ours)} than {_words(theirs)}.",
                sooner(_RUN, ours, theirs, partial(_load, times=times)),
            )
            for ours, theirs in _PAIRS
            for times in _TIMES
        ),
    )  # fmt: skip


def _plots(data: Data) -> Mapping[str, Any]:
    lines = [plots.curve(*line) for line in by_configuration(data.outcome(_RUN)).items()]
    names = [str(c["name"]) for c in _CONFIGURATIONS]
    return {
        "pod": plots.throughput(lines, "A router in a pod", note="one machine, veth and pktgen"),
        "pod-delay": peers.delays(data, _RUN, names, _TIMES),
    }


FIGURE = Figure(
    id="pod",
    title="A router in a pod: untuned, and tuned from the node",
    paper="",
    ours=f"One router of one vcpu, which compares every frame with {_RULES:,} routing rules, run as "
    "virt-launcher of KubeVirt runs it, without Kubernetes: in a container's cgroup with two CPUs, on taps "
    "and bridges in a network namespace of its own. A third CPU receives, and sends the load. Untuned, the "
    "router's threads have both CPUs of the pod. Each policy binds the vcpu to one of them, and has the "
    "classes of the profile router. It binds both vhost workers to the other one, as "
    "`isolateEmulatorThread` does (housekeeping CPU), or to the pod's two (pool). `auto` chooses as the "
    "former. A load is so many times the untuned peak; probes beside it give the delay. What is lost in "
    "the pod counts as lost elsewhere. Three emulated CPUs on two cores. The router is as fast as its vcpu: "
    "a policy can gain no more than the untuned vcpu lacks of a CPU, which the causes below tell.",
    runs=(
        Run(
            _PEAK, _BOOT, (untuned(_UNTUNED),), rates=(4000, 6000, 8000, 12000),
            seconds=2.0, pairs=3, seed=71, **_IN_A_POD,
        ),
        Run(
            _RUN, _BOOT, _CONFIGURATIONS, scaled=(f"pod/{_PEAK}", _TIMES), latency=True,
            seconds=4.0, pairs=9, seed=72, **_IN_A_POD,
        ),
    ),
    claims=_claims(),
    plots=_plots,
    native=None,
)  # fmt: skip
