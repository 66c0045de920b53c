"""Every file of tests/plans is one situation and the exact plan for it (plan_cases.py).

VSRTUNE_REGENERATE=1 writes the plans anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from golden import matches
from plan_cases import CASES, PLANS, expecting, patched, read
from plan_text import plan_yaml

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.plan import Action, Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.planner import plan
from vsrtune.plan.safety.projection import project_actions


def _comparable(snapshot: Snapshot) -> Snapshot:
    """Without libvirt's view and the kernel's result, which follow from the rest."""
    groups = (replace(c, effective=CpuSet()) for c in snapshot.host.cpusets)
    nics = (
        replace(n, irqs=tuple(replace(i, effective=CpuSet()) for i in n.irqs))
        for n in snapshot.host.nics
    )
    return replace(
        snapshot,
        host=replace(snapshot.host, cpusets=tuple(groups), nics=tuple(nics)),
        guests=tuple(
            replace(
                g,
                threads=tuple(replace(t, pin=None, cpuset_effective=None) for t in g.threads),
            )
            for g in snapshot.guests
        ),
    )


@pytest.mark.parametrize("file", CASES, ids=lambda p: p.stem)
def test_plan(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = read(file)
    snapshot = case.snapshot
    monkeypatch.chdir(tmp_path)  # messages name the files as the operator did
    policies, ours = case.load(Path()), case.ours
    reassert = {target.guest for target in ours} if case.given.get("reassert") else set()
    made = plan(snapshot, policies, ours, reassert)
    matches(file, expecting(file.read_text("utf-8"), plan_yaml(made)))
    applied = project_actions(snapshot, made.actions)
    wrote = ours | {a.target: a.after for a in made.actions}
    assert plan(applied, policies, wrote, reassert).actions == ()
    back = [Action(a.target, a.after, a.before, a.reason) for a in reversed(made.actions)]
    undone = project_actions(applied, back)
    assert _comparable(undone) == _comparable(snapshot)


def test_there_are_cases() -> None:
    assert len(CASES) >= 20


def test_patches() -> None:
    base = {
        "cpus": [{"id": n, "siblings": str(n), "node": 0} for n in range(4)],
        "nics": [{"name": "p0", "irqs": [1]}, {"name": "p1", "irqs": []}],
    }
    assert patched(base, {}) == base
    found = patched(base, {"cpus": {"1-2": {"node": 1}, 3: None}, "nics": {"*": {"irqs": [7]}}})
    assert [c["node"] for c in found["cpus"]] == [0, 1, 1]
    assert [n["irqs"] for n in found["nics"]] == [[7], [7]]
    assert len(patched(base, {"nics": {"+": [{"name": "p2"}]}})["nics"]) == 3
    for wrong in ({"cpu": {}}, {"nics": {"p2": {"irqs": []}}}, {"nics": {"p0": {"irq": []}}}):
        with pytest.raises(AssertionError, match="the base"):
            patched(base, wrong)


def test_no_policy_no_action() -> None:
    made = plan(read(PLANS / "dedicated-cores.yaml").snapshot, ())
    assert made == Plan(skipped=made.skipped)
    assert [s.reason for s in made.skipped] == ["no policy names this guest"]
