"""Which policy a guest gets, what is told of the others, and what is left of a policy that is
stepped down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_samples import router

from vsrtune.model.guest import Guest, SchedClass
from vsrtune.model.stepdown import UNTIL, Step, StepLevel
from vsrtune.policy.lowering import lowered, next_level
from vsrtune.policy.matching import Match, QemuFilter, assign, match, policies_of, qemu_filter
from vsrtune.policy.model import Policy, SchedRule
from vsrtune.policy.parser import parse

NONE, GLOB, EXACT = Match.NONE, Match.GLOB, Match.EXACT
UUID = router().uuid


def policy(guest: str, more: str = "") -> Policy:
    return parse(f"guest: '{guest}'\n{more}", f"{guest}.yaml")


def plain(name: str = "vr1", uid: int = 0) -> Guest:
    """A plain QEMU."""
    return replace(router(name, source="qemu"), uid=uid)


@pytest.mark.parametrize(
    ("pattern", "guest", "how"),
    [
        ("vr1", router(), EXACT),
        ("vr2", router(), NONE),
        (UUID, router(), EXACT),
        (UUID.upper(), router(), EXACT),
        ("vr?", router(), GLOB),
        ("*", router(), GLOB),
        ("x*", router(), NONE),
        ("vr[*]", router("vr*"), EXACT),
        ("vr[*]", router(), NONE),
        ("qemu:vr1", router(), NONE),
        ("qemu:*", router(), NONE),
        ("vr1", plain(), NONE),
        ("proxmox:101", router("101", source="proxmox"), EXACT),
        ("proxmox:1?1", router("101", source="proxmox"), GLOB),
        ("proxmox:101", router("101", source="qemu"), NONE),
        ("proxmox:101", router("101"), NONE),
        ("qemu:101", router("101", source="proxmox"), NONE),
        ("101", router("101", source="proxmox"), NONE),
        ("*", router("101", source="proxmox"), NONE),
        ("kubevirt:ns/fw", router("ns/fw", source="kubevirt"), EXACT),
        ("kubevirt:ns/*", router("ns/fw", source="kubevirt"), GLOB),
        ("kubevirt:*/fw", router("ns/fw", source="kubevirt"), GLOB),
        ("kubevirt:n/fw", router("ns/fw", source="kubevirt"), NONE),
        ("*", router("ns/fw", source="kubevirt"), NONE),
        ("ns/fw", router("ns/fw", source="kubevirt"), NONE),
        ("*", plain(), NONE),
        ("qemu:vr1", plain(), EXACT),
        ("qemu:*", plain(), GLOB),
        ("qemu:x*", plain(), NONE),
        (f"qemu:{UUID}", plain(), EXACT),
        ("vr1", replace(router(), source="foreign"), NONE),
        ("qemu:vr1", replace(router(), source="foreign"), NONE),
        ("vr1", replace(router("x"), uuid=""), NONE),
    ],
)
def test_how_a_policy_names_a_guest(pattern: str, guest: Guest, how: Match) -> None:
    assert match(policy(pattern), guest) is how


@pytest.mark.parametrize(
    ("user", "uid", "how"),
    [("", 0, EXACT), ("", 7, NONE), ("user: root\n", 0, EXACT), ("user: 7\n", 7, EXACT),
     ("user: 7\n", 0, NONE), ("user: somebody\n", 0, NONE)],
)  # fmt: skip
def test_a_plain_qemu_is_named_with_its_user(user: str, uid: int, how: Match) -> None:
    found = policy("qemu:vr1", user)
    assert match(found, plain(uid=uid)) is how
    assert QemuFilter(policies=(found,)).asks(uid, "qemu", "vr1", "") is (how is EXACT)


def test_which_plain_qemus_may_be_guests() -> None:
    found = qemu_filter(
        [policy("qemu:a", "user: 7\n"), policy("qemu:b", "user: somebody\n"), policy("vr1")],
        ["vr1", "qemu:x", "qemu:y@12", "qemu:z@12345678901"],
    )
    assert found.users == {0, 7, 12}
    assert found.asks(7, "qemu", "a", "")
    assert not found.asks(0, "qemu", "a", "")
    assert not found.asks(7, "qemu", "c", "")
    assert QemuFilter().asks(7, "qemu", "c", "")
    assert QemuFilter().users == {0}


def test_the_best_name_wins() -> None:
    glob, exact, other = policy("vr*"), policy("vr1"), policy("x")
    assert policies_of(router(), [glob, exact, other]) == [exact]
    assert policies_of(router(), [glob, other]) == [glob]
    assert policies_of(router(), [other]) == []
    assert policies_of(router(), []) == []
    found = assign([router()], [glob, exact])
    assert found.pairs == [(router(), exact)]
    assert found.notes == ["vr1: vr1.yaml names it exactly and wins over vr*.yaml ('vr*')"]
    assert found.unmatched == []


def test_guests_that_get_no_policy() -> None:
    names = ("none", "busy", "unconfirmed", "foreign", "two", "twin")
    guests = [router(name, 1000 * n) for n, name in enumerate(names, 1)]
    guests[1] = replace(guests[1], busy=True)
    guests[2] = replace(guests[2], unconfirmed=True)
    guests[3] = replace(guests[3], source="foreign")
    guests.append(router("twin", 9000))
    wanted = [policy(name) for name in (*names[1:], "qemu:gone")]
    wanted += [policy("tw?"), parse("guest: two\n", "second.yaml")]
    found = assign(guests, wanted)
    assert found.pairs == []
    assert {(s.guest, s.subject, s.reason, s.pending) for s in found.skipped} == {
        ("none", "all settings", "no policy names this guest", False),
        ("busy", "all settings", ("libvirt is busy starting, restoring, saving or migrating it: "
         "tuned when that is done"), True),
        ("unconfirmed", "all settings", ("libvirt does not answer and has not confirmed that this "
         "process is its guest: what it has stays, nothing is added; see: systemctl status "
         "libvirtd virtqemud"), True),
        (guests[3].ref, "all settings", ("another libvirt manages it: --connect says which one is "
         "asked"), False),
    }  # fmt: skip
    assert {(r.guest, r.policy, r.reason, r.hint) for r in found.refusals} == {
        ("two", "two.yaml:1", ("2 policies name this guest: two.yaml:1 ('two') and second.yaml:1 "
         "('two')"), "keep one, or name the guest exactly in the one that shall win over a glob"),
        ("twin", "twin.yaml:1", "2 processes have this name: 6000 and 9000; none of them is tuned",
         "end one of them, or start it with a name of its own (-name)"),
    }  # fmt: skip
    assert [p.guest for p in found.unmatched] == ["foreign", "qemu:gone"]
    assert found.notes == [
        "foreign.yaml:1: no running guest matches 'foreign'",
        (
            "qemu:gone.yaml:1: no running guest matches 'qemu:gone' of user root (`vsrtune show` lists "
            "processes that are not believed)"
        ),
    ]


FIFO, RR = SchedRule(SchedClass.FIFO, 9), SchedRule(SchedClass.RR, 9)
BATCH, OTHER = SchedRule(SchedClass.BATCH), SchedRule(SchedClass.OTHER)
BUDGET = SchedRule(SchedClass.DEADLINE, 0, 1, 2, 3)
LEVELS = (StepLevel.POLICY, StepLevel.RR, StepLevel.OTHER)


@pytest.mark.parametrize(
    ("rule", "rules"),
    [
        (FIFO, [FIFO, RR, OTHER]),
        (RR, [RR, RR, OTHER]),
        (BUDGET, [BUDGET, BUDGET, OTHER]),
        (BATCH, [BATCH] * 3),
        (OTHER, [OTHER] * 3),
    ],
)
@pytest.mark.parametrize("name", ["vcpu_sched", "vhost_sched", "softirq_sched", "napi_sched"])
def test_what_a_level_leaves_of_a_rule(name: str, rule: SchedRule, rules: list[SchedRule]) -> None:
    queue = {"queue.macvtap": 300}
    whole = Policy("p", "vr1", devices=queue, **{name: rule})  # type: ignore[arg-type]
    found = [lowered(whole, level) for level in LEVELS]
    assert [getattr(p, name) for p in found] == rules
    assert [p.lowered for p in found] == [left != rule for left in rules]
    assert replace(found[-1], **{name: rule}, lowered=False) == whole  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "levels"),
    [
        ({"vcpu_sched": FIFO}, ["rr", "other", "undone"]),
        ({"vcpu_sched": RR}, ["other", "other", "undone"]),
        ({"vcpu_sched": FIFO, "vhost_sched": BUDGET}, ["other", "other", "undone"]),
        ({"vcpu_sched": BATCH}, ["undone"] * 3),
        ({}, ["undone"] * 3),
    ],
)
def test_the_next_level_changes_something(rules: dict[str, SchedRule], levels: list[str]) -> None:
    whole = Policy("p", "vr1", **rules)  # type: ignore[arg-type]
    assert [next_level(whole, level).value for level in LEVELS] == levels


@pytest.mark.parametrize(
    ("level", "subject", "kept"),
    [(StepLevel.RR, "scheduling", True), (StepLevel.UNDONE, "all settings", False)],
)
def test_a_guest_that_is_stepped_down(level: StepLevel, subject: str, kept: bool) -> None:
    step = Step(level, "it stood still")
    text = "profile: none\nscheduler: {vcpu: {class: fifo, priority: 9}}\n"
    found = assign([router()], [policy("vr1", text)], {"vr1": step})
    (skipped,) = found.skipped
    assert (skipped.guest, skipped.subject, skipped.stepped) == ("vr1", subject, True)
    assert skipped.reason == f"{step}; {UNTIL}"
    assert [p.vcpu_sched for _, p in found.pairs] == ([RR] if kept else [])
