"""CPUs for each queue of an interface of a real guest."""

from __future__ import annotations

import labhelp
import pytest
from labhelp import LabGuest

POLICY = """\
guest: "{name}"
profile: none
cpus: {{irq: 0, vhost: {{{device}: 1, {device}/1: 2}}}}
"""


def test_the_worker_of_each_queue_gets_its_cpu(guests: list[LabGuest], irq_cpus: set[int]) -> None:
    guest = next((g for g in guests if g.kind == "libvirt"), None)
    if guest is None or len(guest.workers()) < 4:
        pytest.skip("needs a libvirt router with two queues, which another boot has")
    device = guest.device(0)
    before = {tid: labhelp.mask(tid) for tid in guest.workers()}
    (labhelp.POLICIES / "test0.yaml").write_text(POLICY.format(name=guest.name, device=device))
    labhelp.start()
    (shown,) = (g for g in labhelp.show()["guests"] if g["name"] == guest.name)
    cpus = {
        (t["interface"] == device, t["queue"]): labhelp.mask(t["key"]["tid"])
        for t in shown["threads"]
        if t["role"] == "vhost"
    }
    everywhere = set(range(labhelp.lab_cpus()))
    assert cpus == {
        (True, 0): {1},
        (True, 1): {2},
        (False, 0): everywhere,
        (False, 1): everywhere,
    }
    labhelp.sh("lab-wait-forward", guest.name)
    labhelp.stop()
    assert {tid: labhelp.mask(tid) for tid in guest.workers()} == before
