"""A result as one HTML file with tables and plots, which fetches nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from vsrtune.bench.report import plots, summaries, tables
from vsrtune.bench.spec.model import Outcome
from vsrtune.views.tables import filled


def page(outcome: Outcome) -> str:
    """The whole document. Raises VsrtuneError when matplotlib is missing."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    label = tables.label(outcome)
    note = " | ".join(t for t in (label, outcome.started, f"vsrtune {outcome.version}") if t)
    found = tables.outcome_tables(outcome)
    first = 1 + len(filled(*summaries.tables(outcome)))
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


def write(outcome: Outcome, path: Path) -> None:
    """Write the report; replace an existing file as a whole."""
    text = page(outcome)
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
