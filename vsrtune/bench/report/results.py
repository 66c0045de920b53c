"""Outcomes as JSON text, and back."""

from __future__ import annotations

import json
import math
from typing import Any

from vsrtune.bench.spec.model import Outcome
from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import VsrtuneError

FORMAT = "vsrtune-bench/1"
_QUANTILES = ("p50", "p90", "p99")


def outcome_to_json(outcome: Outcome) -> str:
    """The outcome as JSON text, indented, ending in a newline. Infinities and NaN become
    null."""
    data = {"format": FORMAT, **_finite(encode(outcome))}
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def outcome_from_json(text: str, path: str = "") -> Outcome:
    """Read the text of ``outcome_to_json``; ``path`` is used in messages. Raises VsrtuneError."""
    hint = "name a file that vsrtune bench wrote with --json"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise VsrtuneError("the file is not JSON", where=path, hint=hint) from None
    if not isinstance(data, dict) or "format" not in data:
        raise VsrtuneError("the file is not a bench result", where=path, hint=hint)
    if data.pop("format") != FORMAT:
        raise VsrtuneError(
            "the result has another version's format", where=path, hint=f"this one reads {FORMAT}"
        )
    _restore_quantiles(data)
    try:
        return decode(Outcome, data)
    except VsrtuneError as error:
        where = f"{path}: {error.where}" if path else error.where
        raise VsrtuneError(error.what, where=where, hint=hint) from None


def _finite(data: Any) -> Any:
    """``data`` with None for infinities and NaN, for which JSON has no form."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


def _restore_quantiles(data: dict[str, Any]) -> None:
    trials = data.get("trials")
    for trial in trials if isinstance(trials, list) else []:
        latency = trial.get("latency") if isinstance(trial, dict) else None
        if isinstance(latency, dict):
            latency |= {q: math.nan for q in _QUANTILES if q in latency and latency[q] is None}
