"""A killed daemon, and a crash after each of several writes, leave no trace behind."""

from __future__ import annotations

import os
import signal
import time

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


@labhelp.one_release("what systemd does with a daemon that cannot run", "trixie")
def test_a_crash_beside_a_wrong_policy_leaves_nothing_tuned(
    tuned: set[int], guests: list[LabGuest]
) -> None:
    """``tuned`` compares the host with what it was."""
    (labhelp.POLICIES / "broken.yaml").write_text("guest: vr1\nqueue: {macvtap: 0}\n")
    labhelp.wait_for(
        lambda: "vsrtune_policy_reload_success 0.0" in labhelp.scrape(), "the older ones stay"
    )
    os.kill(labhelp.main_pid(), signal.SIGKILL)
    labhelp.wait_for(
        lambda: labhelp.sh("systemctl", "is-failed", "vsrtune", check=False).stdout == "failed\n",
        "systemd has given up",
    )
    shown = labhelp.sh("systemctl", "show", "-P", "ExecMainStatus", "vsrtune").stdout
    assert shown.strip() == "2"
    assert "with wrong policies no daemon runs" in labhelp.daemon_log(200)
    assert not labhelp.journal_is_live()


@labhelp.one_release("what systemd does with a signal", "trixie")
def test_a_stop_while_the_next_daemon_starts_restores(
    tuned: set[int], guests: list[LabGuest]
) -> None:
    first = labhelp.main_pid()
    os.kill(first, signal.SIGKILL)
    end = time.monotonic() + 60
    while labhelp.main_pid() in (0, first):
        assert time.monotonic() < end
    labhelp.stop()
    assert not labhelp.journal_is_live()


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
