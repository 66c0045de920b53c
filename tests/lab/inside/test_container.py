# ruff: noqa: F811 (router is a fixture)
"""The image of vsrtune's DaemonSet beside the router of test_kubevirt: started by crun with what the
manifest lists, and without each part of it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import hoststate
import labhelp
import podhelp
import pytest
from labhelp import LabGuest
from launcherhelp import CPUS, REF, USER, vcpus
from podhelp import Container, Json
from test_kubevirt import POLICY, router  # noqa: F401

pytestmark = pytest.mark.skipif(not podhelp.TAR.exists(), reason="not a lab with --container")

VOLUME = podhelp.PLACE / "policies"
Start = Callable[..., Container]


@pytest.fixture(scope="module")
def image() -> Iterator[Json]:
    """The image, unpacked, and the pod's network."""
    found = podhelp.prepare()
    labhelp.sh("ip", "netns", "add", podhelp.NETNS)
    inside = ("ip", "-n", podhelp.NETNS)
    labhelp.sh(*inside, "link", "set", "lo", "up")
    labhelp.sh(*inside, "address", "add", f"{podhelp.ADDRESS}/32", "dev", "lo")
    yield found
    labhelp.sh("ip", "netns", "del", podhelp.NETNS)
    shutil.rmtree(podhelp.PLACE)


@pytest.fixture
def start(image: Json, router: LabGuest) -> Iterator[Start]:
    """Starts containers of the DaemonSet, after ``change`` of it, with other ``words`` for vsrtune;
    they end with the test."""
    containers: list[Container] = []

    def started(*words: str, change: Callable[[Json], None] | None = None) -> Container:
        daemonset = copy.deepcopy(podhelp.manifest())
        if words:
            container_of(daemonset)["args"] = list(words)
        if change is not None:
            change(daemonset)
        number = 0xA0 + len(containers)
        volumes = {"vsrtune-policies": VOLUME}
        spec = podhelp.config(daemonset, image, volumes, f"{number:064x}")
        containers.append(Container(number, spec))
        return containers[-1]

    podhelp.write_config_map(VOLUME, {"edge.yaml": POLICY})
    yield started
    for container in containers:
        print(f"container {container.id[-2:]}:\n{container.log}")
        container.remove()


def container_of(daemonset: Json) -> Any:
    return daemonset["spec"]["template"]["spec"]["containers"][0]


def threads_of(guest: LabGuest) -> list[int]:
    return [*vcpus(guest), *guest.workers()]


def tuned(guest: LabGuest, priority: int = labhelp.PRIORITY) -> bool:
    wanted = f"policy=2 flags=1 nice=0 priority={priority} "
    return all(
        len(labhelp.mask(tid)) == 1 and hoststate.sched(tid).startswith(wanted)
        for tid in threads_of(guest)
    )


def untuned(guest: LabGuest) -> bool:
    return all(
        labhelp.mask(tid) == labhelp.cpu_list(CPUS)
        and hoststate.sched(tid).startswith("policy=0 flags=0 nice=0 priority=0 ")
        for tid in threads_of(guest)
    )


def wait_for(container: Container, condition: Callable[[], bool], what: str) -> None:
    def told() -> bool:
        assert container.running, f"it ended before: {what}\n{container.log}"
        return condition()

    try:
        labhelp.wait_for(told, what)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{container.log}") from None


def test_it_tunes_from_a_pod_follows_its_config_map_and_its_stop_restores(
    router: LabGuest,
    restored: None,
    irq_cpus: set[int],
    start: Start,
) -> None:
    container = start()
    wait_for(container, lambda: tuned(router), "the guest is tuned")
    threads = threads_of(router)
    for tid in threads:
        assert labhelp.mask(tid) <= labhelp.cpu_list(CPUS)
    labhelp.forwards(router, threads, irq_cpus)
    # kubectl exec
    assert "\nno drift" in f"\n{container.exec('verify').stdout}"
    shown = json.loads(container.exec("show", "--json").stdout)
    (guest,) = (g for g in shown["guests"] if g["source"] == "kubevirt")
    assert (f"kubevirt:{guest['name']}", guest["pid"], guest["problems"]) == (REF, router.pid, [])
    # The cgroup namespace is the container's own, and the cgroups are the host's.
    paths = {f"/{t['cgroup']}" for t in guest["threads"]}
    assert paths == {hoststate.cgroup(tid) for tid in hoststate.threads(router.pid)}
    # Prometheus, at the pod's address
    scraped = labhelp.sh(
        "ip", "netns", "exec", podhelp.NETNS,
        "curl", "-sS", "--max-time", "30", f"http://{podhelp.ADDRESS}:9178/metrics",
    ).stdout  # fmt: skip
    assert f'domain="{REF}"' in scraped

    podhelp.write_config_map(VOLUME, {"edge.yaml": POLICY.replace("priority: 10", "priority: 20")})
    wait_for(container, lambda: tuned(router, 20), "the daemon follows the ConfigMap")
    podhelp.write_config_map(VOLUME, {"edge.yaml": "guest: [", "other.yaml": ""})
    wait_for(container, lambda: "edge.yaml:1" in container.log, "a wrong policy is reported")
    assert tuned(router, 20)
    podhelp.write_config_map(VOLUME, {})
    wait_for(container, lambda: untuned(router), "no policy, no setting")
    podhelp.write_config_map(VOLUME, {"edge.yaml": POLICY})
    wait_for(container, lambda: tuned(router), "the guest is tuned again")

    container.kill("TERM")
    assert container.ended() == 0, container.log
    assert untuned(router)


def test_another_container_takes_over_after_a_kill(
    router: LabGuest,
    restored: None,
    start: Start,
) -> None:
    first = start()
    wait_for(first, lambda: tuned(router), "the guest is tuned")
    first.kill("KILL")
    assert first.ended() == 128 + 9
    assert tuned(router)
    # The kubelet starts the next one, which knows the originals by the journal of the first.
    second = start()
    wait_for(second, lambda: "ready: " in second.log, "the next one is ready")
    assert tuned(router)
    assert "no drift" in second.exec("verify").stdout
    second.kill("KILL")
    second.ended()
    # An operator who wants no daemon any more.
    undo = start("undo")
    assert undo.ended() == 0, undo.log
    assert untuned(router)


def test_the_default_profile_without_its_time_slice(
    router: LabGuest,
    restored: None,
    start: Start,
) -> None:
    """The profile sets ksoftirqd too, and asks for a slice in /proc/sys, which is read-only."""
    podhelp.write_config_map(VOLUME, {"edge.yaml": f'guest: "{REF}"\ncpus: {{irq: 0}}\n'})
    container = start()
    wait_for(container, lambda: "ready: " in container.log, "it is ready")
    assert tuned(router)
    for cpu in {cpu for tid in threads_of(router) for cpu in labhelp.mask(tid)}:
        softirq = hoststate.sched(labhelp.softirq_thread(cpu))
        assert softirq.startswith(f"policy=1 flags=1 nice=0 priority={labhelp.PRIORITY} ")
    assert "sysctl kernel.sched_rr_timeslice_ms=8 on the host" in container.exec("plan").stdout
    assert "no drift" in container.exec("verify").stdout
    container.kill("TERM")
    assert container.ended() == 0, container.log


def without_capability(name: str) -> Callable[[Json], None]:
    def change(daemonset: Json) -> None:
        container_of(daemonset)["securityContext"]["capabilities"]["add"].remove(name)

    return change


def without_volume(name: str) -> Callable[[Json], None]:
    def change(daemonset: Json) -> None:
        container = container_of(daemonset)
        pod = daemonset["spec"]["template"]["spec"]
        for holder, key in ((container, "volumeMounts"), (pod, "volumes")):
            holder[key] = [item for item in holder[key] if item["name"] != name]

    return change


def without_hosts_processes(daemonset: Json) -> None:
    daemonset["spec"]["template"]["spec"]["hostPID"] = False


# What is taken away, and what the daemon then says before it changes anything.
REFUSED = {
    "hostPID": (without_hosts_processes, "lacks hostPID: it sees only its own processes"),
    "cgroup": (without_volume("cgroup"), "lacks hostPath /sys/fs/cgroup"),
    "journal": (without_volume("journal"), "/var/lib/vsrtune/journal.jsonl"),
    "DAC_READ_SEARCH": (without_capability("DAC_READ_SEARCH"), "lacks capability DAC_READ_SEARCH"),
    "SYS_NICE": (without_capability("SYS_NICE"), "lacks capability SYS_NICE"),
    "SYS_PTRACE": (without_capability("SYS_PTRACE"), "lacks capability SYS_PTRACE"),
}
# And what a command that asks for nothing beforehand then says of the guest.
LOST = {
    "hostPID": (without_hosts_processes, ("plan",), "no running guest"),
    "cgroup": (without_volume("cgroup"), ("show",), f"it is user {USER}'s, and no policy"),
    "debugfs": (without_volume("debugfs"), ("plan",), "they need debugfs and kernel 6.0"),
    "containerd": (without_volume("containerd"), ("show",), "there is no such file on this host"),
    "DAC_READ_SEARCH": (
        without_capability("DAC_READ_SEARCH"),
        ("show",),
        "/fd: Permission denied",
    ),
    "SYS_PTRACE": (
        without_capability("SYS_PTRACE"),
        ("show",),
        "its executable is not ours to see",
    ),
    "SYS_NICE": (without_capability("SYS_NICE"), ("apply",), "run as root with CAP_SYS_NICE"),
}


def test_every_privilege_is_tried() -> None:
    daemonset = podhelp.manifest()
    pod = daemonset["spec"]["template"]["spec"]
    listed = set(container_of(daemonset)["securityContext"]["capabilities"]["add"])
    listed |= {volume["name"] for volume in pod["volumes"] if "hostPath" in volume}
    listed |= {key for key in pod if key.startswith("host")}
    assert listed == REFUSED.keys() | LOST.keys()


@pytest.mark.parametrize("missing", REFUSED)
def test_the_daemon_says_which_privilege_is_missing(
    router: LabGuest,
    restored: None,
    start: Start,
    missing: str,
) -> None:
    change, told = REFUSED[missing]
    container = start(change=change)
    assert container.ended() == 1, container.log
    assert told in container.log
    assert untuned(router)


@pytest.mark.parametrize("missing", LOST)
def test_what_is_lost_without_each_privilege(
    router: LabGuest,
    restored: None,
    start: Start,
    missing: str,
) -> None:
    change, words, told = LOST[missing]
    container = start(*words, change=change)
    container.ended()
    assert told in " ".join(container.log.split())
    assert untuned(router)
