"""Plans as JSON: what ``vsrtune plan --json`` prints and ``apply --plan`` executes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from vsrtune.actions import Action, Drift, Plan, Refusal, Skipped
from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import StaleError, VsrtuneError
from vsrtune.core.untrusted import json_value

PLAN_VERSION = 1


def dumps(plan: Plan, boot_id: str) -> str:
    """JSON text; ``loads`` with the same boot_id gives an equal Plan."""
    data = {
        "version": PLAN_VERSION,
        "boot_id": boot_id,
        **encode(replace(plan, settled={}, heeded={}, accepted=frozenset())),
    }
    del data["settled"], data["heeded"], data["accepted"]
    data["actions"] = [a.to_data() for a in plan.actions]
    return json.dumps(data, indent=2, ensure_ascii=False)


def loads(text: str, boot_id: str, where: str = "plan") -> Plan:
    """Read a stored plan.

    Raises VsrtuneError for what is no plan, StaleError for one of another boot:
    its thread ids mean other threads now.
    """
    try:
        data: Any = json_value(text)
    except ValueError as error:
        raise VsrtuneError(f"not JSON: {error}", where=where) from None
    if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
        raise VsrtuneError(
            f"not a plan of version {PLAN_VERSION}",
            where=where,
            hint="write one with `vsrtune plan --json`",
        )
    if data.get("boot_id") != boot_id:
        raise StaleError(
            "the plan was made before this host booted",
            where=where,
            hint="make a new one with `vsrtune plan --json`",
        )

    def items(key: str) -> list[Any]:
        value = data.get(key, [])
        if not isinstance(value, list):
            raise VsrtuneError("expected a list", where=f"{where}: $.{key}")
        return value

    def action(value: Any) -> Action:
        if not isinstance(value, dict):
            raise VsrtuneError("expected a mapping", where="$.actions")
        return Action.from_data(value)

    try:
        return Plan(
            tuple(action(a) for a in items("actions")),
            tuple(decode(Skipped, s) for s in items("skipped")),
            tuple(decode(Refusal, r) for r in items("refusals")),
            tuple(decode(str, w) for w in items("warnings")),
            tuple(decode(str, n) for n in items("notes")),
            tuple(decode(Drift, d) for d in items("drift")),
        )
    except VsrtuneError as error:
        raise VsrtuneError(error.what, where=f"{where}: {error.where}") from None
