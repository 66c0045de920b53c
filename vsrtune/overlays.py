"""Files of clones: overlays of a template's disks, made with qemu-img, and copies.

A file appears under its name whole or not at all, and never in the place of another.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator

from vsrtune.clone_model import File
from vsrtune.errors import WriteError

_PROGRAM = "qemu-img"
# Under this name a file is made; who finds it under that knows that it is ours and no use.
_PART = ".vsrtune-part"
# An overlay is some 200 KiB; a base on a network may take its time.
_SECONDS = 60.0
# The first fields of a qcow2 file: magic, version, and where the name of its base is.
_HEADER = struct.Struct(">4sIQI")
_MAGIC = b"QFI\xfb"
_LONGEST = 1023


class OutOfReachError(WriteError):
    """This process may not see or write where guests' files are; another may."""


def there(path: str) -> bool:
    """Whether there is anything of that name."""
    return os.path.lexists(path)


def make(file: File) -> None:
    """Make it, owned and readable as its base is; a copy whose original is not there is left
    out. Raises WriteError, also when there is a file of that name."""
    if not file.format and not there(file.base):
        return  # libvirt makes an NVRAM when a guest first starts
    part = file.path + _PART
    with _told(file.path):
        _discard(part)
        if file.format:
            _run("create", "-q", "-f", "qcow2", "-F", file.format, "-b", file.base, part)
        else:
            shutil.copyfile(file.base, part)
        _own_as(file, part)
        # Unlike a rename this takes nobody's place.
        os.link(part, file.path)
        os.unlink(part)


def remove(file: File) -> str:
    """Remove what ``make`` made, whole or in part; why it was left, "" when it is gone.
    Raises WriteError."""
    with _told(file.path):
        _discard(file.path + _PART)
        if not there(file.path):
            return ""
        if file.format and _base(file.path) != file.base:
            return f"left {file.path}: it is no overlay of {file.base}"
        os.unlink(file.path)
    return ""


def _base(path: str) -> str:
    """What it is an overlay of, "" for any other file."""
    if os.path.islink(path) or not os.path.isfile(path):
        return ""
    with open(path, "rb") as opened:
        head = opened.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return ""
        magic, _version, offset, size = _HEADER.unpack(head)
        if magic != _MAGIC or not offset or size > _LONGEST:
            return ""
        opened.seek(offset)
        return os.fsdecode(opened.read(size))


def _discard(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _own_as(file: File, part: str) -> None:
    """libvirt gives a guest's files to QEMU's user, unless it was told not to: then they
    are that user's already."""
    base = os.stat(file.base)
    block = not os.path.isfile(file.base)
    os.chmod(part, 0o600 if block else base.st_mode & 0o666 | 0o600)
    os.chown(part, base.st_uid, base.st_gid)


def _run(*words: str) -> None:
    try:
        done = subprocess.run(
            [_PROGRAM, *words], capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except FileNotFoundError:
        raise WriteError(
            f"{_PROGRAM} is not installed, which makes overlays of disks", where=words[-1],
            hint="install qemu-utils",
        ) from None  # fmt: skip
    except subprocess.TimeoutExpired:
        raise WriteError(
            f"{_PROGRAM} {words[0]} did not end within {_SECONDS:g} s", where=words[-1],
            hint="is the storage there?",
        ) from None  # fmt: skip
    if done.returncode:
        raise WriteError(
            f"{_PROGRAM} {words[0]} failed: {done.stderr.strip()}", where=words[-1],
            hint="see: qemu-img info on the template's disk",
        )  # fmt: skip


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    """OSError as an error for people."""
    try:
        yield
    except FileExistsError as error:
        raise WriteError("there is a file of that name", where=path) from error
    except OSError as error:
        raise WriteError(
            f"the file cannot be made or removed: {error.strerror}", where=path,
            hint="the directory must be there, and its filesystem must know hard links",
        ) from error  # fmt: skip
