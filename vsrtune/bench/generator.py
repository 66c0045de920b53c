"""What a generator of frames must offer. pktgen is the one there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vsrtune.bench.streams import Stream


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a stream at the generator: ``frames`` offered to the device, in
    ``seconds`` by the generator's own clock."""

    key: str
    frames: int
    seconds: float


class Generator(Protocol):
    """Sends streams from the devices that it was made with, and from no other."""

    def configure(self, streams: Sequence[Stream]) -> None:
        """Take these streams in place of those before. Raises VsrtuneError."""
        ...

    def run(self, seconds: float, cancel: int) -> tuple[Sent, ...]:
        """Send them all, each until its frames are sent; end after ``seconds`` at the
        latest, or when the descriptor ``cancel`` is readable. Raises VsrtuneError."""
        ...

    def close(self) -> None:
        """Stop, and leave nothing configured."""
        ...
