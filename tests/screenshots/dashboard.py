"""Writes docs/images/dashboard.png: what the panels of the Grafana dashboard show.

Grafana's server is in none of the registries, so this is no picture of Grafana. Half an hour of a
recorded host is put into a real Prometheus server, which is asked what Grafana would ask; its
answers are drawn where the dashboard has its panels, under the panels' own titles and legends.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import sin
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path += [str(REPO / "tests/unit/support")]

import matplotlib  # noqa: E402
import picture  # noqa: E402
from monitored_state import state  # noqa: E402
from prometheus_tools import Api, asked, dashboard, program, running  # noqa: E402

from vsrtune.daemon.http import exposition  # noqa: E402
from vsrtune.daemon.journald import LOGGER  # noqa: E402
from vsrtune.model.daemon_state import DaemonState  # noqa: E402
from vsrtune.model.guest import Guest  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PICTURE = REPO / "docs/images/dashboard.png"
STEP, STEPS = 15, 120
_ROWS, _COLUMNS, _TABLE_ROWS = 46, 24, 8
_TABLE = ("domain", "role", "vcpu", "target_device", "class", "cpus")
_PERCENT, _PER_SECOND = "percentunit", "pps"


def at(first: DaemonState, step: int, now: float) -> DaemonState:
    """The host after so many steps: threads work, overload begins after a third of the time,
    and somebody's change was put right after half of it."""
    assert first.snapshot is not None
    loss = max(0, step - STEPS // 3) * STEP

    def worked(guest: Guest) -> Guest:
        threads = tuple(
            replace(t, cpu_ns=round(1e9 * (STEP * step * (0.15 + 0.1 * n) + 2 * sin(step / 7 + n))))
            for n, t in enumerate(guest.threads)
        )
        interfaces = []
        for number, one in enumerate(guest.interfaces):
            counters = one.counters
            if counters is not None:
                counters = replace(
                    counters, rx_dropped_ring_full=loss * (40 + 30 * number),
                    rx_dropped_queue_full=loss * 4,
                )  # fmt: skip
            interfaces.append(replace(one, counters=counters, ring_drops=loss * (40 + 30 * number)))
        return replace(guest, threads=threads, interfaces=tuple(interfaces))

    snapshot = replace(first.snapshot, guests=tuple(map(worked, first.snapshot.guests)))
    corrections = int(step > STEPS // 2)
    totals = replace(
        first.totals,
        writes=first.totals.writes + corrections,
        corrections=corrections,
        durations=tuple(n * step for n in first.totals.durations),
    )
    budgets = tuple((key, 0.55 + 0.3 * sin(step / 11)) for key, _ in first.budgets)
    return replace(first, snapshot=snapshot, totals=totals, budgets=budgets, last_pass=now - 3)


def history(first: DaemonState, end: float) -> str:
    """OpenMetrics: every family once, with all its samples."""
    families: dict[str, list[str]] = {}
    heads: dict[str, str] = {}
    for step in range(STEPS + 1):
        now = end - STEP * (STEPS - step)
        name = ""
        for line in exposition(at(first, step, now)).splitlines():
            if line.startswith("# TYPE"):
                name = line.split()[2]
                heads[name] = line
            elif line and not line.startswith("#"):
                families.setdefault(name, []).append(f"{line} {now:.0f}")
    lines = [line for name, found in families.items() for line in (heads[name], *found)]
    return "\n".join([*lines, "# EOF", ""])


@contextmanager
def prometheus(text: str, place: Path) -> Iterator[Api]:
    """A server that knows this history."""
    (place / "history").write_text(text)
    words = ("tsdb", "create-blocks-from", "openmetrics", "history", "data")
    subprocess.run([program("promtool"), *words], cwd=place, check=True, capture_output=True)
    with running(place, {}) as (api, _):
        yield api


def legend(template: str, labels: dict[str, str]) -> str:
    text = re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m[1], ""), template)
    return " ".join(text.split())


def draw(axes: Any, panel: dict[str, Any], api: Api, end: float) -> None:
    """One panel, as near to its type as matters."""
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
    axes.set_title(panel["title"], loc="left", fontsize=9)
    if panel["type"] == "timeseries":
        for target in panel["targets"]:
            query = {"start": str(end - STEP * STEPS), "end": str(end), "step": str(STEP)}
            found = api.get("/api/v1/query_range", query=asked(target["expr"]), **query)["result"]
            for series in found:
                minutes = [(float(t) - end) / 60 for t, _ in series["values"]]
                factor = 100 if unit == _PERCENT else 1
                values = [factor * float(v) for _, v in series["values"]]
                name = legend(target.get("legendFormat", ""), series["metric"])
                axes.plot(minutes, values, linewidth=1, label=name)
        axes.set_ylim(0, 1.1 * max(axes.get_ylim()[1], 1e-3))
        axes.tick_params(labelsize=7)
        names = {_PERCENT: "%", _PER_SECOND: "frames/s", "s": "s"}
        axes.set_ylabel(names.get(unit, ""), fontsize=7)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=6, loc="best")
        return
    axes.axis("off")
    (target,) = panel["targets"]
    found = api.get("/api/v1/query", query=asked(target["expr"]), time=str(end))["result"]
    if panel["type"] == "stat":
        (only,) = found
        text = f"{float(only['value'][1]):g}" + (" s" if unit == "s" else "")
        axes.text(0.5, 0.4, text, fontsize=20, ha="center", va="center")
    else:
        rows = sorted([s["metric"].get(k, "") for k in _TABLE] for s in found)[:_TABLE_ROWS]
        made = axes.table(cellText=rows, colLabels=_TABLE, loc="upper center", cellLoc="left")
        made.auto_set_font_size(False)
        made.set_fontsize(7)


def place_of(panel: dict[str, Any]) -> tuple[float, float, float, float]:
    """Left, bottom, width, height of a panel's axes as shares of the picture, with room for its
    title and numbers."""
    box = panel["gridPos"]
    left, top = box["x"] / _COLUMNS + 0.045, 1 - box["y"] / _ROWS - 0.022
    width, height = box["w"] / _COLUMNS - 0.06, box["h"] / _ROWS - 0.045
    return left, top - height, width, height


def main() -> None:
    """Fails where Debian's prometheus is not to be had."""
    LOGGER.setLevel(logging.ERROR)
    end = float(int(time.time()) // STEP * STEP)
    figure = plt.figure(figsize=(12, 15))
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place,
        prometheus(history(state(), end), Path(place)) as api,
    ):
        for panel in dashboard()["panels"]:
            if "targets" in panel:
                draw(figure.add_axes(place_of(panel)), panel, api, end)
    figure.savefig(PICTURE, dpi=90, metadata={"Software": None})
    picture.check(PICTURE)


if __name__ == "__main__":
    main()
