"""Plans as the golden files of tests/plans show them: one readable YAML form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import Pin, Value


def plan_yaml(plan: Plan) -> str:
    """The whole plan."""
    skipped = [
        f"{s.guest}: {s.subject}: {s.reason}"
        + (" [held]" if s.held else "")
        + (" [pending]" if s.pending else "")
        for s in plan.skipped
    ]
    refusals = [f"{r.guest}: {r.policy}: {r.reason}; {r.hint}" for r in plan.refusals]
    drift = [
        f"{d.target}: {d.setting} set to {d.desired}, found {d.found}, by {d.by or 'nobody known'}: "
        f"{d.rule.value}{', left' if d.left else ''}"
        for d in plan.drift
    ]
    return (
        _actions(plan.actions)
        + (_texts("drift", drift) if drift else "")
        + _texts("skipped", skipped)
        + _texts("refusals", refusals)
        + _texts("warnings", plan.warnings)
        + _texts("notes", plan.notes)
    )


def _actions(actions: Iterable[Action]) -> str:
    lines = ["actions:"]
    for action in actions:
        lines += [
            f"- set: {_quote(action.target)}",
            f"  from: {_value(action.before)}",
            f"  to: {_value(action.after)}",
            f"  why: {_quote(action.reason)}",
        ]
    return "\n".join(lines if len(lines) > 1 else ["actions: []"]) + "\n"


def _texts(name: str, texts: Iterable[str]) -> str:
    lines = [f"- {_quote(t)}" for t in texts]
    return "\n".join([f"{name}:", *lines] if lines else [f"{name}: []"]) + "\n"


def _value(value: Value) -> str:
    if isinstance(value, Pin):
        cpuset = "null" if value.cpuset is None else _quote(value.cpuset)
        return f"{{cpus: {_quote(value.cpus)}, cpuset: {cpuset}}}"
    if isinstance(value, CpuSet):
        return f"{{cpus: {_quote(value)}}}"
    return json.dumps(value) if isinstance(value, bool | int) else _quote(value)


def _quote(value: Any) -> str:
    return json.dumps(str(value), ensure_ascii=False)
