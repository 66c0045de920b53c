"""Guests planned alone get what a plan for all gives them, and nobody else gets anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import shell_samples as samples
from planning_samples import journalled, router, snapshot, with_cpusets

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Role, Sched, SchedClass, Thread
from vsrtune.model.journal_records import Entry
from vsrtune.model.snapshot import Snapshot, SnapshotSlice
from vsrtune.model.targets import NapiThreaded, TxQueueLen
from vsrtune.plan import incremental, planner
from vsrtune.plan.brought_pins import REASON
from vsrtune.plan.drift import NO_MEMORY
from vsrtune.plan.full_plan import full_plan, plan_with_releases
from vsrtune.plan.safety.projection import project_actions
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
    snapshot = project_actions(snapshot, first.actions)
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
    snapshot = project_actions(snapshot, first.actions)
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
    snapshot = project_actions(snapshot, planner.plan(snapshot, wanted).actions)
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


@pytest.mark.parametrize(
    ("before", "now", "alone"),
    [("0-3", "0-3", True), ("0-3", "1", False), ("1", "1", True), ("1", "2", False)],
)
def test_a_guest_without_a_policy_that_is_bound_elsewhere_is_planned_with_all(
    before: str, now: str, alone: bool
) -> None:
    wanted = (parse("guest: vr1\n", "p"),)
    seen = snapshot(router(), router("db", 2000, online=before))
    whole = plan_with_releases(seen, wanted, ()).whole
    assert whole is not None
    seen = replace(seen, guests=(router("db", 3000, online=now),))
    assert (incremental.plan_alone(whole, seen, wanted, (), NO_MEMORY) is not None) is alone


def test_a_guest_that_two_policies_name_is_planned_with_all() -> None:
    texts = ('guest: "vr*"', 'guest: "*9"')
    wanted = tuple(
        parse(f"{text}\nqueue: {{macvtap: 200}}\nprofile: none\n", text) for text in texts
    )
    whole = plan_with_releases(host(), wanted, ()).whole
    assert whole is not None
    alone = replace(host(), guests=(samples.guest("vr9", 900),))
    assert incremental.plan_alone(whole, alone, wanted, (), NO_MEMORY) is None


QUEUE = TxQueueLen("vr1", "macvtap100", 100)
WRITTEN = Entry(QUEUE, 500, 300, "done")
NAPI = Entry(NapiThreaded("vr1", "macvtap100", 100), 0, 1, "done")

Given = tuple[Snapshot, tuple[Policy, ...], tuple[Entry, ...]]


def _first(given: Given, **more: Any) -> Given:
    seen, *rest = given
    return (replace(seen, guests=(replace(seen.guests[0], **more),)), *rest)


def _host(given: Given, **more: Any) -> Given:
    return (replace(given[0], host=replace(given[0].host, **more)), *given[1:])


def _without_vcpu(given: Given) -> Given:
    threads = given[0].guests[0].threads
    return _first(given, threads=tuple(t for t in threads if t.role is not Role.VCPU))


def _on_device_of_vr2(given: Given) -> Given:
    (tap,) = given[0].guests[0].interfaces
    return _first(given, interfaces=(tap, replace(tap, ifindex=110)))


ALONE: dict[str, tuple[Callable[[Given], Given], bool]] = {
    "nothing has changed": (lambda g: g, True),
    "CPUs were read anew": (lambda g: _host(g, cpus=tuple(map(replace, g[0].host.cpus))), False),
    "NICs were read anew": (lambda g: _host(g, nics=tuple(map(replace, g[0].host.nics))), False),
    "policies": (lambda g: (g[0], (*g[1], parse("guest: x\n", "x")), g[2]), False),
    "a guest that is refused": (_without_vcpu, False),
    "a device of another guest": (_on_device_of_vr2, False),
    "a setting as the policy wants it": (lambda g: (*g[:2], (WRITTEN,)), True),
    "a setting to release": (lambda g: (*g[:2], (NAPI,)), False),
    "a setting to release later": (lambda g: _first((*g[:2], (NAPI,)), busy=True), True),
    "a pin that was brought": (
        lambda g: (*g[:2], (replace(WRITTEN, reason=REASON),)), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ALONE)
def test_when_a_guest_is_planned_alone(case: str) -> None:
    change, alone = ALONE[case]
    wanted, seen = policies("lists"), host()
    whole = plan_with_releases(seen, wanted, ()).whole
    assert whole is not None
    one = replace(seen, guests=seen.guests[:1])
    made = incremental.plan_alone(whole, *change((one, wanted, ())), NO_MEMORY)
    assert (made is not None) is alone


def _twins(seen: Snapshot) -> Snapshot:
    first, second, *rest = seen.guests
    taps = tuple(replace(i, ifindex=100) for i in second.interfaces)
    return replace(seen, guests=(first, replace(second, interfaces=taps), *rest))


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("others: keep-off", lambda seen: seen),
        ("queue: {macvtap: 300}", _twins),
        ("cpus: {vcpu: 99}", lambda seen: seen),
    ],
)
def test_when_no_guest_is_planned_alone(text: str, change: Callable[[Snapshot], Snapshot]) -> None:
    """They share a device, keep others off their CPUs, or one is refused."""
    wanted = (parse(f"guest: '*'\n{text}\nprofile: none\n", "test.yaml"),)
    assert plan_with_releases(change(host()), wanted, ()).whole is None


def test_guests_that_share_root_domains_are_planned_with_all() -> None:
    seen = with_cpusets(snapshot(router()))
    budget = "scheduler: {vcpu: {class: deadline, runtime: 2ms, period: 10ms}}"
    for text, alone in ((budget, False), ("", True)):
        wanted = (parse(f"guest: vr1\ncpus: {{vcpu: 1}}\n{text}\nprofile: none\n", "p"),)
        made = plan_with_releases(seen, wanted, ())
        assert made.plan.refusals == ()
        assert (made.whole is not None) is alone


def test_two_guests_of_one_name_are_planned_with_all() -> None:
    wanted, snapshot = policies("queue-only"), host()
    whole = plan_with_releases(snapshot, wanted, ()).whole
    assert whole is not None
    one = snapshot.guests[0]
    assert incremental.plan_alone(whole, replace(snapshot, guests=(one,)), wanted, (), NO_MEMORY)
    twice = replace(snapshot, guests=(one, one))
    assert incremental.plan_alone(whole, twice, wanted, (), NO_MEMORY) is None
