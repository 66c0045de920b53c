"""reload_backlog.py: when what a reload could not have is tried again."""

from __future__ import annotations

from vsrtune.daemon.reload_backlog import LONGEST, Owed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def failed(owed: Owed, settle: bool = False) -> None:
    """A pass that breaks off."""
    owed.begin(settle, reassert=settle)
    owed.broke_off()


def test_each_try_that_breaks_off_doubles_the_wait() -> None:
    clock = Clock()
    owed = Owed(clock)
    failed(owed, settle=True)
    waits = []
    for _ in range(8):
        wait = owed.next_try()
        assert wait is not None
        waits.append(wait)
        clock.now += wait
        failed(owed)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST, LONGEST]


def test_a_pass_that_breaks_off_without_having_tried_changes_no_wait() -> None:
    clock = Clock()
    owed = Owed(clock)
    failed(owed, settle=True)
    for _ in range(4):
        clock.now += 0.125
        failed(owed)
    assert owed.next_try() == 0.5


def test_nothing_waits_once_all_is_taken_back() -> None:
    clock = Clock()
    owed = Owed(clock)
    failed(owed, settle=True)
    clock.now += 1.0
    assert owed.begin(settle=False, reassert=False) == (True, True)
    owed.end(frozenset(), None, unsettled=False)
    assert owed.next_try() is None
    assert owed.begin(settle=False, reassert=False) == (False, frozenset())
