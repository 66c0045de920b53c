"""Files of clones, made with the real qemu-img, and never taken from anybody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vsrtune import overlays
from vsrtune.clone_model import File
from vsrtune.errors import WriteError

pytestmark = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-utils")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "router.img"
    path.write_bytes(b"\xab" * 65536)
    path.chmod(0o640)
    return path


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_an_overlay(tmp_path: Path, base: Path) -> None:
    file = File(str(tmp_path / "vr2 ü-vda.qcow2"), str(base), "raw")
    overlays.make(file)
    told = json.loads(
        subprocess.run(
            ["qemu-img", "info", "--output=json", file.path], check=True, capture_output=True
        ).stdout
    )
    assert (told["format"], told["virtual-size"]) == ("qcow2", 65536)
    assert (told["backing-filename"], told["backing-filename-format"]) == (str(base), "raw")
    assert os.stat(file.path).st_mode & 0o777 == 0o640
    assert len(files(tmp_path)) == 2
    assert overlays.there(file.path)
    with pytest.raises(WriteError, match="there is a file of that name"):
        overlays.make(file)
    assert overlays.remove(file) == ""
    assert overlays.remove(file) == ""
    assert files(tmp_path) == ["router.img"]


def test_what_is_not_ours_is_left(tmp_path: Path, base: Path) -> None:
    path = tmp_path / "vr2-vda.qcow2"
    file = File(str(path), str(base), "raw")
    for text in ("theirs", ""):
        path.write_text(text)
        assert f"left {path}" in overlays.remove(file)
    path.unlink()
    path.symlink_to(base)
    assert f"left {path}" in overlays.remove(file)
    path.unlink()
    other = tmp_path / "other.img"
    shutil.copyfile(base, other)
    overlays.make(File(str(path), str(other), "raw"))
    assert f"left {path}: it is no overlay of {base}" in overlays.remove(file)
    assert path.exists()


def test_what_a_killed_one_left_is_no_obstacle(tmp_path: Path, base: Path) -> None:
    file = File(str(tmp_path / "vr2-vda.qcow2"), str(base), "raw")
    part = Path(file.path + ".vsrtune-part")
    part.write_text("half of it")
    overlays.make(file)
    assert files(tmp_path) == ["router.img", "vr2-vda.qcow2"]
    # Killed between its two names.
    os.link(file.path, part)
    assert overlays.remove(file) == ""
    assert files(tmp_path) == ["router.img"]


def test_a_copy_for_firmware(tmp_path: Path, base: Path) -> None:
    file = File(str(tmp_path / "vr2_VARS.fd"), str(base))
    overlays.make(file)
    assert Path(file.path).read_bytes() == base.read_bytes()
    assert overlays.remove(file) == ""
    # A template that never ran has none yet: libvirt makes it for the clone.
    overlays.make(File(str(tmp_path / "vr3_VARS.fd"), str(tmp_path / "none.fd")))
    assert files(tmp_path) == ["router.img"]


def test_what_is_wrong_is_said(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = File(str(tmp_path / "a.qcow2"), str(tmp_path / "none.img"), "raw")
    with pytest.raises(WriteError, match=r"qemu-img create failed: .*none\.img"):
        overlays.make(gone)
    nowhere = File(str(tmp_path / "no" / "a.qcow2"), str(base), "raw")
    with pytest.raises(WriteError):
        overlays.make(nowhere)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WriteError, match="install qemu-utils"):
        overlays.make(File(str(tmp_path / "a.qcow2"), str(base), "raw"))
    assert files(tmp_path) == ["router.img"]
