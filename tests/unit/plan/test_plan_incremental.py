"""Guests planned alone get what a plan for all gives them, and nobody else gets anything."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import shell_samples as samples
from planning_samples import journalled

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Role, Sched, SchedClass, Thread
from vsrtune.model.snapshot import Snapshot, SnapshotSlice
from vsrtune.plan import incremental, planner
from vsrtune.plan.drift import NO_MEMORY
from vsrtune.plan.full_plan import full_plan, plan_with_releases
from vsrtune.plan.safety.projection import project
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

POLICIES = {
    "lists": "cpus: {irq: '0', vcpu: 1, vhost: 2, emulator: 0-1}",
    "auto": "cpus: {irq: '0', vcpu: auto, vhost: auto, emulator: auto}",
    "auto-irq": "cpus: {vcpu: auto, vhost: auto}",
    "by-device": "cpus: {irq: {p0: 0}, vcpu: auto, vhost: auto, emulator: auto}",
    "placement": "placement: auto\ncpus: {irq: '0', emulator: auto}",
    "queue-only": "queue: {macvtap: 200}",
}
SCHEDULING = """
scheduler:
  vcpu: {class: rr, priority: 7}
  vhost: {class: rr, priority: 7}
"""
NAMES = ("vr1", "vr2", "vr3", "vr4")


def policies(kind: str) -> tuple[Policy, ...]:
    text = POLICIES[kind]
    more = "" if kind == "queue-only" else f"{SCHEDULING}\nqueue: {{macvtap: 300}}"
    return (parse(f'guest: "*"\n{text}\n{more}\nprofile: none\n', "test.yaml"),)


def host() -> Snapshot:
    return samples.snapshot(*(samples.guest(name, 100 + 10 * n) for n, name in enumerate(NAMES)))


def _changed(thread: Thread, rng: random.Random) -> Thread:
    return rng.choice(
        [
            replace(thread, affinity=CpuSet([rng.randint(0, 3)])),
            replace(thread, sched=Sched(SchedClass.FIFO, rng.randint(1, 9), reset_on_fork=True)),
            replace(thread, sched=Sched(SchedClass.OTHER, nice=1)),
            replace(thread, last_cpu=rng.randint(0, 3), cpu_ns=thread.cpu_ns + 5),
        ]
    )


def change(guest: Guest, rng: random.Random) -> Guest:
    """What others do to a guest, or the guest itself."""
    kind = rng.choice(["thread", "thread", "queue", "restart", "hotplug", "pin"])
    threads = list(guest.threads)
    number = rng.randrange(len(threads))
    if kind == "thread":
        threads[number] = _changed(threads[number], rng)
        return replace(guest, threads=tuple(threads))
    if kind == "pin":
        pinned = CpuSet([rng.randint(0, 3)])
        return replace(
            guest,
            threads=tuple(
                replace(t, affinity=pinned, pin=pinned) if t.role is Role.VCPU else t
                for t in threads
            ),
        )
    if kind == "queue":
        taps = tuple(replace(i, txqueuelen=rng.randint(50, 500)) for i in guest.interfaces)
        return replace(guest, interfaces=taps)
    fresh = samples.guest(guest.name, 1000 + rng.randrange(10_000))
    if kind == "restart":
        return fresh
    more = replace(fresh.threads[1], key=replace(fresh.threads[1].key, pid=guest.pid), index=1)
    return replace(guest, threads=(*threads, more))


@pytest.mark.parametrize("kind", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(40))
def test_alone_as_with_all(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    wanted = policies(kind)
    snapshot = host()
    first = planner.plan(snapshot, wanted)
    snapshot = project(snapshot, first)
    ours = journalled(first)
    again = plan_with_releases(snapshot, wanted, ours)
    whole = again.whole
    assert not again.plan.actions
    assert whole is not None
    names = frozenset(rng.sample(NAMES, rng.randint(1, 2)))
    guests = tuple(change(g, rng) if g.name in names else g for g in snapshot.guests)
    snapshot = replace(snapshot, guests=guests)
    mine = [e for e in ours if e.target.guest in names]
    alone = incremental.plan_alone(
        whole, SnapshotSlice.of(snapshot, names).alone(), wanted, mine, NO_MEMORY
    )
    if alone is None:
        return
    everything = full_plan(snapshot, wanted, ours)
    assert alone.actions == everything.actions
    assert alone.drift == everything.drift
    # What is asked of ksoftirqd is the host's, and no part of a plan for guests alone.
    skipped = {s for s in everything.skipped if s.subject != "softirq scheduling"}
    assert set(alone.skipped) == {s for s in skipped if s.guest in names}


def test_drift_of_one_guest_is_planned_alone() -> None:
    wanted, snapshot = policies("auto"), host()
    first = planner.plan(snapshot, wanted)
    snapshot = project(snapshot, first)
    ours = journalled(first)
    whole = plan_with_releases(snapshot, wanted, ours).whole
    assert whole is not None
    vhost = snapshot.guests[1].by_role(Role.VHOST)[0]
    moved = replace(vhost, affinity=samples.ALL)
    guest = snapshot.guests[1]
    guest = replace(guest, threads=tuple(moved if t is vhost else t for t in guest.threads))
    snapshot = replace(snapshot, guests=(snapshot.guests[0], guest, *snapshot.guests[2:]))
    mine = [e for e in ours if e.target.guest == "vr2"]
    alone = SnapshotSlice.of(snapshot, frozenset(["vr2"])).alone()
    plan = incremental.plan_alone(whole, alone, wanted, mine, NO_MEMORY)
    assert plan is not None
    (action,) = plan.actions
    assert (action.target.guest, action.after) == ("vr2", vhost.affinity)


@pytest.mark.parametrize("lower", ["p1", "p0"])
def test_a_guest_that_no_longer_has_a_nic_of_a_key_is_planned_with_all(lower: str) -> None:
    """It is to be refused, although its interrupt CPUs stay."""
    text = "guest: vr1\ncpus: {irq: {p0: 0, p1: 0}, vcpu: auto}\nprofile: none\n"
    wanted, snapshot = (parse(text, "test.yaml"),), host()
    first = snapshot.guests[0]
    second = replace(first.interfaces[0], ifindex=77, lower=("p1",))
    first = replace(first, interfaces=(*first.interfaces, second))
    snapshot = replace(snapshot, guests=(first, *snapshot.guests[1:]))
    snapshot = project(snapshot, planner.plan(snapshot, wanted))
    ours = journalled(planner.plan(snapshot, wanted))
    whole = plan_with_releases(snapshot, wanted, ours).whole
    assert whole is not None
    first = snapshot.guests[0]
    alone = replace(snapshot, guests=(first,))
    assert incremental.plan_alone(whole, alone, wanted, ours, NO_MEMORY) is not None
    kept = tuple(i for i in first.interfaces if i.lower == (lower,))
    alone = replace(snapshot, guests=(replace(first, interfaces=kept),))
    assert incremental.plan_alone(whole, alone, wanted, ours, NO_MEMORY) is None
    (refusal,) = planner.plan(alone, wanted).refusals
    assert "no such device" in refusal.reason


def test_a_guest_that_comes_under_auto_is_planned_with_all() -> None:
    wanted, snapshot = policies("auto"), host()
    whole = plan_with_releases(snapshot, wanted, ()).whole
    assert whole is not None
    alone = replace(snapshot, guests=(samples.guest("vr9", 900),))
    assert incremental.plan_alone(whole, alone, wanted, (), NO_MEMORY) is None


def test_a_guest_that_two_policies_name_is_planned_with_all() -> None:
    texts = ('guest: "vr*"', 'guest: "*9"')
    wanted = tuple(
        parse(f"{text}\nqueue: {{macvtap: 200}}\nprofile: none\n", text) for text in texts
    )
    whole = plan_with_releases(host(), wanted, ()).whole
    assert whole is not None
    alone = replace(host(), guests=(samples.guest("vr9", 900),))
    assert incremental.plan_alone(whole, alone, wanted, (), NO_MEMORY) is None


def test_two_guests_of_one_name_are_planned_with_all() -> None:
    wanted, snapshot = policies("queue-only"), host()
    whole = plan_with_releases(snapshot, wanted, ()).whole
    assert whole is not None
    one = snapshot.guests[0]
    assert incremental.plan_alone(whole, replace(snapshot, guests=(one,)), wanted, (), NO_MEMORY)
    twice = replace(snapshot, guests=(one, one))
    assert incremental.plan_alone(whole, twice, wanted, (), NO_MEMORY) is None
