"""The search for the highest passing value, against routers with a known edge."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsrtune.bench.methods.methods import Answer, Bounds, search
from vsrtune.bench.spec.model import Load, Trial

Router = Callable[[int], Answer]


def drive(low: int, high: int, precision: float, router: Router) -> tuple[Bounds, list[int]]:
    asked: list[int] = []

    def attempt(value: int) -> Generator[Load, Trial, Answer]:
        asked.append(value)
        yield from ()
        return router(value)

    with pytest.raises(StopIteration) as end:
        next(search(low, high, precision, attempt))
    return end.value.value, asked


def edge(at: float, *, collapse: float = 1.0, most: float = 1e12) -> Router:
    """Passes up to ``at``; above, ``collapse`` of it still gets through. The generator
    sends at most ``most``."""

    def answer(value: int) -> Answer:
        sent = min(float(value), most)
        return sent <= at, sent, at * collapse

    return answer


@given(
    st.integers(1, 10**6), st.integers(2, 10**6), st.floats(0.5, 2e6),
    st.sampled_from([0.001, 0.01, 0.05, 0.3]), st.floats(0.0, 1.0),
)  # fmt: skip
def test_the_edge_is_between_the_bounds(
    low: int, more: int, at: float, precision: float, collapse: float
) -> None:
    high = low + more
    found, asked = drive(low, high, precision, edge(at, collapse=collapse))
    assert all(low <= value <= high for value in asked)
    assert len(asked) <= 70
    if at >= high:
        assert found == Bounds(high, None)
    elif at < low:
        assert found == Bounds(None, low)
    else:
        assert found.lower is not None and found.upper is not None
        assert found.lower <= at < found.upper
        # A value between neighbours that rounds to one of them cannot be tried.
        assert found.upper <= found.lower * (1 + precision) or found.upper - found.lower <= 1
    assert {b for b in (found.lower, found.upper) if b is not None} <= set(asked)


def test_a_typical_search_is_short() -> None:
    found, asked = drive(1, 200_000, 0.05, edge(23_456))
    assert found.lower is not None and 23_456 / 1.05 <= found.lower <= 23_456
    assert len(asked) <= 4


def test_a_router_that_collapses_in_overload() -> None:
    found, asked = drive(1, 200_000, 0.05, edge(23_456, collapse=0.01))
    assert found.lower is not None and 23_456 / 1.05 <= found.lower <= 23_456
    assert len(asked) <= 20


def test_a_generator_that_falls_short_is_told_from_loss() -> None:
    found, _ = drive(1, 200_000, 0.05, edge(80_000, most=50_000.0))
    assert found.by_generator
    assert found.lower == 50_000.0
    assert found.upper is not None and found.upper <= 52_500
    found, _ = drive(1, 200_000, 0.05, edge(40_000, most=50_000.0))
    assert not found.by_generator
    assert found.lower is not None and 38_000 <= found.lower <= 40_000


def test_a_generator_that_does_not_reach_the_lowest_value_is_not_asked_for_less() -> None:
    found, asked = drive(772_506, 46_810_205, 0.5, edge(1e9, most=10_551.0))
    assert (found.lower, found.by_generator) == (10_551.0, True)
    assert set(asked) == {46_810_205}
