"""Other users cannot read what vsrtune writes down, nor hold its locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vsrtune.bench.cleanup import cleaners as bench
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.journal import DEFAULT_PATH, Journal
from vsrtune.execute.ledger import Ledger
from vsrtune.host import state_files

OTHER = 64123
NAMES = ("log.jsonl", "log.jsonl.lock")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user of the host can reach."""
    mask = os.umask(0)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)
    os.umask(mask)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_journal(path: Path) -> Journal:
    return Journal.open(path, "boot")


def open_ledger(path: Path) -> Ledger:
    return Ledger.open(path, wait=0.1)


OPENERS = [open_journal, open_ledger]


def gets(work: Callable[[], None]) -> list[str]:
    """What another user is let do, of the names it is tried with."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            os.dup2(writing, 1)
            work()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answers:
        told = answers.read()
    os.waitpid(pid, 0)
    assert told.endswith("end\n")
    return told.split("\n")[:-2]


def tries(directory: Path) -> list[str]:
    def work() -> None:
        for name in NAMES:
            for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                try:
                    found = os.open(directory / name, flags)
                except PermissionError:
                    continue
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(1, f"{name} {flags}\n".encode())
        os.write(1, b"end\n")

    return gets(work)


@as_root
@pytest.mark.parametrize("opened", OPENERS)
def test_another_user_neither_reads_nor_locks(
    place: Path, opened: Callable[[Path], Journal | Ledger]
) -> None:
    """Also in a directory of the operator's choice, which stays as it is, and that is made
    anew: by itself it keeps others out."""
    for directory, expected in ((place, 0o755), (place / "a" / "new", 0o700)):
        with opened(directory / "log.jsonl"):
            pass
        assert [mode(directory / name) for name in NAMES] == [0o600, 0o600]
        assert mode(directory) == expected
        assert tries(directory) == []
        with opened(directory / "log.jsonl"):
            pass


@as_root
@pytest.mark.parametrize("opened", OPENERS)
def test_what_an_older_version_left_open_is_closed(
    place: Path, opened: Callable[[Path], Journal | Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_files, "OURS", {place})
    with opened(place / "log.jsonl"):
        pass
    place.chmod(0o755)
    for name in NAMES:
        (place / name).chmod(0o644)
    assert len(tries(place)) == len(NAMES)
    with opened(place / "log.jsonl"):
        pass
    assert [mode(path) for path in (place, *(place / name for name in NAMES))] == [
        0o700, 0o600, 0o600,
    ]  # fmt: skip
    assert tries(place) == []


def test_which_directories_are_ours() -> None:
    assert {DEFAULT_PATH.parent, bench.DEFAULT_PATH.parent} == state_files.OURS
    units = Path(__file__).parents[3] / "units"
    for unit in units.glob("*.service"):
        assert "\nStateDirectoryMode=0700\n" in unit.read_text()


@pytest.mark.parametrize("opened", OPENERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_link_is_not_followed(
    tmp_path: Path, opened: Callable[[Path], Journal | Ledger], name: str
) -> None:
    """In a directory where others may make one."""
    victim = tmp_path / "victim"
    victim.write_text("")
    (tmp_path / name).symlink_to(victim)
    before = victim.stat()
    with contextlib.suppress(VsrtuneError), opened(tmp_path / "log.jsonl"):
        pass
    after = victim.stat()
    assert (after.st_mtime_ns, after.st_mode) == (before.st_mtime_ns, before.st_mode)
