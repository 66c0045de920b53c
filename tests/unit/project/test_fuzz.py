"""No bytes crash a reader of foreign input, and none makes it write (tests/fuzz)."""

from __future__ import annotations

import time

import pytest
import targets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NAMES = sorted(targets.TARGETS)
# A whole host takes milliseconds, the others microseconds.
EXAMPLES = {"whole_host": 25, "json_files": 40, "domain_xml": 60, "policy": 60, "bench_spec": 60}
# What one input may cost on a busy machine; the traps would take minutes.
SECONDS = 5.0


@st.composite
def changed(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A well-formed input with some of its bytes cut, replaced or repeated."""
    data = draw(st.sampled_from([seed for seed in seeds if len(seed) < 1 << 14]))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        cut = draw(st.integers(0, 8))
        new = draw(st.one_of(st.binary(max_size=8), st.sampled_from(PIECES)))
        data = data[:at] + new + data[at + cut :]
    return data


PIECES = (b"", b"\0", b"\n", b")", b"(", b"\xff", b"-1", b"9" * 30, b"null", b"[", b"}", b"&x;")


@pytest.mark.parametrize("name", NAMES)
def test_no_input_gets_through(name: str) -> None:
    seeds = targets.SEEDS[name]
    target = targets.TARGETS[name]
    target(seeds[0])

    @settings(
        max_examples=EXAMPLES.get(name, 100),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(st.binary(max_size=200), changed(seeds)))
    def search(data: bytes) -> None:
        with targets.guarded():
            target(data)

    search()


@pytest.mark.parametrize("name", NAMES)
def test_the_known_traps(name: str) -> None:
    """Nesting, entities, numbers of thousands of digits: each is refused soon."""
    target = targets.TARGETS[name]
    target(targets.SEEDS[name][0])
    for seed in targets.SEEDS[name]:
        begin = time.monotonic()
        with targets.guarded():
            target(seed)
        assert time.monotonic() - begin < SECONDS, seed[:60]
