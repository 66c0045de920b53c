"""Write "newc" cpio archives, the format the kernel unpacks as an initramfs.

Archives are written here because they must hold root-owned files and device
nodes whoever runs the tool, and because the kernel accepts archives that are
simply concatenated: modules are packed once per image, scripts once per run.
"""

from __future__ import annotations

import stat
from pathlib import Path

_TRAILER = "TRAILER!!!"


class Archive:
    """An initramfs in memory. Parents of every entry are made as needed."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._directories: set[str] = set()
        self._inode = 0

    def directory(self, path: str) -> None:
        path = path.strip("/")
        if not path or path in self._directories:
            return
        self._parents_of(path)
        self._directories.add(path)
        self._entry(path, stat.S_IFDIR | 0o755, b"")

    def file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        path = path.strip("/")
        self._parents_of(path)
        self._entry(path, stat.S_IFREG | mode, data)

    def symlink(self, path: str, target: str) -> None:
        path = path.strip("/")
        self._parents_of(path)
        self._entry(path, stat.S_IFLNK | 0o777, target.encode())

    def char_device(self, path: str, major: int, minor: int) -> None:
        path = path.strip("/")
        self._parents_of(path)
        self._entry(path, stat.S_IFCHR | 0o600, b"", (major, minor))

    def write(self, target: Path) -> None:
        self._entry(_TRAILER, 0, b"")
        target.write_bytes(b"".join(self._parts))

    def _parents_of(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        if parent:
            self.directory(parent)

    def _entry(self, name: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> None:
        self._inode += 1
        encoded = name.encode() + b"\0"
        fields = (
            self._inode,
            mode,
            0,  # uid
            0,  # gid
            1,  # links
            0,  # mtime
            len(data),
            0,  # major and minor of the file system
            0,
            device[0],
            device[1],
            len(encoded),
            0,  # checksum, unused by newc
        )
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        self._parts += [_pad(header + encoded), _pad(data)]


def _pad(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
