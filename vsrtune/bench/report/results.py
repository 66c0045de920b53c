"""Outcomes as JSON text, and back."""

from __future__ import annotations

import json

from vsrtune.bench.spec.model import Outcome
from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import VsrtuneError

FORMAT = "vsrtune-bench/1"


def outcome_to_json(outcome: Outcome) -> str:
    """The outcome as JSON text, indented, ending in a newline."""
    data = {"format": FORMAT, **encode(outcome)}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


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
    try:
        return decode(Outcome, data)
    except VsrtuneError as error:
        where = f"{path}: {error.where}" if path else error.where
        raise VsrtuneError(error.what, where=where, hint=hint) from None
