"""Markdown made from the policy's schema, the metrics and the doctor's checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vsrtune.cli.doctor import traps
from vsrtune.core.exit_codes import ExitCode
from vsrtune.policy.schema import SCHEMA
from vsrtune.views.metric_families import FAMILIES

_HEAD = """\
# Policy reference

Every key of a policy file, made from the schema (`vsrtune policy schema`) by `make docs`.
[policy.md](policy.md) describes what the keys do together.

"""


def keys(schema: dict[str, Any], above: str = "") -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Every key path with its subschema, and whether it must be written; sections before
    their keys. The values of a free mapping are ``path.KEY``."""
    required = schema.get("required", ())
    for key, part in schema.get("properties", {}).items():
        yield above + key, part, key in required
        yield from keys(part, f"{above}{key}.")
        for below in dict.fromkeys(map(repr, part.get("patternProperties", {}).values())):
            found = next(p for p in part["patternProperties"].values() if repr(p) == below)
            yield f"{above}{key}.KEY", {**found, "x-map": part.get("x-keys", "")}, False
            yield from keys(found, f"{above}{key}.KEY.")
    items = schema.get("items")
    if isinstance(items, dict):
        yield f"{above.rstrip('.')}[]", items, False
        yield from keys(items, f"{above.rstrip('.')}[].")


def limits(part: dict[str, Any]) -> str:
    """What a value must be, in words."""
    said = []
    if "x-expects" in part:
        said.append(str(part["x-expects"]))
    elif "enum" in part:
        said.append(", ".join(map(str, part["enum"])))
    bounds = f"from {part.get('minimum')} to {part.get('maximum')}"
    numbers = "minimum" in part and "maximum" in part and "integer" in _types(part)
    if numbers and not any(bounds in text for text in said):
        said.append(f"numbers {bounds}")
    if part.get("x-map"):
        said.append(f"KEY: {part['x-map']}")
    if "default" in part:
        said.append(f"default {part['default']}")
    return "; ".join(said)


def _types(part: dict[str, Any]) -> list[str]:
    kind = part.get("type", [])
    return kind if isinstance(kind, list) else [kind]


def policy_reference() -> str:
    """docs/policy-reference.md. What stands word for word under another key is linked."""
    lines = [_HEAD]
    before: dict[tuple[str, str, str], str] = {}
    for path, part, needed in keys(SCHEMA):
        lines.append(f"## `{path}`\n")
        text, expects = str(part.get("description", "")), limits(part)
        same = before.setdefault((path.rpartition(".")[2], text, expects), path)
        if same != path:
            lines.append(f"As [`{same}`](#{same.replace('.', '').lower()}).\n")
        else:
            lines.append(f"{text}\n")
            lines.append(f"Write: {expects}.\n" if expects else "")
        lines.append("Required.\n" if needed else "")
    return "\n".join(line for line in lines if line).rstrip("\n") + "\n"


def metrics() -> str:
    """The table of docs/metrics.md."""
    rows = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        kind = "gauge" if family.kind == "info" else family.kind
        labels = " ".join(f"`{label}`" for label in family.labels)
        cells = (f"`{family.name}`", kind, family.unit, labels, family.help)
        rows.append("".join(f"| {cell} " if cell else "| " for cell in cells) + "|")
    return "\n".join(rows) + "\n"


def checks() -> str:
    """The table of docs/doctor.md."""
    rows = ["| check | what it looks for |", "|---|---|"]
    rows += [f"| {name} | {trap} |" for name, trap in traps()]
    return "\n".join(rows) + "\n"


def exit_codes() -> str:
    """The table of docs/troubleshooting.md."""
    rows = ["| code | means |", "|---|---|"]
    rows += [f"| {int(code)} | {code.meaning} |" for code in ExitCode]
    return "\n".join(rows) + "\n"
