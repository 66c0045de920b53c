"""Files of clones, made with the real qemu-img, and never taken from anybody."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import stat
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vsrtune.attach import overlays
from vsrtune.attach.plan.clone_model import File
from vsrtune.core.errors import WriteError

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
    told = info(file.path)
    assert (told["format"], told["virtual-size"]) == ("qcow2", 65536)
    assert (told["backing-filename"], told["backing-filename-format"]) == (str(base), "raw")
    assert os.stat(file.path).st_mode & 0o777 == 0o640
    assert len(files(tmp_path)) == 2
    assert os.path.lexists(file.path)
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
    part.mkdir(0o700)
    (part / "made-by-vsrtune").write_text("half of it")
    overlays.make(file)
    assert files(tmp_path) == ["router.img", "vr2-vda.qcow2"]
    # Killed between its two names.
    part.mkdir(0o700)
    os.link(file.path, part / "made-by-vsrtune")
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
    with pytest.raises(WriteError, match=r"none\.img: the template's file cannot be read: No such"):
        overlays.make(gone)
    nowhere = File(str(tmp_path / "no" / "a.qcow2"), str(base), "raw")
    with pytest.raises(WriteError):
        overlays.make(nowhere)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WriteError, match="install qemu-utils"):
        overlays.make(File(str(tmp_path / "a.qcow2"), str(base), "raw"))
    assert files(tmp_path) == ["router.img"]


# -- what a base says of itself is what a guest's QEMU wrote


def info(path: str) -> dict[str, object]:
    words = ["qemu-img", "info", "--output=json", path]
    found: dict[str, object] = json.loads(
        subprocess.run(words, check=True, capture_output=True).stdout
    )
    return found


def qcow2(path: Path, below: str = "", size: str = "3M") -> Path:
    words = ["qemu-img", "create", "-q", "-u", "-f", "qcow2"]
    words += ["-F", "raw", "-b", below] if below else []
    subprocess.run([*words, str(path), size], check=True)
    return path


def test_what_a_base_names_is_not_opened(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        server.settimeout(0.2)
        met = []

        def answer() -> None:
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    met.append(server.accept()[0].close())

        done = threading.Event()
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            below = f"nbd+unix:///x?socket={tmp_path}/s"
            base = qcow2(tmp_path / "router.qcow2", below)
            file = File(str(tmp_path / "vr2-vda.qcow2"), str(base), "qcow2")
            overlays.make(file)
        finally:
            done.set()
            thread.join(10)
    assert met == []
    # Its own header says so much without that.
    assert info(str(base))["backing-filename"] == below
    with Path(file.path).open("rb") as opened:
        assert struct.unpack(">4sIQIIQ", opened.read(32))[-1] == 3 << 20
    assert overlays.remove(file) == ""


@pytest.mark.parametrize(("size", "expected"), [(65536, 65536), (1, 512), (512 * 3 + 1, 2048)])
def test_the_size_is_the_bases(tmp_path: Path, base: Path, size: int, expected: int) -> None:
    """Of a raw one as QEMU counts it, in sectors."""
    with base.open("r+b") as opened:
        opened.truncate(size)
    file = File(str(tmp_path / "vr2-vda.qcow2"), str(base), "raw")
    overlays.make(file)
    assert info(file.path)["virtual-size"] == expected
    told = info(str(base))
    assert told["virtual-size"] == expected


def test_a_chain_is_as_large_as_its_top(tmp_path: Path, base: Path) -> None:
    top = qcow2(tmp_path / "top.qcow2", str(base), "5M")
    file = File(str(tmp_path / "vr2-vda.qcow2"), str(top), "qcow2")
    overlays.make(file)
    assert info(file.path)["virtual-size"] == 5 << 20
    done = subprocess.run(
        ["qemu-io", "-r", "-c", "read -P 0xab 0 64k", "-c", "read -P 0 64k 1M", file.path],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "verification failed" not in done.stdout


@pytest.mark.parametrize(
    "head",
    [
        b"", b"QFI\xfb", b"\xab" * 512,
        struct.pack(">4sIQIIQ", b"QFI\xfb", 3, 0, 0, 16, 0),
        struct.pack(">4sIQIIQ", b"QFI\xfb", 3, 0, 0, 16, (2 << 50) + 1),
        struct.pack(">4sIQIIQ", b"QFI\xfb", 3, 0, 0, 16, (1 << 64) - 1),
    ],
)  # fmt: skip
def test_a_header_that_says_no_size_is_refused(tmp_path: Path, base: Path, head: bytes) -> None:
    base.write_bytes(head)
    with pytest.raises(WriteError, match="it is no disk of format qcow2"):
        overlays.make(File(str(tmp_path / "vr2-vda.qcow2"), str(base), "qcow2"))
    assert files(tmp_path) == ["router.img"]


# -- directories of which others own a part

OTHER = 64123
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")


@dataclass(frozen=True)
class Secret:
    """A file and a directory of root's that another user would like to have or to change."""

    file: Path
    directory: Path

    def state(self) -> tuple[object, ...]:
        found = (self.file, self.directory, self.directory / "kept")
        status = [(s.st_mode, s.st_uid, s.st_gid, s.st_nlink) for s in map(os.stat, found)]
        return (self.file.read_bytes(), *status, files(self.directory))


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    directory = tmp_path / "roots"
    directory.mkdir(0o755)
    (directory / "kept").write_text("kept")
    file = tmp_path / "secret"
    file.write_text("secret" * 100)
    file.chmod(0o600)
    return Secret(file, directory)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory of QEMU's user with an NVRAM in it."""
    directory = tmp_path / "nvram"
    directory.mkdir()
    (directory / "router_VARS.fd").write_bytes(b"\xcd" * 8192)
    for path in (directory, directory / "router_VARS.fd"):
        os.chown(path, OTHER, OTHER)
    return directory


def clones_file(theirs: Path, base: Path, kind: str) -> File:
    if kind == "copy":
        return File(str(theirs / "vr2_VARS.fd"), str(theirs / "router_VARS.fd"))
    return File(str(theirs / "vr2-vda.qcow2"), str(base), "raw")


@as_root
@pytest.mark.parametrize("kind", ["copy", "overlay"])
@pytest.mark.parametrize("to", ["file", "directory", "nothing"])
@pytest.mark.parametrize("name", ["", ".vsrtune-part"])
def test_a_link_under_a_name_of_ours_is_not_followed(
    theirs: Path, base: Path, secret: Secret, kind: str, to: str, name: str
) -> None:
    file = clones_file(theirs, base, kind)
    nothing = secret.directory / "made"
    target = {"file": secret.file, "directory": secret.directory, "nothing": nothing}[to]
    link = Path(file.path + name)
    link.symlink_to(target)
    before = secret.state()
    with pytest.raises(WriteError, match="there is a file of that name"):
        overlays.make(file)
    assert secret.state() == before
    assert not nothing.exists()
    overlays.remove(file)
    assert secret.state() == before
    assert link.is_symlink() == (kind == "overlay" or name != "")


@as_root
@pytest.mark.parametrize("how", ["symbolic", "hard", "fifo", "directory"])
def test_what_another_chooses_is_not_copied(theirs: Path, secret: Secret, how: str) -> None:
    file = clones_file(theirs, Path(), "copy")
    source = Path(file.base)
    source.unlink()
    match how:
        case "symbolic":
            source.symlink_to(secret.file)
        case "hard":
            os.link(secret.file, source)
        case "fifo":
            os.mkfifo(source)
        case _:
            source.mkdir()
    before = secret.state()
    with pytest.raises(WriteError) as caught:
        overlays.make(file)
    assert caught.value.where == file.base
    assert secret.state() == before
    assert files(theirs) == ["router_VARS.fd"]


@as_root
def test_a_link_on_the_way_is_followed_where_only_root_could_make_it(
    tmp_path: Path, theirs: Path, base: Path, secret: Secret
) -> None:
    """A directory of images may well be a link; who owns its parent decides."""
    tmp_path.chmod(0o755)
    (tmp_path / "images").symlink_to("roots/../roots")
    (tmp_path / "disk").symlink_to(base)
    made = File(str(tmp_path / "images" / "vr2-vda.qcow2"), str(tmp_path / "disk"), "raw")
    overlays.make(made)
    assert files(secret.directory) == ["kept", "vr2-vda.qcow2"]
    assert overlays.remove(made) == ""
    (theirs / "images").symlink_to(secret.directory)
    (theirs / "disk").symlink_to(secret.file)
    before = secret.state()
    for file in (
        File(str(theirs / "images" / "vr2-vda.qcow2"), str(base), "raw"),
        File(str(theirs / "vr2-vda.qcow2"), str(theirs / "disk"), "raw"),
    ):
        with pytest.raises(WriteError, match="is a symbolic link in a directory where others"):
            overlays.make(file)
        if "images" in file.path:
            with pytest.raises(WriteError, match="is a symbolic link in a directory where others"):
                overlays.remove(file)
    # Root's directory, but others may write to it.
    tmp_path.chmod(0o1777)
    with pytest.raises(WriteError, match="disk is a symbolic link"):
        overlays.make(made)
    assert secret.state() == before
    loop = tmp_path / "roots" / "loop"
    loop.symlink_to("loop")
    with pytest.raises(WriteError, match="loop is a symbolic link"):
        overlays.make(File(f"{loop}/a.qcow2", str(base), "raw"))
    with pytest.raises(WriteError, match="no absolute path"):
        overlays.make(File("a.qcow2", str(base), "raw"))


@contextlib.contextmanager
def swapping(directory: Path, names: tuple[str, ...], targets: tuple[Path, ...]) -> Iterator[None]:
    """Another user who puts links, directories and nothing under these names, without end."""
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.chdir(directory)
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            os.write(told, b"x")
            number = 0
            while True:
                number += 1
                name, target = random.choice(names), random.choice(targets)
                for step in (
                    lambda: os.rename(name, f"moved{number}"),  # noqa: B023
                    lambda: os.symlink(target, name),  # noqa: B023
                    lambda: os.rename(name, f"link{number % 3}"),  # noqa: B023
                    lambda: os.mkdir(name),  # noqa: B023
                    lambda: os.rmdir(name),  # noqa: B023
                    lambda: os.rename(f"moved{number}", name),  # noqa: B023
                ):
                    with contextlib.suppress(OSError):
                        step()
        os._exit(1)
    os.close(told)
    try:
        assert os.read(ready, 1) == b"x"
        yield
        # It has gone on until now.
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)


@as_root
@pytest.mark.parametrize(("kind", "times"), [("copy", 1500), ("overlay", 60)])
def test_names_that_are_swapped_meanwhile(
    theirs: Path, base: Path, secret: Secret, kind: str, times: int
) -> None:
    file = clones_file(theirs, base, kind)
    target = Path(file.path)
    names = (target.name, f"{target.name}.vsrtune-part")
    if kind == "copy":
        names += ("router_VARS.fd",)
    secret.directory.chmod(0o777 if kind == "copy" else 0o755)  # what is put there would stay
    before = secret.state()
    ended: Counter[str] = Counter()
    with swapping(theirs, names, (secret.file, secret.directory, secret.directory / "made")):
        # On a busy machine one side may win each of the first rounds.
        for n in range(times * 20):
            if n >= times and ended["make done"] and ended["make refused"]:
                break
            for step in (overlays.make, overlays.remove):
                try:
                    step(file)
                    ended[f"{step.__name__} done"] += 1
                except WriteError:
                    ended[f"{step.__name__} refused"] += 1
                assert told_nothing(target)
            assert secret.state() == before
    print(ended)
    assert ended["make done"] and ended["make refused"]


def told_nothing(path: Path) -> bool:
    """Whether a file that libvirt would give to QEMU's user is without the secret."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        return stat.S_ISDIR(os.fstat(found).st_mode) or b"secret" not in os.read(found, 1 << 20)
    finally:
        os.close(found)
