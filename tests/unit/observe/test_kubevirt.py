"""Guests of KubeVirt: QEMUs in pods, which root's files identify, and pretenders beside them."""

from __future__ import annotations

import json

import pytest
import recorded_hosts
from hosttree import HostTree

from vsrtune.doctor import guest_checks
from vsrtune.doctor.model import Case, Facts
from vsrtune.host.filesystem import FileStat
from vsrtune.host.kubevirt import essential
from vsrtune.host.procfs import KVM
from vsrtune.host.recorded import RecordedRoot
from vsrtune.model.guest import Guest, Role
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import ThreadAffinity
from vsrtune.observe.observer import Observer
from vsrtune.observe.recording import RecordingRoot, prune
from vsrtune.plan.planner import plan
from vsrtune.plan.starter_policy import policy_name, start
from vsrtune.policy.matching import qemu_filter
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

NOBODY = 65534
POD = "0f6c2d1e-7a3b-4c5d-8e9f-0123456789ab"
POD_ = POD.replace("-", "_")
ONE, OTHER = "5a" * 32, "c3" * 32
SLICE = f"kubepods-pod{POD_}.slice"
PLACE = f"/kubepods.slice/{SLICE}/cri-containerd-{ONE}.scope"
BURSTABLE = f"kubepods-burstable-pod{POD_}.slice"
CONTAINERD = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/{}/config.json"
CRIO = "/run/containers/storage/overlay-containers/{}/userdata/config.json"
FILE = CONTAINERD.format(ONE)
LAUNCHER = "virt-launcher-edge-x7k2p"
TEXT = """\
guest: kubevirt:routers/edge
cpus: {{irq: 0, vcpu: {}, vhost: auto}}
scheduler: {{vcpu: {{class: rr, priority: 10}}}}
profile: none
"""
POLICY = parse(TEXT.format("auto"), "p.yaml")


def config(
    cgroup: str, namespace: str = "routers", pod: str = LAUNCHER, name: str = "compute"
) -> str:
    words = {"sandbox-namespace": namespace, "sandbox-name": pod, "container-name": name}
    annotations = {f"io.kubernetes.cri.{key}": value for key, value in words.items()}
    linux = {"cgroupsPath": cgroup}
    env = {"env": ["TOKEN=secret"]}
    return json.dumps({"process": env, "annotations": annotations, "linux": linux})


def in_crio(cgroup: str) -> str:
    words = {"pod.namespace": "routers", "pod.name": LAUNCHER, "container.name": "compute"}
    annotations = {f"io.kubernetes.{key}": value for key, value in words.items()}
    return json.dumps({"annotations": annotations, "linux": {"cgroupsPath": cgroup}})


def started(tree: HostTree, pid: int, place: str, *, uid: int = 107) -> None:
    """A QEMU as virt-launcher's libvirt starts it, with two vcpus and a worker."""
    tree.homes[pid] = place
    tree.qemu(
        pid, "-name", "guest=routers_edge,debug-threads=on", "-object", "secret,id=masterKey0",
        "-smp", "2,maxcpus=4", "-netdev", "tap,fd=12,vhost=on,vhostfd=13,id=hostua",
        "-device", "virtio-net-pci,netdev=hostua,mac=02:00:00:00:00:01", uid=uid,
    )  # fmt: skip
    tree.homes[pid] = place
    tree.links[f"/proc/{pid}/exe"] = "/usr/libexec/qemu-kvm"
    tree.thread(pid, pid, "qemu-kvm", allowed="1-3", cgroup=place, uid=uid)
    # The second calls itself a vcpu; the third is one, by KVM.
    names = (f"vhost-{pid}", "CPU 1/KVM", "worker", "CPU 0/KVM", "IO iothread1")
    for tid, name in enumerate(names, pid + 1):
        tree.thread(pid, tid, name, start=100 + tid, allowed="1-3", cgroup=place, uid=uid)
    tree.fd(pid, 12, "/dev/net/tun", "pos:\t0\niff:\ttap0\n").fd(pid, 13, "/dev/vhost-net")
    # KVM's own numbers are those of two sockets with three cores each.
    for number, tid in ((0, pid + 4), (4, pid + 3)):
        tree.file(f"{KVM}/{pid}-15/vcpu{number}/pid", f"{tid}\n")
    tree.file(f"{KVM}/{pid}-15/exits", "1\n").file(f"{KVM}/1{pid}-15/vcpu0/pid", f"{pid + 2}\n")


@pytest.fixture
def tree() -> HostTree:
    """A node with one such guest, and a device that has the name of one of its pod's."""
    tree = HostTree().host()
    tree.device("tap0", 7, has="tun_flags")
    started(tree, 50, PLACE)
    tree.file(f"/sys/fs/cgroup{PLACE}/cpuset.cpus", "1-3\n")
    tree.file(f"/sys/fs/cgroup{PLACE}/cpuset.cpus.effective", "1-3\n")
    return tree.file(FILE, config(f"{SLICE}:cri-containerd:{ONE}"))


def observed(tree: HostTree, *policies: Policy) -> Snapshot:
    return Observer(tree.root(), None, qemu_filter=lambda: qemu_filter(policies)).observe()


def only(snapshot: Snapshot) -> Guest:
    (guest,) = snapshot.guests
    return guest


def why(tree: HostTree, *policies: Policy) -> str:
    """Why its only process is not believed."""
    snapshot = observed(tree, POLICY, *policies)
    assert snapshot.guests == ()
    (stranger,) = snapshot.strangers
    return stranger.why


def planned(tree: HostTree, text: str) -> Plan:
    return plan(observed(tree), [parse(text, "p.yaml")])


def tids(guest: Guest, role: Role) -> list[int]:
    return [t.key.tid for t in guest.by_role(role)]


def test_threads_have_the_roles_that_the_kernel_knows(tree: HostTree) -> None:
    guest = only(observed(tree))
    assert (guest.ref, guest.pid, guest.uid, guest.problems) == ("kubevirt:routers/edge", 50, 0, ())
    assert [(t.key.tid, t.index) for t in guest.by_role(Role.VCPU)] == [(54, 0), (53, 1)]
    assert (tids(guest, Role.EMULATOR), tids(guest, Role.VHOST)) == ([50], [51])
    assert (tids(guest, Role.WORKER), tids(guest, Role.IOTHREAD)) == ([52, 55], [])
    assert guest.interfaces == ()
    (nic,) = guest.other_nics
    assert nic.kind == "pod"
    assert "network namespace" in nic.why
    assert policy_name(guest) == '"kubevirt:routers/edge"'


def test_its_own_cpus(tree: HostTree) -> None:
    made = planned(tree, TEXT.format("auto"))
    assert made.refusals == ()
    cpus = {
        a.target.thread.tid: a.after for a in made.actions if isinstance(a.target, ThreadAffinity)
    }
    assert {tid: str(mask) for tid, mask in cpus.items()}.keys() == {51, 53, 54}
    assert all(str(mask) in ("1", "2", "3") for mask in cpus.values())
    refusals = planned(tree, TEXT.format("0").replace("irq: 0", "irq: 2")).refusals
    assert [r.reason for r in refusals] == [
        f"cpus.vcpu: the cgroup of vcpu {number} allows CPUs 1-3 only" for number in (0, 1)
    ]
    assert {r.hint for r in refusals} == {"choose among them; the kubelet gives a pod its CPUs"}


def test_a_realtime_thread_keeps_off_interrupts_that_nobody_sees(tree: HostTree) -> None:
    (refusal,) = planned(tree, "guest: kubevirt:routers/edge\n").refusals
    assert refusal.reason.startswith("cpus.irq: which CPUs serve the interrupts of its pod's NICs")
    snapshot = observed(tree)
    text = start(snapshot, only(snapshot)).text
    assert 'guest: "kubevirt:routers/edge"' in text
    assert "class: batch" in text


REALTIME = "guest: kubevirt:routers/edge\ncpus: {irq: 0}\n"


@pytest.mark.parametrize("what", ["no list", "burstable", "batch", "vhost only"])
def test_a_realtime_thread_keeps_off_the_cpus_of_other_pods(tree: HostTree, what: str) -> None:
    """Only a container of the class Guaranteed has CPUs of its own, and then in its own list."""
    assert planned(tree, REALTIME).refusals == ()
    text = REALTIME
    if what == "burstable":
        place = f"/kubepods.slice/kubepods-burstable.slice/{BURSTABLE}/cri-containerd-{ONE}.scope"
        started(tree, 50, place)
        tree.file(f"/sys/fs/cgroup{place}/cpuset.cpus", "1-3\n")
        tree.file(f"/sys/fs/cgroup{place}/cpuset.cpus.effective", "1-3\n")
        tree.file(FILE, config(f"{BURSTABLE}:cri-containerd:{ONE}"))
    else:
        tree.file(f"/sys/fs/cgroup{PLACE}/cpuset.cpus", "\n")
    if what == "batch":
        text += "scheduler: {vcpu: {class: batch}, vhost: {class: batch}}\n"
        assert planned(tree, text).refusals == ()
        return
    if what == "vhost only":
        text += "scheduler: {vcpu: {class: batch}}\n"
    (refusal,) = planned(tree, text).refusals
    key = "vhost" if what == "vhost only" else "vcpu"
    assert refusal.reason == (
        f"scheduler.{key}: other pods may run on the CPUs of its pod, and class rr would starve them"
    )
    assert "dedicatedCpuPlacement" in refusal.hint
    assert planned(tree, text).actions == ()


PLACES = [
    (f"/kubepods.slice/kubepods-pod{POD_}.slice/crio-{ONE}.scope/container/housekeeping",
     CRIO, in_crio(f"kubepods-pod{POD_}.slice:crio:{ONE}")),
    (f"/kubepods.slice/kubepods-burstable.slice/{BURSTABLE}/cri-containerd-{ONE}.scope",
     CONTAINERD, config(f"{BURSTABLE}:cri-containerd:{ONE}")),
    (f"/kubepods/besteffort/pod{POD}/{ONE}", CONTAINERD, config(f"/kubepods/besteffort/pod{POD}/{ONE}")),
    (f"/kubepods/pod{POD}/crio-{ONE}", CRIO, in_crio(f"/kubepods/pod{POD}/crio-{ONE}")),
]  # fmt: skip


@pytest.mark.parametrize(("place", "file", "text"), PLACES, ids=[p for p, _, _ in PLACES])
def test_the_other_runtime_and_the_other_driver(place: str, file: str, text: str) -> None:
    tree = HostTree().host()
    started(tree, 50, place)
    tree.file(file.format(ONE), text)
    assert only(observed(tree)).ref == "kubevirt:routers/edge"


@pytest.mark.parametrize(
    "place",
    [
        f"/user.slice/user-1000.slice/user@1000.service{PLACE}", f"/system.slice{PLACE}",
        PLACE.replace("kubepods.slice", "kubelet-kubepods.slice"), PLACE.replace(ONE, "5a"),
        PLACE.removesuffix(f"/cri-containerd-{ONE}.scope"), PLACE.replace("scope", "service"),
    ],
)  # fmt: skip
def test_a_cgroup_that_imitates_the_path(tree: HostTree, place: str) -> None:
    started(tree, 50, place)
    assert why(tree) == "it is user 107's, and no policy for plain QEMU has `user: 107`"


def test_a_cgroup_that_is_not_roots(tree: HostTree) -> None:
    tree.stats[f"/sys/fs/cgroup{PLACE}"] = FileStat(NOBODY, 0o040755, 1, 9)
    assert why(tree) == "it is user 107's, and no policy for plain QEMU has `user: 107`"


GONE = f"{FILE}: there is no such file on this host"
FILES = [
    (config(f"{SLICE}:cri-containerd:{OTHER}"), f"it is of the cgroup '{SLICE}:cri-containerd:{OTHER}'"),
    (config(f"{SLICE}:crio:{ONE}"), f"it is of the cgroup '{SLICE}:crio:{ONE}'"),
    ("{", "Expecting property name"),
    ("[" * 99 + "]" * 99, "nested deeper than 64 levels"),
    ('{"annotations": [], "linux": {}}', "it has no annotations or no cgroup"),
    (config(f"{SLICE}:cri-containerd:{ONE}") + " " * (4 << 20), "larger than 4 MiB"),
    *(
        (config(f"{SLICE}:cri-containerd:{ONE}", pod=pod), f"pod 'routers/{pod}' does not tell its")
        for pod in (
            "virt-launcher-x7k2p", "virt-launcher-a/b-x7k2p", "virt-launcher-A-x7k2p",
            "virt-launcher-*-x7k2p", f"virt-launcher-{'a' * 44}x7k2p", f"virt-launcher-{'a' * 43}-x7k2p",
        )
    ),
    (config(f"{SLICE}:cri-containerd:{ONE}", "x/../y"), f"pod 'x/../y/{LAUNCHER}' does not tell its"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "told"), FILES, ids=[told for _, told in FILES])
def test_a_file_that_is_not_its_own_or_damaged(tree: HostTree, text: str, told: str) -> None:
    tree.file(FILE, text)
    said = why(tree)
    assert said.startswith(f"it runs in a pod whose container is not known: {FILE}: ")
    assert told in said


@pytest.mark.parametrize(
    ("path", "found", "told"),
    [
        (FILE, FileStat(NOBODY, 0o100644, 1, 9), f"{FILE} belongs to user 65534"),
        (FILE, FileStat(0, 0o100666, 1, 9), f"others than root may write {FILE} (mode 0666)"),
        (FILE, FileStat(0, 0o120777, 1, 9), f"{FILE} is no regular file"),
        ("/run", FileStat(0, 0o040777, 1, 9), "others than root may write /run (mode 0777)"),
        (FILE, None, GONE),
    ],
)
def test_a_file_that_is_not_roots(
    tree: HostTree, path: str, found: FileStat | None, told: str
) -> None:
    if found is None:
        tree.remove(path).errors[path] = "ENOENT"
    else:
        tree.stats[path] = found
    assert why(tree) == f"it runs in a pod whose container is not known: {told}"


@pytest.mark.parametrize("change", [{"name": "guest-console-log"}, {"pod": "web-x7k2p"}])
def test_a_container_of_somebody_elses(tree: HostTree, change: dict[str, str]) -> None:
    tree.file(FILE, config(f"{SLICE}:cri-containerd:{ONE}", **change))
    assert why(tree) == "it is user 107's, and no policy for plain QEMU has `user: 107`"


def test_an_executable_that_is_not_roots(tree: HostTree) -> None:
    tree.stats["/proc/50/exe"] = FileStat(107, 0o100755, 1, 9)
    assert why(tree) == "/usr/libexec/qemu-kvm belongs to user 107"


def test_a_tenant_has_only_the_names_of_its_namespace(tree: HostTree) -> None:
    started(tree, 70, PLACE.replace(ONE, OTHER))
    file = CONTAINERD.format(OTHER)
    tree.file(file, config(f"{SLICE}:cri-containerd:{OTHER}", "tenant"))
    assert [g.ref for g in observed(tree).guests] == [
        "kubevirt:routers/edge",
        "kubevirt:tenant/edge",
    ]
    # In the namespace itself it takes the settings away from both.
    tree.file(file, config(f"{SLICE}:cri-containerd:{OTHER}"))
    made = planned(tree, TEXT.format("auto"))
    assert made.actions == ()
    assert {(r.reason, r.hint) for r in made.refusals} == {
        (
            "2 processes run in pods of this machine: 50 and 70; none of them is tuned",
            "wait until the older pod has ended (kubectl get pods)",
        )
    }


def test_no_policy_of_another_kind_reaches_it(tree: HostTree) -> None:
    texts = ("guest: '*'\n", "guest: 'qemu:*'\nuser: 107\n", "guest: 'proxmox:*'\n")
    policies = [parse(text, f"{number}.yaml") for number, text in enumerate(texts)]
    assert plan(observed(tree, *policies), policies).actions == ()
    (note,) = plan(observed(HostTree().host()), [POLICY]).notes
    assert "no QEMU runs in such a pod's container compute" in note


@pytest.mark.parametrize("tid", [0, 50, 170])
def test_a_vcpu_that_no_thread_has_run_or_that_is_another_processs(
    tree: HostTree, tid: int
) -> None:
    tree.file(f"{KVM}/50-15/vcpu0/pid", f"{tid}\n")
    guest = only(observed(tree))
    assert [(t.key.tid, t.index) for t in guest.by_role(Role.VCPU)] == [(53, 1)]


def test_a_second_machine_under_its_number(tree: HostTree) -> None:
    """As of an earlier process, whose descriptor somebody holds."""
    tree.file(f"{KVM}/50-99/vcpu0/pid", "54\n")
    guest = only(observed(tree))
    assert guest.by_role(Role.VCPU) == ()
    assert "KVM knows 2 machines of process 50" in guest.problems[0]


def test_a_kernel_that_tells_of_no_vcpu(tree: HostTree) -> None:
    for number in (0, 4):
        tree.file(f"{KVM}/50-15/vcpu{number}/pid", "0\n")
    (problem,) = only(observed(tree)).problems
    assert problem == "vcpu threads are not known: none of its vcpus has run yet"
    for number in (0, 4):
        tree.remove(f"{KVM}/50-15/vcpu{number}/pid").file(f"{KVM}/50-15/vcpu{number}/exits", "")
    (problem,) = only(observed(tree)).problems
    assert problem.endswith("they need debugfs and kernel 6.0")
    (refusal,) = planned(tree, TEXT.format("auto")).refusals
    assert "no vcpu thread of this guest was found" in refusal.reason


def test_a_process_that_took_the_number_of_another(tree: HostTree) -> None:
    """Between the decision and the reading of its threads."""
    stat = tree.text("/proc/50/task/50/stat")
    tree.file("/proc/50/task/50/stat", stat.replace(" 100 ", " 300 "))
    assert observed(tree).guests == ()


def test_doctor_asks_for_no_trace_of_a_pod(tree: HostTree) -> None:
    case = Case(observed(tree), Facts())
    assert list(guest_checks.worker_mapping(case)) == []
    (told,) = guest_checks.vhost(case)
    assert "network namespace" in told.what


def test_a_recording_shows_the_guest_and_nothing_else_of_its_container(tree: HostTree) -> None:
    assert "TOKEN" in tree.text(FILE)
    root = RecordingRoot(tree.root())
    snapshot = Observer(root, None).observe()
    prune(root.answers)
    assert "TOKEN" not in root.answers.texts[FILE]
    assert Observer(RecordedRoot(root.answers), None).observe() == snapshot
    assert essential("{") == ""


def test_the_recorded_host() -> None:
    """A lab's, where no thread has a name that tells."""
    guest = only(recorded_hosts.shown(recorded_hosts.file("trixie-kubevirt")))
    assert (guest.ref, guest.interfaces, guest.problems) == ("kubevirt:routers/edge", (), ())
    assert [len(guest.by_role(role)) for role in (Role.VCPU, Role.VHOST)] == [1, 2]
    assert "qemu-system-x86" in {t.name for t in guest.by_role(Role.VCPU)}
