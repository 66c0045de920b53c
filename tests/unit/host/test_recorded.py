"""A recorded host's answers, and the file that holds them."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import recorded_hosts

from vsrtune.core.errors import ObserveError
from vsrtune.host.filesystem import FileStat
from vsrtune.host.recorded import Answers, RecordedRoot, Recording, dumps, load, parse
from vsrtune.model.guest import Sched, SchedClass


def test_recorded_root_gives_files_links_listings_and_errors() -> None:
    root = RecordedRoot(
        Answers(
            texts={"/proc/7/comm": "x\n"},
            links={"/proc/7/exe": "/bin/x"},
            listings={"/proc": ("7", "1")},
            errors={"/proc/1/exe": "EACCES", "/proc/1/cwd": "EODD"},
            present={"/proc/7/fd": True},
        )
    )
    assert root.read("/proc/7/comm") == "x\n"
    assert root.readlink("/proc/7/exe") == "/bin/x"
    assert root.listdir("/proc") == ["1", "7"]
    assert root.listdir("/proc/7") == ["comm", "exe"]
    assert root.listdir("/proc/7/fd") == []
    assert root.exists("/proc/7/comm")
    assert root.exists("/proc/7")
    assert not root.exists("/proc/8")
    with pytest.raises(PermissionError):
        root.readlink("/proc/1/exe")
    with pytest.raises(OSError) as unknown:
        root.readlink("/proc/1/cwd")
    assert unknown.value.errno == errno.EIO
    with pytest.raises(FileNotFoundError) as caught:
        root.read("/proc/8/comm")
    assert caught.value.filename == "/proc/8/comm"
    with pytest.raises(FileNotFoundError):
        root.readlink("/proc/8/exe")
    with pytest.raises(FileNotFoundError):
        root.listdir("/proc/8")
    with pytest.raises(NotADirectoryError):
        root.listdir("/proc/7/comm")
    with pytest.raises(OSError) as invalid:
        root.readlink("/proc/7/comm")
    assert invalid.value.errno == errno.EINVAL


def test_more_names_than_asked_for() -> None:
    root = RecordedRoot(Answers(listings={"/proc/7/task": ("7", "8", "9")}))
    assert root.listdir("/proc/7/task", 3) == ["7", "8", "9"]
    with pytest.raises(OSError) as caught:
        root.listdir("/proc/7/task", 2)
    assert caught.value.errno == errno.E2BIG


def test_links_in_a_circle_end() -> None:
    root = RecordedRoot(Answers(links={"/a": "/b", "/b": "/a"}))
    assert root.stat("/a").uid == 0


def test_recorded_answers_that_are_no_files() -> None:
    root = RecordedRoot(
        Answers(
            sched={"5": Sched(SchedClass.FIFO, 3)},
            qmp={"9": {"0": 11}, "10": "busy"},
            ethtool={"nvt0": {"rx_received": 3}},
        )
    )
    assert root.sched_attr(5) == Sched(SchedClass.FIFO, 3)
    with pytest.raises(ProcessLookupError):
        root.sched_attr(6)
    assert root.qmp_vcpus(9, "/run/x", 1) == {0: 11}
    with pytest.raises(ObserveError, match="busy"):
        root.qmp_vcpus(10, "/run/x", 1)
    with pytest.raises(ObserveError, match="not recorded"):
        root.qmp_vcpus(11, "/run/x", 1)
    assert root.ethtool_statistics("nvt0") == {"rx_received": 3}
    with pytest.raises(OSError) as caught:
        root.ethtool_statistics("eth0")
    assert caught.value.errno == errno.ENODEV


@pytest.mark.parametrize("file", recorded_hosts.FILES, ids=lambda p: p.stem)
def test_the_text_of_a_recording_is_always_the_same(file: Path) -> None:
    text = file.read_text("utf-8")
    found = parse(text)
    assert dumps(found) == text
    # In whatever order the host was read.
    found.host.texts = dict(reversed(found.host.texts.items()))
    assert dumps(found) == text
    # One path a line, for diff.
    lines = [line.split(": ")[0] for line in text.split("\n")]
    assert {f"  {json.dumps(path)}" for path in found.host.texts} <= set(lines)


def test_any_text_comes_back() -> None:
    odd = 'a\0b\t\u2028\udc80\r\n"\\é'
    answers = Answers(texts={"/x y": odd}, stats={"/é": FileStat(1, 2, 3, 4)})
    recording = Recording(("one", ""), answers)
    data = dumps(recording).encode("utf-8", "backslashreplace")
    assert parse(data) == recording


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"\xff", b'{"host": {"texts": {"/x": 1}}}', b'{"hosts": {}}', b"[" * 9999],
)
def test_what_is_no_recording(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ObserveError, match="no host is recorded here") as caught:
        load(tmp_path / "x")
    assert caught.value.where == str(tmp_path / "x")


def test_a_recording_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ObserveError, match="cannot be read: No such file"):
        load(tmp_path / "none")
