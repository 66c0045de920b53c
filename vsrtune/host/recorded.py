# SPDX-License-Identifier: GPL-2.0-or-later
"""A recorded host: its answers in one file, and the interfaces through which readers get them.

The file is JSON with one path a line, in a fixed order, so that diff compares recordings.
``vsrtune record`` writes it (observe/recording.py).
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import ObserveError, VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.host.filesystem import FileStat, HostRoot, capped
from vsrtune.host.libvirt import DomainText
from vsrtune.host.state_files import read_file
from vsrtune.model.guest import Sched

# A host with 1,000 guests takes 64 MiB.
MAX_SIZE = 256 << 20
_CODES = {name: code for code, name in errno.errorcode.items()}
HINT = "name a file that `vsrtune record` has made"


@dataclass(slots=True)
class Answers:
    """Answers of a host by path: texts of files, names in directories, targets of links, names of
    errors, paths that exist and were not read, and stat(2) of files.

    ``sched`` is by tid, ``ethtool`` and ``napi`` (the thread that its driver tells) by device,
    ``qmp`` by pid: vcpu number to tid, or why there was no answer. A path without ``stats`` is
    root's, and only root may write it.
    """

    texts: dict[str, str] = field(default_factory=dict)
    listings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    present: dict[str, bool] = field(default_factory=dict)
    stats: dict[str, FileStat] = field(default_factory=dict)
    sched: dict[str, Sched] = field(default_factory=dict)
    ethtool: dict[str, dict[str, int]] = field(default_factory=dict)
    napi: dict[str, int] = field(default_factory=dict)
    qmp: dict[str, str | dict[str, int]] = field(default_factory=dict)


# The domains that libvirt told, or why it did not answer.
Told = str | tuple[DomainText, ...]


@dataclass(slots=True)
class Recording:
    """The content of the file. ``note`` describes it to a reader, line by line. ``snapshot`` is
    the JSON form of the host's snapshot."""

    note: tuple[str, ...] = ()
    host: Answers = field(default_factory=Answers)
    libvirt: Told = ()
    snapshot: Any = None

    def root(self) -> RecordedRoot:
        """The host's files."""
        return RecordedRoot(self.host)

    def virt(self) -> RecordedVirt:
        """The host's libvirt."""
        return RecordedVirt(self.libvirt)


def load(path: Path) -> Recording:
    """Read the file. Raises ObserveError when it holds no recording."""
    try:
        return parse(read_file(path, MAX_SIZE))
    except OSError as error:
        raise ObserveError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, VsrtuneError) as error:
        what = f"no host is recorded here: {error}"
        raise ObserveError(what, where=str(path), hint=HINT) from error


def parse(text: str | bytes) -> Recording:
    """The recording in a text. Raises ValueError and VsrtuneError."""
    return decode(Recording, json_value(text, MAX_SIZE))


def dumps(recording: Recording) -> str:
    """The text of the file."""
    told: dict[str, Any] = encode(recording.host)
    host = ",\n".join(f"{_json(name)}: {_lines(answers)}" for name, answers in told.items())
    return (
        f'{{\n"note": {_json(recording.note, 1)},\n"host": {{\n{host}\n}},\n'
        f'"libvirt": {_json(encode(recording.libvirt), 1)},\n'
        f'"snapshot": {_json(recording.snapshot, 1)}\n}}\n'
    )


def _lines(answers: Any) -> str:
    if not answers or not isinstance(answers, dict):
        return _json(answers)
    lines = ",\n".join(f"  {_json(path)}: {_json(answers[path])}" for path in sorted(answers))
    return f"{{\n{lines}\n}}"


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class RecordedRoot(HostRoot):
    """A HostRoot that gives recorded answers.

    A directory that was not listed holds the recorded paths below it.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def read(self, path: str) -> str:
        self._check(path)
        text = self.answers.texts.get(path)
        if text is None:
            raise _error(errno.ENOENT, path)
        return text

    def listdir(self, path: str, most: int | None = None) -> list[str]:
        self._check(path)
        listed = self.answers.listings.get(path)
        names = self._below(path) if listed is None else listed
        if listed is None and not names and path not in self.answers.present:
            raise _error(errno.ENOTDIR if path in self.answers.texts else errno.ENOENT, path)
        return sorted(capped(names, path, most))

    def stat(self, path: str, *, follow: bool = True) -> FileStat:
        found = self.answers.stats.get(path)
        if found is not None:
            return found
        self._check(path)
        target = self.answers.links.get(path)
        if target is not None and follow:
            # Follow one link only: a recording from elsewhere may hold a circle.
            return self.stat(target, follow=False)
        kind = stat.S_IFLNK if target is not None else self._kind(path)
        return FileStat(0, kind | 0o755, 0, zlib.crc32(path.encode()))

    def _kind(self, path: str) -> int:
        """The file type of a path without ``stats``. Only the links that point to an executable
        identify it."""
        file = path in self.answers.texts or path in self.answers.links.values()
        return stat.S_IFREG if file else stat.S_IFDIR

    def readlink(self, path: str) -> str:
        self._check(path)
        target = self.answers.links.get(path)
        if target is None:
            raise _error(errno.EINVAL if self.exists(path) else errno.ENOENT, path)
        return target

    def exists(self, path: str) -> bool:
        if self.answers.errors.get(path) == "ENOENT":
            return False
        known = (
            self.answers.texts,
            self.answers.links,
            self.answers.listings,
            self.answers.present,
        )
        return any(path in answers for answers in known) or bool(self._below(path))

    def processes(self) -> list[tuple[str, int]]:
        found = []
        for name in self.listdir("/proc"):
            if name.isdecimal():
                try:
                    # Inodes are not recorded: the start time tells processes apart.
                    text = self.read(f"/proc/{name}/stat").rpartition(")")[2].split()
                except OSError:
                    continue
                found.append((name, int(text[19])))
        return found

    def link_count(self, path: str) -> int:
        return 2 + len(self.listdir(path))

    def sched_attr(self, tid: int) -> Sched:
        sched = self.answers.sched.get(str(tid))
        if sched is None:
            raise _error(errno.ESRCH, f"sched_getattr of {tid}")
        return sched

    def ethtool_statistics(self, device: str) -> dict[str, int]:
        statistics = self.answers.ethtool.get(device)
        if statistics is None:
            raise _error(errno.ENODEV, device)
        return dict(statistics)

    def napi_thread(self, device: str) -> int | None:
        return self.answers.napi.get(device)

    def qmp_vcpus(self, pid: int, socket: str, timeout: float) -> dict[int, int]:
        del timeout  # there is nobody to wait for
        answer = self.answers.qmp.get(str(pid), "not recorded")
        if isinstance(answer, str):
            raise ObserveError(answer, where=socket)
        return {int(index): tid for index, tid in answer.items() if index.isdecimal()}

    def _check(self, path: str) -> None:
        name = self.answers.errors.get(path)
        if name is not None:
            raise _error(_CODES.get(name, errno.EIO), path)

    def _below(self, path: str) -> set[str]:
        """The names in a directory, according to the files and links below it."""
        prefix = path.rstrip("/") + "/"
        return {
            known[len(prefix) :].partition("/")[0]
            for answers in (self.answers.texts, self.answers.links)
            for known in answers
            if known.startswith(prefix)
        }


def _error(code: int, path: str) -> OSError:
    """The subclass of OSError that belongs to the code."""
    return OSError(code, os.strerror(code), path)


class RecordedVirt:
    """The domains of a recorded host."""

    def __init__(self, recorded: Told) -> None:
        self._recorded = recorded

    def domains(self) -> tuple[DomainText, ...]:
        if isinstance(self._recorded, str):
            raise ObserveError(self._recorded)
        return self._recorded

    def domain(self, name: str) -> DomainText | None:
        return next((d for d in self.domains() if d.name == name), None)
