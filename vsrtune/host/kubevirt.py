# SPDX-License-Identifier: GPL-2.0-or-later
"""KubeVirt: which virtual machine runs in a cgroup of the kubelet's, from the container runtime's
files.

KubeVirt runs each QEMU in the container ``compute`` of a pod ``virt-launcher-NAME-xxxxx``. The
cgroup of a container has its id in its path. Under that id the runtime keeps the configuration
(config.json of OCI) with which it started the container. Kubernetes' names of namespace, pod and
container are annotations there. The runtime writes these last, so no annotation of the pod's own
replaces them.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from vsrtune.core.untrusted import json_value

# The kubelet's two ways to name cgroups (cgroupDriver), and each runtime's own word in them.
_QOS = "burstable|besteffort"
_SYSTEMD = re.compile(
    rf"kubepods\.slice/(?:kubepods-(?:{_QOS})\.slice/)?"
    rf"(?P<pod>kubepods(?:-(?:{_QOS}))?-pod[0-9a-f_]{{36}}\.slice)/"
    r"(?P<runtime>cri-containerd|crio)-(?P<id>[0-9a-f]{64})\.scope(?:/.*)?",
    re.ASCII,
)
_CGROUPFS = re.compile(
    rf"(?P<cgroup>kubepods/(?:(?:{_QOS})/)?pod[0-9a-f-]{{36}}/"
    r"(?P<runtime>crio-)?(?P<id>[0-9a-f]{64}))(?:/.*)?",
    re.ASCII,
)
# By runtime, the file of a container, and the annotations that hold namespace, pod and container.
_CONTAINERD = (
    "/run/containerd/io.containerd.runtime.v2.task/k8s.io/{}/config.json",
    tuple(
        f"io.kubernetes.cri.{n}" for n in ("sandbox-namespace", "sandbox-name", "container-name")
    ),
)
_CRIO = (
    "/run/containers/storage/overlay-containers/{}/userdata/config.json",
    tuple(f"io.kubernetes.{n}" for n in ("pod.namespace", "pod.name", "container.name")),
)
# Such files have some 50 KiB.
_MOST = 4 << 20

_LAUNCHER = "virt-launcher-"
_NAME = r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?"
_POD = re.compile(rf"{_LAUNCHER}({_NAME})-[a-z0-9]{{5}}", re.ASCII)
_NAMESPACE = re.compile(_NAME, re.ASCII)
# A pod's name of this length may hold only the beginning of the machine's (names.generateName).
_CUT = 63


class Container(NamedTuple):
    """A container: ``cgroup`` is how its configuration names its cgroup."""

    config: str
    annotations: tuple[str, ...]
    cgroup: str


def container_of(path: str) -> Container | None:
    """The container of a cgroup, which may be one inside the container's own; None for a cgroup
    that is no container of the kubelet's."""
    if (found := _SYSTEMD.fullmatch(path)) is not None:
        cgroup = f"{found['pod']}:{found['runtime']}:{found['id']}"
    elif (found := _CGROUPFS.fullmatch(path)) is not None:
        cgroup = found["cgroup"]
    else:
        return None
    file, annotations = _CRIO if (found["runtime"] or "").startswith("crio") else _CONTAINERD
    return Container(file.format(found["id"]), annotations, cgroup)


def machine_in(container: Container, text: str) -> str:
    """``NAMESPACE/NAME`` of the virtual machine, by the text of the container's configuration; ""
    for a container that is not KubeVirt's. Raises ValueError for one that is damaged, is another
    container's, or has names that Kubernetes would not give."""
    annotations, cgroup = _parts(text)
    if cgroup.removeprefix("/") != container.cgroup:
        raise ValueError(f"it is of the cgroup {cgroup[:200]!r}")
    namespace, pod, name = (annotations.get(key, "") for key in container.annotations)
    if name != "compute" or not pod.startswith(_LAUNCHER):
        return ""
    machine = _POD.fullmatch(pod)
    if machine is None or len(pod) >= _CUT or _NAMESPACE.fullmatch(namespace) is None:
        raise ValueError(f"pod {f'{namespace}/{pod}'[:200]!r} does not tell its machine's name")
    return f"{namespace}/{machine[1]}"


def essential(text: str) -> str:
    """A configuration that ``machine_in`` reads in the same way, without everything else."""
    try:
        annotations, cgroup = _parts(text)
    except ValueError:
        return ""
    used = {key: annotations[key] for key in (*_CONTAINERD[1], *_CRIO[1]) if key in annotations}
    return json.dumps({"annotations": used, "linux": {"cgroupsPath": cgroup}})


def _parts(text: str) -> tuple[dict[str, str], str]:
    """The annotations, and the cgroup."""
    config: Any = json_value(text, _MOST)
    try:
        annotations, cgroup = config["annotations"], config["linux"]["cgroupsPath"]
        return {str(key): str(value) for key, value in annotations.items()}, str(cgroup)
    except (AttributeError, KeyError, TypeError):
        raise ValueError("it has no annotations or no cgroup") from None
