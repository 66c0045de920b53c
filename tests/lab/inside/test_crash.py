"""A killed daemon, and a crash after each of several writes, leave no trace behind."""

from __future__ import annotations

import os
import signal

import labhelp
import pytest
from labhelp import LabGuest


@labhelp.core("trixie")
@labhelp.one_release("what systemd does with a dead daemon", "trixie")
def test_killed_daemon_is_restarted_and_still_restores(
    tuned: set[int], guests: list[LabGuest]
) -> None:
    first = labhelp.main_pid()
    os.kill(first, signal.SIGKILL)
    labhelp.started_again(first)
    for guest in guests:
        assert labhelp.untuned_lines(guest, tuned) == []


@pytest.mark.parametrize("writes", labhelp.shared([2, 7, 11]))
def test_crash_after_a_write_then_undo(restored: None, guests: list[LabGuest], writes: int) -> None:
    labhelp.write_policies("auto")
    crashed = labhelp.vsrtune("apply", check=False, fault=f"crash:{writes}")
    assert crashed.returncode != 0
    assert labhelp.JOURNAL.stat().st_size > 0
    labhelp.vsrtune("undo")


@labhelp.one_release("the journal", "trixie")
@pytest.mark.parametrize("writes", [5])
def test_crash_after_a_write_then_start(
    restored: None,
    guests: list[LabGuest],
    irq_cpus: set[int],
    writes: int,
) -> None:
    labhelp.write_policies("auto")
    crashed = labhelp.vsrtune("apply", check=False, fault=f"crash:{writes}")
    assert crashed.returncode != 0
    labhelp.start()
    for guest in guests:
        assert labhelp.untuned_lines(guest, irq_cpus) == []


@labhelp.core("bookworm")
@labhelp.one_release("the journal")
def test_crash_while_undoing_then_undo(restored: None, guests: list[LabGuest]) -> None:
    labhelp.write_policies("auto")
    labhelp.vsrtune("apply")
    assert labhelp.vsrtune("undo", check=False, fault="crash:3").returncode != 0
    labhelp.vsrtune("undo")
