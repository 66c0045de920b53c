"""Files of our own are replaced as a whole."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from vsrtune.host import state_files
from vsrtune.host.state_files import create_file, replace_file, replace_volatile


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("mode", [0o600, 0o644])
@pytest.mark.parametrize("replace", [replace_file, replace_volatile])
def test_the_new_file_is_whole_and_alone(tmp_path: Path, replace: object, mode: int) -> None:
    assert callable(replace)
    path = tmp_path / "file"
    path.write_text("old")
    replace(path, b"new", mode)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_in_run_may_lack_its_directory(tmp_path: Path) -> None:
    replace_volatile(tmp_path / "vsrtune/trace-results.json", b"{}", 0o600)
    assert (tmp_path / "vsrtune/trace-results.json").read_bytes() == b"{}"


@pytest.mark.parametrize("replace", [replace_file, replace_volatile])
def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, replace: object) -> None:
    assert callable(replace)
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="director"):
        replace(tmp_path / "file", b"new", 0o600)
    assert os.listdir(tmp_path) == ["file"]


def test_a_new_file_is_whole_and_alone(tmp_path: Path) -> None:
    create_file(tmp_path / "file", b"new", 0o644)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_a_new_file_takes_nobodys_place(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "taken"
    {"file": path.touch, "link": lambda: path.symlink_to("nowhere"), "directory": path.mkdir}[
        kind
    ]()
    with pytest.raises(FileExistsError):
        create_file(path, b"new", 0o644)
    assert os.listdir(tmp_path) == ["taken"]
    assert path.is_symlink() == (kind == "link")
    assert not (tmp_path / "nowhere").exists()


def test_a_new_file_that_cannot_be_written_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_files, "write_all", full)
    with pytest.raises(OSError, match="No space"):
        create_file(tmp_path / "file", b"new", 0o644)
    assert os.listdir(tmp_path) == []
