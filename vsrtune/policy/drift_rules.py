"""``drift`` of a policy: what vsrtune does about settings that somebody changes."""

from __future__ import annotations

from typing import Any

from vsrtune.model.plan import DriftRule
from vsrtune.model.targets import DEVICE_SETTINGS

DriftRules = tuple[tuple[str, DriftRule], ...]

DEFAULT = "default"
# Named like the sections of docs/policy.md.
SETTINGS = {
    "cpus.vcpu": "CPUs of vcpu threads",
    "cpus.vhost": "CPUs of vhost workers",
    "cpus.napi": "CPUs of NAPI threads",
    "cpus.emulator": "CPUs of the emulator",
    "scheduler.vcpu": "class and priority of vcpu threads",
    "scheduler.vhost": "class and priority of vhost workers",
    "scheduler.napi": "class and priority of NAPI threads",
    "scheduler.softirq": "class and priority of ksoftirqd threads",
    "scheduler.slice": "time slice of class rr",
    "irq.set": "interrupts, RPS, XPS and NAPI threads of lower devices",
    **{row.key: row.means for row in sorted(DEVICE_SETTINGS, key=lambda row: row.key)},
}
SECTIONS = tuple(dict.fromkeys(name.partition(".")[0] for name in SETTINGS))
_RULES = [rule.value for rule in DriftRule]
_EXPECTS = "enforce, adopt or report"


def _rule(description: str) -> dict[str, Any]:
    return {"description": description, "enum": _RULES, "x-expects": _EXPECTS}


def drift_schema() -> dict[str, Any]:
    """The subschema of the key ``drift``."""
    return {
        "description": "What the daemon does when somebody changes a setting: enforce puts it "
        "back, adopt accepts the new value until a reload, report leaves it alone, warns and "
        "counts it. One word for all settings, or a mapping. Unset: report for pins that an "
        "operator sets through libvirt, enforce for everything else.",
        "type": ["string", "object"],
        "pattern": f"^({'|'.join(_RULES)})$",
        "x-pattern": "a drift rule",
        "minProperties": 1,
        "additionalProperties": False,
        "x-expects": f"{_EXPECTS}, or a mapping such as {{default: enforce, queue: adopt}}",
        "properties": {
            DEFAULT: _rule("The rule of settings that are not named."),
            **{name: _rule(f"The rule of all settings of {name}.") for name in SECTIONS},
            **{name: _rule(f"The rule of the {what}.") for name, what in SETTINGS.items()},
        },
    }


def read_rules(value: Any) -> DriftRules:
    """The rules in a validated value of ``drift``."""
    if value is None:
        return ()
    if isinstance(value, str):
        return ((DEFAULT, DriftRule(value)),)
    return tuple((str(key), DriftRule(rule)) for key, rule in value.items())


def rule_of(rules: DriftRules, setting: str) -> DriftRule | None:
    """The rule of a setting: its own, its section's, or the default; None when unset."""
    found = dict(rules)
    for key in (setting, setting.partition(".")[0], DEFAULT):
        if key in found:
            return found[key]
    return None
