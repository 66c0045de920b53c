"""Runs the container of vsrtune's DaemonSet. crun gets what kubelet and containerd make of the
manifest, and nothing else: a key of the manifest that is not read here is an error.

The files and cgroups are where they are on a node: the bundle below /run/containerd, the scope in a
slice of the pod below kubepods.slice, the ConfigMap in a directory as the kubelet's AtomicWriter
fills it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import labhelp
from ruamel.yaml import YAML

TAR = Path("/run/lab/container.tar")
DEBS = Path("/run/lab/container-debs")
BASE = Path("/run/lab/container-base")
PLACE = Path("/var/lib/lab-container")
ROOT = PLACE / "root"
BUNDLES = Path("/run/containerd/io.containerd.runtime.v2.task/k8s.io")
POD = "11111111_2222_3333_4444_555555555555"
SLICE = f"kubepods-burstable-pod{POD}.slice"
NETNS = "vsrtune-pod"
ADDRESS = "10.99.0.2"
# What containerd hides from a container that is not privileged, and what it makes read-only.
MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/sys/firmware",
    "/sys/devices/virtual/powercap", "/proc/scsi",
)  # fmt: skip
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
# The mounts that a container has without volumes. A volume takes the place of one.
MOUNTS = {
    "/proc": ("proc", "proc", "nosuid", "noexec", "nodev"),
    "/dev": ("tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
    "/dev/pts": ("devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666"),
    "/sys": ("sysfs", "sysfs", "nosuid", "noexec", "nodev", "ro"),
    "/sys/fs/cgroup": ("cgroup", "cgroup", "nosuid", "noexec", "nodev", "relatime", "ro"),
}

Json = dict[str, Any]


def prepare() -> Json:
    """Unpack the image and install what runs it; the image's own configuration."""
    crun = [str(deb) for deb in DEBS.iterdir() if not deb.name.startswith("golang-")]
    labhelp.sh("dpkg", "--install", *crun)
    layout = PLACE / "layout"
    layout.mkdir(parents=True)
    labhelp.sh("tar", "-xf", str(TAR), "-C", str(layout))

    def blob(descriptor: Json) -> Path:
        kind, _, digest = descriptor["digest"].partition(":")
        path = layout / "blobs" / kind / digest
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
        return path

    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads(blob(entry).read_text())
    ROOT.mkdir()
    for layer in manifest["layers"]:
        labhelp.sh("tar", "-xzf", str(blob(layer)), "-C", str(ROOT))
    found: Json = json.loads(blob(manifest["config"]).read_text())["config"]
    shutil.rmtree(layout)
    return found


def manifest() -> Json:
    """The DaemonSet of the base."""
    text = (BASE / "daemonset.yaml").read_text()
    found: Json = YAML(typ="safe", pure=True).load(text)
    return found


def seccomp(capabilities: list[str]) -> Json:
    """RuntimeDefault, as CRI-O has it: the profile of the package containers-common for these
    capabilities. containerd's own is code, and made after the same model."""
    (deb,) = DEBS.glob("golang-github-containers-common_*.deb")
    name = "./usr/share/containers/seccomp.json"
    text = labhelp.sh(
        "sh", "-c", 'dpkg-deb --fsys-tarfile "$1" | tar -xO "$2"', "sh", str(deb), name
    )
    profile = json.loads(text.stdout)

    def meant(rule: Json) -> bool:
        wanted, unwanted = (rule.get(key) or {} for key in ("includes", "excludes"))
        caps = set(wanted.get("caps") or ()), set(unwanted.get("caps") or ())
        arches = set(wanted.get("arches") or ["amd64"]), set(unwanted.get("arches") or ())
        held = set(capabilities)
        return (
            caps[0] <= held and not caps[1] & held
            and "amd64" in arches[0] and "amd64" not in arches[1]
        )  # fmt: skip

    keys = ("names", "action", "args", "errnoRet")
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": [
            {key: rule[key] for key in keys if rule.get(key)}
            for rule in profile["syscalls"]
            if meant(rule)
        ],
    }


def config(daemonset: Json, image: Json, volumes: dict[str, Path], scope: str) -> Json:
    """config.json of OCI for the container. ``volumes`` are the directories of those that are no
    host paths."""
    pod = copy.deepcopy(daemonset["spec"]["template"]["spec"])
    for key in (
        # What says where and when, and no privilege.
        "affinity", "tolerations", "terminationGracePeriodSeconds", "enableServiceLinks",
        "serviceAccountName",
    ):  # fmt: skip
        del pod[key]
    assert pod.pop("automountServiceAccountToken") is False
    # The kubelet's score for this class of pods.
    assert pod.pop("priorityClassName") == "system-node-critical"
    (container,) = pod.pop("containers")
    hosts_processes = pod.pop("hostPID", False)
    sources = {v.pop("name"): v for v in pod.pop("volumes")}
    assert pod == {}, f"not understood: {pod}"

    security = container.pop("securityContext")
    resources = container.pop("resources")
    environment = {item["name"]: item["value"] for item in container.pop("env")}
    capabilities = security.pop("capabilities")
    assert capabilities.pop("drop") == ["ALL"]
    names = [f"CAP_{name}" for name in capabilities.pop("add", [])]
    assert capabilities == {}
    assert security.pop("privileged") is False
    assert security.pop("seccompProfile") == {"type": "RuntimeDefault"}
    assert security.pop("appArmorProfile") == {"type": "Unconfined"}
    user = {"uid": security.pop("runAsUser"), "gid": security.pop("runAsGroup")}
    process = {
        "terminal": False,
        "cwd": image.get("WorkingDir") or "/",
        "user": user,
        "args": [*image["Entrypoint"], *container.pop("args")],
        "env": [*image["Env"], "HOSTNAME=node", *(f"{k}={v}" for k, v in environment.items())],
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), names),
        "noNewPrivileges": not security.pop("allowPrivilegeEscalation"),
        "oomScoreAdj": -997,
    }
    mounts = {
        place: {"destination": place, "type": kind, "source": source, "options": list(options)}
        for place, (kind, source, *options) in MOUNTS.items()
    }
    for mount in container.pop("volumeMounts"):
        volume = sources.pop(mount.pop("name"))
        place = mount.pop("mountPath")
        options = ["rbind", "rprivate"]
        if mount.pop("readOnly", False):
            options.append("rro" if mount.pop("recursiveReadOnly", "") else "ro")
        assert mount == {}, f"not understood: {mount}"
        source = _source(volume, volumes)
        mounts[place] = {"destination": place, "type": "bind", "source": source, "options": options}
    assert sources == {}, f"volumes that nothing mounts: {sources}"
    read_only = security.pop("readOnlyRootFilesystem")
    for key in ("name", "image", "ports"):
        del container[key]
    assert (container, security) == ({}, {}), f"not understood: {container} {security}"

    names_of_spaces = ["ipc", "uts", "mount", "cgroup", *([] if hosts_processes else ["pid"])]
    spaces: list[Json] = [{"type": name} for name in names_of_spaces]
    spaces.append({"type": "network", "path": f"/run/netns/{NETNS}"})
    limit = resources["limits"]["memory"]
    assert limit.endswith("Mi")
    prefix = "io.kubernetes.cri."
    return {
        "ociVersion": "1.0.2",
        "process": process,
        "root": {"path": "rootfs", "readonly": read_only},
        "hostname": "node",
        "mounts": sorted(mounts.values(), key=lambda m: str(m["destination"])),
        "annotations": {
            f"{prefix}container-type": "container",
            f"{prefix}container-name": "vsrtune",
            f"{prefix}sandbox-namespace": "vsrtune",
            f"{prefix}sandbox-name": "vsrtune-x7k2p",
        },
        "linux": {
            "cgroupsPath": f"{SLICE}:cri-containerd:{scope}",
            "namespaces": spaces,
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
            "resources": {"memory": {"limit": int(limit.removesuffix("Mi")) << 20}},
            "seccomp": seccomp(names),
        },
    }


def _source(volume: Json, volumes: dict[str, Path]) -> str:
    if "hostPath" not in volume:
        ((_, reference),) = volume.items()
        return str(volumes[reference["name"]])
    path = Path(volume["hostPath"]["path"])
    match volume["hostPath"]["type"]:
        case "Directory":
            assert path.is_dir(), f"the kubelet would wait for {path}"
        case "DirectoryOrCreate":
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
        case other:
            raise AssertionError(f"not understood: {other}")
    return str(path)


def write_config_map(volume: Path, data: dict[str, str]) -> None:
    """Project a ConfigMap as the kubelet does: an own directory for each version, and one rename of
    a link. The directory of the volume is an emptyDir's, so anybody could write it."""
    volume.mkdir(exist_ok=True)
    volume.chmod(0o777)
    link = volume / "..data"
    old = volume / link.readlink() if link.is_symlink() else None
    fresh = Path(tempfile.mkdtemp(prefix="..2026_11_26_", dir=volume))
    fresh.chmod(0o755)
    for name, text in data.items():
        (fresh / name).write_text(text)
        (fresh / name).chmod(0o644)
        if not (volume / name).is_symlink():
            (volume / name).symlink_to(f"..data/{name}")
    new = volume / "..data_tmp"
    new.symlink_to(fresh.name)
    new.rename(link)
    for path in volume.iterdir():
        if not path.name.startswith("..") and path.name not in data:
            path.unlink()
    if old is not None:
        shutil.rmtree(old)


class Container:
    """One container of the DaemonSet, from its start on."""

    def __init__(self, number: int, spec: Json) -> None:
        self.id = f"{number:064x}"
        self._bundle = BUNDLES / self.id
        rootfs = self._bundle / "rootfs"
        rootfs.mkdir(parents=True)
        self._layers = PLACE / self.id
        for name in ("upper", "work"):
            (self._layers / name).mkdir(parents=True)
        layers = f"lowerdir={ROOT},upperdir={self._layers}/upper,workdir={self._layers}/work"
        labhelp.sh("mount", "-t", "overlay", "-o", layers, "overlay", str(rootfs))
        self.spec = spec
        (self._bundle / "config.json").write_text(json.dumps(spec))
        self._log = (self._layers / "log").open("w")
        self._process = subprocess.Popen(
            ["crun", "--systemd-cgroup", "run", "--bundle", str(self._bundle), self.id],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def log(self) -> str:
        return (self._layers / "log").read_text()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self, signal: str) -> None:
        """Send its first process a signal, as the kubelet has the runtime do."""
        labhelp.sh("crun", "kill", self.id, signal)

    def ended(self, seconds: float = 120) -> int:
        """Wait for its end; the exit status of its first process, or 128 and a signal."""
        return self._process.wait(seconds)

    def exec(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``kubectl exec`` of vsrtune."""
        process = {**self.spec["process"], "args": ["/usr/bin/vsrtune", *words]}
        file = self._layers / "process.json"
        file.write_text(json.dumps(process))
        return labhelp.sh("crun", "exec", "--process", str(file), self.id, check=check)

    def remove(self) -> None:
        """What the runtime does when the container is deleted; ends what still runs."""
        if self._process.poll() is None:
            labhelp.sh("crun", "kill", self.id, "KILL", check=False)
            self._process.wait(60)
        self._log.close()
        labhelp.sh("crun", "delete", "--force", self.id, check=False)
        labhelp.sh("umount", str(self._bundle / "rootfs"))
        shutil.rmtree(self._bundle)
        shutil.rmtree(self._layers)
