"""Profiles: the values of the keys that a policy does not write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import plan_cases
import pytest
import recorded_hosts
from planning_samples import host, router, snapshot

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import SchedClass
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import StepLevel
from vsrtune.plan.planner import plan
from vsrtune.policy.lowering import lowered
from vsrtune.policy.model import AUTO, Policy, PolicyErrors, SchedRule
from vsrtune.policy.parser import parse
from vsrtune.policy.schema import PROFILES

ROUTER = "profile: router\n"
# The policy that was measured (docs/results/no-harm.md), every key written.
MEASURED = """\
profile: none
cpus:
  irq: auto
  vcpu: auto
  vhost: auto
  emulator: auto
scheduler:
  vcpu: {class: rr, priority: 10, slice: 8ms}
  vhost: {class: rr, priority: 10, slice: 8ms}
  softirq: {class: fifo, priority: 10}
  rest: 10ms
"""
# Another value of every key that a profile has: as written, the field, as read.
OTHERS = [
    ("cpus: {irq: 3}", "irq", CpuSet([3])),
    ("cpus: {vcpu: 1}", "vcpu", CpuSet([1])),
    ("cpus: {vcpu: {0: 1}}", "vcpu", (("0", CpuSet([1])),)),
    ("cpus: {vhost: 1-2}", "vhost", CpuSet([1, 2])),
    ("cpus: {emulator: 0}", "emulator", CpuSet([0])),
    ("scheduler: {vcpu: {class: other}}", "vcpu_sched", SchedRule(SchedClass.OTHER)),
    ("scheduler: {vcpu: {class: rr, priority: 3}}", "vcpu_sched", SchedRule(SchedClass.RR, 3)),
    ("scheduler: {vhost: {class: batch}}", "vhost_sched", SchedRule(SchedClass.BATCH)),
    ("scheduler: {softirq: {class: other}}", "softirq_sched", SchedRule(SchedClass.OTHER)),
]


def asked(policy: Policy) -> Policy:
    """What a policy asks for, wherever it is written."""
    return replace(policy, path="", profile="", lines={})


def outcome(made: Plan) -> tuple[object, ...]:
    """A plan without the places in policies. A ksoftirqd that stays is told of only where the file
    asks for its class."""
    actions = [(a.target, a.before, a.after) for a in made.actions]
    refusals = [(r.guest, r.reason) for r in made.refusals]
    skipped = [s for s in made.skipped if s.subject != "softirq scheduling"]
    return actions, refusals, skipped, made.warnings, made.notes


def test_router_is_what_was_measured() -> None:
    short, full = (parse(f"guest: vr1\n{text}", "p") for text in (ROUTER, MEASURED))
    assert asked(short) == asked(full)
    assert asked(parse("guest: vr1\n", "p")) == asked(full), "it is the default"


def test_none_asks_for_nothing() -> None:
    assert not parse("guest: vr1\nprofile: none\n", "p").asks
    assert parse(f"guest: vr1\n{ROUTER}", "p").asks


@pytest.mark.parametrize(("text", "field", "value"), OTHERS)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_written_key_replaces_the_whole_value(
    profile: str, text: str, field: str, value: object
) -> None:
    head = f"guest: vr1\nprofile: {profile}\n"
    policy, bare = parse(f"{head}{text}\n", "p"), parse(head, "p")
    assert getattr(policy, field) == value
    assert asked(policy) == replace(asked(bare), **{field: value})


def test_a_written_rest_replaces_that_of_the_profile() -> None:
    # profile none has no thread for which it could be.
    assert parse("guest: vr1\nscheduler: {rest: 50ms}\n", "p").rest_us == 50_000


def test_sections_that_a_profile_does_not_have_are_read_beside_it() -> None:
    policy = parse(f"guest: vr1\nqueue: {{macvtap: 300}}\nplacement: auto\n{ROUTER}", "p")
    assert (policy.vcpu, policy.placement) == (AUTO, AUTO)
    assert policy.devices == {"queue.macvtap": 300}


def test_the_place_of_a_key_of_the_profile() -> None:
    policy = parse(f"# mine\nguest: vr1\n{ROUTER}cpus:\n  vcpu: 1\n", "vr1.yaml")
    assert policy.at("cpus", "vcpu") == "vr1.yaml:5"
    assert policy.at("cpus", "vhost") == "vr1.yaml:3 (profile router)"
    assert policy.at("scheduler", "softirq") == "vr1.yaml:3 (profile router)"
    assert parse("# mine\nguest: vr1\n", "p").at("cpus", "irq") == "p:2 (profile router)"
    # Neither the file nor the profile has these.
    assert policy.at("cpus", "napi") == "vr1.yaml:4"
    assert policy.at("queue", "macvtap") == "vr1.yaml:1"
    assert policy.at() == "vr1.yaml:1"


def test_a_guest_that_is_stepped_down_keeps_the_place() -> None:
    policy = lowered(parse(f"guest: vr1\n{ROUTER}", "p"), StepLevel.OTHER)
    assert policy.vcpu_sched == SchedRule(SchedClass.OTHER)
    assert policy.at("scheduler", "vcpu") == "p:2 (profile router)"


def test_a_refusal_names_the_profile() -> None:
    guest = router(online="0-1", vcpus=2)
    made = plan(snapshot(guest, on=host(2)), [parse(f"guest: vr1\n{ROUTER}", "p.yaml")])
    assert [r.policy for r in made.refusals] == ["p.yaml:2 (profile router)"]


@pytest.mark.parametrize("section", ["cpus: 1", "cpus:", "scheduler: [rr]", "scheduler: rr"])
def test_a_section_that_is_no_mapping_stays_an_error(section: str) -> None:
    with pytest.raises(PolicyErrors) as caught:
        parse(f"guest: vr1\n{ROUTER}{section}\n", "p")
    assert [e.where for e in caught.value.errors] == ["p:3"]


def test_ksoftirqd_of_the_profile_is_for_realtime_threads() -> None:
    """A policy with other classes is not told each time that ksoftirqd stays as it is."""
    text = "scheduler: {vcpu: {class: batch}, vhost: {class: batch}}\n"
    made = plan(snapshot(router()), [parse(f"guest: vr1\n{ROUTER}{text}", "p")])
    assert made.actions != ()
    assert [s for s in made.skipped if "softirq" in s.subject] == []


@pytest.mark.parametrize("file", recorded_hosts.FILES, ids=lambda path: path.stem)
def test_the_plan_of_recorded_hosts_is_that_of_the_measured_policy(file: Path) -> None:
    same_plans(recorded_hosts.shown(file))


@pytest.mark.parametrize("file", plan_cases.CASES[::5], ids=lambda path: path.stem)
def test_the_plan_of_other_hosts_is_that_of_the_measured_policy(file: Path) -> None:
    same_plans(plan_cases.read(file).snapshot)


def same_plans(seen: Snapshot) -> None:
    for guests in ('"*"', '"qemu:*"', '"proxmox:*"', '"kubevirt:*/*"'):
        short, full = (
            plan(seen, [parse(f"guest: {guests}\n{text}", "p")]) for text in ("", MEASURED)
        )
        assert outcome(short) == outcome(full)
