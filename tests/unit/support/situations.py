"""Situations that make the planner plan: one generator for all its properties.

A situation is a host with one to four guests and their policies, on an imitated kernel
(imitated_host.py). Most policies fit their host, so most plans have actions for several guests.
About half of the situations have a past: earlier policies were carried out, so there is a journal,
and somebody may have changed settings since. Few hosts are recorded ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import recorded_hosts
from hypothesis import assume
from hypothesis import strategies as st
from imitated_host import ImitatedHost, Visible
from planning_samples import (
    budget,
    host,
    macvtap,
    napi_macvtap,
    nic,
    own_processes,
    router,
    snapshot,
    thread,
    with_cpusets,
    with_napi,
)

from vsrtune.core.codec import encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Interface, NicKind, Role, Sched, SchedClass, WorkerKind
from vsrtune.model.host import Host, Nic, NicQueue, NicThread, ThreadKey
from vsrtune.model.load import WINDOWS
from vsrtune.model.plan import DriftRule, Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.interrupt_cpus import interrupt_cpus
from vsrtune.policy.model import AUTO, CpuChoice, CpuMap, Policy, SchedRule
from vsrtune.policy.schema import DEFAULT

Policies = tuple[Policy, ...]
# A row of FakeKernel's state: threads, devices, irqs or cgroups, and its name there.
Row = tuple[str, str]

OTHER, BATCH = SchedRule(SchedClass.OTHER), SchedRule(SchedClass.BATCH)
FIFO, URGENT = SchedRule(SchedClass.FIFO, 10), SchedRule(SchedClass.FIFO, 20)
TURNS, SHORT = SchedRule(SchedClass.RR, 10, slice_ms=10), SchedRule(SchedClass.RR, 20, slice_ms=4)
# The classes of vcpus and workers that leave no guest standing still.
CLASSES = (
    (None, None),
    (OTHER, OTHER),
    (BATCH, None),
    (None, FIFO),
    (OTHER, URGENT),
    (FIFO, URGENT),
    (FIFO, URGENT),
    (TURNS, SHORT),
    (TURNS, TURNS),
)
SCHEDS = (
    Sched(nice=-5),
    Sched(SchedClass.BATCH),
    Sched(SchedClass.RR, 3),
    Sched(SchedClass.FIFO, 30, reset_on_fork=True),
)


@dataclass(frozen=True, eq=False)
class Situation:
    """``before`` is what the host showed before vsrtune, ``touched`` are the rows that somebody
    has changed since vsrtune wrote for the first time."""

    host: ImitatedHost
    policies: Policies
    before: Visible
    touched: frozenset[Row]
    story: tuple[str, ...]

    def plan(self) -> Plan:
        """The plan for the host as it is."""
        return self.host.plan(self.policies)

    def clone(self) -> ImitatedHost:
        """A copy of the host, to carry the plan out on."""
        return self.host.clone()

    def __repr__(self) -> str:
        return "\n  ".join(("Situation:", *self.story))


# -- the host


@st.composite
def lower_nics(draw: st.DrawFn, count: int) -> tuple[Nic, ...]:
    """p0 and p1, whose interrupts leave most CPUs to guests."""
    wiring = draw(st.sampled_from(("one", "one", "two", "queues", "veth", "threaded")))
    everywhere = CpuSet(range(count))
    if wiring in ("one", "two"):
        second = "1" if wiring == "two" else "0"
        return nic("p0", "0", node=draw(st.sampled_from((-1, 0)))), nic("p1", second)
    names = ("rx-0", "rx-1", "tx-0", "tx-1")
    if wiring == "queues":
        steered = draw(st.sampled_from((CpuSet(), CpuSet([0]))))
        queues = tuple(NicQueue(name, steered) for name in names)
        return nic("p0", "0", queues=queues, driver="ixgbe"), nic("p1", "0-1", queues=queues[:2])
    if wiring == "veth":
        queues = (NicQueue("rx-0", CpuSet()), NicQueue("tx-0", None))
        return (
            nic("p0", None, queues=queues, driver="", rx_cpus=CpuSet([0])),
            nic("p1", None, queues=queues, driver=""),
        )
    napi = (NicThread(ThreadKey(700, 700, 1), "napi/p0-1", everywhere),)
    queues = (NicQueue("rx-0", CpuSet()),)
    return nic("p0", "0", threaded_napi=True, queues=queues, napi=napi), nic("p1", "0")


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    count = draw(st.sampled_from((12, 8, 12, 8, 6, 12, 4)))
    last = str(count - 1)
    away = draw(st.sampled_from(("", "", "", "", "", "", "offline", "isolated")))
    numa, smt = draw(st.booleans()), draw(st.booleans())
    found = host(
        count,
        draw(lower_nics(count)),
        offline=last if away == "offline" else "",
        isolated=last if away == "isolated" else "",
        rt_runtime=draw(st.sampled_from((950_000, 950_000, 950_000, -1))),
        nodes={n: 2 * n // count for n in range(count)} if numa else None,
        siblings={n: f"{n // 2 * 2}-{n // 2 * 2 + 1}" for n in range(count)} if smt else None,
        softirq=dict.fromkeys(range(count - (away == "offline")), Sched()),
    )
    return replace(found, rr_timeslice_ms=100)


@st.composite
def interfaces(draw: st.DrawFn, number: int, earlier: tuple[Interface, ...]) -> list[Interface]:
    found: list[Interface] = []
    for nth in range(draw(st.sampled_from((2, 1)))):
        kind = draw(st.sampled_from((*[NicKind.MACVTAP] * 4, NicKind.NAPI_MACVTAP, NicKind.TAP)))
        lower, at = f"p{nth}", 10 * number + nth
        more = {"queues": draw(st.sampled_from((1, 1, 2)))}
        if kind is NicKind.NAPI_MACVTAP:
            found.append(napi_macvtap(at, lower, threaded=draw(st.sampled_from((0, 1))), **more))
        elif kind is NicKind.TAP:
            tap = macvtap(at, lower, **more)
            found.append(replace(tap, kind=kind, target=f"tap{at}"))
        else:
            found.append(macvtap(at, lower, **more))
    shared = [i for i in earlier if i.kind.rings]
    if shared and not draw(st.integers(0, 5)):
        found[0] = draw(st.sampled_from(shared))
    return found


@st.composite
def made_up(draw: st.DrawFn) -> Snapshot:
    """A host with guests of which none is tuned."""
    machine = draw(hosts())
    # On 6.1 a vhost worker is a kernel thread.
    old = not draw(st.integers(0, 3))
    usable = machine.online - machine.isolated
    guests: list[Guest] = []
    for number in range(draw(st.sampled_from((3, 4, 2, 3, 4, 3, 2, 1)))):
        pid = 1000 * (number + 1)
        taken = tuple(i for g in guests for i in g.interfaces)
        made = router(
            f"vr{number + 1}",
            pid,
            online=str(usable),
            vcpus=draw(st.sampled_from((1, 2, 2, 3) if len(usable) > 4 else (1, 2))),
            interfaces=draw(interfaces(number, taken)),
            source=draw(st.sampled_from((*["libvirt"] * 7, "qemu"))),
            kind=WorkerKind.KTHREAD if old else WorkerKind.TASK,
        )
        home = made.threads[0].cgroup
        # One of QEMU's own threads, which nobody tunes.
        helper = thread(pid, pid + 90, Role.WORKER, usable, home, name="call_rcu")
        made = replace(made, threads=(*made.threads, helper))
        guests.append(own_processes(made) if old else made)
    found = snapshot(*guests, on=machine)
    if draw(st.integers(0, 11)):
        found = with_cpusets(found, exclusive=not old)
    else:
        kernel = "6.1.0" if old else "6.12.0"
        bare = {"cpuset_cpus": None, "cpuset_effective": None, "cpuset_limit": None}
        found = Snapshot(
            replace(machine, kernel=kernel),
            tuple(replace(g, threads=tuple(replace(t, **bare) for t in g.threads)) for g in guests),
        )
    return replace(found, guests=tuple(map(with_napi, found.guests)))


@st.composite
def recorded(draw: st.DrawFn) -> Snapshot:
    """A recorded host; its cgroups are those of a host that has the cpuset controller."""
    found = recorded_hosts.shown(draw(st.sampled_from(recorded_hosts.FILES)))
    found = replace(found, host=replace(found.host, rr_timeslice_ms=100, cpusets=()))
    bare = tuple(
        replace(g, threads=tuple(t for t in g.threads if t.role is not Role.NAPI))
        for g in found.guests
    )
    old = found.host.kernel.startswith("6.1.")
    listed = with_cpusets(replace(found, guests=bare), exclusive=not old)
    return replace(listed, guests=found.guests)


# -- policies


@dataclass(frozen=True)
class Room:
    """The CPUs that policies of a host may name: ``free`` for guests, ``irq`` for interrupts.
    ``moves``: whether policies move interrupts there. ``budgets``: whether guests may get
    budgets; all CPUs are then listed by hand, each for one guest."""

    free: tuple[int, ...]
    irq: CpuSet
    moves: bool
    budgets: bool


@st.composite
def rooms(draw: st.DrawFn, seen: Snapshot, budgets: bool) -> Room:
    irq = CpuSet(c for g in seen.guests for c in interrupt_cpus(seen.host, g).cpus)
    moves = not draw(st.integers(0, 3))
    irq = CpuSet([0]) if moves else irq
    free = sorted(seen.host.online - irq - seen.host.isolated - CpuSet([0]))
    return Room(tuple(free), irq, moves, budgets)


@st.composite
def policies_for(draw: st.DrawFn, guest: Guest, number: int, room: Room) -> Policy:
    """A policy that mostly fits: lists of guests overlap only by chance."""
    vcpus = [t.index or 0 for t in guest.by_role(Role.VCPU)]
    start = 2 * number + draw(st.sampled_from((0, 0, 0, 1)))
    own = [room.free[(start + n) % len(room.free)] for n in range(len(vcpus) + 1)]
    vcpu: CpuChoice | CpuMap | None = None
    vhost: CpuChoice | CpuMap | None = None
    emulator: CpuChoice | None = draw(st.sampled_from((None, AUTO, AUTO, CpuSet([0]))))
    placement = None
    styles = ("auto", "lists", "auto", "lists", "auto", "lists", "load", "one role", "none")
    style = draw(st.sampled_from(styles))
    if style == "auto":
        vcpu, vhost = AUTO, AUTO
    elif style == "lists":
        vcpu = tuple((str(index), CpuSet([cpu])) for index, cpu in zip(vcpus, own, strict=False))
        worker = CpuSet([own[-1]])
        mapped = tuple((i.target, worker) for i in guest.interfaces if i.vhost)
        vhost = draw(st.sampled_from((worker, mapped or worker, AUTO)))
    elif style == "load":
        placement = AUTO
    elif style == "one role":
        vcpu, vhost = draw(st.sampled_from(((AUTO, None), (None, AUTO), (None, CpuSet(own[:1])))))
    vcpu_sched, vhost_sched = draw(st.sampled_from(CLASSES))
    if room.budgets and style in ("auto", "lists", "load") and draw(st.integers(0, 2)):
        share = draw(st.sampled_from((0.5, 2, 8)))
        rule = _rule(budget(share, 10))
        vcpu_sched, vhost_sched = draw(
            st.sampled_from(((rule, None), (rule, rule), (None, rule), (rule, FIFO)))
        )
    # Threads that stay where they are may be on an interrupt CPU.
    if vcpu is None and placement is None and draw(st.integers(0, 9)):
        vcpu_sched = draw(st.sampled_from((None, OTHER, BATCH)))
    if vhost is None and placement is None and draw(st.integers(0, 9)):
        vhost_sched = None
    softirq = None
    if not draw(st.integers(0, 3)):
        softirq = draw(st.sampled_from((URGENT, SHORT, OTHER)))
    devices: dict[str, int] = {}
    if draw(st.integers(0, 3)):
        devices["queue.macvtap"] = draw(st.sampled_from((50, 50, 200, 500)))
    taps = any(i.kind is NicKind.NAPI_MACVTAP for i in guest.interfaces)
    if taps and draw(st.booleans()):
        devices["napi.threaded"] = True
    drift = draw(st.sampled_from((*[None] * 4, *DriftRule)))
    below = sorted({name for i in guest.interfaces for name in i.lower})
    by_device = tuple((name, room.irq) for name in below if draw(st.integers(0, 3)))
    irq = draw(st.sampled_from((room.irq, room.irq, by_device or room.irq)))
    return Policy(
        path=f"{guest.name}.yaml",
        guest=guest.ref,
        irq=irq if room.moves else None,
        irq_set=True if room.moves else None,
        vcpu=vcpu,
        vhost=vhost,
        emulator=emulator,
        placement=placement,
        vcpu_sched=vcpu_sched,
        vhost_sched=vhost_sched,
        softirq_sched=softirq,
        rest_us=draw(st.sampled_from((0, 10_000, 10_000, 30_000))),
        napi=AUTO if taps and draw(st.booleans()) else None,
        napi_sched=FIFO if taps and style == "auto" and draw(st.booleans()) else None,
        devices=devices,
        drift={} if drift is None else {DEFAULT: drift},
    )


def _rule(sched: Sched) -> SchedRule:
    return SchedRule(sched.cls, 0, sched.runtime_ns, sched.deadline_ns, sched.period_ns)


@st.composite
def policy_sets(draw: st.DrawFn, seen: Snapshot, earlier: Policies, budgets: bool) -> Policies:
    """Policies for most guests; some are as before."""
    room = draw(rooms(seen, budgets))
    old = {p.guest: p for p in earlier}
    found: list[Policy] = []
    for number, guest in enumerate(seen.guests):
        choice = draw(st.integers(0, 9))
        if choice == 9:
            continue
        if choice < 1 and guest.ref in old:
            found.append(old[guest.ref])
        else:
            found.append(draw(policies_for(guest, number, room)))
    return tuple(found)


# -- what others do


@st.composite
def changes(draw: st.DrawFn, on: ImitatedHost) -> tuple[str, frozenset[Row]]:
    """Somebody changes a setting of a guest or of the host; what, and the rows that it is in."""
    state, online = on.kernel.state, on.scene.host.online
    guest = draw(st.sampled_from(on.scene.guests))
    one = draw(st.sampled_from([t for t in guest.threads if t.role is not Role.NAPI]))
    tid, row = one.key.tid, state["threads"][str(one.key.tid)]
    allowed = on.kernel.effective(row["cgroup"]) & online
    cpus = CpuSet(draw(st.lists(st.sampled_from(sorted(allowed)), min_size=1, max_size=3)))
    budgeted = row["sched"]["cls"] == SchedClass.DEADLINE.value
    kind = draw(st.sampled_from(("mask", "class", "pin", "queue", "interrupt", "softirq")))
    rows: set[Row] = set()
    if kind == "mask" and not budgeted:
        on.kernel.set_affinity(tid, cpus)
        rows = {("threads", str(tid))}
        kind = f"mask of {guest.ref} tid {tid} is {cpus}"
    elif kind == "class" and not budgeted:
        sched = draw(st.sampled_from(SCHEDS))
        on.kernel.set_sched(tid, sched)
        rows = {("threads", str(tid))}
        kind = f"class of {guest.ref} tid {tid} is {sched}"
    elif kind == "pin" and one.role is Role.VCPU and guest.source == "libvirt" and not budgeted:
        on.kernel.pin(guest.uuid, one.index or 0, cpus)
        rows = {("threads", str(tid)), ("cgroups", row["cgroup"])}
        kind = f"vcpupin of {guest.ref} {one.index} is {cpus}"
    elif kind == "queue" and guest.interfaces:
        name = guest.interfaces[0].target
        state["devices"][name]["tx_queue_len"] = 333
        rows = {("devices", name)}
        kind = f"{name} has 333"
    elif kind == "interrupt" and state["irqs"]:
        number = draw(st.sampled_from(sorted(state["irqs"])))
        on.kernel.write(f"/proc/irq/{number}/smp_affinity_list", "0")
        rows = {("irqs", number)}
        kind = f"irq {number} is on 0"
    elif kind == "softirq":
        busy = on.scene.host.softirq[0].key.tid
        state["threads"][str(busy)]["sched"] = encode(SCHEDS[0])
        rows = {("threads", str(busy))}
        kind = f"ksoftirqd tid {busy} is {SCHEDS[0]}"
    return (kind if rows else "nothing"), frozenset(rows)


# -- all of it


@st.composite
def situations(
    draw: st.DrawFn, past: bool | None = None, strangers: bool = True, loose: bool = False
) -> Situation:
    """Situations with or without a past. Without ``strangers`` nobody else has changed anything
    since vsrtune wrote first. With ``loose`` the past may leave a whole slice as a root domain."""
    seen = draw(recorded()) if draw(st.integers(0, 15)) == 15 else draw(made_up())
    if not draw(st.integers(0, 2)):
        seen = _loaded(seen, draw(st.lists(st.sampled_from((0.0, 0.1, 0.5, 0.9)), min_size=4)))
    on = ImitatedHost(seen)
    story = [f"{g.ref}: {len(g.by_role(Role.VCPU))} vcpus" for g in seen.guests]
    story.insert(0, f"CPUs {seen.host.online}, kernel {seen.host.kernel}")
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        story.append("at first: " + draw(changes(on))[0])
    before = on.visible()
    budgets = not draw(st.integers(0, 3))
    policies: Policies = ()
    touched: set[Row] = set()
    if draw(st.booleans()) if past is None else past:
        policies = draw(policy_sets(on.observed(), (), budgets))
        story += [f"before: {_brief(p)}" for p in policies]
        try:
            settle(on, policies, loose=loose)
        except Exception as error:
            error.add_note("\n  ".join(story))
            raise
        assume(loose or not on.loose)
        for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2))) if strangers else 0):
            what, rows = draw(changes(on))
            story.append(f"since: {what}")
            touched |= rows
    policies = draw(policy_sets(on.observed(), policies, budgets))
    story += [f"now: {_brief(p)}" for p in policies]
    return Situation(on, policies, before, frozenset(touched), tuple(story))


def settle(on: ImitatedHost, policies: Policies, passes: int = 4, *, loose: bool = False) -> Plan:
    """Pass by pass until a plan has nothing to do, as the daemon does; the last plan. Some
    settings wait for threads that run or cgroups that are left."""
    for _ in range(passes):
        plan = on.plan(policies)
        if not plan.actions:
            break
        on.apply(plan)
        if on.loose and not loose:
            # Undo does not give everything back yet that was first seen within such a slice.
            break
    return plan


def _loaded(seen: Snapshot, loads: list[float]) -> Snapshot:
    """Threads in turn with these loads."""
    return replace(
        seen,
        guests=tuple(
            replace(
                g,
                threads=tuple(
                    replace(t, load=(loads[n % len(loads)],) * WINDOWS)
                    for n, t in enumerate(g.threads)
                ),
            )
            for g in seen.guests
        ),
    )


def _brief(policy: Policy) -> str:
    """What the policy asks, in one line."""
    told = {"guest": policy.guest}
    fields = (
        "irq", "vcpu", "vhost", "napi", "emulator", "placement", "vcpu_sched", "vhost_sched",
        "napi_sched", "softirq_sched", "devices", "drift",
    )  # fmt: skip
    for name in fields:
        value = getattr(policy, name)
        if value not in (None, ()):
            told[name] = str(value.sched) if isinstance(value, SchedRule) else str(value)
    return ", ".join(f"{key} {value}" for key, value in told.items())
