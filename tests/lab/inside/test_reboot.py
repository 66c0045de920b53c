"""A reboot of the host with a tuned router: libvirt-guests saves it, the daemon that the next boot
starts tunes it, and at its stop the router has what it would have without vsrtune.

The lab runs these tests twice, before and after the reboot.
"""

from __future__ import annotations

import json
from pathlib import Path

import labhelp
import pytest
import test_travel
from labhelp import LabGuest

# On the disk: what the guest is when it was saved and started, and never tuned.
NEVER_TUNED = Path("/var/lib/never-tuned.json")
# Asks the lab for the reboot (inlab/agent).
ASK = Path("/run/lab/reboot")
SETTINGS = Path("/etc/default/libvirt-guests")
SAVING = "ON_SHUTDOWN=suspend\nON_BOOT=ignore\n"
LATE = NEVER_TUNED.exists()


@pytest.fixture(autouse=True)
def untuned() -> None:
    """The host stays as the test leaves it, over the reboot."""


def libvirt_guests_runs() -> None:
    """The lab has masked it for the boot."""
    Path("/run/systemd/system/libvirt-guests.service").unlink()
    SETTINGS.write_text(SAVING)
    labhelp.sh("systemctl", "daemon-reload")
    labhelp.sh("systemctl", "start", "libvirt-guests")


@pytest.mark.skipif(LATE, reason="was before the reboot")
def test_a_tuned_router_goes_down_with_its_host(
    libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    labhelp.reset()
    test_travel.fresh(libvirt_guest)
    test_travel.save(libvirt_guest)
    test_travel.start(libvirt_guest)
    never = [*test_travel.shape(libvirt_guest), *test_travel.pins(libvirt_guest)]

    test_travel.fresh(libvirt_guest)
    labhelp.write_policies("auto")
    labhelp.sh("systemctl", "enable", "--now", "vsrtune")
    labhelp.wait_for(lambda: labhelp.untuned_lines(libvirt_guest, irq_cpus) == [], "it is tuned")
    libvirt_guests_runs()
    NEVER_TUNED.write_text(json.dumps(never))
    ASK.touch()


@pytest.mark.skipif(not LATE, reason="comes after the reboot")
def test_it_comes_back_tuned_and_at_stop_as_it_was_never(
    libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    command = Path(f"/proc/{libvirt_guest.pid}/cmdline").read_text().split("\0")
    assert "-incoming" in command, "libvirt-guests has not saved it"
    print(f"\ncame: {test_travel.notes(libvirt_guest)}")
    labhelp.wait_for(lambda: labhelp.main_pid() > 0, "systemd started the daemon")
    # Devices of the module, had there been any, were made ahead of libvirt's start.
    words = ("systemctl", "show", "--value", "-p")
    asked = labhelp.sh(*words, "ConditionTimestampMonotonic", "vsrtune-devices").stdout
    libvirt = labhelp.sh(*words, "InactiveExitTimestampMonotonic", "libvirtd").stdout
    assert 0 < int(asked) < int(libvirt)
    labhelp.wait_for(lambda: labhelp.untuned_lines(libvirt_guest, irq_cpus) == [], "tuned again")
    assert all(labhelp.mask(tid) & irq_cpus == set() for tid in libvirt_guest.workers())
    labhelp.stop()
    test_travel.check(libvirt_guest, json.loads(NEVER_TUNED.read_text()))
