"""A recorded host with every kind of series that the rules and the dashboard ask for."""

from __future__ import annotations

from dataclasses import replace

import recorded_state

from vsrtune.model.daemon_state import DaemonState
from vsrtune.model.guest import Role, Sched, SchedClass
from vsrtune.model.host import DeadlineCpu

BUDGET = Sched(
    SchedClass.DEADLINE, runtime_ns=2_000_000, deadline_ns=10_000_000, period_ns=10_000_000
)


def state() -> DaemonState:
    """A recorded host with a device of the kernel module, tuned, a queue changed since, a vcpu
    with a budget that has waited for a CPU, and made-up traffic."""
    with recorded_state.passes("trixie-napi") as (host, passes):
        passes.run()
        recorded_state.set_queue(host, 0, 77)
        passes.run()
        seen = passes.state
    assert seen.snapshot is not None
    (guest,) = seen.snapshot.guests
    (vcpu, *_) = guest.by_role(Role.VCPU)
    threads = tuple(replace(t, sched=BUDGET) if t is vcpu else t for t in guest.threads)
    booked = tuple(DeadlineCpu(c.id, 209715) for c in seen.snapshot.host.cpus)
    host_seen = replace(seen.snapshot.host, deadline=booked)
    snapshot = replace(seen.snapshot, host=host_seen, guests=(replace(guest, threads=threads),))
    recent = recorded_state.with_traffic(seen).recent
    recent = replace(recent, budgets={vcpu.key: 0.5}, waited={vcpu.key: 9.0})
    return replace(seen, snapshot=snapshot, recent=recent)
