"""scope.py: what a pass has to look at, merged from many reasons."""

from __future__ import annotations

from functools import reduce

from vsrtune.daemon.scope import FULL, NOTHING, Look


def test_guests_add_up_and_the_unknown_is_everything() -> None:
    both = reduce(Look.merge, [Look.of("vr1"), Look.of("vr 2.ü"), Look.of("vr1")], NOTHING)
    assert both == Look(frozenset({"vr1", "vr 2.ü"}))
    assert not both.host
    assert both.merge(Look.of(None)).host
    assert FULL.merge(NOTHING) == FULL == Look.of(None)


def test_nothing_is_nothing() -> None:
    assert not NOTHING
    assert Look.of("vr1")
    assert FULL
