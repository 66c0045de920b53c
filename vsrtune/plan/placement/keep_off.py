# SPDX-License-Identifier: GPL-2.0-or-later
"""``others: keep-off``: guests that no policy names leave the CPUs of those that ask for it.

One list does this for all threads of such a guest, for later ones too: ``cpuset.cpus`` of the
cgroup above those that libvirt makes for vcpus and emulator. The kernel cuts what is below to it
(update_cpumasks_hier), and a libvirt that pins a thread writes its lists below. A guest is left
alone if it would lose what somebody else chose: a list with none of the CPUs that remain, or a
mask of its own, which Linux 6.1 would forget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.model.guest import Guest, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.plan import Action
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import StepLevel, Steps
from vsrtune.model.targets import CpusetFile, CpusetList
from vsrtune.plan.deadline.partitions import CPUS
from vsrtune.plan.phases import Draft, Phase
from vsrtune.plan.placement.costs import Chosen
from vsrtune.plan.requirements import EMULATOR_CGROUP, Context, Requirements, label
from vsrtune.policy.matching import policies_of
from vsrtune.policy.model import Policy

_SUBJECT = "CPUs of all its threads"


def build(
    context: Context,
    snapshot: Snapshot,
    policies: Sequence[Policy],
    per_guest: Sequence[Requirements],
    chosen: Mapping[ThreadKey, Chosen],
    steps: Steps,
    draft: Draft,
) -> None:
    """Add the lists of the other guests to ``draft``. While a guest that asks for this is not
    planned for, and so keeps its CPUs, the lists stay as they are. One that is stepped down to
    nothing keeps none."""
    if not any(policy.keep_off for policy in policies):
        return
    named = {g.ref: found for g in snapshot.guests if (found := policies_of(g, policies))}
    others = [g for g in snapshot.guests if g.ref not in named and g.source == "libvirt"]
    done = {w.guest.ref for w in per_guest}
    done |= {ref for ref, step in steps.items() if step.level is StepLevel.UNDONE}
    if any(p.keep_off for ref, found in named.items() if ref not in done for p in found):
        places = {g.ref: g.main.cgroup.rpartition("/")[0] for g in others if g.main is not None}
        ours = {CpusetFile(ref, path, CPUS) for ref, path in places.items()}
        draft.desired |= ours & context.applied.keys()
        return
    asking = [w for w in per_guest if w.policy.keep_off]
    cpus = CpuSet.union(chosen[p.thread.key].cpus for w in asking for p in w.pins)
    if not cpus:
        return
    why = f"others: keep-off ({', '.join(w.policy.at('others') for w in asking)})"
    for guest in others:
        if not guest.waits:
            _keep_off(context, guest, cpus, why, draft)


def _keep_off(context: Context, guest: Guest, cpus: CpuSet, why: str, draft: Draft) -> None:
    main = guest.main
    path, _, name = ("", "", "") if main is None else main.cgroup.rpartition("/")
    group = context.host.cpuset(path)
    if group is None or name != EMULATOR_CGROUP:
        draft.skip(guest.ref, _SUBJECT, "it has no cgroup whose CPUs could be set", vain=True)
        return
    target = CpusetFile(guest.ref, path, CPUS)
    above = context.host.cpuset(path.rpartition("/")[0])
    rest = (context.online if above is None else above.effective) - cpus
    left = _without_choice(guest, rest)
    if not left and target not in context.applied:
        left = _chosen_by_others(context.host, guest, group, cpus)
    if left:
        draft.skip(guest.ref, _SUBJECT, left)
        return
    now, then = CpusetList(group.cpus), CpusetList(str(rest))
    draft.want(Phase.LISTS_BESIDE, Action.of(target, now, then, why), None, _SUBJECT)


def _without_choice(guest: Guest, rest: CpuSet) -> str:
    """Why a guest cannot do with the CPUs ``rest``; "" when it can."""
    if not rest:
        return "left alone: no other CPU would remain"
    for thread in guest.threads:
        bound = CpuSet.parse(thread.cpuset_cpus or "")
        if bound and not bound & rest:
            return f"left alone: {label(thread)} is bound to CPUs {bound}"
    return ""


def _chosen_by_others(host: Host, guest: Guest, group: CpusetGroup, cpus: CpuSet) -> str:
    """Why a guest that is not kept off ``cpus`` yet is left alone; "" when it is not."""
    if all(t.affinity.isdisjoint(cpus) for t in guest.threads):
        return f"already off CPUs {cpus}"
    # An undo leaves a list of all CPUs, because none can be taken away under threads.
    if group.cpus and not host.online <= CpuSet.parse(group.cpus):
        return f"left alone: somebody has given it CPUs {group.cpus}"
    # libvirt gives a guest without pins a mask without them, which Linux 6.1 would forget as well.
    without = host.isolated if host.release >= (6, 2) else CpuSet()
    for thread in guest.threads:
        allowed = thread.cpuset_effective or CpuSet()
        if thread.affinity not in (allowed, allowed - without):
            return f"left alone: somebody has given {label(thread)} CPUs {thread.affinity}"
    return ""
