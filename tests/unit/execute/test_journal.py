"""The journal: what it remembers, what it survives, and when it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import JournalError, Lasting
from vsrtune.execute import jsonl_log
from vsrtune.execute.journal import Journal, read_entries
from vsrtune.execute.jsonl_log import holder
from vsrtune.host import state_files
from vsrtune.model.guest import ThreadKey
from vsrtune.model.plan import Action
from vsrtune.model.targets import (
    CgroupDir,
    EmulatorPin,
    Pin,
    ThreadAffinity,
    ThreadMask,
    TxQueueLen,
)

BOOT, OTHER_BOOT = "boot-a", "boot-b"
QUEUE = TxQueueLen("vr1", "macvtap0", 7)
KEY = ThreadKey(100, 101, 5000)
MASK = ThreadAffinity("vr1", KEY, "vhost eth0")
PIN = EmulatorPin("vr1", "uuid", KEY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.jsonl"


def queue(before: int, after: int) -> Action:
    return Action(QUEUE, before, after, "policy")


def write(journal: Journal, action: Action) -> None:
    journal.intent(action)
    journal.done(action.target)


def folded(path: Path) -> list[tuple[object, object, str]]:
    return [(e.original, e.written, e.state) for e in read_entries(path, BOOT)]


def test_entries_survive_in_order_of_first_write(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        write(journal, Action(MASK, CpuSet([0, 1]), CpuSet([1]), "policy"))
        write(journal, queue(100, 50))
        entries = journal.entries()
    assert [e.target for e in entries] == [QUEUE, MASK]
    assert folded(path) == [(500, 50, "done"), (CpuSet([0, 1]), CpuSet([1]), "done")]
    with Journal.open(path, BOOT) as journal:
        assert journal.entries() == entries
        assert journal.applied() == {QUEUE: 50, MASK: CpuSet([1])}
        assert journal.discarded == 0


def test_a_foreign_value_becomes_the_original(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        write(journal, queue(300, 100))
    assert folded(path) == [(300, 100, "done")]


def test_an_intent_may_name_the_original(path: Path) -> None:
    """What is put back under rule enforce was nobody's to have; a crash does not change that."""
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        journal.intent(queue(300, 100), original=500)
    assert folded(path) == [(500, 100, "intent")]
    with Journal.open(path, BOOT) as journal:
        journal.done(QUEUE)
    assert folded(path) == [(500, 100, "done")]
    with Journal.open(path, BOOT) as journal:
        journal.intent(queue(300, 70), original=500)
        journal.revert(QUEUE)
    assert folded(path) == [(500, 100, "done")], "the other value is on the host, and drifts"


def test_a_named_original_survives_a_compaction(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        journal.intent(queue(300, 100), original=500)
        monkeypatch.setattr(jsonl_log, "MAX_SIZE", 1)
        inode = path.stat().st_ino
        while path.stat().st_ino == inode:
            write(journal, Action(MASK, CpuSet([0]), CpuSet([1]), "policy"))
    assert folded(path)[0] == (500, 100, "intent")


def test_pins_are_ours_by_their_cpus(path: Path) -> None:
    others = (ThreadMask(ThreadKey(100, 102, 5001), CpuSet([3])),)
    start = Pin(CpuSet(range(4)), "", others)
    with Journal.open(path, BOOT) as journal:
        write(journal, Action(PIN, start, Pin(CpuSet([0]), "0"), "policy"))
        write(journal, Action(PIN, Pin(CpuSet([0]), "0,"), Pin(CpuSet([1]), "1"), "policy"))
    ((original, written, _),) = folded(path)
    assert isinstance(original, Pin)
    assert (original, original.others) == (start, others)
    assert written == Pin(CpuSet([1]), "1")


def test_a_mask_that_the_kernel_gave_for_want_of_cpus_is_nobodys_wish(path: Path) -> None:
    """CPU 2 went away under a thread pinned to it; undo could not give it 0-1 in cpuset 2."""
    start, ours = Pin(CpuSet([0, 1, 2]), "0-2"), Pin(CpuSet([2]), "2")
    elsewhere, left = Pin(CpuSet([0, 1]), "2"), Pin(CpuSet([1]), "1")
    with Journal.open(path, BOOT) as journal:
        write(journal, Action(PIN, start, ours, "policy"))
        write(journal, Action(PIN, elsewhere, left, "policy"))
    ((original, written, _),) = folded(path)
    assert (original, written) == (start, left)


def test_unfinished_writes(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        journal.intent(queue(100, 50))
        journal.intent(Action(MASK, CpuSet([0]), CpuSet([1]), "policy"))
        assert journal.applied() == {QUEUE: 100}
    with Journal.open(path, BOOT) as journal:
        first, second = journal.entries()
        assert (first.state, first.before, first.original) == ("intent", 100, 500)
        assert (second.state, second.before, second.committed) == ("intent", CpuSet([0]), None)
        journal.revert(QUEUE)
        journal.revert(MASK)
    assert folded(path) == [(500, 100, "done")]


def test_a_revert_to_a_foreign_value_leaves_nothing(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        journal.intent(queue(300, 100))
        journal.revert(QUEUE)
        assert journal.entries() == ()


def test_done_with_the_original_ends_the_entry(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        write(journal, queue(100, 500))
        assert journal.entries() == ()
    assert path.read_bytes() == b"", "an empty journal is compacted"


def test_drop_forgets_and_tolerates_what_it_does_not_know(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        journal.drop(QUEUE, "vanished")
        journal.drop(QUEUE, "vanished")
        assert journal.entries() == ()


def test_another_boot_is_discarded_and_counted(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        write(journal, Action(CgroupDir("vr1", "a/b"), False, True, "policy"))
    assert read_entries(path, OTHER_BOOT) == ()
    with Journal.open(path, OTHER_BOOT) as journal:
        assert journal.discarded == 2
        assert journal.entries() == ()
        write(journal, queue(500, 100))
    assert json.loads(path.read_text().splitlines()[0])["boot_id"] == OTHER_BOOT


def test_corruption_in_a_journal_of_another_boot_does_not_matter(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
    path.write_bytes(path.read_bytes() + b"\0\0\0\n")
    with Journal.open(path, OTHER_BOOT) as journal:
        assert journal.entries() == ()


def test_every_torn_end_is_tolerated(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        header = len(path.read_bytes().splitlines(keepends=True)[0])
        whole = path.read_bytes()
    intent_end = whole.index(b"\n", header) + 1
    for cut in range(header, len(whole)):
        path.write_bytes(whole[:cut])
        expected = [] if cut < intent_end else [(500, 100, "intent")]
        assert folded(path) == expected, cut
        with Journal.open(path, BOOT) as journal:
            assert [e.state for e in journal.entries()] == [s for *_, s in expected]
            if expected:
                journal.revert(QUEUE)
            write(journal, queue(500, 77))
        assert folded(path) == [(500, 77, "done")], cut


@pytest.mark.parametrize(
    "bad",
    [
        b"garbage\n",
        b"\n",
        b"[]\n",
        b'{"r":"intent"}\n',
        b'{"r":"done","target":{"kind":"txqueuelen","guest":"x","device":"d","ifindex":1}}\n',
        b'{"later":1}\n',
        b"\xff\xfe\n",
    ],
)
def test_corruption_in_the_middle_is_an_error_that_names_the_line(path: Path, bad: bytes) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        write(journal, Action(MASK, CpuSet([0]), CpuSet([1]), "policy"))
    lines = path.read_bytes().splitlines(keepends=True)
    spoiled = b"".join([*lines[:3], bad, *lines[3:]])
    path.write_bytes(spoiled)
    for attempt in (lambda: Journal.open(path, BOOT), lambda: read_entries(path, BOOT)):
        with pytest.raises(JournalError) as caught:
            attempt()
        assert "line 4 is corrupt" in str(caught.value)
        assert "nothing was changed on the host" in caught.value.hint
    assert path.read_bytes() == spoiled, "the evidence is left as it is"


@pytest.mark.parametrize("header", [b"{}\n", b"junk", b"junk\n", b"[1]\n"])
def test_a_file_that_is_no_journal_is_refused(path: Path, header: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(header)
    with pytest.raises(JournalError, match="line 1"):
        Journal.open(path, BOOT)
    assert path.read_bytes() == header


def test_a_missing_journal_has_no_entries(path: Path) -> None:
    assert read_entries(path, BOOT) == ()
    assert not path.parent.exists()


def test_only_one_process_writes(path: Path) -> None:
    holder = (
        "import sys, pathlib; from vsrtune.execute.journal import Journal\n"
        "j = Journal.open(pathlib.Path(sys.argv[1]), 'boot-a'); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[3],
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(JournalError) as caught:
            Journal.open(path, BOOT)
        assert str(caught.value).startswith(f"{path}: process {child.pid} (")
        assert str(caught.value).endswith(
            ") is using the journal; if that is the daemon, let it do the work (systemctl reload "
            "vsrtune) or stop it first (systemctl stop vsrtune)"
        )
        assert caught.value.lasting is Lasting.TRANSIENT
        assert read_entries(path, BOOT) == (), "readers need no lock"
        child.stdin.close()
        assert child.wait() == 0
    Journal.open(path, BOOT).close()


def test_the_lock_outlives_a_compaction(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        journal.drop(QUEUE, "compacts")
        with pytest.raises(JournalError, match="is using the journal"):
            Journal.open(path, BOOT)


def test_the_file_stays_bounded_while_values_are_enforced_again(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        for _ in range(400):
            write(journal, queue(500, 100))
            assert path.stat().st_size < 3 * jsonl_log.TINY
        assert [e.original for e in journal.entries()] == [500]
    assert folded(path) == [(500, 100, "done")]


def test_a_grown_journal_is_compacted_when_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(jsonl_log, "TINY", 1 << 30)
        patch.setattr(os, "fsync", lambda _fd: None)
        with Journal.open(path, BOOT) as journal:
            write(journal, Action(MASK, CpuSet([0]), CpuSet([1]), "policy"))
            for _ in range(100):
                write(journal, queue(500, 100))
            journal.intent(queue(100, 20))
            entries = journal.entries()
    size = path.stat().st_size
    with Journal.open(path, BOOT) as journal:
        assert journal.entries() == entries, "unfinished writes are kept as they are"
        assert path.stat().st_size < size / 10
        journal.done(QUEUE)
    assert folded(path)[1] == (500, 20, "done")


class _Kept:
    """Records that amount to so many bytes; nothing is live when that is none."""

    def __init__(self, size: int) -> None:
        self.live = [{"kept": "x" * (size - len('{"kept":""}\n'))}] if size else []

    def record(self, data: object) -> None:
        raise NotImplementedError

    def compacted(self) -> list[dict[str, Any]]:
        return self.live


@pytest.mark.parametrize(
    ("size", "live", "rewritten"),
    [
        (0, 0, False),
        (100, 0, True),
        (16 << 10, 50, False),
        ((16 << 10) + 1, 50, True),
        (30_000, 3_000, False),
        (30_001, 3_000, True),
        (1 << 20, 200_000, False),
        ((1 << 20) + 1, 200_000, True),
        # Nearly all of it is live.
        (1_200_051, 600_000, False),
        (1_200_052, 600_000, True),
    ],
)
def test_when_a_log_is_rewritten(
    path: Path, monkeypatch: pytest.MonkeyPatch, size: int, live: int, rewritten: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    header = {"h": "x" * 42}
    names = jsonl_log.LogNames("the log", "{process} has it", "wait")
    with jsonl_log.JsonlLog(path, names, header) as log:
        log.rewrite(_Kept(0))
        if size:
            log.append({"r": "x" * (size - 51 - len('{"r":""}\n'))})
        assert path.stat().st_size == size
        log.compact_if_grown(_Kept(live))
        assert path.stat().st_size == ((live and live + 51) if rewritten else size)


def test_a_log_is_not_weighed_again_before_it_has_grown(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By TINY, or by half of what it has."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    names = jsonl_log.LogNames("the log", "{process} has it", "wait")
    with jsonl_log.JsonlLog(path, names, {}) as log:
        log.rewrite(_Kept(0))
        for first, more, rewritten in ((20_000, 16_000, False), (0, 500, True)):
            if first:
                log.append({"r": "x" * first})
                log.compact_if_grown(_Kept(5_000))
            log.append({"r": "x" * more})
            size = path.stat().st_size
            log.compact_if_grown(_Kept(50))
            assert (path.stat().st_size < size) is rewritten


def test_a_failed_compaction_keeps_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))

        def refuse(*_: object) -> None:
            raise OSError(28, "full")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", refuse)
            journal.drop(QUEUE, "vanished")
        write(journal, queue(500, 50))
    assert folded(path) == [(500, 50, "done")]


def test_a_file_that_another_has_replaced_takes_no_more_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is the new file's, whose directory did not reach the disk. What went to the old one
    would be lost with this process."""

    def fail(_path: Path) -> None:
        raise OSError(5, "Input/output error")

    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        with monkeypatch.context() as patch:
            patch.setattr(state_files, "fsync_directory", fail)
            journal.drop(QUEUE, "vanished")
        with pytest.raises(JournalError, match="an earlier write failed"):
            journal.intent(queue(500, 50))
        assert journal.entries() == ()
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 50))
    assert folded(path) == [(500, 50, "done")]


def test_a_record_that_does_not_fit_is_taken_out_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        size = path.stat().st_size
        real = os.write

        def short(fd: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return real(fd, data[:10])

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", short)
            with pytest.raises(JournalError) as caught:
                journal.intent(queue(100, 50))
        assert caught.value.lasting is Lasting.TRANSIENT
        assert "free space" in caught.value.hint
        assert path.stat().st_size == size
        assert journal.applied() == {QUEUE: 100}
        write(journal, queue(100, 50))
    assert folded(path) == [(500, 50, "done")]


def test_a_new_file_takes_records_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_fd: int) -> None:
        raise OSError(5, "I/O error")

    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
        journal.renew()
        file = path.stat().st_ino
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            for record in (lambda: journal.intent(queue(100, 50)), journal.renew):
                with pytest.raises(JournalError):
                    record()
        assert path.stat().st_ino == file
        journal.renew()
        assert path.stat().st_ino != file
        assert folded(path) == [(500, 100, "done")]
        write(journal, queue(100, 50))
    assert folded(path) == [(500, 50, "done")]


def test_records_out_of_turn_never_reach_the_file(path: Path) -> None:
    with Journal.open(path, BOOT) as journal:
        size = path.stat().st_size
        with pytest.raises(Exception, match="not begun"):
            journal.done(QUEUE)
        assert path.stat().st_size == size


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, already full but for a little."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root and CAP_SYS_ADMIN")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_shows_before_the_first_write(small_disk: Path) -> None:
    with Journal.open(small_disk / "journal.jsonl", BOOT) as journal:
        journal.reserve([queue(500, 100)] * 20)
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        for _ in range(20):
            write(journal, queue(500, 100))
            write(journal, queue(100, 500))
        write(journal, queue(500, 100))
        with pytest.raises(JournalError, match="No space"):
            journal.reserve([queue(500, 100)] * 500)
        assert journal.applied() == {QUEUE: 100}


def test_a_disk_that_has_become_read_only_keeps_no_daemon_from_its_start(small_disk: Path) -> None:
    """What is in force is known and can be guarded; the end of the last line stays torn."""
    path = small_disk / "journal.jsonl"
    with Journal.open(path, BOOT) as journal:
        write(journal, queue(500, 100))
    path.write_bytes(path.read_bytes() + b'{"r":"int')
    remount = ("mount", str(small_disk), "-o")
    subprocess.run([*remount, "remount,ro"], check=True)
    with Journal.open(path, BOOT) as journal:
        assert str(os.getpid()) in holder(path)
        assert journal.applied() == {QUEUE: 100}
        for attempt in (lambda: journal.intent(queue(100, 50)), journal.renew):
            with pytest.raises(JournalError, match="Read-only file system"):
                attempt()
        subprocess.run([*remount, "remount,rw"], check=True)
        journal.renew()
        write(journal, queue(100, 50))
    assert folded(path) == [(500, 50, "done")]
