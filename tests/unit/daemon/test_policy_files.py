"""events/policy_files.py on this machine's kernel."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vsrtune.daemon.events.policy_files import Inotify, PolicyWatch


class Watching:
    """A running watch, and what it has told."""

    def __init__(self, *dirs: Path) -> None:
        self.told: list[str] = []
        self.watch = PolicyWatch(dirs, self.told.append)
        self.watch.start()
        assert self.watch.started.wait(10)

    def until_told(self, act: Callable[[], object], what: str) -> str:
        """The words of the first news after ``act``."""
        before = len(self.told)
        act()
        end = time.monotonic() + 10
        while len(self.told) == before:
            assert time.monotonic() < end, what
            time.sleep(0.01)
        return self.told[before]


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    directory = tmp_path / "etc" / "policies"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def started(policies: Path) -> Iterator[Watching]:
    found = Watching(policies)
    yield found
    found.watch.stop()
    found.watch.join(10)
    assert not found.watch.is_alive()


def test_written_replaced_renamed_and_removed(started: Watching, policies: Path) -> None:
    file = policies / "a b.ü.yaml"
    assert str(file) in started.until_told(lambda: file.write_text("guest: x\n"), "written")
    other = policies / ".new"
    other.write_text("guest: y\n")
    started.until_told(lambda: other.rename(file), "renamed over it, as editors do")
    started.until_told(file.unlink, "removed")
    started.until_told(lambda: file.symlink_to("/dev/null"), "a link is whole at once")
    file.unlink()
    file.write_text("guest: x\n")
    time.sleep(0.2)
    for path in (file, policies):
        started.until_told(lambda path=path: path.chmod(0o700), "others may no longer write there")


def test_other_files_are_not_told(started: Watching, policies: Path) -> None:
    for name in ("notes.txt", ".hidden.yaml", "a.yaml~", "b.yaml.swp"):
        (policies / name).write_text("x")
    (policies.parent / "c.yaml").write_text("x")
    last = policies / "z.yaml"
    assert str(last) in started.until_told(lambda: last.write_text("guest: x\n"), "written")


def test_directory_that_goes_and_comes(started: Watching, policies: Path) -> None:
    moved = policies.with_name("aside")
    started.until_told(lambda: policies.rename(moved), "gone")
    started.until_told(lambda: moved.rename(policies), "back, with what is in it")
    file = policies / "a.yaml"
    started.until_told(lambda: file.write_text("guest: x\n"), "watched again")


def exchange(one: Path, other: Path) -> None:
    """renameat2(2) with RENAME_EXCHANGE, which Python has not."""
    here, both = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), both) != 0:
        pytest.skip(f"renameat2: {os.strerror(ctypes.get_errno())}")


def test_directory_in_whose_place_another_is_at_once(started: Watching, policies: Path) -> None:
    other = policies.with_name("new")
    other.mkdir()
    started.until_told(lambda: exchange(policies, other), "another directory")
    file = policies / "a.yaml"
    started.until_told(lambda: file.write_text("guest: x\n"), "the new one is watched")
    time.sleep(0.2)
    told = len(started.told)
    (policies.parent / "c.yaml").write_text("x")
    (other / "b.yaml").write_text("guest: x\n")
    time.sleep(0.2)
    assert len(started.told) == told, "what is not in it is not told, nor told again"


def test_directory_that_is_made_later(tmp_path: Path) -> None:
    policies = tmp_path / "etc" / "vsrtune" / "policies"
    started = Watching(policies)
    started.until_told(lambda: policies.mkdir(parents=True), "made")
    # The news may be of a directory above it; it is watched a moment later.
    watched = threading.Event()
    started.told.clear()

    def write_until_told() -> None:
        while not watched.wait(0.1):
            (policies / "a.yaml").write_text("guest: x\n")

    writer = threading.Thread(target=write_until_told)
    started.until_told(writer.start, "watched")
    watched.set()
    writer.join()
    started.watch.stop()
    started.watch.join(10)


def test_a_config_map_that_the_kubelet_replaces(tmp_path: Path) -> None:
    """The policy directory is the link that the kubelet turns to the next version before it removes
    the one before (AtomicWriter)."""
    for version in ("..1", "..2", "..3"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a.yaml").write_text(f"guest: {version}\n")
    link, new = tmp_path / "..data", tmp_path / "..data_tmp"
    link.symlink_to("..1")
    started = Watching(link)

    def replace(old: str, fresh: str) -> None:
        new.symlink_to(fresh)
        new.rename(link)
        (tmp_path / old / "a.yaml").unlink()
        (tmp_path / old).rmdir()

    started.until_told(lambda: replace("..1", "..2"), "the second version")
    # News of the file and of the directory; it is watched anew before the latter.
    time.sleep(0.5)
    started.until_told(lambda: replace("..2", "..3"), "the third version")
    started.watch.stop()
    started.watch.join(10)


def test_what_changed_before_the_watch_is_told(policies: Path) -> None:
    """The daemon reads the files, and starts to watch a little later."""
    started = Watching(policies)
    assert len(started.told) == 1
    started.watch.stop()
    started.watch.join(10)


def test_directory_that_is_made_while_the_one_above_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies, real = tmp_path / "etc" / "policies", Inotify.watch
    policies.parent.mkdir()

    def watch(files: Inotify, directory: str) -> int:
        if directory == str(policies.parent) and not policies.exists():
            policies.mkdir()
        return real(files, directory)

    monkeypatch.setattr(Inotify, "watch", watch)
    started = Watching(policies)
    started.until_told(lambda: (policies / "a.yaml").write_text("guest: x\n"), "written")
    started.watch.stop()
    started.watch.join(10)
