"""Bench specifications: YAML text to a frozen Spec, every error with its line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vsrtune.bench.model import Spec
from vsrtune.errors import VsrtuneError


class SpecErrors(VsrtuneError):
    """All errors of one specification, in ``errors``; nothing was run."""

    exit_code = 2

    def __init__(self, errors: Iterable[VsrtuneError]) -> None:
        self.errors = tuple(errors)
        count = len(self.errors)
        super().__init__(f"{count} error{'' if count == 1 else 's'} in the bench specification")

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def load_text(text: str, path: str, base: Spec | None = None) -> Spec:
    """Read one specification's text; ``path`` is used in messages and ``Spec.path``.

    With ``base``, the first file of a comparison, everything but ``name`` and
    ``configuration`` may be left out, and what is stated must equal it.

    ``configuration.name`` is the specification's name. A policy is named, not read:
    ``configuration.policy_path`` is its path as seen from the working directory
    (relative ones are relative to ``path``) and ``policy`` is None until
    ``with_policy``. A leg whose MAC was left out has ``mac`` "".

    Raises SpecErrors with every error found.
    """
    raise NotImplementedError


def load_data(data: dict[str, Any], path: str) -> Spec:
    """A Spec of plain data with the keys of a file (command-line short forms);
    ``path`` stands in messages. Raises SpecErrors."""
    raise NotImplementedError


def with_policy(spec: Spec, text: str) -> Spec:
    """The same with ``configuration.policy`` set. Raises PolicyErrors for a bad policy."""
    raise NotImplementedError


def to_data(spec: Spec) -> dict[str, Any]:
    """The specification as plain data with the keys of a file; defaults are left out."""
    raise NotImplementedError
