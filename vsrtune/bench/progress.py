"""Shows the progress of a run and the time left, on standard error.

A terminal gets a bar; otherwise each trial gets a line, so that a log tells the same.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Self

from vsrtune.bench.methods.runner import Progress
from vsrtune.bench.spec.model import Trial
from vsrtune.core.closing import Closing
from vsrtune.core.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


class ProgressWatch(Closing):
    """Shows the progress of one run. A context manager; silent when ``quiet``."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("looking at the host", total=None, left="")
        return self

    def close(self) -> None:
        """Remove the bar from the screen."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a remark that stays on the screen."""
        if self._bar is not None:
            self._bar.console.print(printable(text), markup=False, highlight=False)
        elif not self._quiet:
            sys.stderr.write(f"vsrtune: {printable(text)}\n")
            sys.stderr.flush()

    def doing(self, text: str) -> None:
        """Show the present work on the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text)

    def progress(self, now: Progress[Any]) -> None:
        """Show the runner's report, before each trial and at the end."""
        left = "" if now.seconds_left is None else f"{duration(now.seconds_left)} left"
        if self._bar is not None and self._task is not None:
            total = max(now.total, now.done)
            text = describe(now.last) if now.last is not None else "first trial"
            self._bar.update(
                self._task, description=text, completed=now.done, total=total, left=left
            )
        elif now.last is not None:
            tail = f", {left}" if left and now.order is not None else ""
            self.say(f"trial {now.done} of {now.total}: {describe(now.last)}{tail}")


def describe(trial: Trial) -> str:
    """One trial on one line."""
    size = "" if trial.load.size is None else f" of {trial.load.size}"
    return (
        f"{trial.configuration}, {trial.load.total:,.0f} pps{size} offered, "
        f"{trial.pps:,.0f} forwarded, {100 * trial.loss:.1f} % lost"
    )


def duration(seconds: float) -> str:
    """Seconds as text: ``45 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
