"""Threaded NAPI of the guests' napi_macvtap devices: the setting, and threads to come.

A device's NAPI thread exists only while ``threaded`` is on, so its CPUs and its class
come one pass later than the setting: until then they are pending.
"""

from __future__ import annotations

from collections.abc import Sequence

from vsrtune.model.guest import Interface, NicKind, Role
from vsrtune.model.plan import Action
from vsrtune.model.targets import NapiThreaded
from vsrtune.plan_build import Phases
from vsrtune.policy.model import cpus_for, rule_for
from vsrtune.policy.yaml_reader import dotted
from vsrtune.wishes import Context, Wishes

_KEYS = ("napi", "threaded")


def build(context: Context, all_wishes: Sequence[Wishes], phases: Phases) -> None:
    """Add what the policies ask of ``threaded``, and say which threads are missing."""
    claimed: dict[int, str] = {}
    for wish in all_wishes:
        devices = [i for i in wish.guest.interfaces if i.kind is NicKind.NAPI_MACVTAP]
        asked = _asked(wish)
        if asked and not devices:
            what = ", ".join(map(dotted, asked))
            phases.skip(wish.guest.ref, what, "the guest has no napi_macvtap interface")
        for device in devices:
            _threaded(context, wish, device, claimed, phases)
            _missing(wish, device, claimed, phases)


def _asked(wish: Wishes) -> list[tuple[str, ...]]:
    policy = wish.policy
    settings = (
        (("cpus", "napi"), policy.napi),
        (("scheduler", "napi"), policy.napi_sched),
        (_KEYS, policy.napi_threaded),
    )
    return [keys for keys, value in settings if value is not None]


def _threaded(
    context: Context, wish: Wishes, device: Interface, claimed: dict[int, str], phases: Phases
) -> None:
    ref, wanted = wish.guest.ref, wish.policy.napi_threaded
    target = NapiThreaded(ref, device.target, device.ifindex)
    subject = f"{device.target} threaded NAPI"
    other = claimed.setdefault(device.ifindex, ref)
    if wanted is None:
        phases.skip(ref, subject, "not asked by the policy")
        return
    wish.asked.add(target)
    if device.threaded is None:
        phases.skip(ref, subject, "the device has no such attribute")
    elif other != ref:
        phases.skip(ref, subject, f"the device is shared, the setting goes with {other}")
    elif bool(device.threaded) == wanted:
        phases.skip(ref, subject, f"already as asked: {device.threaded}")
        context.settled[target] = device.threaded
    elif (drift := context.leave(target)) is not None:
        phases.leave(ref, subject, drift)
    else:
        reason = f"{dotted(_KEYS)} ({wish.policy.at(*_KEYS)})"
        phases.threaded.append(Action(target, device.threaded, int(wanted), reason))


def _missing(wish: Wishes, device: Interface, claimed: dict[int, str], phases: Phases) -> None:
    """Say why CPUs or a class asked for NAPI threads cannot be given to this device's."""
    ref, policy = wish.guest.ref, wish.policy
    if any(t.interface == device.target for t in wish.threads(Role.NAPI)):
        return
    cpus, rule = cpus_for(policy, Role.NAPI), rule_for(policy, Role.NAPI)
    if isinstance(cpus, tuple):
        names = (device.target, device.mac.lower())
        cpus = next((c for key, c in cpus if key in names), None)
    pending = False
    if claimed[device.ifindex] != ref:
        reason = f"the device is shared, its thread goes with {claimed[device.ifindex]}"
    elif policy.napi_threaded is False:
        reason = "there is no thread with napi.threaded: false"
    elif device.threaded:
        seen = "; ".join(p for p in wish.guest.problems if p.startswith(device.target))
        reason = f"its thread was not found ({seen or 'no reason was reported'})"
    elif policy.napi_threaded:
        pending = device.threaded is not None
        reason = "the thread is made by threaded NAPI, and can be tuned once it is there"
    else:
        reason = "its NAPI is not threaded; napi.threaded: true makes the thread"
    for what, value in (("CPUs", cpus), ("scheduling", rule)):
        if value is not None:
            told = f"pending: {reason}" if pending else reason
            phases.skip(ref, f"napi {device.target} {what}", told, pending=pending)
