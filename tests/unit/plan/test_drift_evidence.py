"""Who changed a setting, as far as there is evidence, and what counts as a change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning_samples import change, cpus, host, nic, router, snapshot

from vsrtune.model.guest import Role, Sched, SchedClass, ThreadKey
from vsrtune.model.host import Competitor, NicQueue
from vsrtune.model.plan import Drift, DriftRule
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    IrqAffinity,
    Pin,
    QueueCpus,
    RrTimeslice,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TimeSlice,
    TxQueueLen,
    Value,
    VcpuPin,
)
from vsrtune.plan.drift import UNSURE, Memory, drifts
from vsrtune.policy.parser import parse

POLICY = "guest: vr1\ncpus: {irq: 0, vcpu: 1, vhost: 2}\nirq: {set: true}\nprofile: none\n"
GUEST = router()
VCPU, WORKER = GUEST.by_role(Role.VCPU)[0], GUEST.by_role(Role.VHOST)[0]
PIN = VcpuPin("vr1", GUEST.uuid, 0, VCPU.key)
SCHED = ThreadSched("vr1", VCPU.key, "vcpu 0")
SOFTIRQ = ThreadSched(HOST_REF, ThreadKey(11, 11, 1), "ksoftirqd/1")
NIC = nic("p0", "2", queues=(NicQueue("rx-0", cpus("2")),))
IRQ = IrqAffinity(HOST_REF, NIC.irqs[0].number, NIC.irqs[0].name)
RPS = QueueCpus(HOST_REF, "p0", NIC.ifindex, "rx-0")
FIFO = Sched(SchedClass.FIFO, 10)


def running(*names: str, detail: str = "", pid: int | None = 77) -> tuple[Competitor, ...]:
    return tuple(Competitor(name, pid, detail) for name in names)


ALL = running("irqbalance", "numad", "stalld", "tuned")


def found(
    applied: dict[Target, Value],
    neighbours: tuple[Competitor, ...] = (),
    memory: Memory | None = None,
    text: str = "",
    **vcpu: Any,
) -> dict[Target, Drift]:
    """The drift on a host on which the vcpu is on CPU 2, by something else than libvirt."""
    guest = change(GUEST, Role.VCPU, **{"affinity": cpus("2"), **vcpu})
    machine = replace(
        host(nics=[NIC], softirq={1: Sched()}), neighbours=neighbours, rr_timeslice_ms=100
    )
    policies = [(guest, parse(POLICY + text, "p"))]
    return drifts(snapshot(guest, on=machine), policies, applied, memory or Memory())


@pytest.mark.parametrize(
    ("target", "written", "neighbours", "vcpu", "by"),
    [
        (PIN, Pin(cpus("1"), "1"), ALL, {"pin": cpus("2")}, "libvirt"),
        (PIN, Pin(cpus("1"), "1"), ALL, {"cpuset_effective": cpus("2-3")}, "a writer of its cgroup"),
        (PIN, Pin(cpus("1"), "1"), ALL, {}, "numad"),
        (PIN, Pin(cpus("1"), "1"), running("tuned"), {}, "tuned"),
        (PIN, Pin(cpus("1"), "1"), running("tuned", detail="no profile"), {}, ""),
        (PIN, Pin(cpus("1"), "1"), running("tuned", pid=None), {}, ""),
        (PIN, Pin(cpus("1"), "1"), running("irqbalance", "stalld"), {}, ""),
        (PIN, Pin(cpus("1"), "1"), (), {"pin": None}, ""),
        (SCHED, FIFO, ALL, {"pin": cpus("2")}, "stalld"),
        (SCHED, FIFO, running("tuned"), {}, "tuned"),
        (SCHED, FIFO, running("irqbalance", "numad"), {}, ""),
        (SOFTIRQ, FIFO, ALL, {}, "stalld"),
        (IRQ, cpus("0"), ALL, {}, "irqbalance"),
        (IRQ, cpus("0"), running("numad", "tuned", "stalld"), {}, ""),
        (RPS, cpus("0"), ALL, {}, ""),
        (RrTimeslice(HOST_REF), TimeSlice(8), ALL, {}, ""),
        (TxQueueLen("vr1", "macvtap10", 110), 100, ALL, {}, ""),
    ],
)  # fmt: skip
def test_who_did_it(
    target: Target,
    written: Value,
    neighbours: tuple[Competitor, ...],
    vcpu: dict[str, Any],
    by: str,
) -> None:
    assert found({target: written}, neighbours, **vcpu)[target].by == by


@pytest.mark.parametrize(
    ("target", "written"),
    [
        (PIN, Pin(cpus("2"), "1")),
        (SCHED, Sched()),
        (IRQ, cpus("2")),
        (RrTimeslice(HOST_REF), TimeSlice(100)),
        # Threads and devices that are gone, and settings that nobody else changes.
        (ThreadAffinity("vr1", ThreadKey(1, 1, 1), "vhost"), cpus("1")),
        (TxQueueLen("vr1", "macvtap10", 99), 100),
        (ThreadCgroup("vr1", WORKER.key, "vhost"), "elsewhere"),
        (CgroupDir("vr1", "elsewhere"), True),
    ],
)
def test_what_is_no_drift(target: Target, written: Value) -> None:
    assert found({target: written}) == {}


def test_values_that_were_never_written_count_too() -> None:
    memory = Memory(for_verify={PIN: cpus("1")})
    assert found({}, memory=memory) == {
        PIN: Drift(PIN, "cpus.vcpu", DriftRule.ENFORCE, "CPUs 1", "CPUs 2", "", "")
    }


RELOAD = "a reload takes it back"


@pytest.mark.parametrize(
    ("rule", "pin", "expected", "left"),
    [
        ("", "0-3", DriftRule.ENFORCE, ""),
        ("", "2", DriftRule.REPORT, f"held by the operator on CPUs 2, we had set 1; {RELOAD}"),
        ("enforce", "2", DriftRule.ENFORCE, ""),
        ("adopt", "2", DriftRule.ADOPT, f"adopted as found: CPUs 2, we had set CPUs 1; {RELOAD}"),
        (
            "report", "2", DriftRule.REPORT,
            f"reported: libvirt changed it to CPUs 2, we had set CPUs 1; {RELOAD}",
        ),
        (
            "report", "0-3", DriftRule.REPORT,
            f"reported: something changed it to CPUs 2, we had set CPUs 1; {RELOAD}",
        ),
    ],
)  # fmt: skip
def test_what_is_done_about_it(rule: str, pin: str, expected: DriftRule, left: str) -> None:
    text = f"drift: {rule}\n" if rule else ""
    drift = found({PIN: Pin(cpus("1"), "1")}, text=text, pin=cpus(pin))[PIN]
    assert (drift.rule, drift.left) == (expected, left)


@pytest.mark.parametrize(
    ("target", "patient", "stayed", "pin", "left"),
    [
        (PIN, True, False, "0-3", UNSURE),
        (PIN, True, True, "0-3", "later"),
        (PIN, False, False, "0-3", "later"),
        (PIN, True, False, "2", "later"),  # libvirt has noted it
        (SCHED, True, False, "0-3", "later"),
    ],
)
def test_a_pin_that_libvirt_may_note_in_a_moment_is_waited_for(
    target: Target, patient: bool, stayed: bool, pin: str, left: str
) -> None:
    known = frozenset([(target, "CPUs 2")] if stayed else [])
    memory = Memory(waits={target: "later"}, patient=patient, stayed=known)
    written: Value = FIFO if target is SCHED else Pin(cpus("1"), "1")
    text = "drift: enforce\n"
    assert found({target: written}, memory=memory, text=text, pin=cpus(pin))[target].left == left


@pytest.mark.parametrize(
    ("first", "second", "rule"),
    [
        ("enforce", "adopt", DriftRule.ENFORCE),
        ("adopt", "report", DriftRule.REPORT),
        ("adopt", "adopt", DriftRule.ADOPT),
        ("adopt", "", DriftRule.ENFORCE),
    ],
)
def test_the_strictest_rule_holds_for_a_setting_of_the_host(
    first: str, second: str, rule: DriftRule
) -> None:
    guests = router(), router("vr2", 2000)
    on = host(nics=[NIC])
    pairs = [
        (g, parse(POLICY.replace("vr1", g.name) + (f"drift: {r}\n" if r else ""), "p"))
        for g, r in zip(guests, (first, second), strict=True)
    ]
    for order in (pairs, pairs[::-1]):
        made = drifts(snapshot(*guests, on=on), order, {IRQ: cpus("0")})
        assert made[IRQ].rule is rule
