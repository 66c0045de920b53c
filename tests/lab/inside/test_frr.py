"""Real router software: a guest with FRR is a router as any other, and keeps its sessions when it is
loaded. The lab has one router, which has FRR."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import labhelp
import pytest
from labhelp import LabGuest

# Longer than the hold time of BGP, 9 s.
SECONDS = 20
# Of what the untuned router forwards in overload.
LOAD = 1


@pytest.fixture
def router(guests: list[LabGuest]) -> Iterator[LabGuest]:
    """The router, all of whose sessions are up."""
    (guest,) = guests
    labhelp.sh("lab-peers", "start")
    try:
        labhelp.sh("lab-peers", "wait", guest.name)
        yield guest
    finally:
        labhelp.sh("lab-peers", "stop")


def forwarded(guest: LabGuest, rate: int, seconds: int) -> float:
    words = ("--guest", guest.name, "--rate", str(rate), "--seconds", str(seconds))
    found: dict[str, Any] = json.loads(labhelp.sh("lab-traffic", *words).stdout)
    return float(found["forwarded_pps"])


def test_a_router_with_frr_is_tuned_and_keeps_its_sessions(
    restored: None, router: LabGuest
) -> None:
    peak = forwarded(router, 10_000, 2)
    labhelp.sh("lab-peers", "wait", router.name)
    labhelp.write_policies("auto", (router.name,))
    labhelp.start()
    assert labhelp.untuned_lines(router, {0}) == []
    with subprocess.Popen(
        ["lab-peers", "record", router.name], stdout=subprocess.PIPE, text=True
    ) as record:
        assert record.stdout is not None
        assert forwarded(router, round(LOAD * peak), SECONDS) > 0
        time.sleep(1)
        record.terminate()
        lines = [json.loads(line) for line in record.stdout]
    ticks = [line for line in lines if "bgp" in line]
    assert ticks[-1]["sent"] - ticks[0]["sent"] > 0.9 * LOAD * peak * SECONDS
    assert len(ticks) > SECONDS
    for session in ("bgp", "ospf"):
        lost = [tick for tick in ticks if not tick[session]]
        assert not lost, f"{session} was lost in {len(lost)} of {len(ticks)} ticks: {lost[0]}"
    assert ticks[-1]["drops"]["bgp"] == ticks[0]["drops"]["bgp"]
    for name in ("snmp", "ssh"):
        answers = [line[name] for line in lines if name in line]
        assert any(took is not None for took in answers), f"no answer by {name}"
