# SPDX-License-Identifier: GPL-2.0-or-later
"""Checks of the host: kernel, CPUs, interrupts, scheduling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.text import counted
from vsrtune.doctor.model import Case, Finding, error, info, ok, warning
from vsrtune.model.cpuset_tree import at_or_below
from vsrtune.model.deadline import UNIT, has_fair_server, percent
from vsrtune.model.deadline import bandwidth as booked_by
from vsrtune.model.guest import REALTIME, Guest, Role, SchedClass
from vsrtune.model.host import IRQBALANCE, Nic
from vsrtune.model.root_domains import books as domains
from vsrtune.model.root_domains import is_partition
from vsrtune.plan.interrupt_cpus import BRIDGE_HINT, queue_irqs, serving
from vsrtune.plan.interrupts import irqbalance_bans
from vsrtune.policy.matching import heeded
from vsrtune.policy.model import MAX_REST_MS

OLDEST = (6, 1)
_CPUS = "/sys/devices/system/cpu"
_SCHED = "/proc/sys/kernel"
_CGROUP = "/sys/fs/cgroup"
# The books and the threads may differ by this share of a CPU, because each thread is rounded.
_ROUNDING = UNIT // 1000


def observation(case: Case) -> Iterable[Finding]:
    """A part of the host that cannot be read, so that nothing there is tuned."""
    matter = heeded(case.snapshot, case.policies)
    for problem in case.snapshot.problems:
        tell = warning if problem in matter else info
        # The problem's own text says what to do about a libvirt that does not answer.
        hints = {"libvirt": "see --connect", "domain": "docs/hardening.md says who is a guest"}
        hint = hints.get(problem.reader, "run as root")
        yield tell(problem.what, hint, f"reader {problem.reader}")
    for guest in case.snapshot.guests:
        for text in guest.problems:
            yield warning(f"{guest.ref}: {text}", "see `vsrtune show`")
    for stranger in case.snapshot.strangers:
        yield info(
            f"process {stranger.pid} is named like a QEMU and not believed: {stranger.why}",
            "if it is a guest, see docs/hardening.md: who is a guest",
        )
    if not case.snapshot.problems:
        yield ok(f"all of the host can be read; {counted(len(case.snapshot.guests), 'guest')}")


def kernel(case: Case) -> Iterable[Finding]:
    """A kernel that lacks what a setting needs: workers, partitions and lasting pins came
    with certain releases."""
    release = case.release
    evidence = f"{_SCHED}/osrelease: {case.snapshot.host.kernel}"
    if release < OLDEST:
        yield warning(
            "this kernel is older than any that vsrtune is tested on",
            "use 6.1 or later", evidence,
        )  # fmt: skip
        return
    if release < (6, 2):
        yield info(
            "pins are lost when something writes the cgroup's CPUs (before 6.2); the daemon "
            "sets them again",
            "keep the daemon running, `vsrtune apply` alone does not last",
            evidence,
        )
    if release < (6, 7):
        yield info(
            "no exclusive CPUs for a cgroup below others (before 6.7): class deadline of vcpus "
            "makes all of machine.slice one partition",
            "docs/scheduling.md, budgets, mode loose",
            evidence,
        )
    else:
        yield ok("every setting of a policy is possible on it", evidence=evidence)


def cpus(case: Case) -> Iterable[Finding]:
    """Too few CPUs: one for interrupts and the rest, one for a router are the least."""
    online = case.snapshot.host.online
    evidence = f"{_CPUS}/online: {online}"
    if len(online) < 2:
        yield error(
            "one CPU: no thread can be kept off the interrupts' CPU",
            "give the host a second CPU", evidence,
        )  # fmt: skip
    elif len(online) == 2:
        yield info(
            "two CPUs: every thread of a router shares the one without interrupts",
            "write one: vsrtune policy init GUEST", evidence,
        )  # fmt: skip
    else:
        yield ok(f"{len(online)} CPUs", evidence=evidence)


def isolated_cpus(case: Case) -> Iterable[Finding]:
    """Several CPUs isolated at boot are one root domain, so none of them can have class
    deadline of its own."""
    boot = case.facts.isolated
    if boot is None:
        return
    evidence = f"{_CPUS}/isolated: {boot or 'none'}"
    if len(boot) > 1:
        yield info(
            f"CPUs {boot} are isolated at boot: good for pins, but class deadline is refused there",
            "for class deadline isolate one CPU at most (isolcpus=) and leave the rest to "
            "the partitions that vsrtune makes; auto takes isolated CPUs first, so if DPDK, SPDK "
            "or another program is bound to some, write cpus.pool without these",
            evidence,
        )
    else:
        yield ok("isolation at boot is in nobody's way", evidence=evidence)


def interrupts(case: Case) -> Iterable[Finding]:
    """Interrupts on every CPU, so that no CPU is left for guests' threads; masks do not
    tell where they are served."""
    host = case.snapshot.host
    serves = {n for g in case.snapshot.guests for i in g.interfaces for n in serving(host, i)}
    lower = [nic for nic in _lowers(case) if nic.name in serves]
    all_of_them = CpuSet()
    for nic in lower:
        served = CpuSet.union(irq.effective for irq in queue_irqs(nic)) & host.online
        all_of_them |= served
        if not nic.irqs:
            where = f"where its SoftIRQ was seen: CPU {nic.rx_cpus}" if nic.rx_cpus else ""
            lacks = "port to a NIC" if nic.bridge else "interrupts of its own"
            hint = (
                "send traffic and run `vsrtune show --trace 5s`, which remembers where frames are "
                "received; or write cpus.irq"
            )
            tell = ok if where else info
            yield tell(
                f"{nic.name} has no {lacks}; "
                + (where or "the first online CPU is taken for its interrupt CPU"),
                "" if where else BRIDGE_HINT if nic.bridge else hint,
                f"/sys/class/net/{nic.name}/device/msi_irqs: none",
            )
    if host.online and host.online <= all_of_them:
        listed = "; ".join(
            f"/proc/irq/{irq.number}/effective_affinity_list: {irq.effective}"
            for nic in lower
            for irq in queue_irqs(nic)
        )
        yield warning(
            "the NICs' interrupts are served on every online CPU: auto finds no CPU for a "
            "guest's threads and refuses it",
            "move them to few CPUs: cpus: {irq: LIST} and irq: {set: true} in a policy, or "
            "ethtool -L fewer queues and /proc/irq/N/smp_affinity_list",
            listed,
        )
    elif all_of_them:
        yield ok(
            f"interrupts are served on CPU {all_of_them}",
            evidence="/proc/irq/*/effective_affinity_list",
        )  # fmt: skip


def managed_interrupts(case: Case) -> Iterable[Finding]:
    """Managed interrupts refuse to be moved (EIO): their CPUs are fixed by the driver."""
    irqs = case.facts.managed_irqs
    if irqs is None:
        return
    of = {irq.number: (nic, irq) for nic in _lowers(case) for irq in nic.irqs}
    for number in irqs:
        if number in of:
            nic, irq = of[number]
            yield info(
                f"interrupt {number} of {nic.name} is managed by the kernel and stays on "
                f"CPU {irq.effective}",
                "change the number of queues with ethtool -L, or keep guests off that CPU",
                f"/sys/kernel/debug/irq/irqs/{number}: IRQD_AFFINITY_MANAGED",
            )


def steering(case: Case) -> Iterable[Finding]:
    """RPS brings back the per-CPU backlog that macvtap otherwise does not use, and
    threaded NAPI moves the work of receiving to where interrupts do not tell."""
    found = False
    for nic in _lowers(case):
        # Where there is no interrupt, it is RPS alone that moves the work, and a policy may ask.
        if nic.rps_cpus and nic.irqs:
            found = True
            files = f"/sys/class/net/{nic.name}/queues/rx-*/rps_cpus"
            yield warning(
                f"RPS of {nic.name} sends frames through the backlogs of CPU {nic.rps_cpus}",
                f"for queue in {files}; do echo 0 >$queue; done",
                f"/sys/class/net/{nic.name}/queues/rx-*/rps_cpus: {nic.rps_cpus}",
            )
        if nic.threaded_napi:
            found = True
            yield info(
                f"{nic.name} receives in kernel threads napi/{nic.name}-*, which may run beside "
                "its interrupts or elsewhere",
                "pin these threads to the interrupt CPUs",
                f"/sys/class/net/{nic.name}/threaded: 1",
            )
    if not found and _lowers(case):
        yield ok("no RPS and no threaded NAPI below guests")


def backlog(case: Case) -> Iterable[Finding]:
    """Frames dropped by a CPU's backlog, which all guests share: from guest to guest, to a
    veth, broadcast, RPS."""
    drops = case.facts.backlog
    if drops is None:
        return
    lost = [(cpu, count) for cpu, count in drops if count]
    if lost:
        text = ", ".join(f"CPU {cpu}: {count}" for cpu, count in lost)
        yield warning(
            "frames were dropped at a CPU's backlog since boot",
            "give ksoftirqd the class of the guests' threads (scheduler.softirq), or move guests "
            "that talk to each other to napi-macvlan",
            f"/proc/net/softnet_stat, second column: {text}",
        )
    else:
        yield ok("no backlog dropped a frame", evidence="/proc/net/softnet_stat")


def neighbours(case: Case) -> Iterable[Finding]:
    """Other software that writes what vsrtune writes: irqbalance, TuneD, numad, stalld."""
    found = case.snapshot.host.neighbours
    hints = {
        "numad": "stop it on hosts of routers, or exclude QEMU (-x PID)",
        "stalld": "keep it off class deadline and off the guests' CPUs",
    }
    for one in found:
        hint, detail = hints.get(one.name, ""), one.detail
        if one.name == IRQBALANCE:
            hint = irqbalance_bans(one, _lowers(case))
        elif one.name == "tuned" and case.facts.tuned:
            hint = "tuned-adm profile virtual-host; docs/doctor.md, TuneD, keeps the rest of yours"
            detail += f"; it writes {', '.join(case.facts.tuned)}"
        pid = "" if one.pid is None else f"/proc/{one.pid}/comm"
        tell = warning if hint else info
        yield tell(
            f"{one.name}: {detail}" if detail else f"{one.name} runs",
            hint,
            f"{pid}: {one.name}" if pid else f"{_CPUS}/nohz_full",
        )
    if not found:
        yield ok("nothing else writes affinity or scheduling")


def throttling(case: Case) -> Iterable[Finding]:
    """sched_rt_runtime_us -1 switches off DEADLINE admission and the rest that a realtime
    thread must leave; 0 stops realtime threads; before 6.12 a long rest delays frames."""
    host = case.snapshot.host
    evidence = f"{_SCHED}/sched_rt_runtime_us: {host.sched_rt_runtime_us}"
    rest_us = host.sched_rt_period_us - host.sched_rt_runtime_us
    classes = {t.sched.cls for g in case.snapshot.guests for t in g.threads}
    realtime = not classes.isdisjoint(REALTIME) and SchedClass.DEADLINE not in classes
    stops = not has_fair_server(host)
    if host.sched_rt_runtime_us == -1:
        tell = error if SchedClass.DEADLINE in classes else warning
        yield tell(
            "no limit: the kernel admits any sum of budgets, so none is guaranteed, and a "
            "realtime thread that never sleeps keeps its CPU for good",
            "sysctl kernel.sched_rt_runtime_us=950000, and keep who set it (TuneD's realtime "
            "profile, stalld) from doing so again",
            evidence,
        )
    elif host.sched_rt_runtime_us == 0 and host.sched_rt_period_us:
        yield error(
            "0: realtime threads get no CPU time at all",
            "sysctl kernel.sched_rt_runtime_us=950000", evidence,
        )  # fmt: skip
    elif realtime and 1000 * rest_us >= MAX_REST_MS * host.sched_rt_period_us and stops:
        yield warning(
            f"a CPU that realtime threads keep busy stops them for {rest_us / 1000:g} ms at a time",
            "scheduler.rest in the policy; in a container, sysctl "
            "kernel.sched_rt_runtime_us=990000 on the host",
            evidence,
        )
    else:
        yield ok("realtime threads leave something to others", evidence=evidence)


def realtime_groups(case: Case) -> Iterable[Finding]:
    """A kernel with RT_GROUP_SCHED refuses fifo and rr (EPERM) to threads of a cpu cgroup
    without a realtime budget."""
    where = case.facts.rt_group_sched
    if where:
        yield warning(
            "fifo and rr may be refused with EPERM: every cpu cgroup needs a realtime budget",
            "use class deadline or pins only, or boot with rt_group_sched=0 where the kernel "
            "has it",
            f"{where}: CONFIG_RT_GROUP_SCHED=y",
        )
    elif where is not None:
        yield ok("the kernel has no realtime budgets for cgroups")


def kernel_threads(case: Case) -> Iterable[Finding]:
    """A kernel with PREEMPT_RT runs timers and RCU in realtime threads of priority 1 (ktimers,
    rcuc): they starve below guests' threads of a higher priority that keep a CPU busy."""
    version = case.facts.version
    if version is None:
        return
    evidence = f"{_SCHED}/version: {version}"
    if "PREEMPT_RT" in version:
        yield warning(
            "ktimers/N and rcuc/N have class fifo and priority 1, so they starve below guests' "
            "threads of class fifo or rr that keep a CPU busy",
            "after each boot, raise them above the policy's priority (10 by default) with for t in "
            "$(pgrep '^(ktimers|rcuc)/'); do chrt -f -p 11 $t; done, or set class batch",
            evidence,
        )
    else:
        yield ok("no PREEMPT_RT: timers and RCU run in no realtime threads", evidence=evidence)


def cpusets(case: Case) -> Iterable[Finding]:
    """Without cgroup v2 cpusets there is no class deadline for libvirt's guests, and a
    partition that something made invalid holds its threads' budgets no more."""
    host = case.snapshot.host
    libvirt = [g for g in case.snapshot.guests if g.source == "libvirt"]
    if libvirt and all(t.cpuset_cpus is None for g in libvirt for t in g.threads):
        yield warning(
            "guests run without cgroup v2 cpusets: class deadline is refused, pins are "
            "affinities alone",
            "boot with the unified hierarchy (systemd.unified_cgroup_hierarchy=1)",
            f"{_CGROUP}/machine.slice/.../cpuset.cpus: none",
        )
    isolated = [c for c in host.cpusets if c.valid and c.partition == "isolated"]
    for group in host.cpusets:
        evidence = f"{_CGROUP}/{group.path}/cpuset.cpus.partition: {group.partition}"
        if "invalid" in group.partition:
            yield error(
                f"the partition {group.path} is not in force",
                "start the daemon or run `vsrtune apply`, which makes it anew"
                if is_partition(group.path) or "libvirt" in group.path
                else "write member into it, or remove what stands in its way",
                evidence,
            )
        elif group.valid and not _has_guest(case, group.path) and not is_partition(group.path):
            yield info(
                f"the partition {group.path} holds CPU {group.effective} for itself",
                "guests get none of these CPUs while it stands",
                evidence,
            )
    if len(isolated) > 1:
        yield warning(
            f"{len(isolated)} isolated partitions share one root domain: class deadline works "
            "in none of them",
            "make them root instead of isolated",
            "; ".join(f"{_CGROUP}/{c.path}/cpuset.cpus.partition: isolated" for c in isolated),
        )


def deadline_bandwidth(case: Case) -> Iterable[Finding]:
    """DEADLINE bandwidth that stays booked after its thread is gone (it left the class while
    it slept) and takes room from new budgets."""
    if all(c.booked is None for c in case.facts.books):
        return
    snapshot = case.snapshot
    known = replace(snapshot, host=replace(snapshot.host, deadline=case.facts.books))
    clean = True
    for domain in domains(known):
        own = sum(
            booked_by(t.sched)
            for g in snapshot.guests
            for t in g.threads
            if t.sched.cls is SchedClass.DEADLINE and t.affinity & domain.cpus
        )
        # The books may or may not include what the kernel books for itself.
        if domain.booked - own > domain.kernel + _ROUNDING:
            clean = False
            yield warning(
                f"{percent(domain.booked - own)} of a CPU is booked on CPU {domain.cpus} by no "
                "guest's thread: another program's, or left behind",
                "ps -eLo tid,cls,comm | grep DLN names threads that have it; what is left behind "
                "goes when a cpuset partition of these CPUs is made and removed",
                f"/sys/kernel/debug/sched/debug, dl_bw->total_bw; {domain.made_by}",
            )
    if clean:
        yield ok(
            "no bandwidth is booked but by guests' threads",
            evidence="/sys/kernel/debug/sched/debug",
        )  # fmt: skip


def qdisc(case: Case) -> Iterable[Finding]:
    """The length of a macvtap is also that of its queue from the guest where its qdisc is
    pfifo_fast."""
    name = case.facts.default_qdisc
    if name is None:
        return
    evidence = f"/proc/sys/net/core/default_qdisc: {name}"
    if name == "pfifo_fast":
        yield info(
            "queue.macvtap also shortens the queue for frames that guests send",
            "sysctl net.core.default_qdisc=fq_codel, before the devices are made", evidence,
        )  # fmt: skip
    else:
        yield ok("queue.macvtap governs the rings alone", evidence=evidence)


def vhost_workers(case: Case) -> Iterable[Finding]:
    """How the kernel runs vhost workers changed in 6.4 and can be changed back: tools that
    tell by the kernel's version are wrong."""
    kinds = {
        t.worker.value
        for g in case.snapshot.guests
        for t in g.by_role(Role.VHOST)
        if t.worker is not None
    }
    told = case.facts.fork_from_owner
    parameter = "" if told is None else f"fork_from_owner_default: {told}"
    if not kinds and not parameter:
        return
    what = {"kthread": "kernel threads", "task": "threads of QEMU"}
    text = " and ".join(what[k] for k in sorted(kinds)) or "none runs"
    yield ok(
        f"vhost workers: {text}",
        evidence=parameter and f"/sys/module/vhost/parameters/{parameter}",
    )  # fmt: skip


def _lowers(case: Case) -> list[Nic]:
    """The devices below guests' interfaces."""
    names = {low for g in case.snapshot.guests for i in g.interfaces for low in i.lower}
    return [nic for nic in case.snapshot.host.nics if nic.name in names]


def _has_guest(case: Case, path: str) -> bool:
    def inside(guest: Guest) -> bool:
        return any(at_or_below(t.cgroup, path) for t in guest.threads)

    return any(inside(guest) for guest in case.snapshot.guests)
