"""The status page of the running daemon, as an operator without Prometheus sees it."""

from __future__ import annotations

import html
import json
import re
import urllib.error
import urllib.request
from typing import Any

import labhelp
import pytest
from labhelp import LabGuest

BASE = "http://127.0.0.1:9178"
USUAL_LENGTH = "500"

pytestmark = labhelp.one_release("what vsrtune says of itself", "trixie")


def page() -> str:
    """The texts of the page, one a line."""
    with urllib.request.urlopen(f"{BASE}/", timeout=30) as answer:
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        document = answer.read().decode()
    body = document.partition("<body>")[2]
    return html.unescape(re.sub(r"(<[^>]*>)+", "\n", body))


def status() -> dict[str, Any]:
    """The same as data."""
    with urllib.request.urlopen(f"{BASE}/status.json", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_the_page_names_guests_threads_and_what_an_operator_changed(
    tuned: set[int], guests: list[LabGuest], libvirt_guest: LabGuest
) -> None:
    path = labhelp.POLICIES / "test0.yaml"
    path.write_text(path.read_text() + "drift: {queue: report}\n")
    labhelp.sh("systemctl", "reload", "vsrtune")
    labhelp.wait_for(lambda: status()["totals"]["tuned"] == len(guests), "all are shown as tuned")
    seen, text = status(), page()
    for guest in guests:
        (view,) = [g for g in seen["guests"] if g["name"] == guest.ref]
        assert (view["state"], view["drift"]) == ("tuned", 0)
        assert f"\n{guest.ref}\n" in text
        of = {t["tid"]: t for t in view["threads"]}
        for tid in guest.data_plane():
            assert of[tid]["priority"] == labhelp.PRIORITY
            assert labhelp.cpu_list(of[tid]["cpus"]) == labhelp.mask(tid)
            assert f"\n{tid}\n" in text
        for nic in (0, 1):
            assert f"\n{guest.device(nic)}\n" in text
    busy = {t["thread"] for c in seen["cpus"] if c["cpu"] in tuned for t in c["threads"]}
    assert not any(name.startswith(("vcpu", "vhost")) for name in busy)
    assert all(c["interrupts"] for c in seen["cpus"] if c["cpu"] in tuned)
    # Two samples are 9 s apart at least.
    sampled = labhelp.wait_for(
        lambda: (now := status())["intervals"] and now, "CPUs and frames are sampled"
    )
    assert all(0 <= c["softirq"] <= c["busy"] <= 1 for c in sampled["cpus"])
    (view,) = [g for g in sampled["guests"] if g["name"] == libvirt_guest.ref]
    assert len(view["forwarded"]) == len(view["dropped"]) == len(sampled["intervals"])
    assert seen["drift"] == []
    assert "Nobody has changed what was set." in text

    device = libvirt_guest.device(0)
    labhelp.sh("ip", "link", "set", device, "txqueuelen", "77")
    (drift,) = labhelp.wait_for(lambda: status()["drift"], "the page shows the change")
    assert (drift["guest"], drift["rule"]) == (libvirt_guest.ref, "report")
    assert (drift["was_set_to"], drift["found"]) == (str(labhelp.QUEUE), "77")
    assert device in drift["setting"]
    shown = page()
    assert f"\n{drift['setting']}\n" in shown
    assert "a reload takes it back" in shown
    labhelp.sh("systemctl", "reload", "vsrtune")
    length = f"/sys/class/net/{device}/tx_queue_len"
    labhelp.wait_for(
        lambda: status()["drift"] == [] and labhelp.text(length) == str(labhelp.QUEUE),
        "a reload takes it back",
    )

    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{BASE}/", method="POST"), timeout=30)
    refused.value.close()
    assert refused.value.code == 405

    # What the operator chose is his from then on: undo gives him that, and he takes it back.
    labhelp.stop()
    assert labhelp.text(length) == "77"
    labhelp.sh("ip", "link", "set", device, "txqueuelen", USUAL_LENGTH)
