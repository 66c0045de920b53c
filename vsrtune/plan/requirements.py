# SPDX-License-Identifier: GPL-2.0-or-later
"""The requirements of a policy for one guest's threads on this host, before CPU selection.

This module judges everything that needs the host but not the other guests: CPUs that exist,
vcpus and interfaces that the guest has, threads that are held or must be left alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import bandwidth
from vsrtune.model.guest import (
    DATA_PLANE,
    Guest,
    NicKind,
    Role,
    Sched,
    SchedClass,
    Thread,
    ThreadKey,
    thread_label,
)
from vsrtune.model.host import Host
from vsrtune.model.plan import Drift, DriftRule, Refusal, Skipped
from vsrtune.model.root_domains import left_beside, slices_of, within
from vsrtune.model.targets import (
    HOST_REF,
    CpusetFile,
    CpusetList,
    EmulatorPin,
    NapiThreaded,
    Partition,
    Target,
    ThreadAffinity,
    ThreadSched,
    Value,
    VcpuPin,
)
from vsrtune.plan.interrupt_cpus import below, inner_links, irqs_of
from vsrtune.plan.phases import OWN_CGROUP
from vsrtune.plan.placement.costs import Chosen, Occupant
from vsrtune.plan.safety.projection import allowed_cpus
from vsrtune.policy.guest_budget import unfit
from vsrtune.policy.model import (
    AUTO,
    IRQ_KEYS,
    Auto,
    Policy,
    by_hand,
    cpu_lists,
    cpus_for,
    irq_lists,
    rule_for,
    sched_keys,
)
from vsrtune.policy.yaml_reader import KeyPath, dotted

EMULATOR_CGROUP = "emulator"
_WITHOUT_VHOST = "no vhost-net: a thread of QEMU moves its frames, on the emulator's CPUs"
_WIDEN = "widen the cgroup above the guest"
# The cgroup of the kubelet's pods, and the class of quality of service if it has one.
_KUBEPODS = re.compile(r"kubepods(?:\.slice)?/(?:kubepods-)?(burstable|besteffort)?")
# By interface and queue, None for all of its queues: the policy's key and the CPUs.
_Named = Mapping[tuple[str, int | None], tuple[str, CpuSet]]

Seats = Mapping[ThreadKey, CpuSet]


@dataclass(frozen=True)
class Context:
    """The inputs that all guests share. ``irq`` are the interrupt CPUs of all managed guests."""

    host: Host
    irq: CpuSet
    applied: Mapping[Target, Value]
    # What somebody has changed, and what the plan does about it.
    drifts: Mapping[Target, Drift] = field(default_factory=dict)
    # Slices that stay root domains, because of guests that are not planned for.
    kept: frozenset[str] = frozenset()
    # The CPUs that threads had in an earlier round of the same plan.
    seats: Seats = field(default_factory=dict)
    # What undo restores of ``applied``.
    originals: Mapping[Target, Value] = field(default_factory=dict)

    @property
    def online(self) -> CpuSet:
        """CPUs that are online."""
        return self.host.online

    def left_alone(self, target: Target) -> Drift | None:
        """The drift because of which the plan leaves a setting alone, None when there is none."""
        drift = self.drifts.get(target)
        return drift if drift is not None and drift.left else None

    @cached_property
    def lists(self) -> dict[Target, Value]:
        """The partitions of ``applied`` and their CPU lists."""
        return {t: v for t, v in self.applied.items() if isinstance(t, CpusetFile | Partition)}

    def partitioned(self, cgroup: str) -> bool:
        """Whether a cgroup is a partition for threads of a guest, and in force."""
        group = self.host.cpuset(cgroup)
        ours = any(isinstance(t, Partition) and t.path == cgroup for t in self.lists)
        return ours and group is not None and group.valid

    def afloat(self, thread: Thread) -> bool:
        """Whether a thread has all CPUs of the slice around it, which we made a root domain."""
        slices = slices_of(self.host, self.lists)
        return any(
            within(thread.cgroup, path) and thread.affinity & self.online == cpus
            for path, cpus in slices.items()
        )

    def held(self, cgroup: str, guests: Collection[str] = ()) -> CpuSet:
        """The CPUs of the partitions for threads of guests, except for ``cgroup`` and those of
        ``guests``. Threads elsewhere cannot run there as long as the partitions stay."""
        groups = (
            self.host.cpuset(target.path)
            for target in self.lists
            if isinstance(target, Partition)
            and target.path != cgroup
            and target.guest not in {HOST_REF, *guests}
        )
        return CpuSet.union(g.effective for g in groups if g is not None and g.valid)


@dataclass(frozen=True, slots=True)
class PinRequest:
    """A request of CPUs for one thread. ``cpus`` None means ``auto``. ``allowed`` are the CPUs
    that its cgroup permits; for ``auto`` without interrupt CPUs, except for housekeepers."""

    thread: Thread
    target: Target
    cpus: CpuSet | None
    keys: KeyPath
    allowed: CpuSet
    number: int


@dataclass(frozen=True, slots=True)
class Requirements:
    """Everything that a policy asks of one guest, as ``requirements_of`` collects it; nobody
    changes it afterwards. ``pins`` are of threads that handle frames, ``housekeepers`` of the
    emulator and of iothreads. ``moves``: the cgroup to which each worker moves. ``occupants``:
    threads that stay where they are. ``desired``: the targets for which the policy has a value.
    ``left``: those left alone because somebody changed them."""

    guest: Guest
    policy: Policy
    pins: list[PinRequest] = field(default_factory=list)
    housekeepers: list[PinRequest] = field(default_factory=list)
    moves: dict[Thread, str] = field(default_factory=dict)
    occupants: list[Occupant] = field(default_factory=list)
    desired: set[Target] = field(default_factory=set)
    left: set[Target] = field(default_factory=set)
    skipped: list[Skipped] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def all_pins(self) -> tuple[PinRequest, ...]:
        """The pins and the housekeepers."""
        return (*self.pins, *self.housekeepers)

    def threads(self, role: Role) -> tuple[Thread, ...]:
        """The guest's threads of a role, without NAPI threads that are about to go."""
        if role is Role.NAPI and self.policy.desired(NapiThreaded) is False:
            return ()
        return self.guest.by_role(role)

    def booked(self, role: Role) -> int:
        """The bandwidth of each thread of a role; 0 when the policy does not make it DEADLINE."""
        rule = rule_for(self.policy, role)
        return bandwidth(rule.sched) if rule is not None and rule.deadline else 0

    def refusal(self, keys: KeyPath, reason: str, hint: str) -> Refusal:
        """Why the guest gets no action; ``keys`` is the place in its policy."""
        return refusal(self.guest, self.policy, keys, reason, hint)

    def refuse(self, keys: KeyPath, reason: str, hint: str) -> None:
        """Add a refusal."""
        self.refusals.append(self.refusal(keys, reason, hint))

    def skip(self, subject: str, reason: str, *, held: bool = False, vain: bool = False) -> None:
        """Add a setting that is left as it is."""
        self.skipped.append(Skipped(self.guest.ref, subject, reason, held, vain=vain))

    def leave(self, thread: Thread, reason: str, *, held: bool = False, vain: bool = True) -> None:
        """Leave the CPUs of a thread as they are."""
        self.skip(f"{label(thread)} CPUs", reason, held=held, vain=vain)


def refusal(guest: Guest, policy: Policy, keys: KeyPath, reason: str, hint: str) -> Refusal:
    """Why the guest gets no action; ``keys`` is the place in its policy, () for all of it."""
    text = f"{dotted(keys)}: {reason}" if keys else reason
    return Refusal(guest.ref, policy.at(*keys), text, hint)


def label(thread: Thread) -> str:
    """The name of a thread in messages: ``vcpu 0``, ``vhost macvtap0/0``, ``emulator``."""
    if thread.role is not Role.VHOST:
        return thread_label(thread)
    if thread.interface is None or not mapped(thread):
        return f"vhost {thread.key.tid}"
    return f"vhost {thread.interface}/{thread.queue or 0}"


def mapped(thread: Thread) -> bool:
    """True when a per-interface setting may rely on the worker's interface."""
    return thread.confidence is not None and thread.confidence.usable


def pin_target(guest: Guest, thread: Thread) -> Target:
    """The target that sets a thread's CPUs: through libvirt if it has a call for that."""
    if guest.source == "libvirt" and thread.role is Role.VCPU and thread.index is not None:
        return VcpuPin(guest.ref, guest.uuid, thread.index, thread.key)
    if guest.source == "libvirt" and thread.role is Role.EMULATOR:
        return EmulatorPin(guest.ref, guest.uuid, thread.key)
    return ThreadAffinity(guest.ref, thread.key, label(thread))


def foreign_deadline(context: Context, guest: Guest, thread: Thread) -> bool:
    """True for a thread that somebody else made DEADLINE."""
    if thread.sched.cls is not SchedClass.DEADLINE:
        return False
    applied = context.applied.get(ThreadSched(guest.ref, thread.key, ""))
    return not (isinstance(applied, Sched) and applied.cls is SchedClass.DEADLINE)


def staying(context: Context, guest: Guest, threads: Iterable[Thread]) -> list[Occupant]:
    """Occupants for threads that stay where they are. A thread that may run everywhere occupies
    nothing, nor does one that only our list keeps from it (``others: keep-off``)."""
    links = inner_links(context.host, guest)
    everywhere = context.host.unbound
    listed, taken = _listed(context, guest)
    ours = listed & everywhere
    masks = ((t, t.affinity | taken if ours <= t.affinity else t.affinity) for t in threads)
    return [
        Occupant(
            guest.ref,
            t.role,
            mask & context.online,
            load=t.load,
            booked=bandwidth(t.sched),
            links=links,
        )
        for t, mask in masks
        if t.role in DATA_PLANE and not everywhere <= mask
    ]


def _listed(context: Context, guest: Guest) -> tuple[CpuSet, CpuSet]:
    """The CPUs of our list for all threads of a guest, and those that it takes from them."""
    path = "" if guest.main is None else guest.main.cgroup.rpartition("/")[0]
    ours = context.lists.get(CpusetFile(guest.ref, path, "cpuset.cpus"))
    above = context.host.cpuset(path.rpartition("/")[0])
    if not isinstance(ours, CpusetList) or above is None:
        return CpuSet(), CpuSet()
    listed = CpuSet.parse(ours.text) & above.effective
    return listed, above.effective - listed


def requirements_of(context: Context, guest: Guest, policy: Policy) -> Requirements:
    """Everything ``policy`` asks of ``guest``'s threads."""
    out = Requirements(guest, policy)
    _check_threads_known(out)
    _check_lists(context, out)
    _check_vcpu_numbers(out)
    named = {role: _device_keys(out, role) for role in (Role.VHOST, Role.NAPI)}
    _moves(context, out, named[Role.VHOST])
    for role in DATA_PLANE:
        for number, thread in enumerate(out.threads(role)):
            choice, keys = _choice(policy, thread, named.get(role, {}))
            request = _request(context, out, thread, choice, keys, number)
            if request is not None:
                out.pins.append(request)
            else:
                out.occupants.extend(staying(context, guest, [thread]))
    _check_vcpu_cpus(out)
    for nic in guest.other_nics:
        out.skip(f"interface {nic.mac} ({nic.label})", nic.why)
    for interface in (i for i in guest.interfaces if not i.vhost):
        out.skip(f"interface {interface.target}", _WITHOUT_VHOST)
    _housekeepers(context, out)
    _check_realtime(context, out)
    _check_deadline(out)
    return out


def _check_threads_known(out: Requirements) -> None:
    wants = out.policy.pins or out.policy.vcpu_sched or out.policy.vhost_sched
    if wants and not out.guest.by_role(Role.VCPU):
        found = "; ".join(out.guest.problems) or "no reason was reported"
        out.refuse(
            (),
            f"no vcpu thread of this guest was found ({found})",
            "`vsrtune show` lists what could not be read",
        )


def _check_lists(context: Context, out: Requirements) -> None:
    """Lists written by hand must name CPUs that are online and, for vcpu and vhost
    threads, no interrupt CPU of any managed guest."""
    lists = by_hand(out.policy)
    for keys, cpus in lists:
        both = cpus & context.irq
        if both:
            named = irqs_of(context.host, out.guest, out.policy)
            # A policy that names them all by hand conflicts with another guest's NIC.
            every = below(context.host, out.guest).keys() <= named.keys()
            otherwise = "" if every else ", or write cpus.irq by hand"
            out.refuse(
                keys,
                f"CPU {both} serves interrupts of a NIC below a managed guest",
                f"choose from CPUs {context.online - context.irq}{otherwise}",
            )
    lists += cpu_lists(out.policy, "emulator", "iothread")
    if out.policy.pool is not None:
        # One that is offline is no candidate.
        offline = CpuSet(c.id for c in context.host.cpus if not c.online)
        lists.append((("cpus", "pool"), out.policy.pool - offline))
    for keys, cpus in lists:
        out.refusals.extend(not_online(context.host, out.guest, out.policy, keys, cpus))


def not_online(
    host: Host, guest: Guest, policy: Policy, keys: KeyPath, cpus: CpuSet
) -> list[Refusal]:
    """Refusals for CPUs of a list that do not exist or are offline."""
    if cpus <= host.online:
        return []
    present = CpuSet(c.id for c in host.cpus)
    hint = f"choose from the online CPUs {host.online}"
    missing, offline = cpus - present, (cpus & present) - host.online
    out = []
    if missing:
        reason = f"CPU {missing} does not exist on this host"
        out.append(refusal(guest, policy, keys, reason, hint))
    if offline:
        out.append(refusal(guest, policy, keys, f"CPU {offline} is offline", hint))
    return out


def _check_vcpu_numbers(out: Requirements) -> None:
    if not isinstance(out.policy.vcpu, tuple):
        return
    have = [str(t.index) for t in out.guest.by_role(Role.VCPU)]
    for number, _ in out.policy.vcpu:
        if number not in have and have:
            hint = f"its vcpus are {', '.join(have)}"
            out.refuse(("cpus", "vcpu", number), f"the guest has no vcpu {number}", hint)


def _device_keys(out: Requirements, role: Role) -> _Named:
    """The key and CPUs of each interface, or of a queue of it, that a mapping of vhost or NAPI
    threads names."""
    named: dict[tuple[str, int | None], tuple[str, CpuSet]] = {}
    choice = cpus_for(out.policy, role)
    if not isinstance(choice, tuple):
        return named
    for key, cpus in choice:
        keys = ("cpus", role.value, key)
        name, _, number = key.partition("/")
        queue = int(number) if number else None
        interface = next(
            (i for i in out.guest.interfaces if name in (i.target, i.mac.lower())), None
        )
        if interface is None:
            have = ", ".join(f"{i.target} ({i.mac})" for i in out.guest.interfaces) or "none"
            out.refuse(keys, "the guest has no such interface", f"its interfaces are: {have}")
        elif (interface.target, queue) in named:
            first = named[interface.target, queue][0]
            out.refuse(keys, f"{first} names the same interface", "keep one of the two")
        elif queue is not None and queue >= interface.queues:
            reason = f"{interface.target} has no queue {queue}"
            out.refuse(keys, reason, f"it has {interface.queues}, counted from 0")
        else:
            named[interface.target, queue] = (key, cpus)
            if role is Role.NAPI and interface.kind is not NicKind.NAPI_MACVTAP:
                reason = f"the interface is {interface.kind.value}, only napi_macvtap has a thread"
                out.skip(f"napi {interface.target} CPUs", reason, vain=True)
    return named


def _moves(context: Context, out: Requirements, named: _Named) -> None:
    """Move vhost workers out of libvirt's emulator cgroup if the policy asks for CPUs for them or
    for the emulator, so that no emulatorpin reaches them."""
    if out.guest.source != "libvirt":
        return
    for thread in out.guest.by_role(Role.VHOST):
        parent, _, name = thread.cgroup.rpartition("/")
        if out.policy.emulator is None and _choice(out.policy, thread, named)[0] is None:
            continue
        if thread.cpuset_cpus is None or name not in (EMULATOR_CGROUP, OWN_CGROUP):
            continue
        if not foreign_deadline(context, out.guest, thread):
            out.moves[thread] = f"{parent}/{OWN_CGROUP}"


def _choice(policy: Policy, thread: Thread, named: _Named) -> tuple[CpuSet | Auto | None, KeyPath]:
    choice = cpus_for(policy, thread.role)
    keys: KeyPath = ("cpus", thread.role.value)
    if choice is AUTO and policy.placement is not None:
        return choice, ("placement",)
    if not isinstance(choice, tuple):
        return choice, keys
    if thread.role is Role.VCPU:
        return dict(choice).get(str(thread.index)), (*keys, str(thread.index))
    device = thread.interface or ""
    found = named.get((device, thread.queue), named.get((device, None))) if mapped(thread) else None
    return (None, keys) if found is None else (found[1], (*keys, found[0]))


def _request(
    context: Context,
    out: Requirements,
    thread: Thread,
    choice: CpuSet | Auto | None,
    keys: KeyPath,
    number: int,
) -> PinRequest | None:
    target = pin_target(out.guest, thread)
    if choice is None:
        if thread.role is Role.VHOST and not mapped(thread) and isinstance(out.policy.vhost, tuple):
            # A value that an earlier, surer mapping wrote stays desired.
            out.desired.add(target)
            sure = thread.confidence.value if thread.confidence is not None else "none"
            out.leave(thread, f"which interface it serves is not known (confidence {sure})")
        return None
    out.desired.add(target)
    if foreign_deadline(context, out.guest, thread):
        out.leave(thread, "someone else gave the thread class deadline; it is left alone")
        return None
    drift = None
    if choice is AUTO or choice != thread.affinity:
        drift = context.left_alone(target)
    if drift is not None:
        out.left.add(target)
        out.leave(thread, drift.left, held=drift.rule is DriftRule.REPORT, vain=False)
        return None
    moves = thread in out.moves
    allowed = allowed_cpus(context.host, context.lists, out.guest, thread, moves=moves)
    cpus = choice if isinstance(choice, CpuSet) else None
    pool = context.online if thread.role not in DATA_PLANE else out.policy.pool or context.online
    stays = thread.sched.cls is SchedClass.DEADLINE or context.partitioned(thread.cgroup)
    stays |= out.booked(thread.role) > 0 and context.afloat(thread)
    if stays and choice is AUTO:
        # A thread that we made DEADLINE keeps its root domain for as long as it is in it, and so
        # does one that still waits for the class or runs beside it.
        cpus = thread.affinity & context.online
        if not cpus <= pool:
            reason = f"{label(thread)} is of class deadline on CPU {cpus}, outside of {pool}"
            out.refuse(("cpus", "pool"), reason, "run `vsrtune undo`: auto then chooses anew")
    held = context.held(thread.cgroup) if cpus is None and context.lists else CpuSet()
    allowed -= held
    beside = left_beside(context.host, context.kept, thread.cgroup)
    if cpus is not None and cpus <= allowed and not cpus <= beside:
        out.refuse(
            keys,
            f"{', '.join(sorted(context.kept))} stays a root domain for a guest that keeps its "
            f"settings, which leaves CPUs {allowed & beside or 'none'} to {label(thread)}",
            "choose among them, or mend the policy of that guest",
        )
        return None
    allowed &= beside
    if cpus is not None and not cpus <= allowed and cpus <= context.online:
        out.refuse(
            keys,
            f"the cgroup of {label(thread)} allows CPUs {allowed or 'none'} only",
            _ways(out.guest, "choose among them", _WIDEN),
        )
    usable = allowed if thread.role not in DATA_PLANE else allowed - context.irq
    if cpus is None and usable and not usable & pool:
        reason = f"no CPU of {pool} is left, its threads may use {usable}"
        told = out.refusal(("cpus", "pool"), reason, "add CPUs of these")
        if told not in out.refusals:
            out.refusals.append(told)
        return None
    if cpus is None and not usable and thread.role in DATA_PLANE:
        held |= context.online - beside
        others = f", root domains of other threads have CPUs {held}" if held else ""
        out.refuse(
            keys,
            f"no CPU is left for {label(thread)}: its cgroup allows {allowed or 'none'}, "
            f"interrupts are served on {context.irq}{others}",
            _ways(out.guest, _WIDEN, "move the interrupts"),
        )
        return None
    return PinRequest(
        thread, target, cpus, keys, usable & pool if cpus is None else allowed, number
    )


def _ways(guest: Guest, *ways: str) -> str:
    """What to do where the CPUs of a cgroup do not suffice. A pod's are the kubelet's to give."""
    if guest.source == "kubevirt":
        return ", or ".join(w for w in ways if w != _WIDEN) + "; the kubelet gives a pod its CPUs"
    return ", or ".join(ways)


def _housekeepers(context: Context, out: Requirements) -> None:
    requests = [_emulator(context, out)]
    choice = out.policy.iothread
    for number, thread in enumerate(out.guest.by_role(Role.IOTHREAD) if choice is not None else ()):
        own = thread.cpuset_cpus if "/iothread" in thread.cgroup else ""
        if own and isinstance(choice, CpuSet) and not choice <= CpuSet.parse(own):
            ways = "virsh iothreadpin, or <vcpu cpuset=...>"
            out.leave(thread, f"its cgroup allows CPUs {own} only ({ways})")
            continue
        requests.append(_request(context, out, thread, choice, ("cpus", "iothread"), number))
    out.housekeepers.extend(request for request in requests if request is not None)


def _emulator(context: Context, out: Requirements) -> PinRequest | None:
    choice = out.policy.emulator
    if choice is None:
        return None
    thread = out.guest.main
    if thread is None:
        out.skip("emulator CPUs", "QEMU's main thread was not found", vain=True)
        return None
    staying = [
        t
        for t in out.guest.by_role(Role.VHOST)
        if t.cgroup == thread.cgroup and t.cpuset_cpus is not None and t not in out.moves
    ]
    if staying and out.guest.source == "libvirt":
        out.desired.add(pin_target(out.guest, thread))
        names = ", ".join(label(t) for t in staying)
        out.leave(thread, f"{names} cannot be moved out of its cgroup and would be narrowed too")
        return None
    return _request(context, out, thread, choice, ("cpus", "emulator"), 0)


def _check_vcpu_cpus(out: Requirements) -> None:
    pins = _pins_apart(out)
    usable = CpuSet.union(pin.allowed for pin in pins)
    if len(pins) > len(usable):
        out.refusals.append(_too_few_cpus(out, pins, usable))


def lacks_cpus(requirements: Requirements, chosen: Mapping[ThreadKey, Chosen]) -> Refusal | None:
    """The refusal of a guest of which ``auto`` has put two vcpus on one CPU.

    They lose what they would have done at once: measured medians of such guests went down to
    0.77 of untuned ones (docs/results/no-harm.md). Budgets divide a CPU on purpose.
    """
    pins = _pins_apart(requirements)
    cpus = CpuSet.union(chosen[pin.thread.key].cpus for pin in pins)
    return _too_few_cpus(requirements, pins, cpus) if len(pins) > len(cpus) else None


def _pins_apart(requirements: Requirements) -> list[PinRequest]:
    rule = rule_for(requirements.policy, Role.VCPU)
    if rule is not None and rule.deadline:
        return []
    return [p for p in requirements.pins if p.thread.role is Role.VCPU and p.cpus is None]


def _too_few_cpus(requirements: Requirements, pins: Sequence[PinRequest], cpus: CpuSet) -> Refusal:
    pool = requirements.policy.pool
    return requirements.refusal(
        pins[0].keys,
        f"its {len(pins)} vcpus would share CPUs {cpus}, and may then forward less than an "
        "untuned guest's",
        f"give it as many CPUs as vcpus{'' if pool is None else f' (cpus.pool is {pool})'}, or "
        f"write cpus: {{vcpu: {cpus}}} and let `vsrtune try` compare",
    )


def _check_realtime(context: Context, out: Requirements) -> None:
    """A realtime thread on an interrupt CPU starves the SoftIRQ that feeds it; a
    policy that leaves its threads where they are must not make them realtime there. Nor must one
    that does not say where the interrupts of a pod's NICs are served, which vsrtune cannot see."""
    if out.guest.source == "kubevirt" and out.policy.realtime and not irq_lists(out.policy):
        out.refuse(
            IRQ_KEYS,
            "which CPUs serve the interrupts of its pod's NICs is not known, and a realtime thread "
            "there would starve packet reception",
            "name them, such as cpus: {irq: 0} (/proc/interrupts), or write class: batch",
        )
    _check_pod(out)
    for role in DATA_PLANE:
        rule = rule_for(out.policy, role)
        choice = cpus_for(out.policy, role)
        if rule is None or not rule.realtime or choice is not None:
            continue
        for thread in out.threads(role):
            both = thread.affinity & context.irq
            if both and thread.sched.cls is not SchedClass.DEADLINE:
                out.refuse(
                    ("scheduler", role.value),
                    f"{label(thread)} may run on interrupt CPU {both}, where class "
                    f"{rule.cls.value} would starve packet reception",
                    f"add cpus: {{{role.value}: auto}}",
                )
                break


def _check_pod(out: Requirements) -> None:
    """A realtime thread on CPUs that other pods have too starves them."""
    for role in DATA_PLANE:
        rule = rule_for(out.policy, role)
        if rule is not None and rule.realtime and any(map(_shares, out.threads(role))):
            out.refuse(
                ("scheduler", role.value),
                f"other pods may run on the CPUs of its pod, and class {rule.cls.value} would "
                "starve them",
                "give it CPUs of its own (dedicatedCpuPlacement in the VirtualMachine), or write "
                "class: batch",
            )
            return


def _shares(thread: Thread) -> bool:
    """Whether the kubelet has left a thread of a pod among others: only containers of the class
    Guaranteed, which has no directory of its own, can have CPUs of their own, as a list in their
    cgroup (policymanager static; kuberuntime's cgroup names)."""
    in_pod = _KUBEPODS.match(thread.cgroup)
    return in_pod is not None and (in_pod[1] is not None or not thread.cpuset_cpus)


def _check_deadline(out: Requirements) -> None:
    """Class deadline needs CPUs that are a root domain, and a part of a guest's budget."""
    if wrong := unfit(out.policy, out.guest):
        out.refuse(("scheduler", "budget"), *wrong)
    for role in DATA_PLANE:
        rule = rule_for(out.policy, role)
        choice = cpus_for(out.policy, role)
        if rule is not None and rule.deadline and choice is None:
            out.refuse(
                sched_keys(out.policy, role),
                "class deadline needs CPUs that are a root domain of their own",
                f"add cpus: {{{role.value}: auto}}",
            )
