# SPDX-License-Identifier: GPL-2.0-or-later
"""Moves the work of the lower NICs to the interrupt CPUs (``irq.set``).

For each lower device of the guest's interfaces, down to the physical ones, for which ``cpus.irq``
lists CPUs, the plan moves

- every interrupt, except those that the kernel manages or that other devices share
- RPS and XPS of its queues if they are on; otherwise they stay off, because the SoftIRQ then
  runs where the interrupt is served
- its NAPI threads, if its NAPI is threaded

Below an interface without any interrupt (a veth), only RPS moves the SoftIRQ, so the plan
switches RPS on there. A device belongs to the host: its settings stay for as long as the policy
of any guest asks for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, TIMED, Guest, Irq
from vsrtune.model.host import IRQBALANCE, Competitor, Host, Nic, NicQueue
from vsrtune.model.plan import Action, Refusal
from vsrtune.model.present import changed, irq_target, queue_target, thread_target
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    IrqAffinity,
    QueueCpus,
    Target,
    ThreadAffinity,
    pinned_cpus,
    queue_file,
)
from vsrtune.plan.interrupt_cpus import (
    MANAGED_HINT,
    below,
    irqs_of,
    lower_nics,
    napi_threads,
    queue_irqs,
)
from vsrtune.plan.phases import Draft, Phase
from vsrtune.plan.requirements import Context, Requirements, label, refusal
from vsrtune.policy.model import IRQ_KEYS, Policy, irq_lists
from vsrtune.policy.yaml_reader import KeyPath, dotted


def moved(host: Host, pairs: Iterable[tuple[Guest, Policy]], left: Collection[Target] = ()) -> Host:
    """The host with the interrupts where the policies move them. The other policies read their
    interrupt CPUs from this host. Targets in ``left`` stay, because somebody has moved them and
    the policy leaves that alone."""
    nics = {nic.name: nic for nic in host.nics}
    for guest, policy in pairs:
        steered = _steered(host, guest)
        for nic, _, cpus in _moves(host, guest, policy):
            if not cpus <= host.online:
                continue
            for irq in filter(_movable, nic.irqs):
                if irq_target(irq) not in left:
                    nics[nic.name] = changed(nics[nic.name], irq_target(irq), cpus)
            if nic.rps_cpus or nic.name in steered:
                stays = any(queue_target(nic, queue) in left for queue in nic.queues)
                rps = cpus | nic.rps_cpus if stays else cpus
                nics[nic.name] = replace(nics[nic.name], rps_cpus=rps)
            for target in map(thread_target, napi_threads(nic)):
                if target not in left:
                    nics[nic.name] = changed(nics[nic.name], target, cpus)
    return replace(host, nics=tuple(nics.values()))


def conflicts(host: Host, pairs: Sequence[tuple[Guest, Policy]]) -> list[Refusal]:
    """Refusals of guests that move a lower device to other CPUs than an earlier guest."""
    first: dict[str, tuple[Guest, str, CpuSet]] = {}
    out: list[Refusal] = []
    for guest, policy in pairs:
        moves = _moves(host, guest, policy)
        for nic, keys, cpus in moves:
            other, place, before = first.get(nic.name, (guest, "", cpus))
            if before != cpus:
                reason = (
                    f"{nic.name} is below {other.ref} too, for which {place} moves its interrupts "
                    f"to CPUs {before}"
                )
                hint = "ask the same for both guests"
                out.append(refusal(guest, policy, keys, reason, hint))
                break
        else:
            # A refused guest moves nothing, so nobody has to ask for the same.
            first = {n.name: (guest, policy.at(*k), c) for n, k, c in moves} | first
    return out


def not_below(host: Host, guest: Guest, policy: Policy) -> list[Refusal]:
    """Refusals for keys of ``cpus.irq`` that name nothing below the guest."""
    named = [keys for keys, _ in irq_lists(policy) if keys != IRQ_KEYS]
    devices = below(host, guest) if named else {}
    have = ", ".join(f"{name} ({node})" if node else name for name, node in devices.items())
    reason = "no such device or NUMA node is below the guest"
    return [
        refusal(guest, policy, keys, reason, f"below it are: {have or 'none'}")
        for keys in named
        if keys[-1] not in {*devices, *devices.values()}
    ]


def build(context: Context, per_guest: Sequence[Requirements], draft: Draft) -> None:
    """Add the actions that policies ask for on lower devices."""
    host = context.host
    done: set[str] = set()
    for requirements in per_guest:
        policy = requirements.policy
        if not policy.moves_irqs:
            continue
        moves = _moves(host, requirements.guest, policy)
        if not moves:
            why = "the guest has no lower device"
            draft.skip(requirements.guest.ref, "interrupts", why, vain=True)
        steered = _steered(host, requirements.guest)
        for nic, keys, cpus in moves:
            if nic.name not in done:
                done.add(nic.name)
                reason = f"irq.set: {dotted(keys)} {cpus} ({policy.at('irq', 'set')})"
                _Device(context, nic, cpus, reason, nic.name in steered, draft).build()


def warnings(result: Snapshot, per_guest: Sequence[Requirements]) -> list[str]:
    """Warnings about ``result``, the snapshot as the plan leaves it."""
    nics: dict[str, tuple[Nic, CpuSet]] = {}
    for requirements in per_guest:
        moves = _moves(result.host, requirements.guest, requirements.policy)
        nics |= {nic.name: (nic, cpus) for nic, _, cpus in moves}
    managed = {w.guest.ref for w in per_guest}
    guests = [g for g in result.guests if g.ref in managed]
    out = [text for nic, cpus in nics.values() for text in _staying(nic, cpus, guests)]
    return out + [
        f"irqbalance (pid {n.pid}) moves the same interrupts, every few seconds; ban them: {bans}"
        for n in result.host.neighbours
        if n.name == IRQBALANCE and (bans := irqbalance_bans(n, [nic for nic, _ in nics.values()]))
    ]


def _staying(nic: Nic, cpus: CpuSet, guests: Sequence[Guest]) -> list[str]:
    """Warnings about interrupts that cannot be moved away from threads pinned beside them."""
    out = []
    for irq in queue_irqs(nic):
        if _movable(irq) or irq.effective <= cpus:
            continue
        beside = [
            g.ref
            for g in guests
            if any(t.role in DATA_PLANE and t.affinity <= irq.effective for t in g.threads)
        ]
        if beside:
            out.append(
                f"{nic.name}: irq {irq.number} ({irq.name}) cannot be moved and is served on CPU "
                f"{irq.effective}, beside threads of {', '.join(beside)}; {MANAGED_HINT}"
            )
    return out


def irqbalance_bans(irqbalance: Competitor, nics: Iterable[Nic]) -> str:
    """The command that bans the movable interrupts of ``nics``, beside what is banned already; ""
    when nothing is missing, or a policy script decides: an interrupt that it misses shows as drift.
    Debian 12 and 13 start irqbalance with this file, in which the last line counts."""
    movable = {irq.number for nic in nics for irq in nic.irqs if _movable(irq)}
    if irqbalance.policy_script or movable <= {*irqbalance.banned_irqs}:
        return ""
    words = " ".join(f"--banirq={n}" for n in sorted({*movable, *irqbalance.banned_irqs}))
    return (
        f"echo 'IRQBALANCE_ARGS=\"{words}\"' >>/etc/default/irqbalance && systemctl restart "
        "irqbalance (docs/interrupts.md, irqbalance, has a way that survives reboots)"
    )


def onto_realtime(
    host: Host, result: Snapshot, per_guest: Sequence[Requirements], actions: Iterable[Action]
) -> list[Refusal]:
    """Refusals of guests whose interrupts ``actions`` move to a CPU that a guest's realtime thread
    has, if that guest is not planned for: it keeps its settings. ``host`` is as it is now,
    ``result`` the snapshot as the plan leaves it."""
    managed = {w.guest.ref for w in per_guest}
    theirs = [
        (guest.ref, thread)
        for guest in result.guests
        if guest.ref not in managed
        for thread in guest.threads
        if thread.role in DATA_PLANE and thread.sched.cls in TIMED
    ]
    if not theirs:
        return []
    served: dict[Target, CpuSet] = {
        irq_target(irq): irq.effective for nic in host.nics for irq in nic.irqs
    }
    movers: dict[Target, list[Requirements]] = {}
    for w in per_guest:
        for nic, _, _ in _moves(host, w.guest, w.policy):
            for target in _targets(nic):
                movers.setdefault(target, []).append(w)
    out: dict[str, Refusal] = {}
    for action in actions:
        target, after = action.target, action.after
        if action.release or target not in movers or not isinstance(after, CpuSet):
            continue
        # A mask may name CPUs on which nothing is served.
        was = served.get(target) or pinned_cpus(action.before) or CpuSet()
        for ref, thread in theirs:
            both = after & thread.affinity
            # One that may run anywhere, or where the work was done already, fares no worse.
            if not both or was & thread.affinity or result.host.online <= thread.affinity:
                continue
            subject = str(target).removeprefix(f"{HOST_REF}: ")
            reason = (
                f"{subject} would move to CPU {both}, which {label(thread)} of {ref} has with "
                f"{thread.sched}"
            )
            hint = "choose other interrupt CPUs, or give that guest a policy for others"
            for w in movers[target]:
                out.setdefault(w.guest.ref, w.refusal(IRQ_KEYS, reason, hint))
    return list(out.values())


def _targets(nic: Nic) -> Iterator[Target]:
    """What says where the work of a device is done."""
    yield from map(irq_target, nic.irqs)
    yield from (queue_target(nic, queue) for queue in nic.queues)
    yield from map(thread_target, napi_threads(nic))


def refused(actions: Iterable[tuple[Action, object]]) -> tuple[tuple[int, str], ...]:
    """Number and name of the interrupts among ``actions``, which the kernel will never accept."""
    targets = (action.target for action, _ in actions)
    return tuple((t.irq, t.name) for t in targets if isinstance(t, IrqAffinity))


def _moves(host: Host, guest: Guest, policy: Policy) -> list[tuple[Nic, KeyPath, CpuSet]]:
    """The lower devices whose interrupts the policy moves, with the key and its CPUs."""
    if not policy.moves_irqs:
        return []
    named = irqs_of(host, guest, policy)
    return [(nic, *named[nic.name]) for nic in lower_nics(host, guest) if nic.name in named]


def _movable(irq: Irq) -> bool:
    return not (irq.managed or irq.shared)


def _steered(host: Host, guest: Guest) -> frozenset[str]:
    """Devices whose SoftIRQ only RPS can move: those without a driver in sysfs (a veth), below
    an interface whose lower devices have no interrupts. A NIC that is down has none either, but
    it has a driver."""
    found: set[str] = set()
    for interface in guest.interfaces:
        nics = [nic for nic in map(host.nic, interface.lower) if nic is not None]
        if not any(nic.irqs for nic in nics):
            found |= {nic.name for nic in nics if not nic.driver}
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Device:
    """The plan for one lower device."""

    context: Context
    nic: Nic
    cpus: CpuSet
    reason: str
    steered: bool
    draft: Draft

    def build(self) -> None:
        if not self.nic.irqs:
            moves = "so RPS moves its SoftIRQ" if self.steered else "those below it are moved"
            self._skip("interrupts", f"the device has none of its own now, {moves}")
        for irq in self.nic.irqs:
            self._irq(irq)
        for kind, name in (("rx-", "RPS"), ("tx-", "XPS")):
            self._queues(name, [q for q in self.nic.queues if q.name.startswith(kind)])
        self._threads()

    def _skip(self, what: str, why: str, *, vain: bool = False) -> None:
        self.draft.skip(HOST_REF, f"{self.nic.name} {what}", why, vain=vain)

    def _desire(self, target: IrqAffinity | QueueCpus | ThreadAffinity, before: CpuSet) -> bool:
        """Plan a setting; True when it is as desired already."""
        self.draft.desired.add(target)
        if before == self.cpus:
            self.draft.for_verify[target] = before
            return True
        drift = self.context.left_alone(target)
        if drift is not None:
            subject = str(target).removeprefix(f"{HOST_REF}: ")
            self.draft.leave(HOST_REF, subject, drift)
        else:
            self.draft.add(Phase.INTERRUPTS, Action.of(target, before, self.cpus, self.reason))
        return False

    def _irq(self, irq: Irq) -> None:
        what = f"irq {irq.number} ({irq.name})"
        if irq.managed:
            self._skip(
                what,
                f"kernel-managed, the kernel refused to move it; served on CPU {irq.effective}: "
                + MANAGED_HINT,
                vain=True,
            )
            return
        if irq.shared:
            self._skip(what, "other devices share it; give the device MSI interrupts", vain=True)
            return
        if self._desire(irq_target(irq), irq.affinity):
            waits = f", served on CPU {irq.effective} until it fires next"
            here = irq.effective <= self.cpus
            self._skip(what, f"already set: CPUs {self.cpus}{'' if here else waits}")

    def _queues(self, name: str, queues: Sequence[NicQueue]) -> None:
        off = [q for q in queues if q.cpus is not None and not q.cpus]
        without = [q for q in queues if q.cpus is None]
        same: list[NicQueue] = []
        for queue in queues:
            if queue.cpus is None or not (queue.cpus or self._switches_on(queue)):
                continue
            if self._desire(queue_target(self.nic, queue), queue.cpus):
                same.append(queue)
        if without:
            self._skip(f"{name} of {_names(without)}", "the kernel has none for this device")
        if off and not self._switches_on(off[0]):
            self._skip(f"{name} of {_names(off)}", "off, and not needed")
        if same:
            self._skip(f"{name} of {_names(same)}", f"already set: CPUs {self.cpus}")

    def _switches_on(self, queue: NicQueue) -> bool:
        return self.steered and queue_file(queue.name) == "rps_cpus"

    def _threads(self) -> None:
        nic = self.nic
        if not nic.threaded_napi:
            return
        if not nic.napi:
            why = "its NAPI is threaded, but no thread has its name"
            self._skip("NAPI threads", why, vain=True)
        if len(nic.napi) > len(nic.queues):
            # Any user can add threads of that name (docs/interrupts.md): ours keep what they have.
            self.draft.desired.update(map(thread_target, nic.napi))
            names = ", ".join(str(t.key.tid) for t in nic.napi)
            self._skip(
                "NAPI threads",
                f"threads {names} have its name, more than it has queues: which are its own "
                "is not known",
                vain=True,
            )
            return
        for thread in nic.napi:
            if self._desire(thread_target(thread), thread.affinity):
                self._skip(f"{thread.name} affinity", f"already set: CPUs {self.cpus}")


def _names(queues: Sequence[NicQueue]) -> str:
    names = [q.name for q in queues]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
