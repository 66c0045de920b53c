"""How much of their budgets DEADLINE threads use, by looking twice.

No kernel counts how often a thread was throttled; one that uses all of its budget is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vsrtune.host.filesystem import HostRoot
from vsrtune.host.procfs import run_ns
from vsrtune.model.deadline import used
from vsrtune.model.guest import SchedClass, ThreadKey
from vsrtune.model.snapshot import Snapshot


def measure(
    root: HostRoot,
    snapshot: Snapshot,
    least_seconds: float = 0.2,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[ThreadKey, float]:
    """Share of the budget used, by thread, over the longest period but at least
    ``least_seconds``; without threads that end meanwhile."""
    threads = [t for g in snapshot.guests for t in g.threads if t.sched.cls is SchedClass.DEADLINE]
    if not threads:
        return {}
    begin = clock()
    before = {t.key: _run_ns(root, t.key) for t in threads}
    sleep(max(least_seconds, *(t.sched.period_ns / 1e9 for t in threads)))
    elapsed = round((clock() - begin) * 1e9)
    found = {}
    for thread in threads:
        first, last = before[thread.key], _run_ns(root, thread.key)
        if first is not None and last is not None:
            found[thread.key] = used(thread.sched, last - first, elapsed)
    return found


def _run_ns(root: HostRoot, key: ThreadKey) -> int | None:
    try:
        return run_ns(root, f"/proc/{key.pid}/task/{key.tid}")
    except (OSError, ValueError, IndexError):
        return None
