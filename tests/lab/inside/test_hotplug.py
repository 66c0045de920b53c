"""A NIC plugged into a running guest: its worker is mapped, or the doubt is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

MAC = "52:54:00:ab:cd:01"


@pytest.fixture
def plugged(untuned: None, irq_cpus: set[int], libvirt_guest: LabGuest) -> Iterator[set[int]]:
    """The daemon runs, then a third NIC is plugged in; the workers from before."""
    labhelp.write_policies("auto")
    labhelp.start()
    before = set(libvirt_guest.workers())
    labhelp.sh(
        "virsh", "attach-interface", libvirt_guest.name, "direct", "p0",
        "--mac", MAC, "--model", "virtio", "--live",
    )  # fmt: skip
    labhelp.wait_for(
        lambda: set(libvirt_guest.workers()) - before, "the guest drives its new NIC", 120
    )
    yield before
    labhelp.sh("virsh", "detach-interface", libvirt_guest.name, "direct", "--mac", MAC, "--live")
    labhelp.wait_for(
        lambda: set(libvirt_guest.workers()) == before, "the unplugged NIC's worker ended", 120
    )


def third_nic(guest: LabGuest) -> str:
    for entry in Path("/sys/class/net").iterdir():
        if (entry / "address").read_text().strip() == MAC:
            return entry.name
    raise AssertionError("the plugged NIC has no host device")


@labhelp.core()
def test_new_nic_is_tuned_or_its_doubt_shown_and_stop_restores_it(
    plugged: set[int], libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    device = third_nic(libvirt_guest)
    labhelp.wait_for(
        lambda: labhelp.text(f"/sys/class/net/{device}/tx_queue_len") == str(labhelp.QUEUE),
        "the new queue has the policy's length",
    )
    (worker,) = set(libvirt_guest.workers()) - plugged
    labhelp.wait_for(
        lambda: not labhelp.mask(worker) & irq_cpus, "the new worker is off the interrupts' CPU"
    )
    shown = next(g for g in labhelp.show()["guests"] if g["name"] == libvirt_guest.name)
    workers = {t["key"]["tid"]: t for t in shown["threads"] if t["role"] == "vhost"}
    for tid, thread in workers.items():
        if thread["confidence"] in ("exact", "order"):
            own = thread["interface"] == device
            assert own == (tid == worker), f"{tid} is said to serve {thread['interface']}"
        else:
            assert thread["confidence"] in ("uncertain", "none")
    labhelp.stop()
    for tid in libvirt_guest.data_plane():
        assert hoststate.sched(tid).startswith("policy=0 flags=0 ")
