"""Removes an agent of this host that did not end by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vsrtune.bench.cleanup.ledger import BenchLedger
from vsrtune.bench.traffic import pktgen
from vsrtune.bench.traffic.remote import AgentProcess
from vsrtune.host.filesystem import LiveRoot
from vsrtune.host.procfs import parse_stat

KIND = "agent"
# An agent ends by itself once its bench is gone; otherwise it is killed.
END_SECONDS = 5.0
_KILL_SECONDS = 5.0


def note_agent(ledger: BenchLedger, pid: int, namespace: str | None, names: Sequence[str]) -> int:
    """Record an agent that was just started and has done nothing yet."""
    data = {
        "pid": pid,
        "start": _start_time(pid),
        "namespace": namespace,
        "names": list(names),
        "module": not os.path.isdir(pktgen.MODULE),
    }
    return ledger.add(KIND, data)


def clean_agent(data: Mapping[str, Any]) -> None:
    """Wait for the agent's end, or kill it, and remove what it may have left."""
    pid, start = int(data["pid"]), data["start"]
    if not _ended(pid, start, END_SECONDS):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _ended(pid, start, _KILL_SECONDS)
    with AgentProcess() as agent:
        agent.call("clean", namespace=data["namespace"], names=data["names"])
    if data["module"]:
        pktgen.unload_module()


def _ended(pid: int, start: int | None, seconds: float) -> bool:
    """Whether the process ends within so many seconds."""
    end = time.monotonic() + seconds
    while start is not None and _start_time(pid) == start:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _start_time(pid: int) -> int | None:
    """Field 22 of the process's stat; None when it is gone, or only waits to be reaped."""
    try:
        text = LiveRoot().read(f"/proc/{pid}/stat")
    except OSError:
        return None
    return None if text.rpartition(")")[2].split()[0] == "Z" else parse_stat(text).start_time
