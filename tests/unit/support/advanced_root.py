"""A recorded host on which time passes: its counters are advanced as told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vsrtune.host.recorded import RecordedRoot, load
from vsrtune.model.guest import ThreadKey

SECOND = 10**9


class AdvancedRoot(RecordedRoot):
    """The host recorded in ``path``. What ``pass_time`` or ``set`` gives stands in for its files
    in memory. ``clock`` gives nanoseconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recording = load(path)
        super().__init__(self.recording.host)
        self._now = 1000 * SECOND

    def clock(self) -> int:
        return self._now

    def set(self, path: str, text: str) -> None:
        """Let a file have this text."""
        self.answers.texts[path] = text

    def pass_time(
        self,
        seconds: float,
        threads: Mapping[ThreadKey, tuple[float, float]],
        counters: Mapping[str, int],
    ) -> None:
        """So much time passes, in which ``threads`` run and wait for these shares of it, and
        the files of ``counters`` (decimal numbers) grow by so much."""
        elapsed = int(seconds * SECOND)
        self._now += elapsed
        for key, shares in threads.items():
            path = f"/proc/{key.pid}/task/{key.tid}/schedstat"
            run, wait, turns = map(int, self.read(path).split())
            run, wait = run + int(shares[0] * elapsed), wait + int(shares[1] * elapsed)
            self.set(path, f"{run} {wait} {turns}\n")
        for path, more in counters.items():
            self.set(path, f"{int(self.read(path)) + more}\n")


def proc_stat(ticks: Mapping[int, tuple[int, int, int]]) -> str:
    """/proc/stat of CPUs that spent so many ticks busy, of them in SoftIRQs, and idle."""
    lines = [
        f"cpu{cpu} {busy - soft} 0 0 {idle} 0 0 {soft} 0 0 0"
        for cpu, (busy, soft, idle) in ticks.items()
    ]
    return "\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *lines, "ctxt 1", ""])


def softnet(dropped: Mapping[int, int]) -> str:
    """/proc/net/softnet_stat of CPUs whose backlogs dropped so many frames."""
    zeros = " 00000000" * 10
    return "".join(f"00000000 {n:08x}{zeros} {cpu:08x}\n" for cpu, n in dropped.items())
