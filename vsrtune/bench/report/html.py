"""A result as one HTML file with tables and plots, which fetches nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from vsrtune.bench.report import plots, summaries, tables
from vsrtune.bench.spec.model import Outcome
from vsrtune.views.tables import Table

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
       max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.label { display: inline-block; padding: .1rem .6rem; border: 1px solid #b58900;
         background: #fff8e1; border-radius: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; border-bottom: 1px solid #e4e4e4;
         vertical-align: top; }
th:first-child, td:first-child, .words td, .words th { text-align: left; }
figure { margin: 1.5rem 0; }
figure svg { max-width: 100%; height: auto; }
figcaption { color: #555; font-size: .9rem; }
.warn h2 { color: #8a5a00; } .bad h2 { color: #a40000; } .good h2 { color: #1b6e1b; }
pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; font-size: .85rem; }
"""

# Tables of at most so many columns hold words, which read better from the left.
_COLUMNS_OF_WORDS = 2


def page(outcome: Outcome) -> str:
    """The whole document. Raises VsrtuneError when matplotlib is missing."""
    title = outcome.spec.name
    label = tables.label(outcome)
    note = " | ".join(t for t in (label, outcome.started, f"vsrtune {outcome.version}") if t)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}: vsrtune bench</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    if label:
        parts.append(f'<p><span class="label">measured on {escape(label)}</span></p>')
    found = tables.outcome_tables(outcome)
    shown_first = 1 + sum(1 for t in summaries.tables(outcome) if t.rows)
    parts += [_table(t) for t in found[:shown_first]]
    for index, (caption, figure) in enumerate(plots.of_outcome(outcome, note)):
        picture = plots.svg(figure, f"f{index}")
        parts.append(f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>")
    parts += [_table(t) for t in found[shown_first:]]
    parts += _policies(outcome)
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def write(outcome: Outcome, path: Path) -> None:
    """Write the report; replace an existing file as a whole."""
    text = page(outcome)
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _table(table: Table) -> str:
    words = ' class="words"' if len(table.columns) <= _COLUMNS_OF_WORDS else ""
    lines = [f'<section class="{table.tone}"><h2>{escape(table.title)}</h2>']
    lines.append(f'<div class="scroll"><table{words}>')
    if any(table.columns):
        lines.append(_row("th", table.columns))
    lines += [_row("td", row) for row in table.rows]
    lines.append("</table></div></section>")
    return "\n".join(lines)


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _policies(outcome: Outcome) -> list[str]:
    """The text of every measured policy, without which no figure can be repeated."""
    parts = []
    for configuration in outcome.configurations:
        if configuration.policy is not None:
            parts.append(f"<h2>Policy of {escape(configuration.name)}</h2>")
            parts.append(f"<pre>{escape(configuration.policy)}</pre>")
    return parts
