"""Made-up hosts and router guests for tests of the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.model.guest import (
    Confidence,
    Guest,
    Interface,
    Irq,
    NicKind,
    Role,
    Sched,
    SchedClass,
    Thread,
    ThreadKey,
    WorkerKind,
)
from vsrtune.model.host import Cpu, DeadlineCpu, Host, Nic, SoftirqThread
from vsrtune.model.journal_records import Entry
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import Target
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.model import Policy

BOOT = "2b7f4a31-7c55-4c4e-9f5e-3f2f6f3f0001"
FIFO_10 = Sched(SchedClass.FIFO, 10, reset_on_fork=True)
UUID = "7d1f3a52-9a53-4d0e-8a3b-0000000{:05d}"


def journalled(*plans: Plan) -> tuple[Entry, ...]:
    """The live entries of a journal after these plans."""
    found: dict[Target, Entry] = {}
    for action in (action for plan in plans for action in plan.actions):
        known = found.get(action.target)
        original = action.before if known is None else known.original
        found[action.target] = Entry(action.target, original, action.after, "done")
    return tuple(found.values())


def released(
    snapshot: Snapshot, policies: Sequence[Policy], entries: Iterable[Entry]
) -> frozenset[Target]:
    """What the plan for a host with these entries releases."""
    made = full_plan(snapshot, policies, tuple(entries))
    return frozenset(a.target for a in made.actions if a.release)


def cpus(text: str) -> CpuSet:
    """Short for CpuSet.parse."""
    return CpuSet.parse(text)


def budget(runtime_ms: float, period_ms: float) -> Sched:
    """Class deadline with so much time in each period."""
    runtime, period = round(runtime_ms * 10**6), round(period_ms * 10**6)
    return Sched(
        SchedClass.DEADLINE, reset_on_fork=True,
        runtime_ns=runtime, deadline_ns=period, period_ns=period,
    )  # fmt: skip


def nic(name: str, irq_cpus: str | None, **more: Any) -> Nic:
    """A lower device; with ``irq_cpus`` it has one interrupt, served there."""
    number = 24 + sum(name.encode()) % 50
    irqs = ()
    if irq_cpus is not None:
        irqs = (Irq(number, f"{name}-rx-0", cpus(irq_cpus), cpus(irq_cpus)),)
    base = Nic(name, 2 + number, "e1000e", -1, 1000, False, CpuSet(), irqs)
    return replace(base, **more)


def host(
    count: int = 4,
    nics: Mapping[str, str | None] | Iterable[Nic] | None = None,
    *,
    offline: str = "",
    isolated: str = "",
    rt_runtime: int = 950_000,
    nodes: Mapping[int, int] | None = None,
    siblings: Mapping[int, str] | None = None,
    softirq: Mapping[int, Sched] | None = None,
) -> Host:
    """A host with CPUs 0..count-1; by default NICs p0 and p1, served on CPU 0."""
    if nics is None:
        nics = {"p0": "0", "p1": "0"}
    if isinstance(nics, Mapping):
        nics = [nic(name, served) for name, served in nics.items()]
    return Host(
        boot_id=BOOT,
        kernel="6.12.0",
        clock_ticks=100,
        cpus=tuple(
            Cpu(
                n,
                n not in cpus(offline),
                n in cpus(isolated),
                cpus((siblings or {}).get(n, str(n))),
                (nodes or {}).get(n, 0),
            )
            for n in range(count)
        ),
        nics=tuple(nics),
        sched_rt_runtime_us=rt_runtime,
        sched_rt_period_us=1_000_000,
        softirq=tuple(
            SoftirqThread(ThreadKey(10 + n, 10 + n, 1), n, sched)
            for n, sched in sorted((softirq or {}).items())
        ),
    )


def macvtap(number: int, lower: str = "p0", **more: Any) -> Interface:
    """The macvtap device ``macvtap<number>``."""
    base = Interface(
        target=f"macvtap{number}",
        ifindex=100 + number,
        kind=NicKind.MACVTAP,
        mac=f"52:54:00:00:00:{number:02x}",
        model="virtio",
        vhost=True,
        queues=1,
        txqueuelen=500,
        ring_drops=0,
        lower=(lower,),
        alias=f"net{number}",
    )
    return replace(base, **more)


def napi_macvtap(number: int, lower: str = "p0", **more: Any) -> Interface:
    """The device ``nvt<number>`` of our kernel module, its NAPI not threaded."""
    base = macvtap(number, lower, target=f"nvt{number}", kind=NicKind.NAPI_MACVTAP, threaded=0)
    return replace(base, **more)


def with_napi(guest: Guest, **more: Any) -> Guest:
    """The guest with the NAPI threads of those of its devices that are threaded."""
    everywhere = guest.threads[0].affinity
    threads = [
        thread(
            tid,
            tid,
            Role.NAPI,
            everywhere,
            "",
            name=f"napi/{interface.target}-0",
            cpuset_cpus=None,
            cpuset_limit=None,
            interface=interface.target,
            confidence=Confidence.EXACT,
            **more,
        )
        for tid, interface in enumerate(guest.interfaces, guest.pid + 50)
        if interface.threaded
    ]
    return replace(guest, threads=(*guest.threads, *threads))


def thread(pid: int, tid: int, role: Role, online: CpuSet, cgroup: str, **more: Any) -> Thread:
    """A thread on all CPUs in class other."""
    base = Thread(
        key=ThreadKey(pid, tid, 5000 + tid),
        name={Role.VCPU: "CPU 0/KVM", Role.VHOST: f"vhost-{pid}"}.get(role, "qemu-system-x86"),
        role=role,
        sched=Sched(),
        affinity=online,
        last_cpu=0,
        cpu_ns=0,
        cgroup=cgroup,
        cpuset_cpus="",
        cpuset_effective=online,
        cpuset_limit=online,
    )
    return replace(base, **more)


def router(
    name: str = "vr1",
    pid: int = 1000,
    *,
    online: str = "0-3",
    vcpus: int = 1,
    interfaces: Iterable[Interface] | None = None,
    source: str = "libvirt",
    confidence: Confidence = Confidence.ORDER,
    kind: WorkerKind = WorkerKind.TASK,
) -> Guest:
    """A router guest: untuned, one vhost worker per queue of every vhost interface."""
    everywhere = cpus(online)
    if interfaces is None:
        base = pid // 100
        interfaces = (macvtap(base, "p0"), macvtap(base + 1, "p1"))
    interfaces = tuple(interfaces)
    libvirt = source == "libvirt"
    scope = f"machine.slice/machine-qemu-{pid}-x.scope/libvirt"
    plain = "user.slice/user-0.slice/session-1.scope"
    emulator = f"{scope}/emulator" if libvirt else plain
    pin = everywhere if libvirt else None
    threads = [thread(pid, pid, Role.EMULATOR, everywhere, emulator, pin=pin)]
    for index in range(vcpus):
        group = f"{scope}/vcpu{index}" if libvirt else plain
        tid = pid + 1 + index
        threads.append(thread(pid, tid, Role.VCPU, everywhere, group, index=index, pin=pin))
    tid = pid + 20
    for interface in interfaces:
        for queue in range(interface.queues if interface.vhost else 0):
            tid += 1
            known = confidence is not Confidence.NONE
            threads.append(
                thread(
                    pid,
                    tid,
                    Role.VHOST,
                    everywhere,
                    emulator,
                    worker=kind,
                    interface=interface.target if known else None,
                    queue=queue if known else None,
                    confidence=confidence,
                )
            )
    return Guest(name, UUID.format(pid), source, pid, 4000 + pid, tuple(threads), interfaces)


def snapshot(*guests: Guest, on: Host | None = None) -> Snapshot:
    """A snapshot of these guests."""
    return Snapshot(host() if on is None else on, guests)


def ran(thread: Thread) -> Thread:
    """The thread after it has run for a moment, on the first CPU where it may unless it is on one
    of these."""
    here = thread.last_cpu in thread.affinity
    return thread if here else replace(thread, last_cpu=thread.affinity.first())


def all_ran(seen: Snapshot) -> Snapshot:
    """The snapshot after every thread has run for a moment."""
    guests = (replace(g, threads=tuple(map(ran, g.threads))) for g in seen.guests)
    return replace(seen, guests=tuple(guests))


def own_processes(guest: Guest) -> Guest:
    """The guest, each of whose vhost workers is a process of its own."""
    threads = (
        replace(t, key=replace(t.key, pid=t.key.tid)) if t.role is Role.VHOST else t
        for t in guest.threads
    )
    return replace(guest, threads=tuple(threads))


def change(guest: Guest, role: Role, **more: Any) -> Guest:
    """The guest with fields of every thread of a role changed."""
    return replace(
        guest,
        threads=tuple(replace(t, **more) if t.role is role else t for t in guest.threads),
    )


def change_one(guest: Guest, tid: int, **more: Any) -> Guest:
    """The guest with fields of one thread changed."""
    return replace(
        guest,
        threads=tuple(replace(t, **more) if t.key.tid == tid else t for t in guest.threads),
    )


def with_cpusets(seen: Snapshot, *, exclusive: bool = True, fair_server: int = 52428) -> Snapshot:
    """The snapshot with the cgroups of its guests, of a kernel that has
    cpuset.cpus.exclusive and a fair_server (6.12), or neither (6.1)."""
    online = seen.host.online
    text = "" if exclusive else None
    paths: dict[str, str] = {"system.slice": ""}
    for guest in seen.guests:
        for member in guest.threads:
            paths[member.cgroup] = member.cpuset_cpus or ""
            above = member.cgroup.rpartition("/")[0]
            while above:
                limit = member.cpuset_limit
                narrow = limit is not None and limit != online and above.endswith(".scope")
                paths.setdefault(above, str(limit) if narrow else "")
                above = above.rpartition("/")[0]
    groups = tuple(
        CpusetGroup(path, listed, cpus(listed) or online, "member", text)
        for path, listed in sorted(paths.items())
    )
    own = fair_server if exclusive else 0
    books = tuple(DeadlineCpu(c, own * len(online), own) for c in online)
    kernel = "6.12.0" if exclusive else "6.1.0"
    return replace(seen, host=replace(seen.host, kernel=kernel, cpusets=groups, deadline=books))
