# SPDX-License-Identifier: GPL-2.0-or-later
"""Files of clones: overlays of a template's disks, made with qemu-img, and copies.

A file appears under its name whole or not at all, and never in the place of another.

Directories of guests' files may belong to others: libvirt gives that of the NVRAMs to QEMU's user,
who can put a link or another file under any name in it at any moment. This module therefore opens
every directory once, without links that such a user could have made, and does everything else
through its descriptor: it makes a file in a directory of its own that nobody else may enter, sets
the owner there, and links the file from there to its name.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
import struct
import subprocess
from collections.abc import Iterator

from vsrtune.attach.plan.clone_model import File
from vsrtune.core.errors import WriteError

_PROGRAM = "qemu-img"
# A file's name with this suffix: the directory in which the file is made. If one of ours exists,
# a killed process left it.
_PART = ".vsrtune-part"
# The name of the file there.
_NEW = "made-by-vsrtune"
# An overlay is some 200 KiB; a base on a network may take its time.
_SECONDS = 60.0
# The largest NVRAM that any firmware has is 64 MiB.
_LARGEST_COPY = 256 << 20
# The first fields of a qcow2 file: magic, version, offset and length of the name of its base,
# log2 of a cluster, and the size of the disk.
_HEADER = struct.Struct(">4sIQIIQ")
_MAGIC = b"QFI\xfb"
_SECTOR = 512
# QEMU makes no larger disk: a table of 32 MiB for clusters of 64 KiB.
_LARGEST_DISK = 2 << 50
_LONGEST = 1023
# As many links as the kernel follows in one path.
_LINKS = 40
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OutOfReachError(WriteError):
    """This process may not see or write the directories of guests' files; another may."""


def make(file: File) -> None:
    """Make a file, owned and readable like its base. A copy is left out if its original does not
    exist. Raises WriteError, also when there is a file of that name."""
    with contextlib.ExitStack() as held:
        with _told(file.base, "the template's file cannot be read", "is its storage there?"):
            try:
                # The clone can read the copy, so no link may choose the original.
                found = held.enter_context(_opened(_walk(file.base, follow=bool(file.format))))
            except FileNotFoundError:
                if not file.format:
                    return  # libvirt makes an NVRAM when a guest first starts
                raise
            base = held.enter_context(_opened(_base_of(file, found)))
        directory, name = posixpath.split(file.path)
        with _told(file.path):
            parent = held.enter_context(_opened(_walk(directory)))
        part = file.path + _PART
        with _told(part):
            _discard(parent, part)
            private = held.enter_context(_private(parent, part))
        with _told(file.path):
            if file.format:
                _create(file, _disk_size(file, base), private)
            else:
                _copy(file, base, private)
            _own_as(base, private)
            # Unlike a rename this replaces no file.
            os.link(_NEW, name, src_dir_fd=private, dst_dir_fd=parent, follow_symlinks=False)


def remove(file: File) -> str:
    """Remove a file that ``make`` made, whole or in part. Returns why it was left, "" when it is
    gone. Raises WriteError."""
    directory, name = posixpath.split(file.path)
    with _told(file.path), contextlib.ExitStack() as held:
        try:
            parent = held.enter_context(_opened(_walk(directory)))
            _discard(parent, file.path + _PART)
            found = held.enter_context(_opened(os.open(name, _LOOK, dir_fd=parent)))
        except FileNotFoundError:
            return ""
        if file.format and _names_as_base(found) != file.base:
            return f"left {file.path}: it is no overlay of {file.base}"
        os.unlink(name, dir_fd=parent)
    return ""


# -- paths of which others own a part


def _walk(path: str, *, follow: bool = True) -> int:
    """A descriptor (O_PATH) of the file at an absolute path. A symbolic link is followed only in
    a directory that nobody but root may write. Without ``follow`` a link as the last component is
    not followed but opened itself. Raises OSError, WriteError for other links."""
    if not posixpath.isabs(path):
        raise WriteError(
            "it is no absolute path", where=path, hint="virsh edit of the guest that names it"
        )
    here, names, links = os.open("/", _LOOK), _components(path), 0
    while names:
        name = names.pop()
        with _opened(here):
            found = _look(name, here)
            if not stat.S_ISLNK(os.fstat(found).st_mode) or not (names or follow):
                here = found
                continue
            with _opened(found):
                links += 1
                if links > _LINKS or not _only_root_writes(here):
                    raise WriteError(
                        f"{name} is a symbolic link in a directory where others than root "
                        "make files, so it is not followed",
                        where=path,
                        hint="name the file without the link, or give the directory to root "
                        "(chown root, chmod go-w)",
                    )
                target = os.readlink("", dir_fd=found)
            names += _components(target)
            here = os.open("/", _LOOK) if posixpath.isabs(target) else os.dup(here)
    return here


def _look(name: str, directory: int) -> int:
    try:
        # With O_DIRECTORY the kernel mounts directories that are mounted on demand.
        return os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=directory)
    except NotADirectoryError:
        return os.open(name, _LOOK, dir_fd=directory)


def _components(path: str) -> list[str]:
    """The components of a path, the first one last."""
    return [name for name in path.split("/") if name not in ("", ".")][::-1]


def _only_root_writes(directory: int) -> bool:
    status = os.fstat(directory)
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


@contextlib.contextmanager
def _private(parent: int, path: str) -> Iterator[int]:
    """A new directory that nobody else may enter, and that is gone afterwards. The owner of the
    parent can move it away, but not change its content."""
    name = posixpath.basename(path)
    os.mkdir(name, 0o700, dir_fd=parent)
    try:
        with _opened(os.open(name, _ENTER, dir_fd=parent)) as private:
            if not _ours(private) or os.listdir(private):
                raise WriteError(
                    "another directory was put in the place of the one that was just made",
                    where=path,
                    hint="find out who writes to the directory where the guests' files are",
                )
            try:
                yield private
            finally:
                _unlink(private)
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent)


def _discard(parent: int, path: str) -> None:
    """Remove a directory of ours that a killed process left; anything else stays."""
    name = posixpath.basename(path)
    try:
        left = os.open(name, _ENTER, dir_fd=parent)
    except OSError:
        return
    with _opened(left):
        if not _ours(left):
            return
        _unlink(left)
    os.rmdir(name, dir_fd=parent)


def _ours(directory: int) -> bool:
    status = os.fstat(directory)
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _unlink(private: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_NEW, dir_fd=private)


@contextlib.contextmanager
def _opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(found: int) -> int:
    """The file of an O_PATH descriptor, opened for reading."""
    return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)


# -- what is in the files


def _base_of(file: File, found: int) -> int:
    """A template's file, opened for reading. Raises WriteError when no file of a clone can be made
    from it."""
    status = os.fstat(found)
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG and not (kind == stat.S_IFBLK and file.format):
        raise WriteError(
            f"it is no {'file or block device' if file.format else 'regular file'}",
            where=file.base,
            hint="the template's definition must name the file itself, not a link to it",
        )
    if not file.format and status.st_nlink > 1:
        raise WriteError(
            "it is another file too (a hard link), so it is not copied",
            where=file.base,
            hint="find the other with find -samefile, or give the template a copy as its own",
        )
    return _read(found)


def _names_as_base(found: int) -> str:
    """The base of which a file is an overlay, "" for a file that is none."""
    if not stat.S_ISREG(os.fstat(found).st_mode):
        return ""
    with _opened(_read(found)) as opened:
        head = os.pread(opened, _HEADER.size, 0)
        if len(head) < _HEADER.size:
            return ""
        magic, _version, offset, size, _bits, _disk = _HEADER.unpack(head)
        if magic != _MAGIC or not 0 < offset < 1 << 62 or size > _LONGEST:
            return ""
        return os.fsdecode(os.pread(opened, size, offset))


def _copy(file: File, base: int, private: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _opened(os.open(_NEW, flags, 0o600, dir_fd=private)) as new:
        done = 0
        while count := os.sendfile(new, base, done, 1 << 20):
            done += count
            if done > _LARGEST_COPY:
                raise WriteError(
                    f"it is larger than {_LARGEST_COPY >> 20} MiB, which no NVRAM is",
                    where=file.base,
                    hint="see the <nvram> of the template's definition",
                )


def _own_as(base: int, private: int) -> None:
    """Give the new file the owner and the permissions of its base. libvirt gives a guest's files
    to QEMU's user, unless it was told not to; they are then that user's already."""
    status = os.fstat(base)
    block = stat.S_ISBLK(status.st_mode)
    with _opened(os.open(_NEW, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=private)) as new:
        os.fchmod(new, 0o600 if block else status.st_mode & 0o666 | 0o600)
        os.fchown(new, status.st_uid, status.st_gid)


def _disk_size(file: File, base: int) -> int:
    """The size of the disk in a template's file, in bytes. Raises WriteError."""
    if file.format == "qcow2":
        head = os.pread(base, _HEADER.size, 0)
        size = _HEADER.unpack(head)[-1] if len(head) == _HEADER.size else 0
        if head[: len(_MAGIC)] != _MAGIC:
            size = 0
    else:
        size = os.lseek(base, 0, os.SEEK_END)
    if not 0 < size <= _LARGEST_DISK:
        raise WriteError(
            f"it is no disk of format {file.format}, empty, or larger than "
            f"{_LARGEST_DISK >> 50} PiB",
            where=file.base,
            hint="does the <driver> of the template's disk name its format? See: qemu-img info",
        )
    return -(-size // _SECTOR) * _SECTOR


def _create(file: File, size: int, private: int) -> None:
    """Make the overlay through the descriptor, whatever the name of its directory is by now, and
    without opening the base (-u). The header of the base, which the template's QEMU writes, can
    name any file, socket or server as its own base, and qemu-img would open that as root."""
    new = f"/proc/self/fd/{private}/{_NEW}"
    words = [
        _PROGRAM, "create", "-q", "-u", "-f", "qcow2", "-F", file.format, "-b", file.base,
        new, str(size),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=_SECONDS,
            pass_fds=(private,),
        )  # fmt: skip
    except FileNotFoundError:
        raise WriteError(
            f"{_PROGRAM} is not installed, which makes overlays of disks", where=file.path,
            hint="install qemu-utils",
        ) from None  # fmt: skip
    except subprocess.TimeoutExpired:
        raise WriteError(
            f"{_PROGRAM} create did not end within {_SECONDS:g} s", where=file.path,
            hint="is the storage there?",
        ) from None  # fmt: skip
    if done.returncode:
        raise WriteError(
            f"{_PROGRAM} create failed: {done.stderr.strip()}", where=file.path,
            hint="see: qemu-img info on the template's disk",
        )  # fmt: skip


@contextlib.contextmanager
def _told(
    path: str,
    what: str = "the file cannot be made or removed",
    hint: str = "the directory must be there, and its filesystem must know hard links",
) -> Iterator[None]:
    """Turn an OSError into an error for people."""
    try:
        yield
    except FileExistsError as error:
        raise WriteError(
            "there is a file of that name", where=path,
            hint="remove it if nothing needs it, or name another directory (overlays:)",
        ) from error  # fmt: skip
    except OSError as error:
        raise WriteError(f"{what}: {error.strerror}", where=path, hint=hint) from error
