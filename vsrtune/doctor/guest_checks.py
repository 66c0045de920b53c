# SPDX-License-Identifier: GPL-2.0-or-later
"""Checks of the running guests: workers, devices, queues, classes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.doctor.model import Case, Finding, error, info, ok, warning
from vsrtune.model.guest import (
    DATA_PLANE,
    REALTIME,
    Confidence,
    Guest,
    Interface,
    NicKind,
    Role,
    SchedClass,
    WorkerKind,
)
from vsrtune.model.root_domains import waits_for_domain
from vsrtune.plan import kernel_threads
from vsrtune.plan import warnings as plan_warnings
from vsrtune.plan.interrupt_cpus import lower_nics
from vsrtune.plan.requirements import label
from vsrtune.plan.safety.standstill import standstills

_NET = "/sys/class/net"
_PCI = "/sys/bus/pci/devices"
# Frames that a vhost worker of today's kernels takes at once.
_BATCH = 64
# Measured: 1.07 times the frames of the default, which wait for a tenth of a second.
_LONG = 4000


def vhost(case: Case) -> Iterable[Finding]:
    """An interface without vhost: QEMU itself copies every frame, and no worker can be
    pinned."""
    for guest in case.snapshot.guests:
        slow = [i.target for i in guest.interfaces if not i.vhost]
        if slow:
            yield warning(
                f"{guest.ref}: {', '.join(slow)} without vhost-net: QEMU's own thread moves the "
                "frames",
                "model virtio, <driver name='vhost'/>, and modprobe vhost_net",
                f"QEMU's command line of process {guest.pid}: no vhost=on",
            )
        for nic in guest.other_nics:
            if nic.kind == "pod":
                yield info(
                    f"{guest.ref}: {nic.why}",
                    "name the CPUs of its NICs' interrupts in cpus.irq",
                    f"/proc/{guest.pid}/cgroup",
                )
                continue
            tell = warning if nic.kind == "user" else info
            yield tell(
                f"{guest.ref}: interface {nic.mac} ({nic.label}): {nic.why}",
                "only macvtaps and taps with vhost-net (type direct, bridge) have workers to tune",
                f"virsh dumpxml {shlex.quote(guest.name)}",
            )


def numa(case: Case) -> Iterable[Finding]:
    """A NIC on another NUMA node than all vcpus of its guest: every frame crosses the nodes."""
    host = case.snapshot.host
    nodes = {cpu.id: cpu.node for cpu in host.cpus}
    for guest in case.snapshot.guests:
        there = {nodes[cpu] for t in guest.by_role(Role.VCPU) for cpu in t.affinity}
        nics = ((n.name, n.node, f"{_NET}/{n.name}/device") for n in lower_nics(host, guest))
        passed = ((d.address, d.node, f"{_PCI}/{d.address}") for d in guest.passed)
        for name, node, path in (*nics, *passed):
            if node >= 0 and there and node not in there:
                cpus = CpuSet(cpu for cpu, of in nodes.items() if of == node)
                yield warning(
                    f"{guest.ref}: {name} is on NUMA node {node}, its vcpus are on "
                    f"{', '.join(map(str, sorted(there)))}: every frame crosses the nodes",
                    f"cpus.vcpu from CPUs {cpus}, and the guest's memory there (<numatune>)",
                    f"{path}/numa_node: {node}",
                )


def worker_mapping(case: Case) -> Iterable[Finding]:
    """Every worker of a guest has the same name, so which one serves which interface is
    known by order, and after hotplug by traffic only."""
    for guest in case.snapshot.guests:
        unsure = [
            t
            for t in (*guest.by_role(Role.VHOST), *guest.by_role(Role.NAPI))
            if t.confidence in (Confidence.UNCERTAIN, Confidence.NONE)
        ]
        # No trace sees the devices of a pod.
        if unsure and guest.source != "kubevirt":
            yield info(
                f"{guest.ref}: it is not certain which interface "
                f"{', '.join(label(t) for t in unsure)} serve"
                f"{'s' * (len(unsure) == 1)}; a mapping in cpus.vhost leaves them alone",
                "run `vsrtune show --trace 5s` while the guest sends on each interface",
                f"tids {', '.join(str(t.key.tid) for t in unsure)}",
            )


def emulator_cgroup(case: Case) -> Iterable[Finding]:
    """Workers that are threads of QEMU stand in libvirt's emulator cgroup: emulatorpin
    confines them, whatever their own affinity."""
    for guest in case.snapshot.guests:
        main = guest.main
        if main is None or guest.source != "libvirt" or not main.cpuset_cpus:
            continue
        inside = [t for t in guest.by_role(Role.VHOST) if t.cgroup == main.cgroup]
        narrow = main.cpuset_effective
        if inside and narrow is not None and not case.snapshot.host.online <= narrow:
            yield warning(
                f"{guest.ref}: emulatorpin holds its {len(inside)} vhost workers on CPU {narrow}",
                "ask for cpus.vhost in its policy: they get a cgroup of their own",
                f"/sys/fs/cgroup/{main.cgroup}/cpuset.cpus: {main.cpuset_cpus}",
            )


def queue_length(case: Case) -> Iterable[Finding]:
    """A queue of length 0 drops every frame, a very long one lets frames wait for long, one
    shorter than a worker's batch loses bursts."""
    for guest in case.snapshot.guests:
        for interface in guest.interfaces:
            if not interface.kind.rings:
                continue
            length = interface.txqueuelen
            evidence = f"{_NET}/{interface.target}/tx_queue_len: {length}"
            name = f"{guest.ref}: the ring of {interface.target}"
            default = f"ip link set {interface.target} txqueuelen 500"
            if length == 0:
                yield error(f"{name} drops every frame", default, evidence)
            elif length > _LONG:
                yield warning(
                    f"{name} holds up to {length} frames: in overload they wait for a tenth of "
                    "a second and more, and little more arrives",
                    default,
                    evidence,
                )
            elif length < _BATCH:
                yield info(
                    f"{name} is shorter than the {_BATCH} frames a worker takes at once: "
                    "measured, such queues forward less",
                    default,
                    evidence,
                )


def devices(case: Case) -> Iterable[Finding]:
    """A device that libvirt does not manage can be down, or have another MAC than the guest:
    then the guest receives nothing."""
    for guest in case.snapshot.guests:
        for interface in guest.interfaces:
            name = interface.target
            if name not in case.facts.devices or not interface.kind.rings:
                continue
            mac, up = case.facts.devices[name]
            if not up:
                yield error(
                    f"{guest.ref}: {name} is down, so the guest gets no frames",
                    f"ip link set {name} up",
                    f"{_NET}/{name}/flags",
                )
            if interface.mac and mac.lower() != interface.mac.lower():
                yield error(
                    f"{guest.ref}: {name} receives for {mac}, the guest's NIC has "
                    f"{interface.mac}: it gets broadcast only",
                    f"ip link set {name} address {interface.mac}",
                    f"{_NET}/{name}/address: {mac}",
                )


def stray_opens(case: Case) -> Iterable[Finding]:
    """Whoever else has a guest's tap open is one more queue of it: flows that hash there are
    lost to the guest."""
    if case.facts.openers is None:
        return
    for device, pid, name in case.facts.openers:
        yield warning(
            f"process {pid} ({name}) has {device} open: it takes a share of the guest's flows",
            "close it, if it is not another guest that shares the device on purpose",
            f"/proc/{pid}/fd: /dev/tap of {device}",
        )
    if not case.facts.openers:
        yield ok("guests' taps are open in their own QEMU only", evidence="/proc/*/fd")


def shared_devices(case: Case) -> Iterable[Finding]:
    """Guests that share one macvtap: each broadcast and each ARP answer reaches one of
    them only, unless the device gives them to every queue."""
    on: dict[int, list[tuple[Guest, Interface]]] = {}
    for guest in case.snapshot.guests:
        for interface in guest.interfaces:
            if interface.kind.rings:
                on.setdefault(interface.ifindex, []).append((guest, interface))
    for ifindex, here in sorted(on.items()):
        names = sorted({g.ref for g, _ in here})
        if len(names) < 2:
            continue
        interface = here[0][1]
        told = f"{', '.join(names)} share {interface.target}"
        if interface.kind is NicKind.NAPI_MACVTAP:
            yield info(
                f"{told}: they find all their neighbours only with its flag every-queue",
                "`vsrtune group` keeps it on; docs/kmod.md, Attributes, says how to read it",
                f"interface index {ifindex}",
            )
        else:
            yield info(
                f"{told}: a neighbour that one has resolved the other may not know",
                "make them a group (`vsrtune group`), or give them static neighbours, or a "
                "device each",
                f"interface index {ifindex}",
            )


def guest_to_guest(case: Case) -> Iterable[Finding]:
    """Frames from guest to guest on one lower device pass the CPU's backlog, which all
    share; frames from the NIC do not."""
    on: dict[str, set[str]] = {}
    for guest in case.snapshot.guests:
        for interface in guest.interfaces:
            if interface.kind is NicKind.MACVTAP and interface.lower:
                on.setdefault(interface.lower[0], set()).add(guest.ref)
    for lower, names in sorted(on.items()):
        if len(names) > 1:
            yield info(
                f"{', '.join(sorted(names))} stand on {lower}: what they send to each other "
                "passes the backlog of a CPU",
                "for chains of routers: attachment: napi-macvlan (docs/kmod.md). It gains "
                "nothing for unicast from the NIC",
                f"{_NET}/{lower}/upper_*",
            )


def realtime(case: Case) -> Iterable[Finding]:
    """A realtime thread that may run on an interrupt CPU starves reception, one that may
    run everywhere starves the kernel's own threads (RCU, broadcast)."""
    irq = case.interrupts
    online = case.snapshot.host.online
    for guest in case.snapshot.guests:
        threads = [t for t in guest.threads if t.sched.cls in REALTIME]
        for thread in threads:
            evidence = (
                f"thread {thread.key.tid}: {thread.sched}, Cpus_allowed_list {thread.affinity}"
            )
            if thread.affinity & irq:
                yield error(
                    f"{guest.ref}: {label(thread)} is realtime and may run on interrupt CPU "
                    f"{thread.affinity & irq}, where it starves packet reception",
                    f"ask for its CPUs in the policy (cpus: {{{thread.role.value}: auto}})",
                    evidence,
                )
            elif len(thread.affinity) > 1 and online - irq <= thread.affinity:
                yield warning(
                    f"{guest.ref}: {label(thread)} is realtime on every CPU that serves no "
                    "interrupts: the kernel's own threads find no quiet CPU",
                    "pin it to one CPU",
                    evidence,
                )


def priorities(case: Case) -> Iterable[Finding]:
    """Priorities that starve: vhost above vcpu, unequal guests on a CPU, a busy vcpu
    beside threads it never gives way to, ksoftirqd below realtime threads."""
    snapshot = case.snapshot
    refs = {g.ref for g in snapshot.guests}
    # Throttling has a check of its own.
    quiet = replace(snapshot, host=replace(snapshot.host, sched_rt_runtime_us=1))
    told = plan_warnings.warnings(quiet, refs, CpuSet(), standstills(quiet, refs))
    kernel = snapshot.host.kernel
    for text in told:
        yield warning(text, "equal classes and priorities", "`vsrtune show`")
    for text in kernel_threads.warnings(snapshot, refs):
        # Since 6.5 deferred work is not left to that thread alone.
        tell = warning if case.release < (6, 5) else info
        hint = "scheduler.softirq in the policy"
        yield tell(text, hint, f"kernel {kernel}; `vsrtune show`")


def libvirt_pins(case: Case) -> Iterable[Finding]:
    """libvirt's pin and the kernel's affinity can differ: vcpupin of a DEADLINE vcpu fails
    after it has narrowed the cgroup, and other tools write affinities beneath libvirt."""
    for guest in case.snapshot.guests:
        for thread in guest.threads:
            if thread.pin is None or thread.affinity <= thread.pin:
                continue
            deadline = thread.sched.cls is SchedClass.DEADLINE
            yield warning(
                f"{guest.ref}: libvirt pins {label(thread)} to CPU {thread.pin}, it runs on "
                f"{thread.affinity}" + (" (class deadline refuses vcpupin)" if deadline else ""),
                "change the policy, not the pin, and reload"
                if deadline
                else "virsh vcpupin or emulatorpin again, or name the CPUs in its policy",
                f"/proc/{thread.key.pid}/task/{thread.key.tid}/status Cpus_allowed_list: "
                f"{thread.affinity}",
            )


def pending(case: Case) -> Iterable[Finding]:
    """A thread that sleeps is still counted where it last ran, so class deadline is refused
    (EPERM) until it has run in its new root domain."""
    for guest in case.snapshot.guests:
        waiting = [t for t in guest.threads if waits_for_domain(case.snapshot.host, t)]
        if waiting:
            yield info(
                f"{guest.ref}: {', '.join(label(t) for t in waiting)} cannot be given class "
                "deadline before running",
                "send traffic through it; the daemon tries every ten seconds",
                ", ".join(f"/proc/{t.key.tid}/stat processor: {t.last_cpu}" for t in waiting),
            )


def untuned(case: Case) -> Iterable[Finding]:
    """Threads of routers that may run on an interrupt CPU compete with the SoftIRQ that feeds
    them."""
    irq = case.interrupts
    if not irq:
        return
    for guest in case.snapshot.guests:
        loose = [
            t
            for t in guest.threads
            if t.role in DATA_PLANE and t.affinity & irq and t.sched.cls not in REALTIME
        ]
        if loose:
            kinds = {t.worker for t in loose} - {None}
            also = " (kernel threads, outside the guest)" if kinds == {WorkerKind.KTHREAD} else ""
            yield warning(
                f"{guest.ref}: untuned, {len(loose)} of its threads may run on interrupt CPU "
                f"{irq}{also}",
                "see: vsrtune policy init, with --connect for the libvirt that manages it"
                if guest.source == "foreign"
                else f"vsrtune policy init {shlex.quote(guest.ref)}",
                f"Cpus_allowed_list of {', '.join(str(t.key.tid) for t in loose)}",
            )
