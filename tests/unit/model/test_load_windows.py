"""Windows of measured load."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_samples import cpus, router, snapshot

from vsrtune.core.codec import decode
from vsrtune.model.guest import ThreadKey
from vsrtune.model.load import (
    LEAST_NS,
    WINDOWS,
    Reading,
    Windows,
    data_plane,
    demand,
    least_ns,
    mean,
    measured,
    merged,
    moves,
    parse_schedstat,
)
from vsrtune.model.plan import Action
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import EmulatorPin, Pin, ThreadAffinity, VcpuPin

SECOND = 10**9
START = Reading(0, 0, 0)


def after(seconds: float, ran: float, waited: float = 0.0) -> Reading:
    return Reading(int(seconds * SECOND), int(ran * SECOND), int(waited * SECOND))


def test_running_and_waiting_are_asked_for() -> None:
    assert demand(START, after(10, 2.5)) == 0.25
    assert demand(START, after(10, 2.5, 1.0)) == 0.35


def test_two_that_take_turns_each_ask_for_a_whole_cpu() -> None:
    assert demand(START, after(10, 5.0, 5.0)) == 1.0


def test_who_hardly_runs_is_not_taken_for_busy_because_it_waits() -> None:
    assert demand(START, after(10, 0.1, 9.9)) == 0.04


def test_nothing_is_asked_in_no_time() -> None:
    assert demand(START, START) == 0.0


def test_a_counter_that_began_anew_counts_as_none() -> None:
    assert demand(after(0, 5), after(10, 1)) == 0.0


def test_a_window_is_as_long_as_looks_make_it() -> None:
    windows = Windows(START)
    early = Reading(LEAST_NS - 1, LEAST_NS // 2, 0)
    assert windows.update(early) == windows
    late = windows.update(after(60, 30))
    assert late.load == (0.5,)
    assert late.begin == after(60, 30)


def test_an_interval_is_a_window_at_least() -> None:
    assert least_ns(10.0) == LEAST_NS
    assert least_ns(2.0) == 1_800_000_000
    assert Windows(START).update(after(2, 1), least_ns(2.0)).load == (0.5,)


def test_only_the_latest_windows_are_kept() -> None:
    windows = Windows(START)
    for n in range(1, WINDOWS + 3):
        windows = windows.update(after(10 * n, sum(range(n + 1))))
    assert windows.load == (0.3, 0.4, 0.5)
    assert merged(windows.load) == (0.4,)
    assert merged(()) == ()
    assert mean(()) == 0.0


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1)), min_size=1, max_size=30))
def test_load_does_not_depend_on_how_often_one_looks(looks: list[tuple[int, float]]) -> None:
    """Whatever the looks are, a thread that always asks for the same has that load."""
    windows, now = Windows(START), 0
    for seconds, _ in looks:
        now += seconds
        windows = windows.update(after(now, now * 0.25))
    assert all(load == pytest.approx(0.25, abs=0.001) for load in windows.load)


def test_schedstat() -> None:
    assert parse_schedstat("120 30 4\n", 7) == Reading(7, 120, 30)
    for bad in ("", "1", "a b c"):
        with pytest.raises(ValueError, match=r"schedstat|invalid literal"):
            parse_schedstat(bad, 0)


def test_a_snapshot_with_loads_survives_json() -> None:
    seen = snapshot(router())
    keys = [t.key for t in data_plane(seen)]
    assert len(keys) == 3
    loaded = measured(seen, {keys[0]: (0.1, 0.25), ThreadKey(1, 2, 3): (1.0,)})
    assert [t.load for t in data_plane(loaded)] == [(0.1, 0.25), (), ()]
    assert decode(Snapshot, json.loads(loaded.to_json())) == loaded
    assert measured(loaded, {}) == seen
    assert measured(seen, {}).guests[0] is seen.guests[0]


def test_what_is_a_move() -> None:
    key = ThreadKey(1, 2, 3)
    vhost, vcpu = ThreadAffinity("vr1", key, "vhost"), VcpuPin("vr1", "uuid", 0, key)
    pin = [Pin(cpus(c), c) for c in ("1", "2", "0-3")]
    made = (
        Action(vhost, cpus("1"), cpus("2"), ""),
        Action(vhost, cpus("0-3"), cpus("2"), ""),
        Action(vcpu, pin[0], pin[1], ""),
        Action(vcpu, pin[2], pin[1], ""),
        Action(EmulatorPin("vr1", "uuid", key), pin[0], pin[1], ""),
    )
    assert moves(made) == 2
