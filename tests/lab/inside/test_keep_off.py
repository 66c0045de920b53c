"""`others: keep-off` between two real guests of libvirt."""

from __future__ import annotations

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

POLICY = """\
guest: "{name}"
profile: none
cpus: {{irq: 0, vcpu: 2, vhost: 2}}
others: keep-off
"""


def test_the_other_guest_leaves_the_cpu_and_comes_back(
    guests: list[LabGuest], irq_cpus: set[int]
) -> None:
    routers = [g for g in guests if g.kind == "libvirt"]
    if len(routers) < 2:
        pytest.skip("needs two libvirt routers, which another boot has")
    first, other = routers[:2]
    before = hoststate.capture()
    (labhelp.POLICIES / "test0.yaml").write_text(POLICY.format(name=first.name))
    labhelp.start()
    assert [labhelp.mask(tid) for tid in first.data_plane()] == [{2}] * len(first.data_plane())
    assert {t: m for t in hoststate.threads(other.pid) if 2 in (m := labhelp.mask(t))} == {}
    labhelp.sh("lab-wait-forward", other.name)
    labhelp.stop()
    changed = hoststate.differences(before, hoststate.capture())
    # The kernel does not let the list of a cgroup with threads be emptied again.
    everywhere = f"libvirt cpuset.cpus: was '', is '0-{labhelp.lab_cpus() - 1}'"
    assert [line for line in changed if not line.endswith(everywhere)] == []
    assert len(changed) == 1
