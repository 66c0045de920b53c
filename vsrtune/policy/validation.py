# SPDX-License-Identifier: GPL-2.0-or-later
"""Structural errors of a YAML file, found by JSON Schema and worded here.

The messages of the jsonschema library differ between versions, so this module uses only the kind
and the place of a failure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from vsrtune.core.errors import PolicyError
from vsrtune.policy.schema import CPU_RANGE, SCHEMA
from vsrtune.policy.yaml_reader import Document, KeyPath, dotted, shown

_CPU_RANGE = re.compile(CPU_RANGE)
# YAML reads {vcpu: 1,2} as vcpu: 1 and a key 2 without a value.
_COMMA = 'between { and } quote a list with a comma: "1,2"'
_TYPES = {
    "integer": "a whole number",
    "string": "text",
    "object": "a mapping",
    "array": "a list",
    "number": "a number",
    "boolean": "true or false",
}


def structural(
    document: Document, path: str, wanted: dict[str, Any] = SCHEMA
) -> list[tuple[KeyPath, PolicyError]]:
    """The errors in the structure: (key path, error) in the order of lines.

    ``wanted`` is the JSON Schema. A key without a value is an error, because vsrtune must not
    silently ignore a setting that an operator wrote.
    """
    told: list[tuple[KeyPath, str, str]] = []
    for error in _validating()(wanted).iter_errors(document.data):
        where = tuple(str(p) for p in error.absolute_path)
        kind, part = str(error.validator), dict(error.schema)
        if error.instance is None and where and isinstance(error.absolute_path[-1], str):
            told.append(_empty(where, part, _required(wanted, error)))
        else:
            told += _tell(kind, error.instance, part, where)
    found: list[tuple[KeyPath, int, PolicyError]] = []
    # A missing key is an error of the library for each key that is missing.
    for keys, what, hint in dict.fromkeys(told):
        line = line_of(document.lines, keys)
        name = f"{dotted(keys)}: " if keys else ""
        found.append((keys, line, PolicyError(name + what, where=f"{path}:{line}", hint=hint)))
    found.sort(key=lambda item: (item[1], item[0], item[2].what))
    return [(keys, problem) for keys, _, problem in found]


def _required(wanted: dict[str, Any], error: Any) -> bool:
    """Whether the mapping around the place of an error requires its key."""
    around: Any = wanted
    for step in list(error.absolute_schema_path)[:-3]:
        around = around[step]
    return error.absolute_path[-1] in around.get("required", ())


def _empty(where: KeyPath, part: dict[str, Any], required: bool) -> tuple[KeyPath, str, str]:
    need = _need(part)
    otherwise = "" if required or need.endswith("leave it out") else ", or remove the key"
    comma = f"; {_COMMA}" if _CPU_RANGE.fullmatch(where[-1]) else ""
    return where, "the key has no value", f"write {need}{otherwise}{comma}"


@cache
def _validating() -> Any:
    """The validator class, made once because each one consists of reference cycles."""
    import jsonschema
    from jsonschema.validators import extend

    base = jsonschema.Draft202012Validator
    # JSON Schema takes 10.0 for an integer; a policy does not.
    checker = base.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    make: Any = extend  # the stubs leave it untyped
    return make(base, type_checker=checker)


def located(
    mistakes: Iterable[tuple[KeyPath, str, str]], lines: dict[KeyPath, int], path: str
) -> list[PolicyError]:
    """The errors for mistakes: the key, what is wrong, what to write instead."""
    return [
        PolicyError(f"{dotted(keys)}: {what}", where=f"{path}:{line_of(lines, keys)}", hint=hint)
        for keys, what, hint in mistakes
    ]


def line_of(lines: Mapping[KeyPath, int], keys: KeyPath) -> int:
    """The line of a key path, or of the nearest one above it that has a line."""
    while keys:
        if keys in lines:
            return lines[keys]
        keys = keys[:-1]
    return 1


def _tell(
    kind: str, value: Any, part: dict[str, Any], where: KeyPath
) -> Iterator[tuple[KeyPath, str, str]]:
    hint = f"write {part['x-expects']}" if "x-expects" in part else ""
    match kind:
        case "additionalProperties":
            yield from _extra_keys(value, part, where)
        case "type" if where == ("queue", "macvtap") and value == "adaptive":
            yield where, "the daemon no longer adapts the length", hint
        case "type":
            wanted = part["type"] if isinstance(part["type"], list) else [part["type"]]
            *most, last = (_TYPES[t] for t in wanted)
            names = f"{', '.join(most)} or {last}" if most else last
            yield where, f"{shown(value)} stands where {names} is expected", hint
        case "required":
            for key in part["required"]:
                if key not in value:
                    below = part["properties"][key]
                    yield where, f"the key {key!r} is missing", f"add it: {_need(below)}"
        case "minimum" if where == ("queue", "macvtap") and value == 0:
            yield where, "0 would make the device drop every frame", hint
        case "minimum":
            yield where, f"{shown(value)} is below {part['minimum']}", hint
        case "maximum":
            yield where, f"{shown(value)} is above {part['maximum']}", hint
        case "enum" if value == "deadline" and where[-1] == "class":
            yield where, "class deadline is for vcpu and vhost threads only", hint
        case "enum":
            yield where, f"{shown(value)} is not accepted", _suggest(value, part["enum"], hint)
        case "pattern":
            yield where, f"{shown(value)} is not {part.get('x-pattern', 'a CPU list')}", hint
        case "minLength" | "minProperties" | "minItems":
            yield where, "the value is empty", hint
        case "maxLength":
            yield where, f"the text is longer than {part['maxLength']} characters", hint
        case _:
            yield where, f"{shown(value)} is not accepted", hint


def _need(part: dict[str, Any]) -> str:
    return str(part.get("x-expects", "a value"))


def _suggest(value: Any, accepted: list[Any], otherwise: str) -> str:
    close = difflib.get_close_matches(str(value), map(str, accepted), 1)
    return f"did you mean {close[0]}? {otherwise}" if close else otherwise


def _extra_keys(
    value: dict[str, Any], part: dict[str, Any], where: KeyPath
) -> Iterator[tuple[KeyPath, str, str]]:
    known = list(part.get("properties", {}))
    patterns = list(part.get("patternProperties", {}))
    for key in value:
        if key in known or any(re.search(p, key) for p in patterns):
            continue
        here = (*where, key)
        if key in part.get("x-moved", {}):
            yield here, "this key has another name", f"write {part['x-moved'][key]}"
        elif value[key] is None and _CPU_RANGE.fullmatch(key):
            yield here, "unknown key", _COMMA
        elif "x-keys" in part:
            yield here, "this key does not fit here", f"the keys are {part['x-keys']}"
        else:
            only = f"the only key here is {known[0]}" if len(known) == 1 else ""
            accepted = only or f"the keys here are {', '.join(known)}"
            yield here, "unknown key", _suggest(key, known, accepted)
