"""The budget of class deadline in a policy: its keys, units and limits.

The limits are those of ``__checkparam_dl`` in kernel/sched/deadline.c: runtime <=
deadline <= period, runtime at least 1024 ns, period 100 us to 4 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import parse_time, time_text
from vsrtune.model.deadline import (
    MAX_PERIOD_NS,
    MIN_PERIOD_NS,
    MIN_RUNTIME_NS,
    parse_percent,
)

BUDGET_KEYS = ("runtime", "period", "deadline", "bandwidth")
_EXAMPLE = "write {class: deadline, runtime: 8ms, period: 10ms}"


class BudgetReader:
    """Reads one budget. ``errors`` holds (key, what, hint); key "" is the whole rule."""

    def __init__(self, get: Callable[[str], Any]) -> None:
        self._get = get
        self.errors: list[tuple[str, str, str]] = []

    def read(self) -> tuple[int, int, int] | None:
        """Runtime, deadline and period in nanoseconds; None when ``errors`` says why not."""
        if self._get("priority") is not None:
            self._fail("priority", "class deadline has no priority", "remove it")
        given = self._get("runtime"), self._get("bandwidth")
        if all(v is not None for v in given):
            self._fail("bandwidth", "runtime stands there too", "keep one of the two")
        elif all(v is None for v in given):
            self._fail("", "class deadline needs a runtime or a bandwidth", _EXAMPLE)
        if self._get("period") is None:
            self._fail("", "class deadline needs a period", _EXAMPLE)
        if self.errors:
            return None
        period = self._time("period")
        deadline = period if self._get("deadline") is None else self._time("deadline")
        runtime = self._runtime(period)
        if self.errors:
            return None
        self._check(runtime, deadline, period)
        return None if self.errors else (runtime, deadline, period)

    def _fail(self, key: str, what: str, hint: str) -> None:
        self.errors.append((key, what, hint))

    def _time(self, key: str) -> int:
        try:
            return parse_time(str(self._get(key)))
        except VsrtuneError as error:
            self._fail(key, error.what, error.hint)
            return 0

    def _runtime(self, period: int) -> int:
        if self._get("runtime") is not None:
            return self._time("runtime")
        try:
            return int(parse_percent(str(self._get("bandwidth"))) * period)
        except VsrtuneError as error:
            self._fail("bandwidth", error.what, error.hint)
            return 0

    def _check(self, runtime: int, deadline: int, period: int) -> None:
        share = "runtime" if self._get("runtime") is not None else "bandwidth"
        if not MIN_PERIOD_NS <= period <= MAX_PERIOD_NS:
            least, most = time_text(MIN_PERIOD_NS), time_text(MAX_PERIOD_NS)
            self._fail(
                "period",
                f"{time_text(period)} is outside {least} to {most}",
                f"write a period from {least} to {most}",
            )
        if runtime < MIN_RUNTIME_NS:
            self._fail(
                share,
                f"a runtime of {time_text(runtime)} is below the kernel's {MIN_RUNTIME_NS} ns",
                "write more, or a longer period",
            )
        if deadline > period:
            self._fail(
                "deadline",
                f"{time_text(deadline)} is longer than the period {time_text(period)}",
                "write runtime <= deadline <= period",
            )
        elif runtime > deadline:
            after = "deadline" if deadline != period else "period"
            self._fail(
                share,
                f"a runtime of {time_text(runtime)} is longer than the {after} "
                f"{time_text(deadline)}",
                "write runtime <= deadline <= period",
            )
