# SPDX-License-Identifier: GPL-2.0-or-later
"""A budget for a whole guest: each of its vcpu and vhost threads gets an equal part.

Until a guest is known, both rules of such a policy ask for the whole budget, so that whoever
reads them finds class deadline there. For a guest, they ask for the part of one thread.
"""

from __future__ import annotations

from dataclasses import replace

from vsrtune.core.text import time_text
from vsrtune.model.deadline import MIN_RUNTIME_NS, bandwidth, percent
from vsrtune.model.guest import Guest, Role
from vsrtune.policy.model import Policy

_US = 1000
# The shortest runtime in whole microseconds that the kernel accepts.
_LEAST_NS = -(-MIN_RUNTIME_NS // _US) * _US
# What every kernel admits of a CPU by default, in percent.
_ADMITTED = 90


def divided(policy: Policy, guest: Guest) -> Policy:
    """The policy for ``guest``: its rules ask for a thread's part of the budget, in whole
    microseconds. The same object when there is nothing to divide."""
    whole, count = policy.budget, sum(_threads(guest))
    if whole is None or not count:
        return policy
    part = replace(whole, runtime_ns=whole.runtime_ns // (count * _US) * _US)
    return replace(policy, vcpu_sched=part, vhost_sched=part)


def unfit(policy: Policy, guest: Guest) -> tuple[str, str] | None:
    """Why no thread of ``guest`` can have its part of the budget, and what to write instead; None
    when it can, or when there is no budget."""
    whole, part = policy.budget, policy.vcpu_sched
    if whole is None or part is None or not part.deadline:
        return None
    vcpus, workers = _threads(guest)
    count, period = vcpus + workers, time_text(whole.period_ns)
    parts = f"each of its {count} threads ({vcpus} vcpu, {workers} vhost)"
    if part.runtime_ns > part.period_ns:
        reason = f"{parts} would get {percent(bandwidth(part.sched))} of a CPU"
        return reason, f"write cpu: {_ADMITTED * count}% or less"
    if part.runtime_ns < _LEAST_NS:
        # In hundredths of a percent, rounded up.
        least = -(-10_000 * _LEAST_NS * count // whole.period_ns) / 100
        reason = f"{parts} would get {time_text(part.runtime_ns)} in {period}, which is below "
        reason += time_text(_LEAST_NS)
        return reason, f"write cpu: {least:g}% or more, or a longer period"
    return None


def _threads(guest: Guest) -> tuple[int, int]:
    """How many vcpu and vhost threads a guest has."""
    return len(guest.by_role(Role.VCPU)), len(guest.by_role(Role.VHOST))
