"""A status page of a recorded host, served as the daemon serves it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path += [str(REPO), str(REPO / "tests/unit/support")]

import recorded_state  # noqa: E402

from vsrtune.daemon import http  # noqa: E402
from vsrtune.daemon.http import Metrics  # noqa: E402
from vsrtune.model.daemon_state import DaemonState  # noqa: E402

# The same on every day: 2026-10-26 10:00:00 UTC.
WHEN = 1793008800.0
BUSY, made_up = recorded_state.BUSY, recorded_state.with_traffic
# What nobody should call a guest, but can.
EVIL = '<script>alert("vr1")</script><img src=x onerror=alert(1)>'


@contextmanager
def page(
    recording: str,
    rename: str = "",
    *,
    recent: Callable[[DaemonState], DaemonState] = lambda state: state,
) -> Iterator[str]:
    """The address of the page of a recorded host that is tuned, on which somebody has changed
    a queue since. ``rename`` is another name for its first guest, ``recent`` adds traffic."""
    with recorded_state.passes(recording, rename=rename) as (host, passes):
        passes.run()
        recorded_state.run_threads(host)
        recorded_state.set_queue(host, 0, 77)
        passes.run()
        metrics = Metrics()
        metrics.update(replace(recent(passes.state), last_pass=WHEN))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        http.serve(metrics, "127.0.0.1", port)
        yield f"http://127.0.0.1:{port}/"
