"""The door to this host."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vsrtune.host.filesystem import MOST_ARGUMENTS, FileStat, LiveRoot, seen_from
from vsrtune.host.scheduler import sched_getattr
from vsrtune.model.guest import SchedClass


def test_live_root_reads_this_process() -> None:
    root = LiveRoot()
    pid = os.getpid()
    assert root.read(f"/proc/{pid}/stat").startswith(f"{pid} (")
    assert str(pid) in root.listdir(f"/proc/{pid}/task")
    assert root.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{pid}/exe")
    assert root.exists("/proc/self")
    assert not root.exists("/proc/nothing")


def test_live_root_survives_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"caf\xc3\xa9 \xff\n")
    assert LiveRoot().read(str(tmp_path / "f")) == "café \\xff\n"
    os.symlink(b"\xfe", bytes(tmp_path / "l"))
    assert LiveRoot().readlink(str(tmp_path / "l")) == "\\xfe"


def test_sched_getattr_tells_what_the_standard_library_tells() -> None:
    found = sched_getattr(os.getpid())
    assert found.cls is SchedClass.OTHER
    assert found.nice == os.getpriority(os.PRIO_PROCESS, 0)
    assert found.runtime_ns == 0


def test_sched_getattr_of_a_gone_thread() -> None:
    with pytest.raises(ProcessLookupError):
        sched_getattr(2**22 - 1)


def test_sched_getattr_sees_reset_on_fork() -> None:
    pid = os.fork()
    if pid == 0:
        flags = os.SCHED_BATCH | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, flags, os.sched_param(0))
        found = sched_getattr(os.getpid())
        good = found.cls is SchedClass.BATCH and found.reset_on_fork
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("path", ["/dev/null", "/bin", "/", sys.executable])
@pytest.mark.parametrize("follow", [True, False])
def test_stat_tells_what_the_standard_library_tells(path: str, follow: bool) -> None:
    found = os.stat(path, follow_symlinks=follow)
    told = FileStat(found.st_uid, found.st_mode, found.st_dev, found.st_ino, found.st_rdev)
    assert LiveRoot().stat(path, follow=follow) == told


def test_stat_of_no_file() -> None:
    with pytest.raises(FileNotFoundError, match="/proc/nothing"):
        LiveRoot().stat("/proc/nothing")
    with pytest.raises(ValueError, match="null"):
        LiveRoot().stat("/usr\0/bin")


REPO = Path(__file__).resolve().parents[3]
SILENT = """
import ctypes, os, sys
from vsrtune.host.filesystem import LiveRoot
try:
    server = os.open("/dev/fuse", os.O_RDWR)
except OSError as error:
    sys.exit(f"no FUSE here: {error}")
options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
if ctypes.CDLL(None).mount(b"x", sys.argv[1].encode(), b"fuse", 0, options) < 0:
    sys.exit("no FUSE in user namespaces here")
print("mounted", flush=True)
print(oct(LiveRoot().stat(sys.argv[1]).mode))
"""


def test_a_server_of_files_that_never_answers_keeps_nobody_waiting(tmp_path: Path) -> None:
    """stat(2) of such a file cannot be interrupted. Its user runs it, or has it open."""
    words = ["unshare", "-Urm", sys.executable, "-B", "-c", SILENT, str(tmp_path)]
    ran = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=20, check=False)
    if "mounted" not in ran.stdout:
        pytest.skip(ran.stderr)
    assert ran.stdout.split() == ["mounted", "0o40000"]


def test_a_command_line_is_read_to_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "cmdline"
    file.write_bytes(bytes(MOST_ARGUMENTS))
    assert len(LiveRoot().read(str(file))) == MOST_ARGUMENTS
    file.write_bytes(bytes(MOST_ARGUMENTS + 1))
    with pytest.raises(OSError, match="more than 1048576 bytes") as refused:
        LiveRoot().read(str(file))
    assert (refused.value.errno, refused.value.filename) == (errno.E2BIG, str(file))


def test_a_text_is_whole_however_long_it_is(tmp_path: Path) -> None:
    root, file = LiveRoot(), tmp_path / "f"
    for size in (0, 1, 4095, 4096, 4097, 16384, 20480, 50_000):
        file.write_text("x" * size)
        assert root.read(str(file)) == "x" * size
    for path in ("/proc/self/cgroup", "/proc/self/limits", "/proc/version"):
        assert root.read(path) == Path(path).read_text()


POD = (
    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podA.slice/cri-containerd-1.scope"
)


@pytest.mark.parametrize(
    ("seen", "path"),
    [
        ("/", POD),
        ("/inside/it", f"{POD}/inside/it"),
        ("/../cri-containerd-2.scope", f"{POD.rpartition('/')[0]}/cri-containerd-2.scope"),
        ("/../../../../init.scope", "/init.scope"),
        ("/../../../..", "/"),
        ("/../../../../a b (deleted)", "/a b (deleted)"),
    ],
)
def test_paths_of_cgroups_as_seen_from_a_container(seen: str, path: str) -> None:
    """By cgroup_namespaces(7). test_container.py has a real one."""
    assert seen_from(POD, f"0::{seen}\n") == f"0::{path}\n"
    both = f"4:memory:/../x\n0::{seen}\n"
    assert seen_from(POD, both) == f"4:memory:/../x\n0::{path}\n"


def test_a_read_only_mount(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    (tmp_path / "f").touch()
    code = f"""
import os, sys
from vsrtune.host.filesystem import LiveRoot
root, file = LiveRoot(), {str(tmp_path / "f")!r}
before = root.read_only(file)
os.system(f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path}") and sys.exit(77)
print(before, root.read_only(file), root.read_only("/nowhere"))
"""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", code],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip(f"no bind mounts here: {done.stderr}")
    assert done.stdout == "False True False\n", done.stderr
