"""The door to the host, live and recorded."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from vsrtune.errors import ObserveError
from vsrtune.model import Sched, SchedClass
from vsrtune.rootfs import INDEX, DirRoot, LiveRoot, sched_getattr


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


def test_recorded_root_gives_files_links_listings_and_errors(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/comm").write_text("x\n")
    index = {
        "links": {"/proc/7/exe": "/bin/x"},
        "listings": {"/proc": ["7", "1"]},
        "errors": {"/proc/1/exe": "EACCES"},
    }
    (tmp_path / INDEX).write_text(json.dumps(index))
    root = DirRoot(tmp_path)
    assert root.read("/proc/7/comm") == "x\n"
    assert root.readlink("/proc/7/exe") == "/bin/x"
    assert root.listdir("/proc") == ["1", "7"]
    assert root.listdir("/proc/7") == ["comm"]
    assert root.exists("/proc/7/comm")
    assert not root.exists("/proc/8")
    with pytest.raises(PermissionError):
        root.readlink("/proc/1/exe")
    with pytest.raises(FileNotFoundError) as caught:
        root.read("/proc/8/comm")
    assert caught.value.filename == "/proc/8/comm"
    with pytest.raises(FileNotFoundError):
        root.readlink("/proc/8/exe")
    with pytest.raises(FileNotFoundError):
        root.listdir("/proc/8")
    with pytest.raises(OSError) as invalid:
        root.readlink("/proc/7/comm")
    assert invalid.value.errno == errno.EINVAL


def test_recorded_answers_that_are_no_files(tmp_path: Path) -> None:
    for name in ("sched_attr", "qmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "sched_attr/5.json").write_text('{"cls": "fifo", "priority": 3}')
    (tmp_path / "qmp/9.json").write_text('{"vcpus": {"0": 11}}')
    (tmp_path / "qmp/10.json").write_text('{"error": "busy"}')
    root = DirRoot(tmp_path)
    assert root.sched_attr(5) == Sched(SchedClass.FIFO, 3)
    with pytest.raises(ProcessLookupError):
        root.sched_attr(6)
    assert root.qmp_vcpus(9, "/run/x", 1) == {0: 11}
    with pytest.raises(ObserveError, match="busy"):
        root.qmp_vcpus(10, "/run/x", 1)
    with pytest.raises(ObserveError, match="not recorded"):
        root.qmp_vcpus(11, "/run/x", 1)
