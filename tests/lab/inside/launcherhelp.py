"""Runs the lab's router as KubeVirt's virt-launcher does, without Kubernetes: a QEMU of user 107 in the
cgroup that kubelet and containerd would make for a pod with CPUs of its own, in network, mount and pid namespaces of its own. Plays
kubelet, containerd and virt-launcher: makes the cgroup, the runtime's file and the taps.

    python3 -B launcherhelp.py start [TEXT] | stop

does so outside of the tests, and waits until the router's console has said TEXT."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import hoststate
import labhelp
from labhelp import LabGuest

USER = 107
POD = "0f6c2d1e-7a3b-4c5d-8e9f-0123456789ab"
TREE = Path("/sys/fs/cgroup/kubepods.slice")
SLICE = f"kubepods-pod{POD.replace('-', '_')}.slice"
STATE = Path("/run/containerd/io.containerd.runtime.v2.task/k8s.io")
ROUTER = "5a" * 32
REF = "kubevirt:routers/edge"
# Of the lab's three CPUs.
CPUS = "1-2"
PLACE = Path("/run/lab/pod")
CONSOLE = PLACE / "console"
# The executable has a path of the container's image, which the host has not.
LAUNCH = f"""
mount -t tmpfs -o mode=755 image /usr/libexec
install -m 755 /usr/bin/qemu-system-x86_64 /usr/libexec
exec setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs --bounding-set=-all \\
	/usr/libexec/qemu-system-x86_64 "$@"
"""


def config(scope: str, namespace: str = "routers", pod: str = "virt-launcher-edge-x7k2p") -> str:
    """The part of containerd's file that a runtime of OCI and vsrtune read."""
    prefix = "io.kubernetes.cri."
    annotations = {
        f"{prefix}container-type": "container",
        f"{prefix}container-name": "compute",
        f"{prefix}sandbox-namespace": namespace,
        f"{prefix}sandbox-name": pod,
        f"{prefix}sandbox-uid": POD,
    }
    linux = {"cgroupsPath": f"{SLICE}:cri-containerd:{scope}"}
    return json.dumps({"ociVersion": "1.1.0", "annotations": annotations, "linux": linux})


def run(container: str, *words: str) -> None:
    """Start a QEMU in a container's cgroup and the pod's namespaces. It outlives whoever calls."""
    with (PLACE / "log").open("a") as log:
        subprocess.Popen(
            [
                "systemd-run", "--quiet", "--scope", f"--slice={SLICE}",
                f"--unit=cri-containerd-{container}", "-p", f"AllowedCPUs={CPUS}",
                "ip", "netns", "exec", "pod", "unshare", "--mount", "--pid", "--fork",
                "sh", "-ec", LAUNCH, "sh", *words,
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def end(container: str) -> None:
    labhelp.sh("systemctl", "kill", "-s", "KILL", f"cri-containerd-{container}.scope", check=False)


def start(guest: LabGuest) -> None:
    """Take the router from libvirt and run it in a pod; wait until it forwards."""
    labhelp.stop_guest(guest)
    PLACE.mkdir(exist_ok=True)
    labhelp.sh("chown", str(USER), str(PLACE))
    labhelp.sh("chmod", "666", "/dev/kvm", "/dev/vhost-net")
    # Debian mounts it; the lab saves the time.
    if not Path("/sys/kernel/debug/kvm").exists():
        labhelp.sh("mount", "-t", "debugfs", "debugfs", "/sys/kernel/debug")
    (STATE / ROUTER).mkdir(parents=True)
    (STATE / ROUTER / "config.json").write_text(config(ROUTER))
    inside = ("ip", "-n", "pod")
    labhelp.sh("ip", "netns", "add", "pod")
    bridge = ("up", "type", "bridge", "forward_delay", "0")
    for nic in (0, 1):
        labhelp.sh("ip", "link", "add", f"cni{nic}", *bridge)
        labhelp.sh("ip", "link", "set", f"p{nic}", "master", f"cni{nic}")
        labhelp.sh(
            "ip", "link", "add", f"veth{nic}", "up", "master", f"cni{nic}", "type", "veth",
            "peer", "name", f"eth{nic}", "netns", "pod",
        )  # fmt: skip
        labhelp.sh(*inside, "link", "add", f"k6t-eth{nic}", *bridge)
        labhelp.sh(*inside, "tuntap", "add", f"tap{nic}", "mode", "tap", "user", str(USER))
        for port in (f"eth{nic}", f"tap{nic}"):
            labhelp.sh(*inside, "link", "set", port, "up", "master", f"k6t-eth{nic}")
    taps = [f"ifname=tap{nic},script=no,downscript=no" for nic in (0, 1)]
    # Without names of threads.
    words = labhelp.router_words(guest, guest.name, CONSOLE, taps)
    run(ROUTER, *words, "-qmp", f"unix:{PLACE}/qmp,server=on,wait=off")
    labhelp.sh("lab-wait-forward", guest.name)


def stop(guest: LabGuest) -> None:
    """End what ``start`` has made, as far as it came, and give the router back to libvirt."""
    end(ROUTER)
    labhelp.wait_for(lambda: not guest.runs, "the router is gone")
    for device in ("veth0", "veth1", "cni0", "cni1"):
        labhelp.sh("ip", "link", "del", device, check=False)
    labhelp.sh("ip", "netns", "del", "pod", check=False)
    shutil.rmtree(STATE / ROUTER, ignore_errors=True)
    labhelp.start_guest(guest)


def vcpus(guest: LabGuest) -> list[int]:
    """As QEMU itself says, which counts threads as its pid namespace does."""
    answer = labhelp.qmp(str(PLACE / "qmp"), "query-cpus-fast")
    inner = {cpu["thread-id"] for cpu in answer["return"]}
    every = [int(t.name) for t in Path(f"/proc/{guest.pid}/task").iterdir()]
    return [t for t in every if int(hoststate.status_field(t, "NSpid").split()[-1]) in inner]


def main() -> None:
    what, *texts = sys.argv[1:]
    router = labhelp.lab_guests()[0]
    if what == "stop":
        stop(router)
        return
    start(router)
    for text in texts:
        labhelp.wait_for(lambda: text in CONSOLE.read_text(errors="replace"), text, 200)  # noqa: B023


if __name__ == "__main__":
    main()
