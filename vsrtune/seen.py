"""What a trace and the kernel's refusals have shown, remembered until the next boot:
/run/vsrtune/seen.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from vsrtune.core.codec import encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError
from vsrtune.core.untrusted import kept
from vsrtune.host.state_files import replace_volatile
from vsrtune.model.guest import ThreadKey

DEFAULT_PATH = Path("/run/vsrtune/seen.json")

_VERSION = 1
# Characters; what is cut off there counts as damaged.
_MOST = 4 << 20


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A vhost worker seen transmitting on a device."""

    key: ThreadKey
    device: str
    ifindex: int
    frames: int


@dataclass(frozen=True, slots=True)
class SeenNic:
    """CPUs seen to run a lower device's receive SoftIRQ."""

    nic: str
    ifindex: int
    cpus: CpuSet


@dataclass(frozen=True, slots=True)
class FixedIrq:
    """An interrupt that the kernel refused to move."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class Seen:
    """The file's content."""

    boot_id: str
    workers: tuple[SeenWorker, ...] = ()
    nics: tuple[SeenNic, ...] = ()
    irqs: tuple[FixedIrq, ...] = ()
    version: int = _VERSION


def parse(text: str, boot_id: str) -> Seen:
    """Read the file's text. Text that is damaged, of another version or of another
    boot counts as empty: it can be traced again."""
    return kept(Seen(boot_id), text)


class SeenMemory:
    """Observations that outlive a trace. With ``path`` None they are kept in memory,
    beginning with ``text``."""

    def __init__(self, path: Path | None = DEFAULT_PATH, text: str = "") -> None:
        self.path = path
        self.seen = Seen("")
        self._text = text
        # What the file held when it was last read, and for which boot.
        self._read: tuple[str, str] | None = None
        self._by_key: tuple[Seen, dict[ThreadKey, SeenWorker]] | None = None

    def load(self, boot_id: str) -> None:
        """Read the file again: another process may have traced since."""
        if self.path is not None:
            try:
                with self.path.open(encoding="utf-8", errors="replace") as file:
                    text = file.read(_MOST)
            except OSError:
                self.seen = Seen(boot_id)
                self._read = None
                return
            if self._read != (text, boot_id):
                self.seen = parse(text, boot_id)
                self._read = (text, boot_id)
        elif self.seen.boot_id != boot_id:
            self.seen = parse(self._text, boot_id)

    def worker(self, key: ThreadKey) -> tuple[str, int] | None:
        """(device, ifindex) on which the worker was last seen; None when never."""
        if self._by_key is None or self._by_key[0] is not self.seen:
            self._by_key = self.seen, {w.key: w for w in self.seen.workers}
        found = self._by_key[1].get(key)
        return (found.device, found.ifindex) if found is not None else None

    def rx_cpus(self, nic: str, ifindex: int) -> CpuSet | None:
        """CPUs on which the device was last seen receiving; None when never."""
        found = (n for n in self.seen.nics if (n.nic, n.ifindex) == (nic, ifindex))
        return next((n.cpus for n in found), None)

    def fixed(self, number: int, name: str) -> bool:
        """Whether the kernel has refused to move that interrupt."""
        return FixedIrq(number, name) in self.seen.irqs

    def remember_fixed(self, irqs: Iterable[tuple[int, str]]) -> None:
        """Add interrupts that the kernel refused to move, by number and name. Raises
        ObserveError when the file cannot be replaced; memory is updated anyway."""
        added = (FixedIrq(number, name) for number, name in irqs)
        self.seen = replace(self.seen, irqs=tuple(dict.fromkeys((*self.seen.irqs, *added))))
        self._save()

    def remember(
        self,
        workers: Iterable[SeenWorker],
        nics: Iterable[SeenNic],
        alive: Iterable[ThreadKey],
    ) -> None:
        """Merge, newest winning, and forget workers that are not ``alive``. Raises
        ObserveError when the file cannot be replaced; memory is updated anyway."""
        living = set(alive)
        by_key = {w.key: w for w in self.seen.workers if w.key in living}
        by_key.update((w.key, w) for w in workers)
        by_nic = {(n.nic, n.ifindex): n for n in self.seen.nics}
        by_nic.update(((n.nic, n.ifindex), n) for n in nics)
        self.seen = replace(
            self.seen,
            workers=tuple(w for _, w in sorted(by_key.items())),
            nics=tuple(n for _, n in sorted(by_nic.items())),
        )
        self._save()

    def _save(self) -> None:
        self._read = None
        if self.path is not None:
            try:
                text = json.dumps(encode(self.seen), ensure_ascii=False)
                replace_volatile(self.path, text.encode(), 0o600)
            except OSError as error:
                raise ObserveError(
                    f"cannot remember what was seen: {error.strerror}", where=str(self.path)
                ) from error
