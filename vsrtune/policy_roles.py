"""What a policy asks of the threads of one role, and whether it asks for more than threads."""

from __future__ import annotations

from vsrtune.model.guest import DATA_PLANE, Role
from vsrtune.policy import AUTO, CpuChoice, DeviceMap, Policy, SchedRule, VcpuMap


def rule_for(policy: Policy, role: Role) -> SchedRule | None:
    """The scheduling the policy asks for a role."""
    if role is Role.VCPU:
        return policy.vcpu_sched
    if role is Role.VHOST:
        return policy.vhost_sched
    return policy.napi_sched if role is Role.NAPI else None


def cpus_for(policy: Policy, role: Role) -> CpuChoice | VcpuMap | DeviceMap | None:
    """The CPUs the policy asks for a role."""
    choice: CpuChoice | VcpuMap | DeviceMap | None = None
    if role is Role.VCPU:
        choice = policy.vcpu
    elif role is Role.VHOST:
        choice = policy.vhost
    elif role is Role.NAPI:
        choice = policy.napi
    if choice is None and role in DATA_PLANE and policy.placement is not None:
        return AUTO
    return choice


def asks_of_host(policy: Policy) -> bool:
    """Whether a guest with this policy needs settings of the host itself: interrupts,
    ksoftirqd, the time slice of class rr, or root domains, which class deadline stands on."""
    rules = [rule_for(policy, role) for role in DATA_PLANE]
    budgets = any(rule is not None and rule.deadline for rule in rules)
    realtime = policy.softirq_sched is not None or slice_of(policy) > 0
    return budgets or realtime or policy.moves_irqs is not None


def slice_of(policy: Policy) -> int:
    """The shortest time slice of class rr that the policy asks for, in ms; 0 for none."""
    rules = [*(rule_for(policy, role) for role in DATA_PLANE), policy.softirq_sched]
    return min((r.slice_ms for r in rules if r is not None and r.slice_ms), default=0)
