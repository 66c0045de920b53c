"""A router as KubeVirt's virt-launcher runs it, without Kubernetes (launcherhelp)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
import launcherhelp
import pytest
from labhelp import LabGuest
from launcherhelp import CPUS, REF, ROUTER, SLICE, STATE, TREE, USER, config, end, run, vcpus
from test_proxmox import shown, tids

OTHER = "c3" * 32
DROP_IN = Path("/run/systemd/system/vsrtune.service.d/kubepods.conf")
POLICY = f"""\
guest: "{REF}"
profile: none
cpus: {{irq: "0", vcpu: auto, vhost: auto}}
scheduler:
  vcpu: {{class: rr, priority: {labhelp.PRIORITY}}}
  vhost: {{class: rr, priority: {labhelp.PRIORITY}}}
"""
IDLE = ("-machine", "accel=kvm", "-S", "-nodefaults", "-display", "none", "-m", "16")


@pytest.fixture(scope="module")
def router(guests: list[LabGuest]) -> Iterator[LabGuest]:
    """The lab's only router, which no libvirt runs now."""
    if len(guests) != 1 or guests[0].kind != "libvirt":
        pytest.skip("other routers keep their macvtaps on the lower devices")
    (guest,) = guests
    # A device of the host's that has the name of one of the pod's.
    labhelp.sh("ip", "link", "add", "tap0", "type", "dummy")
    try:
        launcherhelp.start(guest)
        yield guest
    finally:
        labhelp.sh("ip", "link", "del", "tap0")
        launcherhelp.stop(guest)


@pytest.fixture
def read_only() -> Iterator[None]:
    """A daemon for which everything below kubepods is read-only."""
    DROP_IN.parent.mkdir(parents=True, exist_ok=True)
    DROP_IN.write_text(f"[Service]\nReadOnlyPaths={TREE}\n")
    labhelp.sh("systemctl", "daemon-reload")
    yield
    DROP_IN.unlink()
    labhelp.sh("systemctl", "daemon-reload")


def write_policy(text: str = POLICY) -> None:
    (labhelp.POLICIES / "kubevirt.yaml").write_text(text)


def tree() -> dict[str, str]:
    """Every list of CPUs and of processes below kubepods."""
    names = (
        "cgroup.procs",
        "cgroup.type",
        "cgroup.subtree_control",
        "cpuset.cpus",
        "cpuset.cpus.*",
    )
    files = sorted(file for name in names for file in TREE.rglob(name))
    return {str(file): file.read_text() for file in files} | {
        str(path): "" for path in TREE.rglob("*") if path.is_dir()
    }


def refusals(policy: str) -> list[dict[str, str]]:
    write_policy(policy)
    made = json.loads(labhelp.vsrtune("plan", "--json", check=False).stdout)
    found: list[dict[str, str]] = made["refusals"]
    return found


def test_found_planned_tuned_under_traffic_and_undone(
    router: LabGuest, restored: None, irq_cpus: set[int], read_only: None
) -> None:
    write_policy()
    before = tree()
    (ref, found), *others = shown().items()
    assert (ref, found["pid"], found["problems"], others) == (REF, router.pid, [], [])
    assert found["interfaces"] == []
    assert [nic["kind"] for nic in found["other_nics"]] == ["pod"]
    # No name of a thread tells.
    assert tids(found, "vcpu") == vcpus(router)
    assert sorted(tids(found, "vhost")) == router.workers()
    assert len(router.workers()) == 2
    assert "network namespace" in labhelp.vsrtune("show").stdout
    threads = [*vcpus(router), *router.workers()]
    planned = json.loads(labhelp.vsrtune("plan", "--json").stdout)
    assert planned["refusals"] == []
    assert {action["target"]["kind"] for action in planned["actions"]} == {
        "thread-affinity",
        "thread-sched",
    }

    labhelp.start()
    for tid in threads:
        assert len(labhelp.mask(tid)) == 1
        assert labhelp.mask(tid) <= labhelp.cpu_list(CPUS)
        assert hoststate.sched(tid).startswith(labhelp.realtime_start())
    labhelp.forwards(router, threads, irq_cpus)
    assert "\nno drift" in f"\n{labhelp.vsrtune('verify').stdout}"
    assert tree() == before
    labhelp.stop()
    assert tree() == before
    for tid in threads:
        assert labhelp.mask(tid) == labhelp.cpu_list(CPUS)
        assert hoststate.sched(tid).startswith("policy=0 flags=0 nice=0 priority=0 ")


@labhelp.one_release("the journal", "trixie")
def test_killed_after_each_write_then_undone(
    router: LabGuest, restored: None, irq_cpus: set[int]
) -> None:
    write_policy()
    labhelp.killed_after_each_write_then_undone()


@labhelp.one_release("a plan, whatever the kernel", "trixie")
def test_the_pods_own_cpus_and_no_others(
    router: LabGuest, restored: None, irq_cpus: set[int]
) -> None:
    outside = POLICY.replace('irq: "0", vcpu: auto', 'irq: "2", vcpu: 0')
    (refusal,) = refusals(outside)
    assert "the cgroup of vcpu 0 allows CPUs 1-2 only" in refusal["reason"]
    assert "the kubelet gives a pod its CPUs" in refusal["hint"]
    (refusal,) = refusals(POLICY.replace('irq: "0", ', ""))
    assert "interrupts of its pod's NICs is not known" in refusal["reason"]
    # As the kubelet does without its policy `static`: all pods have all CPUs.
    scope = f"cri-containerd-{ROUTER}.scope"
    labhelp.sh("systemctl", "set-property", "--runtime", scope, "AllowedCPUs=")
    (refusal,) = refusals(POLICY)
    assert "other pods may run on the CPUs of its pod" in refusal["reason"]
    labhelp.sh("systemctl", "set-property", "--runtime", scope, f"AllowedCPUs={CPUS}")
    # The kubelet changes them, and the daemon follows.
    write_policy()
    labhelp.start()
    try:
        labhelp.sh("systemctl", "set-property", "--runtime", scope, "AllowedCPUs=0-2")
        done = labhelp.last_pass()
        labhelp.wait_for(lambda: labhelp.last_pass() > done, "one more pass")
        for tid in (*vcpus(router), *router.workers()):
            assert len(labhelp.mask(tid)) == 1
            assert labhelp.mask(tid) <= labhelp.cpu_list(CPUS)
    finally:
        labhelp.stop()
        labhelp.sh("systemctl", "set-property", "--runtime", scope, f"AllowedCPUs={CPUS}")
    for tid in (*vcpus(router), *router.workers()):
        assert labhelp.mask(tid) == labhelp.cpu_list(CPUS)


@labhelp.one_release("who is believed, whatever the kernel", "trixie")
def test_pretenders_beside_it(router: LabGuest, restored: None) -> None:
    file = STATE / OTHER / "config.json"
    file.parent.mkdir(parents=True)

    def why() -> str:
        (stranger,) = labhelp.show()["strangers"]
        assert list(shown()) == [REF]
        told: str = stranger["why"]
        return told

    try:
        file.write_text(config(OTHER, "tenant"))
        run(OTHER, *IDLE, "-name", "edge")
        labhelp.wait_for(lambda: len(hoststate.qemus()) == 2, "the other runs")
        found = shown()["kubevirt:tenant/edge"]
        assert found["problems"] == ["vcpu threads are not known: none of its vcpus has run yet"]
        # Another container's file, one that others wrote, a damaged one, none.
        file.write_text(config(ROUTER))
        assert f"it is of the cgroup '{SLICE}:cri-containerd:{ROUTER}'" in why()
        file.write_text(config(OTHER, pod="virt-launcher-../edge-x7k2p"))
        assert "does not tell its machine's name" in why()
        file.write_text("{")
        assert f"{file}: " in why()
        file.write_text(config(OTHER))
        file.chmod(0o666)
        assert f"others than root may write {file}" in why()
        file.chmod(0o644)
        labhelp.sh("chown", "nobody", str(STATE / OTHER))
        assert f"{STATE / OTHER} belongs to user " in why()
        labhelp.sh("chown", "root", str(STATE / OTHER))
        file.unlink()
        assert f"{file}: there is no such file on this host" in why()
        # A cgroup that is not root's, whatever its name.
        file.write_text(config(OTHER))
        scope = next(TREE.rglob(f"cri-containerd-{OTHER}.scope"))
        labhelp.sh("chown", "nobody", str(scope))
        assert f"it is user {USER}'s, and no policy" in why()
        labhelp.sh("chown", "root", str(scope))
        # Two of one name, which the tenant of that namespace can bring about.
        refusal, *_ = refusals(POLICY)
        assert refusal["guest"] == REF
        assert "2 processes run in pods of this machine" in refusal["reason"]
    finally:
        end(OTHER)
        labhelp.wait_for(lambda: len(hoststate.qemus()) == 1, "the other is gone")
        file.unlink(missing_ok=True)
    assert refusals(POLICY) == []
