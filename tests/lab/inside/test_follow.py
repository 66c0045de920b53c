"""The daemon follows the host: guests come and go, policies change, libvirt restarts."""

from __future__ import annotations

from pathlib import Path

import hoststate
import labhelp
from labhelp import LabGuest


@labhelp.one_release("events of libvirt, as of a NIC that is plugged", "trixie")
def test_guest_started_later_is_tuned_and_forgotten_when_destroyed(
    libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    """With the interval far away, only libvirt's event can have told the daemon; the event
    of a libvirtd that was restarted too."""
    guest = libvirt_guest

    def tuned() -> bool:
        return labhelp.untuned_lines(guest, irq_cpus) == []

    labhelp.stop_guest(guest)
    labhelp.write_policies("auto")
    labhelp.set_environment(VSRTUNE_INTERVAL="3600")
    labhelp.start()
    labhelp.start_guest(guest)
    labhelp.wait_for(tuned, f"{guest.name} is tuned by its event")
    daemon = labhelp.main_pid()
    labhelp.sh("systemctl", "restart", "libvirtd")
    labhelp.libvirt_talks(guest)
    labhelp.stop_guest(guest)
    labhelp.wait_for(
        lambda: not any(f'domain="{guest.name}"' in line for line in labhelp.scrape()),
        "the destroyed guest has left the metrics",
    )
    labhelp.start_guest(guest)
    labhelp.wait_for(tuned, "events arrive again")
    assert labhelp.main_pid() == daemon
    labhelp.stop()
    assert "error" not in labhelp.daemon_log(20).lower()


@labhelp.one_release("guests without libvirt")
def test_plain_guest_started_later_is_found_by_rescan(
    plain_guest: LabGuest, irq_cpus: set[int]
) -> None:
    labhelp.stop_guest(plain_guest)
    labhelp.write_policies("auto")
    labhelp.set_environment(VSRTUNE_INTERVAL="8")
    labhelp.start()
    labhelp.start_guest(plain_guest)
    labhelp.wait_for(
        lambda: labhelp.untuned_lines(plain_guest, irq_cpus) == [], "the rescan tuned it"
    )


@labhelp.one_release("reading policies")
def test_broken_policy_at_start_changes_nothing(restored: None, guests: list[LabGuest]) -> None:
    before = hoststate.capture()
    labhelp.write_policies("auto", ("*",))
    (labhelp.POLICIES / "broken.yaml").write_text("guest: vr1\nqueue: {macvtap: 0}\n")
    assert labhelp.sh("systemctl", "start", "vsrtune", check=False).returncode != 0
    shown = labhelp.sh("systemctl", "show", "-P", "ExecMainStatus", "vsrtune").stdout
    assert shown.strip() == "2"
    assert "broken.yaml:2" in labhelp.daemon_log()
    assert hoststate.differences(before, hoststate.capture()) == []


@labhelp.one_release("reading policies")
def test_broken_policy_on_reload_keeps_the_old_one(tuned: set[int], guests: list[LabGuest]) -> None:
    broken = labhelp.POLICIES / "broken.yaml"
    broken.write_text("guest: other\nqueues: 7\n")
    assert labhelp.sh("systemctl", "reload", "vsrtune", check=False).returncode != 0
    labhelp.wait_for(
        lambda: "vsrtune_policy_reload_success 0.0" in labhelp.scrape(),
        "the metric shows the failure",
    )
    assert "older policies are kept" in labhelp.status_text()
    assert "broken.yaml:2" in labhelp.daemon_log()
    for guest in guests:
        assert labhelp.untuned_lines(guest, tuned) == []
    broken.unlink()
    labhelp.sh("systemctl", "reload", "vsrtune")
    labhelp.wait_for(
        lambda: "vsrtune_policy_reload_success 1.0" in labhelp.scrape(), "the next reload is good"
    )


@labhelp.core("trixie")
@labhelp.one_release("reading policies", "trixie")
def test_reload_follows_a_changed_policy_and_takes_back_what_it_drops(
    tuned: set[int], libvirt_guest: LabGuest
) -> None:
    first = labhelp.POLICIES / "test0.yaml"
    text = first.read_text().partition("scheduler:")[0] + "queue:\n  macvtap: 200\n"
    first.write_text(text)
    labhelp.sh("systemctl", "reload", "vsrtune")
    queue = f"/sys/class/net/{libvirt_guest.device(0)}/tx_queue_len"
    labhelp.wait_for(lambda: labhelp.text(queue) == "200", "the new queue length is set")
    labhelp.wait_for(
        lambda: all(
            hoststate.sched(tid).startswith("policy=0 flags=0 ")
            for tid in libvirt_guest.data_plane()
        ),
        "the class no policy asks for is taken back",
    )
    assert all(not labhelp.mask(tid) & tuned for tid in libvirt_guest.data_plane())
    first.unlink()
    labhelp.sh("systemctl", "reload", "vsrtune")
    labhelp.wait_for(lambda: labhelp.text(queue) == "500", "without policy: restored")


@labhelp.one_release("what vsrtune says of itself")
def test_metrics_tell_every_thread_and_interface(tuned: set[int], guests: list[LabGuest]) -> None:
    labhelp.wait_for(
        lambda: sum(line.startswith("vsrtune_guest_tuned{") and line.endswith(" 1.0")
                    for line in labhelp.scrape()) == len(guests),
        "every guest is shown as tuned",
    )  # fmt: skip
    lines = labhelp.scrape()
    for guest in guests:
        label = f'domain="{guest.ref}"'
        for tid in guest.data_plane():
            told = [
                line for line in lines
                if line.startswith("vsrtune_thread_info{")
                and label in line and f'tid="{tid}"' in line
            ]  # fmt: skip
            assert len(told) == 1
        for nic in (0, 1):
            device = f'target_device="{guest.device(nic)}"'
            (length,) = [
                line for line in lines
                if line.startswith("vsrtune_interface_queue_length_frames{") and device in line
            ]  # fmt: skip
            assert length.endswith(f" {labhelp.QUEUE}.0")
            assert any(
                line.startswith("vsrtune_interface_ring_dropped_frames_total{") and device in line
                for line in lines
            )
            assert any(
                line.startswith("vsrtune_thread_cpu_seconds_total{")
                and 'role="vhost"' in line and device in line
                for line in lines
            )  # fmt: skip


@labhelp.core("bookworm")
@labhelp.one_release("what vsrtune says of itself")
def test_policy_check_of_the_installed_program(tmp_path: Path) -> None:
    """All that it may find is in the unit tests; here is the program as it is installed."""
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("guest: vr1\n")
    bad.write_text("guest: vr1\nqueue: {macvtap: 0}\n")
    assert labhelp.vsrtune("policy", "check", str(good)).returncode == 0
    done = labhelp.vsrtune("policy", "check", str(good), str(bad), check=False)
    assert done.returncode == 2
    assert f"{bad}:2" in done.stderr
    assert "Traceback" not in done.stderr


@labhelp.core("bookworm")
@labhelp.one_release("what vsrtune says of itself")
def test_verify_tells_drift_by_exit_code(
    restored: None, guests: list[LabGuest], irq_cpus: set[int]
) -> None:
    labhelp.write_policies("auto")
    labhelp.vsrtune("apply")
    assert labhelp.vsrtune("verify").returncode == 0
    tid = guests[0].vcpus()[0]
    ours = ",".join(map(str, sorted(labhelp.mask(tid))))
    labhelp.sh("chrt", "-o", "-p", "0", str(tid))
    drift = labhelp.vsrtune("verify", check=False)
    assert drift.returncode == 3
    assert f"tid {tid}" in drift.stdout
    labhelp.vsrtune("apply")
    assert labhelp.vsrtune("verify").returncode == 0
    assert ",".join(map(str, sorted(labhelp.mask(tid)))) == ours
