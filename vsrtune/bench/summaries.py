"""The answer of each method (methods.py, compare.py) as tables. Pure."""

from __future__ import annotations

from vsrtune.bench.model import Outcome
from vsrtune.report import Table


def tables(outcome: Outcome) -> list[Table]:  # noqa: ARG001
    """The tables of ``outcome.summary``; none for methods whose trials say it all."""
    return []
