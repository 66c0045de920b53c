# SPDX-License-Identifier: GPL-2.0-or-later
"""The parts of the JSON Schemas of policies, groups and bench specifications.

``expects`` is the ``x-expects`` of a subschema, the text on what to write instead; ``more`` are
keywords beside those that the function sets.
"""

from __future__ import annotations

from typing import Any

FLAG: dict[str, Any] = {"type": "boolean", "x-expects": "true or false"}


def text(expects: str, pattern: str = "", what: str = "", **more: Any) -> dict[str, Any]:
    """A text; one that does not match ``pattern`` is not ``what``."""
    matching = {"pattern": pattern, "x-pattern": what} if pattern else {}
    return {"type": "string", "x-expects": expects, **matching, **more}


def short_text(expects: str, pattern: str = "", what: str = "") -> dict[str, Any]:
    """A text of 1 to 255 characters."""
    return text(expects, pattern, what, minLength=1, maxLength=255)


def whole(low: int, high: int, unit: str = "", **more: Any) -> dict[str, Any]:
    """A whole number."""
    expects = f"a whole number{unit} from {low} to {high}"
    return {"type": "integer", "minimum": low, "maximum": high, "x-expects": expects, **more}


def choice(*values: object, **more: Any) -> dict[str, Any]:
    """One of several values."""
    *most, last = map(str, values)
    return {"enum": list(values), "x-expects": f"{', '.join(most)} or {last}", **more}


def sequence(items: dict[str, Any], expects: str, **more: Any) -> dict[str, Any]:
    """A list that is not empty."""
    return {"type": "array", "minItems": 1, "items": items, "x-expects": expects, **more}


def by_name(values: dict[str, Any], expects: str, **more: Any) -> dict[str, Any]:
    """A mapping of any keys."""
    return {"type": "object", "additionalProperties": values, "x-expects": expects, **more}


def mapping(
    expects: str, properties: dict[str, Any], required: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """A mapping of these keys and no others."""
    needed = {"required": list(required)} if required else {}
    return {
        "type": "object",
        "additionalProperties": False,
        "x-expects": expects,
        "properties": properties,
        **needed,
        **more,
    }
