"""The status page in Chromium, on a machine without any network but its own loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

import chromium  # noqa: E402
import served  # noqa: E402


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What visit.py has found."""
    if wanted := chromium.missing():
        pytest.skip(f"not installed: {wanted}; `make browser` installs it")
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a network namespace needs root and unshare(1)")
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no network namespace can be made here: {tried.stderr.strip()}")
    done = subprocess.run(
        ["unshare", "-n", sys.executable, str(HERE / "visit.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_section_is_there(seen: dict[str, Any]) -> None:
    assert seen["title"] == "vsrtune: 2 of 2 guests tuned, 1 drift"
    assert seen["headings"] == ["Host", "Guests", "Drift", "Plan"]
    assert seen["links"] == [seen["url"] + "status.json", seen["url"] + "metrics"]


def test_the_host_map_is_seen(seen: dict[str, Any]) -> None:
    zero, one, two = seen["cpus"]
    assert zero.startswith("CPU 0 interrupts: p0, p1")
    assert one.startswith("CPU 1 interrupts: p0, p1")
    assert "interrupts" not in two
    assert "vr2 vcpu 0 rr:10" in two
    assert "vr2 vhost macvtap0/0 rr:10" in two


def test_guests_with_threads_and_queues_are_seen(seen: dict[str, Any]) -> None:
    assert seen["guests"] == [served.EVIL, "vr2"]
    text = re.sub(r"\s+", " ", seen["text"])
    assert "vr2 tuned policy /etc/vsrtune/policies/routers.yaml" in text
    assert "vcpu 1 rr:10 reset-on-fork 2" in text
    assert "macvtap0 macvtap p0" in text
    assert "Nothing to change." in seen["plan"]
    assert "held: reported" in seen["plan"]


def test_the_drift_is_seen(seen: dict[str, Any]) -> None:
    guest, setting, was, found, by, key, rule, left = seen["drift"]
    assert (guest, was, found) == (served.EVIL, "300", "77")
    assert (by, key, rule) == ("unknown", "queue.macvtap", "report")
    assert "macvtap1" in setting
    assert "a reload takes it back" in left


def test_a_name_is_text_and_nothing_runs(seen: dict[str, Any]) -> None:
    assert served.EVIL in seen["text"]
    assert seen["scripts"] == 0
    assert seen["complaints"] == []


def test_nothing_is_asked_of_anybody_else(seen: dict[str, Any]) -> None:
    assert set(seen["requests"]) == {seen["url"]}


def test_its_style_is_in_force_by_day_and_night_and_on_a_telephone(seen: dict[str, Any]) -> None:
    """The style sheet passes the Content-Security-Policy by its hash."""
    assert (seen["light"], seen["dark"]) == ("rgb(255, 255, 255)", "rgb(20, 24, 28)")
    assert {(v["scheme"], v["width"]) for v in seen["views"]} == {
        (scheme, width) for scheme in ("light", "dark") for width in (360, 1024, 1920)
    }
    assert {v["overflow"] for v in seen["views"]} == {0}


def test_every_text_and_drawing_can_be_read(seen: dict[str, Any]) -> None:
    for view in seen["views"]:
        ratio, text = view["contrast"]
        assert ratio >= 4.5, (view["scheme"], text)


def test_the_bars_are_as_wide_as_cpus_are_busy(seen: dict[str, Any]) -> None:
    cpus = seen["data"]["cpus"]
    assert [(c["busy"], c["softirq"]) for c in cpus] == [*served.BUSY.values()]
    for view in seen["views"]:
        bars = [d for d in view["drawn"] if not d["within"]]
        for cpu, bar in zip(cpus, bars, strict=True):
            busy, softirq = bar["parts"]
            _, _, width, height = bar["box"]
            assert width > 100 and height >= 5
            assert abs(busy["width"] - cpu["busy"] * width) < 1
            assert abs(softirq["width"] - cpu["softirq"] * width) < 1
            # They differ in more than colour.
            assert softirq["height"] < busy["height"]
            assert bar["role"] == "img"
    assert bars[0]["title"] == "66 % busy, 58 % in SoftIRQs"


def test_plots_of_what_guests_forward_and_lose(seen: dict[str, Any]) -> None:
    for view in seen["views"]:
        plots = [d for d in view["drawn"] if d["within"]]
        assert [d["within"] for d in plots] == [served.EVIL, served.EVIL, "vr2", "vr2"]
        for plot in plots:
            left, right, width, height = plot["box"]
            (path,) = plot["parts"]
            assert 0 <= left < right <= view["width"]
            assert width > 200 and height > 30
            assert path["width"] > 0.99 * width and path["height"] > 0.9 * (height - 1)
            assert plot["role"] == "img"
    assert [plot["title"] for plot in plots[:2]] == [
        "forwarded frames a second: 48,000 now, 1,600 to 48,000 in the last 5 min",
        "dropped frames a second: 6,000 now, 200 to 6,000 in the last 5 min",
    ]


def test_a_guest_with_an_override_says_so_and_what_it_is(seen: dict[str, Any]) -> None:
    text = re.sub(r"\s+", " ", seen["text"])
    above, _, _ = text.partition("thread class")
    assert f"{served.EVIL} tuned, 1 override policy" in above
    assert "something changed it to 77, we had set 300" in above
