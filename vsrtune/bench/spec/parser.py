# SPDX-License-Identifier: GPL-2.0-or-later
"""Bench specifications: YAML text to a frozen Spec, every error with its line."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Callable
from typing import Any

from vsrtune.bench.spec.checks import differences, mistakes
from vsrtune.bench.spec.model import (
    BenchAttachment,
    Configuration,
    Endpoint,
    Leg,
    Limits,
    Method,
    Router,
    Spec,
    Traffic,
    Tuning,
)
from vsrtune.bench.spec.schema import DURATION_PATTERN, schema
from vsrtune.core.errors import VsrtuneError
from vsrtune.policy.model import Policy, PolicyErrors
from vsrtune.policy.parser import parse, require_mapping
from vsrtune.policy.validation import located, structural
from vsrtune.policy.yaml_reader import Document, read

PDR_LOSS = 0.005
KIND = "bench specification"
_SCALE = {"ms": 0.001, "s": 1.0, "min": 60.0}


def load_text(text: str, path: str, base: Spec | None = None) -> Spec:
    """Read one specification's text; ``path`` is used in messages and ``Spec.path``.

    With ``base``, the first file of a comparison, everything but ``configuration``
    may be left out, and every key stated except ``name`` and ``configuration`` must equal that of
    ``base``.

    ``configuration.name`` is the specification's name. A policy is named, not read:
    ``configuration.policy_path`` is its path as seen from the working directory
    (relative paths are relative to ``path``) and ``policy`` is None until
    ``with_policy``. A leg whose MAC was left out has ``mac`` "".

    Raises PolicyErrors with every error of structure, or if there is none, of meaning.
    """
    return load(read(text, path, KIND), path, base)


def with_policy(spec: Spec, text: str) -> Spec:
    """``spec`` with ``configuration.policy`` set. Raises PolicyErrors for a bad policy."""
    configuration = dataclasses.replace(spec.configuration, policy=text)
    policies(configuration)
    return dataclasses.replace(spec, configuration=configuration)


def policies(configuration: Configuration) -> tuple[Policy, ...]:
    """The policies of a configuration's text: one, or several separated by lines of
    ``---``. Raises PolicyErrors, or VsrtuneError for a text without a policy."""
    path = configuration.policy_path or f"{configuration.name} (policy)"
    found = []
    line = 0
    for part in re.split(r"(?m)^---[ \t]*\n", configuration.policy or ""):
        # Empty lines keep line numbers in messages correct.
        if part.strip():
            found.append(parse("\n" * line + part, path))
        line += part.count("\n") + 1
    if not found:
        raise VsrtuneError("there is no policy", where=path, hint="name a file with a policy")
    return tuple(found)


def load(document: Document, path: str, base: Spec | None = None) -> Spec:
    """As ``load_text``, of plain data with the keys of a file."""
    require_mapping(document, path, "write keys such as left, right and routers", KIND)
    errors = [
        *document.errors,
        *(error for _, error in structural(document, path, schema(partial=base is not None))),
    ]
    if not errors:
        data = document.data
        stated: dict[str, Any] = {key: _READ[key](data[key]) for key in _READ if key in data}
        name = data.get("name", posixpath.splitext(posixpath.basename(path))[0])
        stated |= {
            "name": name,
            "configuration": _configuration(data.get("configuration", {}), name, path),
            "path": path,
        }
        spec = Spec(**stated) if base is None else dataclasses.replace(base, **stated)
        found = [*(differences(stated, base) if base else ()), *mistakes(spec, document.lines)]
        errors += located(found, document.lines, path)
        if not errors:
            return spec
    raise PolicyErrors(sorted(errors, key=lambda e: int(e.where.rpartition(":")[2])))


def _duration(value: float | str) -> float:
    """Seconds of a number, or of text with a unit that fits the schema."""
    found = re.match(DURATION_PATTERN, str(value))
    return float(value) if found is None else float(found[1]) * _SCALE[found[3]]


def _seconds(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: _duration(v) if k in keys else v for k, v in data.items()}


def _method(data: dict[str, Any]) -> Method:
    values = _seconds(data, "seconds", "duration")
    for key in ("rates", "sizes"):
        values[key] = tuple(values.get(key, ()))
    if values["kind"] == "pdr":
        values.setdefault("loss", PDR_LOSS)
    return Method(**values)


def _router(data: dict[str, Any]) -> Router:
    native = data.get("native")
    back = data.get("back")
    members = tuple(data.get("guests", ()))
    guest = data.get("guest", "+".join(members))
    return Router(
        # The checks report more or fewer than one of the three.
        name=guest or native or "",
        forth=_leg(data["forth"]),
        back=None if back is None else _leg(back),
        native=native is not None and not guest,
        members=members,
    )


def _leg(data: dict[str, Any]) -> Leg:
    return Leg(data.get("mac", "").lower(), data["source"], data["destination"])


def _configuration(data: dict[str, Any], name: str, path: str) -> Configuration:
    values = dict(data)
    policy = values.pop("policy", None)
    if policy is not None:
        values["policy_path"] = posixpath.join(posixpath.dirname(path), policy)
    if "cpus" in values:
        values["cpus"] = str(values["cpus"]).strip()
    for key in ("apply", "revert"):
        values[key] = tuple(values.get(key, ()))
    values["tuning"] = Tuning(values.get("tuning", "untuned"))
    values["attachment"] = BenchAttachment(values.get("attachment", "as-is"))
    return Configuration(name=name, **values)


# How the value of a key becomes the field of a Spec, for keys that a comparison shares.
_READ: dict[str, Callable[[Any], Any]] = {
    "left": lambda data: Endpoint(**data),
    "right": lambda data: Endpoint(**data),
    "routers": lambda data: tuple(_router(router) for router in data),
    "traffic": lambda data: Traffic(**_seconds(data, "burst")),
    "method": _method,
    "limits": lambda data: Limits(**_seconds(data, "seconds")),
    "warmup": _duration,
}
