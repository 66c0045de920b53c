"""Guests that share a device and ask different things of it."""

from __future__ import annotations

from vsrtune.model.guest import Interface, NicKind
from vsrtune.model.plan import Refusal
from vsrtune.policy.model import Policy, QueueBounds
from vsrtune.policy.yaml_reader import KeyPath, shown
from vsrtune.wishes import Wishes


def without_quarrels(asked: list[Wishes], refusals: list[Refusal]) -> list[Wishes]:
    """Two guests may share one macvtap; then they must ask the same of it."""
    first: dict[tuple[KeyPath, int], Wishes] = {}
    kept: list[Wishes] = []
    for wish in asked:
        for interface in wish.guest.interfaces:
            for keys, value in _of_device(wish.policy, interface):
                other = first.setdefault((keys, interface.ifindex), wish)
                theirs = dict(_of_device(other.policy, interface))[keys]
                if theirs != value:
                    wish.refuse(
                        keys,
                        f"{interface.target} is shared with {other.guest.ref}, for which "
                        f"{other.policy.at(*keys)} asks {shown(theirs)}",
                        "ask the same for both guests",
                    )
        refusals += wish.refusals
        if not wish.refusals:
            kept.append(wish)
    return kept


def _of_device(policy: Policy, interface: Interface) -> list[tuple[KeyPath, int | QueueBounds]]:
    """What a policy asks of an interface's device, and not of threads."""
    out: list[tuple[KeyPath, int | QueueBounds]] = []
    if policy.macvtap_queue is not None and interface.kind.rings:
        out.append((("queue", "macvtap"), policy.macvtap_queue))
    if policy.napi_threaded is not None and interface.kind is NicKind.NAPI_MACVTAP:
        out.append((("napi", "threaded"), policy.napi_threaded))
    return out
