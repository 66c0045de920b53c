"""Tells when policy files have changed. Reading them is the daemon's."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from vsrtune import inotify
from vsrtune.background import Background
from vsrtune.inotify import Inotify
from vsrtune.log import LOGGER
from vsrtune.observe.config_files import SUFFIXES

_TURN = 1.0
_DONE = inotify.CLOSE_WRITE | inotify.MOVED_FROM | inotify.MOVED_TO | inotify.DELETE
_SELF = inotify.DELETE_SELF | inotify.MOVE_SELF | inotify.IGNORED


class PolicyWatch(Background):
    """Watches directories from ``start`` to ``stop``; ``changed`` is called from this
    thread. A directory that does not exist is waited for in the nearest one above it."""

    def __init__(self, dirs: Sequence[Path], changed: Callable[[str], None]) -> None:
        super().__init__("policy-watch")
        self._dirs = [path.absolute() for path in dirs]
        self._changed = changed
        self._watches: dict[int, Path] = {}
        self.watching = threading.Event()

    def run(self) -> None:
        """Watch; where the kernel refuses, only a reload reads the policies again."""
        try:
            files = Inotify()
        except OSError as error:
            LOGGER.warning("policy files are not watched: %s; reload after a change", error)
            return
        try:
            self._arm(files)
            self.watching.set()
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
            if bits & inotify.Q_OVERFLOW:
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
            # By number as well: at a path may be another directory by now. One that is
            # still the same keeps its number.
            before = self._watches
            self._arm(files)
            if self._watches != before:
                self._changed("a policy directory has come or gone")

    def _is_policy(self, directory: Path, name: str, bits: int) -> bool:
        path = Path(name)
        if path.suffix not in SUFFIXES or name.startswith("."):
            return False
        # A file that is created is not written yet; a link is whole at once.
        return bool(bits & _DONE) or (directory / name).is_symlink()

    def _leads(self, path: Path) -> bool:
        """Whether a policy directory is at or below ``path``."""
        return any(directory == path or path in directory.parents for directory in self._dirs)

    def _arm(self, files: Inotify) -> None:
        self._watches = {}
        for directory in self._dirs:
            for path in (directory, *directory.parents):
                try:
                    self._watches[files.watch(str(path))] = path
                    break
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError as error:
                    LOGGER.warning("%s is not watched: %s; reload after a change", path, error)
                    break
