"""The ledger: what a bench owes this host, on disk before it is done to the host.

Append-only JSON lines in /run: everything a bench changes ends with a restart of the
kernel, and so does the ledger. An entry is added before the host is changed and marked
done after it was put back; what is left over tells the guard, or the next start, what
to put back. A last line without its newline was never complete, so nothing followed
from it, and it is cut off. Any other line that cannot be read is an error.

One bench at a time: whoever has the ledger open holds an exclusive flock beside it.
The guard inherits the descriptor, so the lock is free only after the cleaning.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vsrtune.closing import Closing
from vsrtune.errors import Lasting, VsrtuneError

DEFAULT_PATH = Path("/run/vsrtune/bench/ledger.jsonl")
# A guard that is still cleaning up after a killed run gets this long.
LOCK_SECONDS = 10.0

Cleaner = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """Something to put back: ``kind`` names the cleaner, ``data`` is its own."""

    id: int
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """An entry that could not be resolved; it stays in the ledger."""

    entry: Entry
    what: str

    def __str__(self) -> str:
        return f"{self.entry.kind}: {self.what}"


class Ledger(Closing):
    """The open ledger. Use as a context manager, or ``close``."""

    def __init__(
        self, path: Path, lock: int, file: int, entries: dict[int, Entry], last: int
    ) -> None:
        self.path = path
        self.lock_descriptor = lock
        self._file = file
        self._entries = entries
        self._last = last

    @classmethod
    def open(
        cls, path: Path = DEFAULT_PATH, *, lock: int | None = None, wait: float = LOCK_SECONDS
    ) -> Self:
        """Lock and read the ledger, waiting up to ``wait`` seconds for the lock.

        ``lock`` is the descriptor of one that is held already (the guard's). Raises
        VsrtuneError when another bench runs, or the ledger cannot be read or written.
        """
        opened: list[int] = []
        try:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            if lock is None:
                opened.append(lock := _lock(path, wait))
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened.append(file)
            text = path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            entries, last = _parse(path, whole)
            # With nothing owed a new one begins; the lock makes us its only user.
            os.ftruncate(file, len(whole) if entries else 0)
        except BaseException as error:
            for descriptor in opened:
                os.close(descriptor)
            if isinstance(error, OSError):
                raise _broken(path, error) from error
            raise
        return cls(path, lock, file, entries, last)

    def add(self, kind: str, data: Mapping[str, Any]) -> int:
        """Write down what must be put back, before the host is changed. ``data`` is
        JSON. Returns the id for ``done``. Raises VsrtuneError: then change nothing."""
        self._last += 1
        entry = Entry(self._last, kind, dict(data))
        self._append({"add": entry.id, "kind": kind, "data": entry.data})
        self._entries[entry.id] = entry
        return entry.id

    def done(self, entry: int) -> None:
        """It was put back. An id that is not pending is left alone."""
        if entry in self._entries:
            self._append({"done": entry})
            del self._entries[entry]

    def pending(self) -> list[Entry]:
        """What is owed, oldest first."""
        return [self._entries[number] for number in sorted(self._entries)]

    def resolve(self, cleaners: Mapping[str, Cleaner]) -> list[Failure]:
        """Put back everything pending, newest first, by the cleaner of its kind.

        One that fails hides no other; what failed is returned and stays pending.
        """
        failures = []
        for entry in reversed(self.pending()):
            try:
                cleaner = cleaners.get(entry.kind)
                if cleaner is None:
                    raise VsrtuneError("nothing in this version knows how to undo it")
                cleaner(entry.data)
                self.done(entry.id)
            except Exception as error:  # whatever a cleaner raises, the others must run
                failures.append(Failure(entry, str(error) or repr(error)))
        return failures

    def close(self) -> None:
        """Close it and, when no guard shares it, unlock."""
        for descriptor in (self._file, self.lock_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self.lock_descriptor = -1

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False) + "\n"
        try:
            written = os.write(self._file, line.encode())
            if written != len(line.encode()):
                raise OSError(None, "short write")
            os.fsync(self._file)
        except OSError as error:
            raise _broken(self.path, error) from error


def _lock(path: Path, wait: float) -> int:
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            os.close(descriptor)
            raise VsrtuneError(
                "another bench is running, or is being cleaned up after",
                where=str(path),
                hint="wait for its end",
                lasting=Lasting.TRANSIENT,
            ) from None
        except BaseException:
            os.close(descriptor)
            raise


def _parse(path: Path, text: bytes) -> tuple[dict[int, Entry], int]:
    """What is pending, and the last id that was given."""
    entries: dict[int, Entry] = {}
    last = 0
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            if "add" in record:
                entry = Entry(int(record["add"]), str(record["kind"]), dict(record["data"]))
                entries[entry.id] = entry
                last = max(last, entry.id)
            else:
                entries.pop(int(record["done"]), None)
        except (ValueError, KeyError, TypeError) as error:
            raise VsrtuneError(
                "this line cannot be read",
                where=f"{path}:{number}",
                hint="remove the line; what it stood for must be put back by hand",
            ) from error
    return entries, last


def _broken(path: Path, error: OSError) -> VsrtuneError:
    return VsrtuneError(
        f"the ledger of the bench cannot be used: {error.strerror or error}",
        where=str(path),
        hint="a bench needs root, and writes down here what it must put back",
    )
