"""The time slice of class rr, which the kernel has once for the whole host.

A vhost worker that shares a CPU with a busy vcpu waits for the vcpu's turn to end. At the
kernel's default of 100 ms the queue before it has long overflowed by then (measured in
docs/results/no-harm.md), so policies can ask for shorter turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from vsrtune.model.plan import Action, Skipped
from vsrtune.model.targets import HOST_REF, RrTimeslice, Target, TimeSlice
from vsrtune.plan_build import Phases
from vsrtune.policy.model import slice_of
from vsrtune.wishes import Context, Wishes

_SUBJECT = "time slice of class rr"


def build(context: Context, asked: Sequence[Wishes], phases: Phases) -> frozenset[Target]:
    """Add the shortest slice that the policies ask for; returns the targets asked for."""
    wishes = [wish for wish in asked if slice_of(wish.policy)]
    if not wishes:
        return frozenset()
    target = RrTimeslice(HOST_REF)
    shortest = min(wishes, key=lambda wish: slice_of(wish.policy))
    wanted = TimeSlice(slice_of(shortest.policy))
    if context.host.rr_timeslice_ms is None:
        phases.skipped.append(Skipped(HOST_REF, _SUBJECT, "the host's was not read"))
        return frozenset([target])
    now = TimeSlice(context.host.rr_timeslice_ms)
    if wanted.reached_by(now):
        phases.skipped.append(Skipped(HOST_REF, _SUBJECT, f"already as asked: {now}"))
        context.settled[target] = wanted
    elif (drift := context.leave(target)) is not None:
        phases.leave(HOST_REF, _SUBJECT, drift)
    else:
        reason = f"scheduler ({shortest.policy.at('scheduler')}): equals take turns of {wanted}"
        phases.timeslice.append(Action(target, now, wanted, reason))
    return frozenset([target])
