"""plan.py: a stored plan is the same plan, or is refused."""

from __future__ import annotations

import json

import pytest

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import StaleError, VsrtuneError
from vsrtune.model.guest import Sched, SchedClass, ThreadKey
from vsrtune.model.plan import Action, Plan, Refusal, Skipped, plan_text, read_plan
from vsrtune.model.targets import CgroupDir, Pin, ThreadCgroup, ThreadSched, TxQueueLen, VcpuPin

KEY = ThreadKey(100, 101, 7)
PLAN = Plan(
    actions=(
        Action(CgroupDir("vr 1.ü", "a/b"), False, True, "r"),
        Action(ThreadCgroup("vr 1.ü", KEY, "l"), "a", "a/b", "r"),
        Action(VcpuPin("vr 1.ü", "u", 0, KEY), Pin(CpuSet([0, 1]), ""), Pin(CpuSet([1]), "1"), "r"),
        Action(ThreadSched("vr 1.ü", KEY, "l"), Sched(), Sched(SchedClass.FIFO, 3), "r"),
        Action(TxQueueLen("vr 1.ü", "tap", 3), 500, 100, "r"),
    ),
    skipped=(Skipped("vr 1.ü", "x", "y", held=True),),
    refusals=(Refusal("vr 1.ü", "p", "r", "h"),),
    warnings=("w",),
    notes=("n",),
)


def test_round_trip() -> None:
    assert read_plan(plan_text(PLAN, "boot"), "boot") == PLAN


def test_a_plan_of_another_boot_is_stale() -> None:
    with pytest.raises(StaleError):
        read_plan(plan_text(PLAN, "boot"), "other")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "boot_id": "b"}',
        '{"version": 1, "boot_id": "b", "actions": 3}',
        '{"version": 1, "boot_id": "b", "actions": [{"target": {"kind": "no"}}]}',
        '{"version": 1, "boot_id": "b", "notes": [3]}',
        '{"version": 1, "boot_id": "b", "actions": [7]}',
    ],
)
def test_what_is_no_plan_is_refused_with_the_file_named(text: str) -> None:
    with pytest.raises(VsrtuneError) as caught:
        read_plan(text, "b", "p.json")
    assert "p.json" in caught.value.where


def test_a_damaged_field_is_named() -> None:
    data = json.loads(plan_text(PLAN, "b"))
    data["actions"][4]["after"] = "many"
    with pytest.raises(VsrtuneError, match=r"\$\.after"):
        read_plan(json.dumps(data), "b")
