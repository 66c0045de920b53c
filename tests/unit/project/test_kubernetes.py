"""units/kubernetes: the manifests, the overlay, and the page that says why each privilege is there."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from vsrtune.cli.daemon import CAPABILITIES
from vsrtune.observe.config_files import read_policy

REPO = Path(__file__).resolve().parents[3]
KUBERNETES = REPO / "units/kubernetes"
GUIDE = REPO / "docs/guides/kubernetes.md"


def objects(text: str) -> dict[str, Any]:
    return {item["kind"]: item for item in YAML(typ="safe", pure=True).load_all(text)}


DAEMONSET = objects((KUBERNETES / "base/daemonset.yaml").read_text())["DaemonSet"]
POD = DAEMONSET["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
ADDED = CONTAINER["securityContext"]["capabilities"]["add"]


def test_the_page_explains_exactly_the_privileges_that_are_given() -> None:
    given = {f"capability {name}" for name in ADDED}
    given |= {
        f"{key}: {str(value).lower()}" for key, value in POD.items() if key.startswith("host")
    }
    for volume in POD["volumes"]:
        if "hostPath" in volume:
            (mount,) = (m for m in CONTAINER["volumeMounts"] if m["name"] == volume["name"])
            assert mount["mountPath"] == volume["hostPath"]["path"]
            how = "read-only" if mount.get("readOnly") else "writable"
            given.add(f"{mount['mountPath']}, {how}")
    security = CONTAINER["securityContext"]
    given |= {f"{k}: {v['type']}" for k, v in security.items() if k.endswith("Profile")}
    section = GUIDE.read_text().partition("## Privileges\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([^`]*)` \|", section, re.MULTILINE)) == given


def test_the_daemon_demands_the_capabilities_that_are_given() -> None:
    assert sorted(name for name, _ in CAPABILITIES.values()) == ADDED


def test_nothing_else_is_given() -> None:
    security = CONTAINER["securityContext"]
    assert security["capabilities"]["drop"] == ["ALL"]
    assert security["privileged"] is security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert POD["automountServiceAccountToken"] is False
    for mount in CONTAINER["volumeMounts"]:
        assert mount["name"] == "journal" or mount["readOnly"] is True


def test_the_pod_is_killed_no_sooner_than_the_unit() -> None:
    unit = (REPO / "units/vsrtune.service").read_text()
    assert f"\nTimeoutStopSec={POD['terminationGracePeriodSeconds']}\n" in unit


def test_the_image_is_of_this_version() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPO / "setup.cfg")
    version = setup["metadata"]["version"]
    assert CONTAINER["image"] == f"localhost/vsrtune:{version}"


def test_the_overlay_changes_image_nodes_and_policies() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl, which has kustomize")
    made = {}
    for name in ("base", "example"):
        done = subprocess.run(
            ["kubectl", "kustomize", str(KUBERNETES / name)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made[name] = objects(done.stdout)
    assert made["base"].keys() == {"Namespace", "ServiceAccount", "ConfigMap", "DaemonSet"}
    assert made["base"]["ConfigMap"]["data"] == {}
    data = made["example"]["ConfigMap"]["data"]
    assert list(data) == ["edge.yaml"]
    name = made["example"]["ConfigMap"]["metadata"]["name"]
    base, pod = (made[n]["DaemonSet"]["spec"]["template"]["spec"] for n in ("base", "example"))
    assert {"configMap": {"name": name}, "name": "policies"} in pod["volumes"]
    for key in ("image", "affinity"):
        holder, other = (s["containers"][0] if key == "image" else s for s in (pod, base))
        assert holder[key] != other[key]
        holder[key] = other[key]
    assert pod == base


def test_the_patch_for_cri_o(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl, which has kustomize")
    (patch,) = re.findall(
        r"^```yaml\n(patches:\n.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL
    )
    base = os.path.relpath(KUBERNETES / "base", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{base}]\n{patch}")
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = (KUBERNETES / "base/daemonset.yaml").read_text()
    expected = expected.replace(
        "/run/containerd/io.containerd.runtime.v2.task/k8s.io",
        "/run/containers/storage/overlay-containers",
    )
    pod = objects(done.stdout)["DaemonSet"]["spec"]["template"]["spec"]
    assert pod == objects(expected)["DaemonSet"]["spec"]["template"]["spec"]


def test_the_policy_of_the_overlay_is_one() -> None:
    assert read_policy(KUBERNETES / "example/edge.yaml").guest == "kubevirt:routers/edge"
