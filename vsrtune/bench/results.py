"""Outcomes as JSON text, and back."""

from __future__ import annotations

from vsrtune.bench.model import Outcome

FORMAT = "vsrtune-bench/1"


def outcome_to_json(outcome: Outcome) -> str:
    """The outcome as JSON text, indented, ending in a newline. Values that are no
    numbers (a quantile of no probes) are written as null."""
    raise NotImplementedError


def outcome_from_json(text: str, path: str = "") -> Outcome:
    """Read what ``outcome_to_json`` wrote; ``path`` stands in messages. Raises VsrtuneError."""
    raise NotImplementedError
