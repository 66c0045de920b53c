# SPDX-License-Identifier: GPL-2.0-or-later
"""Bench specifications: YAML text to a frozen Spec, every error with its line."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from typing import Any, get_type_hints

from vsrtune.bench.spec.checks import differences, mistakes
from vsrtune.bench.spec.model import DURATION_PATTERN, Configuration, Spec, keys_of
from vsrtune.core.codec import decode
from vsrtune.core.errors import VsrtuneError
from vsrtune.policy.model import Policy, PolicyErrors
from vsrtune.policy.parser import parse, require_mapping
from vsrtune.policy.validation import located, structural
from vsrtune.policy.yaml_reader import Document, read

PDR_LOSS = 0.005
KIND = "bench specification"
_SCALE = {"ms": 0.001, "s": 1.0, "min": 60.0}


def schema(*, partial: bool = False) -> dict[str, Any]:
    """The JSON Schema of a specification; with ``partial``, that of a comparison's later file,
    which may leave out what it shares with the first."""
    required = ("configuration",) if partial else ("left", "right", "routers", "method")
    return keys_of(Spec, "keys such as left, right and routers", *required)


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
        stated = _stated(document.data, path)
        spec = Spec(**stated) if base is None else dataclasses.replace(base, **stated)
        found = [*(differences(stated, base) if base else ()), *mistakes(spec, document.lines)]
        errors += located(found, document.lines, path)
        if not errors:
            return spec
    raise PolicyErrors(sorted(errors, key=lambda e: int(e.where.rpartition(":")[2])))


def _stated(data: dict[str, Any], path: str) -> dict[str, Any]:
    """The fields of a Spec that a file states, of data that fit the schema."""
    name = data.get("name", posixpath.splitext(posixpath.basename(path))[0])
    configuration = {"name": name, **data.get("configuration", {})}
    if "policy" in configuration:
        policy = configuration.pop("policy")
        configuration["policy_path"] = posixpath.join(posixpath.dirname(path), policy)
    if "cpus" in configuration:
        configuration["cpus"] = str(configuration["cpus"]).strip()
    values = {**data, "name": name, "configuration": configuration, "path": path}
    if "routers" in data:
        values["routers"] = [_router(router) for router in data["routers"]]
    if data.get("method", {}).get("kind") == "pdr":
        values["method"] = {"loss": PDR_LOSS, **data["method"]}
    for key in ("method", "limits"):
        if key in data:
            within = values[key]
            values[key] = {k: _duration(v) if k == "seconds" else v for k, v in within.items()}
    if "warmup" in data:
        values["warmup"] = _duration(data["warmup"])
    fields = get_type_hints(Spec)
    return {key: decode(fields[key], value) for key, value in values.items()}


def _router(data: dict[str, Any]) -> dict[str, Any]:
    members = data.get("guests", [])
    guest, native = data.get("guest", "+".join(members)), data.get("native")
    legs = {way: data[way] for way in ("forth", "back") if way in data}
    return {
        # The checks report more or fewer than one of the three.
        "name": guest or native or "",
        "native": native is not None and not guest,
        "members": members,
        **{way: {**leg, "mac": leg.get("mac", "").lower()} for way, leg in legs.items()},
    }


def _duration(value: float | str) -> float:
    """Seconds of a number, or of text with a unit that fits the schema."""
    found = re.match(DURATION_PATTERN, str(value))
    return float(value) if found is None else float(found[1]) * _SCALE[found[3]]
