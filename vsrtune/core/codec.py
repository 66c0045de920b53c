# SPDX-License-Identifier: GPL-2.0-or-later
"""JSON for frozen dataclasses: exact round trip, errors that name the field."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import UnknownError, VsrtuneError

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Convert a frozen value to data that ``json.dumps`` accepts.

    The data of a dataclass with a ``kind`` class variable includes it, so that ``decode`` can tell
    the members of a union apart.
    """
    if isinstance(value, CpuSet):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Any] = {}
        kind = getattr(type(value), "kind", None)
        if isinstance(kind, str):
            out["kind"] = kind
        for field in dataclasses.fields(value):
            out[field.name] = encode(getattr(value, field.name))
        return out
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    return value


def decode(cls: type[T], data: Any, where: str = "$") -> T:
    """Build ``cls`` from ``json.loads`` output. Raises VsrtuneError, which names the path unless a
    CPU list is malformed."""
    return typing.cast(T, _decode(cls, data, where))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fail(where: str, want: str, got: Any) -> VsrtuneError:
    return VsrtuneError(f"expected {want}, found {type(got).__name__}", where=where)


def _decode(hint: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(typing.get_args(hint), data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise _fail(where, "a list", data)
        item = typing.get_args(hint)[0]
        return tuple(_decode(item, v, f"{where}[{i}]") for i, v in enumerate(data))
    if origin in (Mapping, dict):
        if not isinstance(data, dict):
            raise _fail(where, "a mapping", data)
        item = typing.get_args(hint)[1]
        return {k: _decode(item, v, f"{where}.{k}") for k, v in data.items()}
    if origin is typing.Literal:
        if data not in typing.get_args(hint):
            raise VsrtuneError(f"{data!r} is not accepted here", where=where)
        return data
    if hint is Any:
        return data
    if hint is CpuSet:
        if not isinstance(data, str):
            raise _fail(where, "a CPU list", data)
        return CpuSet.parse(data)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(data)
        except ValueError:
            raise VsrtuneError(f"{data!r} is not a {hint.__name__}", where=where) from None
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, data, where)
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return _float(data, where)
    if hint in (int, float, str, bool):
        if type(data) is not hint:
            raise _fail(where, hint.__name__, data)
        return data
    raise VsrtuneError(f"no JSON form for {hint!r}", where=where)


def _float(data: int, where: str) -> float:
    try:
        return float(data)
    except OverflowError:
        raise _fail(where, "a smaller number", data) from None


def _decode_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None:
        if type(None) in options:
            return None
        raise _fail(where, "a value", data)
    options = tuple(o for o in options if o is not type(None))
    if isinstance(data, dict) and "kind" in data:
        for option in options:
            if getattr(option, "kind", None) == data["kind"]:
                return _decode(option, data, where)
        raise UnknownError(f"unknown kind {data['kind']!r}", where=where)
    # The exact type tells scalars apart. CpuSet comes after them: it is written as text and must
    # not shadow a plain str option.
    for option in options:
        if option in (int, float, str, bool) and type(data) is option:
            return data
    last: VsrtuneError | None = None
    for option in options:
        try:
            return _decode(option, data, where)
        except VsrtuneError as error:
            last = error
    raise last if last is not None else _fail(where, "a value", data)


def _decode_dataclass(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _fail(where, cls.__name__, data)
    hints = _hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        path = f"{where}.{field.name}"
        if field.name in data:
            values[field.name] = _decode(hints[field.name], data[field.name], path)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise VsrtuneError("missing", where=path)
    unknown = set(data) - set(values) - {"kind"}
    if unknown:
        raise UnknownError(f"unknown field {min(unknown)!r}", where=where)
    return cls(**values)
