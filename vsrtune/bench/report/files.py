# SPDX-License-Identifier: GPL-2.0-or-later
"""Outcomes as files: JSON and back, and one HTML page with tables and plots, which fetches nothing
from elsewhere."""

from __future__ import annotations

import json
from importlib.resources import files

from vsrtune.bench.report import plots, tables
from vsrtune.bench.spec.model import Outcome
from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import InputError, VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.views.tables import filled

FORMAT = "vsrtune-bench/1"


def outcome_to_json(outcome: Outcome) -> str:
    """The outcome as JSON text, indented, ending in a newline."""
    data = {"format": FORMAT, **encode(outcome)}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def outcome_from_json(text: str, path: str = "") -> Outcome:
    """Read the text of ``outcome_to_json``; ``path`` is used in messages. Raises InputError."""
    hint = "name a file that vsrtune bench wrote with --json"
    try:
        data = json_value(text)
    except ValueError:
        raise InputError("the file is not JSON", where=path, hint=hint) from None
    if not isinstance(data, dict) or "format" not in data:
        raise InputError("the file is not a bench result", where=path, hint=hint)
    if data.pop("format") != FORMAT:
        raise InputError(
            "the result has another version's format", where=path, hint=f"this one reads {FORMAT}"
        )
    try:
        return decode(Outcome, data)
    except VsrtuneError as error:
        where = f"{path}: {error.where}" if path else error.where
        raise InputError(error.what, where=where, hint=hint) from None


def page(outcome: Outcome) -> str:
    """The whole document. Raises VsrtuneError when matplotlib is missing."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    label = tables.label(outcome)
    note = " | ".join(t for t in (label, outcome.started, f"vsrtune {outcome.version}") if t)
    found = tables.outcome_tables(outcome)
    first = 1 + len(filled(*tables.summary_tables(outcome)))
    figures = [
        (caption, Markup(plots.svg(figure, f"f{index}")))  # noqa: S704 (matplotlib escapes)
        for index, (caption, figure) in enumerate(plots.of_outcome(outcome, note))
    ]
    source = files("vsrtune.bench.report").joinpath("page.html.j2").read_text("utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(source).render(
        name=outcome.spec.name,
        label=label,
        first=found[:first],
        figures=figures,
        rest=found[first:],
        # With the text of every policy, without which no figure can be repeated.
        configurations=outcome.configurations,
    )
