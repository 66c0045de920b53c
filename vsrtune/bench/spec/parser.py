"""Bench specifications: YAML text to a frozen Spec, every error with its line."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Callable, Iterable
from typing import Any

from vsrtune.bench.spec.checks import Checker
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
from vsrtune.core.errors import PolicyError, VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse
from vsrtune.policy.validation import structural
from vsrtune.policy.yaml_reader import Document, read, shown

PDR_LOSS = 0.005
KIND = "bench specification"
_SCALE = {"ms": 0.001, "s": 1.0, "min": 60.0}


class SpecErrors(VsrtuneError):
    """All errors of one specification, in ``errors``; nothing was run."""

    exit_code = ExitCode.WRONG

    def __init__(self, errors: Iterable[VsrtuneError]) -> None:
        self.errors = tuple(errors)
        count = len(self.errors)
        super().__init__(f"{count} error{'' if count == 1 else 's'} in the bench specification")

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def load_text(text: str, path: str, base: Spec | None = None) -> Spec:
    """Read one specification's text; ``path`` is used in messages and ``Spec.path``.

    With ``base``, the first file of a comparison, everything but ``configuration``
    may be left out, and every key stated except ``name`` and ``configuration`` must equal that of
    ``base``.

    ``configuration.name`` is the specification's name. A policy is named, not read:
    ``configuration.policy_path`` is its path as seen from the working directory
    (relative paths are relative to ``path``) and ``policy`` is None until
    ``with_policy``. A leg whose MAC was left out has ``mac`` "".

    Raises SpecErrors with every error of structure, or if there is none, of meaning.
    """
    return _load(read(text, path, KIND), path, base)


def load_data(data: dict[str, Any], path: str) -> Spec:
    """A Spec of plain data with the keys of a file (command-line short forms);
    ``path`` is used in messages. Raises SpecErrors."""
    return _load(Document(data), path, None)


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


def _load(document: Document, path: str, base: Spec | None) -> Spec:
    _require_mapping(document, path)
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
        checker = Checker(document.lines, path)
        if base is None:
            spec = Spec(**stated)
        else:
            checker.same(stated, base)
            spec = dataclasses.replace(base, **stated)
        checker.spec(spec)
        errors += checker.errors
        if not errors:
            return spec
    raise SpecErrors(sorted(errors, key=lambda e: int(e.where.rpartition(":")[2])))


def _require_mapping(document: Document, path: str) -> None:
    if isinstance(document.data, dict):
        return
    if document.data is None and not document.errors:
        what = "the file holds no bench specification"
    elif document.data is None:
        raise SpecErrors(document.errors)
    else:
        what = f"the file holds {shown(document.data)}, not a mapping"
    hint = "write keys such as left, right and routers"
    raise SpecErrors([*document.errors, PolicyError(what, where=f"{path}:1", hint=hint)])


def duration(value: float | str) -> float:
    """Seconds of a number, or of text with a unit that fits the schema."""
    if isinstance(value, str):
        found = re.match(DURATION_PATTERN, value)
        if found is None:
            raise ValueError(f"{value!r} is not a duration")
        return float(found[1]) * _SCALE[found[3]]
    return float(value)


def _seconds(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: duration(v) if k in keys else v for k, v in data.items()}


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
    "warmup": duration,
}
