"""Times with units."""

from __future__ import annotations

import pytest

from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import parse_time, time_text


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [("8ms", 8_000_000), ("0.5 s", 500_000_000), ("200us", 200_000), (" 1024ns ", 1024),
     ("1.5µs", 1500), ("4s", 4_000_000_000)],
)  # fmt: skip
def test_times(text: str, nanoseconds: int) -> None:
    assert parse_time(text) == nanoseconds
    assert parse_time(time_text(nanoseconds)) == nanoseconds


@pytest.mark.parametrize("text", ["8", "ms", "-1ms", "1,5ms", "1e3ns", "", "0.5ns"])
def test_no_times(text: str) -> None:
    with pytest.raises(VsrtuneError):
        parse_time(text)


def test_the_shortest_text() -> None:
    texts = [time_text(n) for n in (8_000_000, 200_000_000, 1_500_000, 100_000, 1024, 10**9, 0)]
    assert texts == ["8ms", "200ms", "1.5ms", "100us", "1.024us", "1s", "0ns"]
