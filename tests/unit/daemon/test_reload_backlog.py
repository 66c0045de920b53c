"""reload_backlog.py: when what a reload could not have is tried again."""

from __future__ import annotations

from vsrtune.daemon.reload_backlog import LONGEST, ReloadBacklog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def failed(backlog: ReloadBacklog, settle: bool = False) -> None:
    """A pass that breaks off."""
    backlog.begin(settle, reassert=settle)
    backlog.broke_off()


def test_each_try_that_breaks_off_doubles_the_wait() -> None:
    clock = Clock()
    backlog = ReloadBacklog(clock)
    failed(backlog, settle=True)
    waits = []
    for _ in range(8):
        wait = backlog.next_try()
        assert wait is not None
        waits.append(wait)
        clock.now += wait
        failed(backlog)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST, LONGEST]


def test_a_pass_that_breaks_off_without_having_tried_changes_no_wait() -> None:
    clock = Clock()
    backlog = ReloadBacklog(clock)
    failed(backlog, settle=True)
    for _ in range(4):
        clock.now += 0.125
        failed(backlog)
    assert backlog.next_try() == 0.5


def test_nothing_waits_once_all_is_taken_back() -> None:
    clock = Clock()
    backlog = ReloadBacklog(clock)
    failed(backlog, settle=True)
    clock.now += 1.0
    assert backlog.begin(settle=False, reassert=False) == (True, True)
    backlog.end(frozenset(), None, unsettled=False)
    assert backlog.next_try() is None
    assert backlog.begin(settle=False, reassert=False) == (False, frozenset())
