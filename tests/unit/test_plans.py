"""Every directory of tests/plans is one situation and the exact plan for it.

``snapshot.json`` and ``policy*.yaml`` go in, ``plan.yaml`` and ``undo.yaml`` come
out. ``given.json`` may add what was written before (``ours``) and ``reassert``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from golden import cases, matches
from plan_text import actions_yaml, plan_yaml

from vsrtune.actions import Plan, Target, Value, decode_target, decode_value
from vsrtune.cpuset import CpuSet
from vsrtune.model import Snapshot
from vsrtune.planner import plan
from vsrtune.policy_files import load
from vsrtune.projection import project, project_actions, undo_actions

CASES = Path(__file__).resolve().parents[1] / "plans"


def _given(case: Path) -> tuple[dict[Target, Value], bool]:
    path = case / "given.json"
    if not path.exists():
        return {}, False
    data = json.loads(path.read_text())
    ours: dict[Target, Value] = {}
    for entry in data.get("ours", []):
        target = decode_target(entry["target"])
        ours[target] = decode_value(target, entry["value"], "$.value")
    return ours, data.get("reassert", False)


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


@pytest.mark.parametrize("case", cases(CASES), ids=lambda p: p.name)
def test_plan(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case)
    snapshot = Snapshot.from_json(Path("snapshot.json").read_text(encoding="utf-8"))
    policies = load(sorted(Path().glob("policy*.yaml")))
    ours, reassert = _given(case)
    made = plan(snapshot, policies, ours, reassert)
    matches(Path("plan.yaml"), plan_yaml(made))
    matches(Path("undo.yaml"), actions_yaml(undo_actions(made)))
    applied = project(snapshot, made)
    wrote = ours | {a.target: a.after for a in made.actions}
    assert plan(applied, policies, wrote, reassert).actions == ()
    undone = project_actions(applied, undo_actions(made))
    assert _comparable(undone) == _comparable(snapshot)


def test_there_are_cases() -> None:
    assert len(cases(CASES)) >= 20


def test_no_policy_no_action() -> None:
    snapshot = Snapshot.from_json((CASES / "dedicated-cores" / "snapshot.json").read_text())
    made = plan(snapshot, ())
    assert made == Plan(skipped=made.skipped)
    assert [s.reason for s in made.skipped] == ["no policy names this guest"]
