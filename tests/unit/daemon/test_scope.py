"""scope.py: what a pass has to look at, merged from many reasons."""

from __future__ import annotations

from functools import reduce

from vsrtune.daemon.scope import FULL, NOTHING, Scope


def test_guests_add_up_and_the_unknown_is_everything() -> None:
    both = reduce(Scope.merge, [Scope.of("vr1"), Scope.of("vr 2.ü"), Scope.of("vr1")], NOTHING)
    assert both == Scope(frozenset({"vr1", "vr 2.ü"}))
    assert not both.host
    assert both.merge(Scope.of(None)).host
    assert FULL.merge(NOTHING) == FULL == Scope.of(None)


def test_nothing_is_nothing() -> None:
    assert not NOTHING
    assert Scope.of("vr1")
    assert FULL
