"""inotify(7), as much of it as is needed to learn of changed files in directories.

Debian has no library for it that both releases ship and that does not bring more than the
four calls below.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator

CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF, Q_OVERFLOW, IGNORED = 0x400, 0x800, 0x4000, 0x8000
_ONLYDIR = 0x01000000
_MASK = CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF | _ONLYDIR
_EVENT = struct.Struct("=iIII")
_BUFFER = 1 << 16


class Inotify:
    """One inotify instance; ``fd`` is readable when there is something to ``read``."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._checked(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "")

    def watch(self, directory: str) -> int:
        """Watch a directory: its number, the same one for a directory that is watched
        already. OSError as from inotify_add_watch(2)."""
        number = self._libc.inotify_add_watch(self.fd, os.fsencode(directory), _MASK)
        return self._checked(number, directory)

    def read(self) -> Iterator[tuple[int, int, str]]:
        """What has happened: number of the watch (-1 for an overflow), bits, and the name of
        the file ("" for the directory itself)."""
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
