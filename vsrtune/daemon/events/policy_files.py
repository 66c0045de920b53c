# SPDX-License-Identifier: GPL-2.0-or-later
"""Tells when policy files have changed; the daemon reads them."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vsrtune.daemon.events.thread import Background
from vsrtune.daemon.systemd import LOGGER
from vsrtune.observe.config_files import SUFFIXES

ATTRIB, CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF, Q_OVERFLOW, IGNORED = 0x400, 0x800, 0x4000, 0x8000
_ONLYDIR = 0x01000000
# Files that others may write are refused, and those in a directory that they may write.
_DONE = ATTRIB | CLOSE_WRITE | MOVED_FROM | MOVED_TO | DELETE
_MASK = _DONE | CREATE | DELETE_SELF | MOVE_SELF | _ONLYDIR
_EVENT = struct.Struct("=iIII")
_BUFFER = 1 << 16


class Inotify:
    """One inotify instance; ``fd`` is readable when there is something to ``read``."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._checked(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "")

    def watch(self, directory: str) -> int:
        """Add a watch for a directory and return its number; a directory that has a watch
        keeps its number. Raises OSError as inotify_add_watch(2) does."""
        number = self._libc.inotify_add_watch(self.fd, os.fsencode(directory), _MASK)
        return self._checked(number, directory)

    def read(self) -> Iterator[tuple[int, int, str]]:
        """Yield pending events: number of the watch (-1 for an overflow), bits, and the name
        of the file ("" for the directory itself)."""
        try:
            data = os.read(self.fd, _BUFFER)
        except BlockingIOError:
            return
        at = 0
        while at + _EVENT.size <= len(data):
            number, bits, _, size = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            name = data[at : at + size].rstrip(b"\0")
            at += size
            yield number, bits, os.fsdecode(name)

    def close(self) -> None:
        """Forget all watches."""
        os.close(self.fd)

    @staticmethod
    def _checked(result: int, path: str) -> int:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        return result


_TURN = 1.0
_SELF = DELETE_SELF | MOVE_SELF | IGNORED


class PolicyWatch(Background):
    """Watches directories from ``start`` to ``stop``; ``changed`` is called from this
    thread. It awaits a missing directory in the nearest existing one above it."""

    def __init__(self, dirs: Sequence[Path], changed: Callable[[str], None]) -> None:
        super().__init__("policy-watch")
        self._dirs = [path.absolute() for path in dirs]
        self._changed = changed
        self._watches: dict[int, Path] = {}
        self.started = threading.Event()

    def run(self) -> None:
        """Watch. Where the kernel refuses, only a reload reads the policies again."""
        try:
            files = Inotify()
        except OSError as error:
            LOGGER.warning("policy files are not watched: %s; reload after a change", error)
            return
        try:
            self._arm(files)
            # They were read before.
            self._changed("policy files are watched now")
            self.started.set()
            while not self._stopping.is_set():
                ready, _, _ = select.select([files.fd], [], [], _TURN)
                if ready:
                    self._read(files)
        finally:
            files.close()

    def _read(self, files: Inotify) -> None:
        again = False
        for number, bits, name in files.read():
            directory = self._watches.get(number)
            if bits & Q_OVERFLOW:
                again = True
                self._changed("too many changes of policy files to be told")
            if bits & _SELF:
                again = True
            if directory is None:
                continue
            if directory in self._dirs and self._is_policy(directory, name, bits):
                self._changed(f"{directory / name} has changed")
            again = again or self._leads(directory / name)
        if again:
            # Compare numbers as well: a path may name another directory by now. An unchanged
            # directory keeps its number.
            before = self._watches
            self._arm(files)
            if self._watches != before:
                self._changed("a policy directory has come or gone")

    def _is_policy(self, directory: Path, name: str, bits: int) -> bool:
        if not name:
            return bool(bits & ATTRIB)
        path = Path(name)
        if path.suffix not in SUFFIXES or name.startswith("."):
            return False
        # A created file is not written yet; a symbolic link is complete at once.
        return bool(bits & _DONE) or (directory / name).is_symlink()

    def _leads(self, path: Path) -> bool:
        """Whether a policy directory is at or below ``path``."""
        return any(directory == path or path in directory.parents for directory in self._dirs)

    def _arm(self, files: Inotify) -> None:
        self._watches = {}
        for directory in self._dirs:
            # Until what is awaited in a watched directory is not there: it may be made meanwhile.
            path = self._watch(files, directory)
            while path is not None and path != directory:
                below = path / directory.relative_to(path).parts[0]
                before, path = path, self._watch(files, directory) if below.is_dir() else None
                path = None if path == before else path

    def _watch(self, files: Inotify, directory: Path) -> Path | None:
        """Watch a directory, or the nearest above it, and return which; None when it cannot be."""
        for path in (directory, *directory.parents):
            try:
                self._watches[files.watch(str(path))] = path
                return path
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                LOGGER.warning("%s is not watched: %s; reload after a change", path, error)
                return None
        return None
