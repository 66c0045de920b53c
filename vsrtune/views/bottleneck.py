# SPDX-License-Identifier: GPL-2.0-or-later
"""Names the stage of a guest's path that limits what it forwards. Pure.

The path is that of a KVM router (Abeni, Kiraly, Li, Bianco, On the Performance of KVM-Based Virtual
Routers, sections 3.3 and 4.1): a NIC's interrupt and its SoftIRQ, the ring of the tap, the vhost
worker that fills the guest's receive queue, the vcpu, the vhost worker that sends. Two facts name
the stage: where frames are lost, and which thread behind that place never sleeps. A thread that
has nothing to do sleeps, so the stage behind a full one has time left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vsrtune.model.guest import Guest, Role
from vsrtune.model.load import Bottleneck, PathStage
from vsrtune.views.host_view import ThreadView

# The share of the time from which on a thread never sleeps, or a CPU is full. Ticks and other
# short interruptions take the rest.
FULL = 0.9
# The share of the time in the run queue from which on a thread never sleeps: a wait that has not
# ended when the interval does is not counted, and may be most of a second (sched_rt_runtime_us).
WAITS = 0.7
# The share of the arriving frames from which on a loss tells of a limit.
LOSS = 0.005
# A loss and a thread that are this clear leave no doubt.
_SURE_LOSS, _SURE_FULL = 0.02, 0.95
# The places of a tap or macvtap that lose a frame because nobody took those before it.
_RINGS = frozenset({"ring", "ring_full", "queue_full", "queue_bytes"})


@dataclass(frozen=True, slots=True)
class CpuLoad:
    """A CPU: the shares of its time that it was busy and in SoftIRQs, and who else is on it, the
    busiest first, with their shares."""

    busy: float
    softirq: float
    others: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Flow:
    """What a guest's path did in one interval. ``arrived``, ``sent`` and ``lost`` (in the ring)
    are frames a second by the guest's devices, ``missed`` those that were lost before the tap, by
    the CPU that serves the NIC, ``unsent`` those that a lower device could not send, by its
    name. ``cpus`` has every online CPU."""

    threads: Sequence[ThreadView]
    arrived: Mapping[str, float]
    sent: Mapping[str, float]
    lost: Mapping[str, float]
    missed: Mapping[int, float]
    unsent: Mapping[str, float]
    cpus: Mapping[int, CpuLoad]

    @property
    def offered(self) -> float:
        """Frames a second that came for the guest."""
        return sum(self.arrived.values()) + sum(self.missed.values())


def is_ring(place: str) -> bool:
    """Whether a place of the drop counters is a ring or queue in front of the guest."""
    return place in _RINGS


def bottleneck(guest: Guest, flow: Flow) -> Bottleneck:
    """The stage that limits the guest: the last one that loses frames, because whoever mends an
    earlier one only gives it more to lose."""
    least = max(LOSS * flow.offered, 1.0)
    device = max(flow.lost, key=lambda name: flow.lost[name], default="")
    lost = sum(flow.lost.values())
    overflows = lost >= max(LOSS * sum(flow.arrived.values()), 1.0)
    found = _behind_ring(guest, flow, device) if overflows else None
    if found is None and sum(flow.missed.values()) >= least:
        return _interrupts(guest, flow)
    found = found or _sending(guest, flow) or _at_limit(guest, flow)
    if found is not None:
        return found
    if overflows:
        text = f"{lost:,.0f} frames/s find the ring full, and every thread has time left: bursts"
        return Bottleneck(
            guest.ref, PathStage.RING, device, text, "a longer queue (queue: macvtap)", False
        )
    unsent = sum(flow.unsent.values())
    if unsent >= least:
        name = max(flow.unsent, key=lambda name: flow.unsent[name])
        text = f"{name} drops {unsent:,.0f} frames/s that it cannot send"
        return Bottleneck(
            guest.ref, PathStage.OUTSIDE, name, text, "a faster link or receiver", True
        )
    text = "no thread or CPU of its path is full, and it loses no frame"
    return Bottleneck(guest.ref, PathStage.OUTSIDE, "", text, "nothing", True)


def _interrupts(guest: Guest, flow: Flow) -> Bottleneck:
    cpu = max(flow.missed, key=lambda cpu: flow.missed[cpu])
    missed, load = flow.missed[cpu], flow.cpus.get(cpu, CpuLoad(0.0, 0.0))
    why = f"CPU {cpu} loses {missed:,.0f} frames/s before the tap; {load.softirq:.0%} SoftIRQ"
    sure = missed >= _SURE_LOSS * flow.offered and load.busy >= _SURE_FULL
    if load.softirq >= load.busy / 2 or not load.others:
        help_ = "another CPU for the NIC's interrupts, or more receive queues"
    else:
        name, share = load.others[0]
        why += f", {share:.0%} {name}"
        help_ = f"keep {name} off CPU {cpu}, or give its ksoftirqd a priority (scheduler: softirq)"
    return Bottleneck(guest.ref, PathStage.INTERRUPTS, f"CPU {cpu}", why, help_, sure)


def _behind_ring(guest: Guest, flow: Flow, device: str) -> Bottleneck | None:
    """Who does not empty the ring of ``device``: its worker, or the vcpu, which then gives the
    worker no buffers, so that this sleeps."""
    busy = [v for v in flow.threads if _never_sleeps(v) or _starved(v, flow)]
    feeders = [v for v in busy if _serves(v, device)]
    vcpus = [v for v in busy if v.thread.role is Role.VCPU]
    if not feeders and not vcpus:
        return None
    # Two that never sleep take turns on one CPU, and the one that waits longer falls behind. On two
    # CPUs the worker is the limit, because it would sleep if the vcpu gave it no buffers.
    cpus = {v.thread.last_cpu for v in feeders}
    worst = max(feeders + [v for v in vcpus if not cpus or v.thread.last_cpu in cpus], key=_waits)
    stage = PathStage.VCPU if worst.thread.role is Role.VCPU else PathStage.RECEIVE
    loss = flow.lost[device]
    return _named(
        guest, flow, stage, worst, f"the ring of {device} loses {loss:,.0f} frames/s", loss
    )


def _sending(guest: Guest, flow: Flow) -> Bottleneck | None:
    """A worker that never sleeps, of a device through which the guest sends."""
    for view in flow.threads:
        device = view.thread.interface
        if view.thread.role is not Role.VHOST or device is None or not _never_sleeps(view):
            continue
        if flow.sent.get(device, 0.0) > flow.arrived.get(device, 0.0):
            what = f"{device} sends {flow.sent[device]:,.0f} frames/s"
            return _named(guest, flow, PathStage.TRANSMIT, view, what, flow.offered)
    return None


def _at_limit(guest: Guest, flow: Flow) -> Bottleneck | None:
    """A thread that never sleeps although nothing is lost. Nothing else tells of a limit, so this
    has to be clear: a vcpu that gets single frames needs much of its CPU for few of them."""
    stages = (
        (Role.VHOST, PathStage.RECEIVE),
        (Role.NAPI, PathStage.RECEIVE),
        (Role.VCPU, PathStage.VCPU),
    )
    if flow.offered < 1.0:
        return None
    for role, stage in stages:
        for view in flow.threads:
            if view.thread.role is role and _never_sleeps(view, _SURE_FULL):
                return _named(guest, flow, stage, view, "no frame is lost yet", 0.0)
    return None


def _named(
    guest: Guest, flow: Flow, stage: PathStage, view: ThreadView, what: str, loss: float
) -> Bottleneck:
    load, wait = view.use.load or 0.0, view.use.wait or 0.0
    why = f"{what}; {view.label} runs {load:.0%} and waits {wait:.0%} of the time"
    cpu = view.thread.last_cpu
    others = flow.cpus.get(cpu, CpuLoad(0.0, 0.0)).others
    beside = [(name, share) for name, share in others if name != f"{guest.ref} {view.label}"]
    if view.use.throttled:
        why, help_ = f"{why}; its budget is used up", "a larger budget"
    elif wait >= (1 - FULL) * load and beside:
        name, share = beside[0]
        help_ = f"a CPU of its own: CPU {cpu} also runs {name} ({share:.0%})"
    elif stage is not PathStage.VCPU:
        help_ = "more queues, each with a worker and a CPU of its own"
    elif idle := _idle_vcpus(flow.threads):
        help_ = f"more queues: {', '.join(idle)} could share the work"
    else:
        help_ = f"nothing here: CPU {cpu} is full"
    sure = loss >= _SURE_LOSS * flow.offered and (_wanted(view) >= _SURE_FULL or view.use.throttled)
    return Bottleneck(guest.ref, stage, view.label, why, help_, sure)


def _never_sleeps(view: ThreadView, full: float = FULL) -> bool:
    """Whether a thread ran, or waited for a CPU or for its budget, all the time."""
    return _wanted(view) >= full or (view.use.wait or 0.0) >= WAITS or view.use.throttled


def _starved(view: ThreadView, flow: Flow) -> bool:
    """Whether a thread that did nothing may have been kept from its only CPU. The kernel counts a
    wait when it ends, so a thread that got no CPU at all shows none."""
    cpu = flow.cpus.get(view.thread.last_cpu)
    others = sum(share for _, share in cpu.others) if cpu is not None else 0.0
    return _wanted(view) < 1 - FULL and len(view.thread.affinity) == 1 and others >= _SURE_FULL


def _wanted(view: ThreadView) -> float:
    return (view.use.load or 0.0) + (view.use.wait or 0.0)


def _serves(view: ThreadView, device: str) -> bool:
    """Whether a worker or NAPI thread may be the one of ``device``."""
    return view.thread.role in (Role.VHOST, Role.NAPI) and view.thread.interface in (device, None)


def _waits(view: ThreadView) -> tuple[float, float]:
    return view.use.wait or 0.0, view.use.load or 0.0


def _idle_vcpus(threads: Iterable[ThreadView]) -> list[str]:
    return [v.label for v in threads if v.thread.role is Role.VCPU and _wanted(v) < FULL / 2]
