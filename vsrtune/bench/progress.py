# SPDX-License-Identifier: GPL-2.0-or-later
"""Shows the progress of a run on standard error.

A terminal gets a bar; otherwise each trial gets a line, so that a log tells the same.
"""

from __future__ import annotations

from vsrtune.bench.spec.model import Trial
from vsrtune.core.closing import Closing
from vsrtune.core.text import printable


class ProgressWatch(Closing):
    """Shows the progress of one run. A context manager; silent when ``quiet``."""

    def __init__(self, *, quiet: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True, quiet=quiet, soft_wrap=True)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("looking at the host", total=None)
        self._bar.start()

    def close(self) -> None:
        """Remove the bar from the screen."""
        if not self._bar.disable:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a remark that stays on the screen."""
        self._bar.console.print(f"vsrtune: {printable(text)}", markup=False, highlight=False)

    def doing(self, text: str) -> None:
        """Show the present work on the bar."""
        self._bar.update(self._task, description=text)

    def expect(self, trials: int | None) -> None:
        """Begin the trials, so many in all; None when a search decides how many."""
        self._bar.reset(self._task, total=trials, description="first trial")

    def made(self, trial: Trial) -> None:
        """Show a trial that was made."""
        self._bar.update(self._task, description=describe(trial), advance=1)
        if self._bar.disable:
            [task] = self._bar.tasks
            total = "" if task.total is None else f" of {task.total}"
            self.say(f"trial {task.completed}{total}: {describe(trial)}")


def describe(trial: Trial) -> str:
    """One trial on one line."""
    size = "" if trial.load.size is None else f" of {trial.load.size}"
    return (
        f"{trial.configuration}, {trial.load.total:,.0f} pps{size} offered, "
        f"{trial.pps:,.0f} forwarded, {100 * trial.loss:.1f} % lost"
    )
