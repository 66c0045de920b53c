"""A small made-up host for tests of the shell: two guests, one NIC, four CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planning_samples import macvtap
from planning_samples import thread as planned_thread

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import (
    CarriedPin,
    Confidence,
    Guest,
    Irq,
    NicKind,
    Role,
    Thread,
    WorkerKind,
)
from vsrtune.model.host import Competitor, Cpu, Host, Nic
from vsrtune.model.module_counters import QueueCounters, TapCounters
from vsrtune.model.snapshot import Problem, Snapshot
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

BOOT = "6f1c0c1e-0000-4000-8000-000000000001"
ALL = CpuSet([0, 1, 2, 3])
# Tunes all of it.
POLICY = """\
guest: "*"
cpus: {vcpu: 1, vhost: 2}
scheduler:
  vcpu: {class: rr, priority: 7}
  vhost: {class: rr, priority: 7}
queue: {macvtap: 300}
profile: none
"""
SCOPE = "machine.slice/machine-qemu-1-vr1.scope/libvirt"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def policies(text: str = POLICY) -> tuple[Policy, ...]:
    return (parse(text, "test.yaml"),)


def thread(pid: int, tid: int, role: Role, **more: Any) -> Thread:
    """A thread on all CPUs; ``more`` overrides fields."""
    usual = {
        "name": "qemu",
        "cpu_ns": 1_500_000_000,
        "cgroup": f"{SCOPE}/emulator",
        "cpuset_limit": None,
    }
    return planned_thread(pid, tid, role, ALL, **{**usual, **more})


def guest(name: str = "vr1", pid: int = 100, source: str = "libvirt") -> Guest:
    """A router with one vcpu and one macvtap with one worker."""
    tap = macvtap(
        0, target=f"macvtap{pid}", ifindex=pid, mac="52:54:00:00:00:01", ring_drops=7, alias=""
    )
    vcpu = {"name": "CPU 0/KVM", "index": 0, "cgroup": f"{SCOPE}/vcpu0", "pin": ALL}
    worker = {
        "name": f"vhost-{pid}", "worker": WorkerKind.KTHREAD, "interface": tap.target, "queue": 0,
        "confidence": Confidence.ORDER,
    }  # fmt: skip
    threads = (
        thread(pid, pid, Role.EMULATOR, name="qemu-system-x86", pin=ALL),
        thread(pid, pid + 1, Role.VCPU, **vcpu),
        thread(pid, pid + 2, Role.VHOST, **worker),
    )
    return Guest(name, "0b1d" + "0" * 28, source, pid, 5000, threads, (tap,))


def travelled(name: str = "vr1", pid: int = 100) -> Guest:
    """A guest as libvirt restores it that was saved while tuned: its vcpu on CPU 1, its
    emulator on CPU 0, and its worker there as well."""
    made = guest(name, pid)
    emulator, vcpu, worker = made.threads
    zero, one = CpuSet([0]), CpuSet([1])
    on_zero: dict[str, Any] = {
        "affinity": zero, "cpuset_cpus": "0", "cpuset_effective": zero,
    }  # fmt: skip
    threads = (
        replace(emulator, pin=zero, **on_zero),
        replace(vcpu, affinity=one, pin=one, cpuset_cpus="1", cpuset_effective=one),
        replace(worker, **on_zero),
    )
    pins = (CarriedPin(0, one, None), CarriedPin(None, zero, None))
    return replace(made, threads=threads, carried=pins)


def napi_guest() -> Guest:
    """The router on a threaded device of our kernel module, with two queues open."""
    plain = guest()
    tap = replace(
        plain.interfaces[0],
        kind=NicKind.NAPI_MACVTAP,
        threaded=1,
        counters=TapCounters(
            rx_received=106,
            rx_delivered=100,
            rx_dropped_ring_full=4,
            rx_dropped_queue_full=2,
            rx_dropped_no_queue=0,
            rx_nic=6,
            rx_broadcast=100,
            rx_diverted=3,
            queue_high_water=31,
            tx_packets_lower=9,
            tx_dropped=0,
            queues=(
                QueueCounters(0, 104, 100, 4, 500, 9, 102, stalled=0),
                QueueCounters(1, received=0, worker_tid=0),
            ),
        ),
    )
    napi = thread(
        170,
        170,
        Role.NAPI,
        name=f"napi/{tap.target}-8193",
        cgroup="",
        cpuset_cpus=None,
        interface=tap.target,
        confidence=Confidence.EXACT,
    )
    return replace(plain, interfaces=(tap,), threads=(*plain.threads, napi))


def snapshot(*guests: Guest) -> Snapshot:
    """The host with the given guests (vr1 when none is given)."""
    host = Host(
        boot_id=BOOT,
        kernel="6.1.0",
        clock_ticks=100,
        cpus=tuple(Cpu(i, True, False, CpuSet([i]), 0) for i in range(4)),
        nics=(
            Nic(
                "p0", 2, "e1000e", 0, 1000, False, CpuSet(),
                (Irq(24, "p0-rx-0", ALL, CpuSet([0])),),
            ),
            Nic("p1", 3, "veth", 0, 1000, False, CpuSet()),
        ),
        sched_rt_runtime_us=950000,
        sched_rt_period_us=1000000,
        neighbours=(Competitor("irqbalance", 77, "moves interrupts"),),
    )  # fmt: skip
    problems = (Problem("trace", "tracefs is not mounted"),)
    return Snapshot(host, guests or (guest(),), problems)
