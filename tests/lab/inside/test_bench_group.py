"""The bench on a router of several guests, whose members come and go with its configurations.

The group is made as in test_pvr.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import labhelp
import pvrhelp
import pytest
from labhelp import LabGuest
from test_pvr import edge, group, members, routers  # noqa: F401 (fixtures)

from vsrtune.bench.cleanup.cleaners import CLEANERS, BenchLedger
from vsrtune.bench.setup.configurator import Configurator
from vsrtune.bench.spec.model import Configuration, Spec
from vsrtune.core.errors import VsrtuneError

ONE, BOTH = (Configuration(f"{n} of them", scale={"edge": n}) for n in (1, 2))


def plugged() -> set[str]:
    return {str(p["member"]) for p in pvrhelp.places() if p["state"] == "plugged"}


def spec(guests: list[LabGuest]) -> Spec:
    made = labhelp.bench_spec(guests[:1])
    return replace(made, routers=(replace(made.routers[0], members=tuple(g.name for g in guests)),))


@pytest.fixture
def compared(edge: list[LabGuest], tmp_path: Path) -> dict[str, Any]:  # noqa: F811
    """Both numbers of members compared with the command, in two rounds."""
    base = labhelp.bench_spec(edge[:1])
    (router,) = base.routers
    leg = {"source": router.forth.source, "destination": router.forth.destination}
    first = {
        "name": "one",
        "left": {"device": "g0", "namespace": "gen"},
        "right": {"device": "s0", "namespace": "sink"},
        "routers": [{"guests": [g.name for g in edge], "forth": leg}],
        "traffic": {"flows": 64},
        "method": {"kind": "sweep", "rates": [2000], "sizes": [60, 1496], "seconds": 1},
        "configuration": {"scale": {"edge": 1}},
    }
    paths = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    paths[0].write_text(json.dumps(first))
    later = {"configuration": {"scale": {"edge": 2}, "tuning": "libvirt-pins", "cpus": "1"}}
    paths[1].write_text(json.dumps(later))
    words = ("bench", "compare", *map(str, paths), "--pairs", "2")
    labhelp.vsrtune(*words, "--json", str(tmp_path / "r.json"))
    return json.loads((tmp_path / "r.json").read_text())


def test_members_are_those_of_the_configuration(
    compared: dict[str, Any],
    edge: list[LabGuest],  # noqa: F811
) -> None:
    assert plugged() == {g.name for g in edge}
    sizes = [(t["configuration"], t["load"]["size"]) for t in compared["trials"]]
    assert sorted(sizes) == [(c, s) for c in ("one", "two") for s in (60, 60, 1496, 1496)]
    for trial in compared["trials"]:
        assert trial["forwarded"] > 0.95 * trial["sent"], trial
        assert trial["cpu_seconds"]["vhost"] > 0
    for name, count in (("one", 1), ("two", 2)):
        guests = compared["environment"][name]["guests"]
        assert [len(g["interfaces"]) for g in guests.values()] == [2] * count + [0] * (2 - count)
    threads = [
        thread
        for guest in compared["environment"]["two"]["guests"].values()
        for thread in guest["threads"]
        if thread["thread"].startswith(("vcpu", "vhost"))
    ]
    assert len(threads) == 6
    assert {thread["cpus"] for thread in threads} == {"1"}


def test_what_a_killed_bench_leaves_is_put_back(edge: list[LabGuest], tmp_path: Path) -> None:  # noqa: F811
    ledger_path = tmp_path / "ledger.jsonl"
    child = subprocess.Popen([sys.executable, "-B", __file__, str(ledger_path)])
    labhelp.wait_for(lambda: plugged() == {edge[0].name}, "one member is plugged in", 60)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    with BenchLedger.open(ledger_path) as ledger:
        assert [entry.kind for entry in ledger.pending()] == ["scale"]
        assert [str(failure) for failure in ledger.resolve(CLEANERS)] == []
        assert ledger.pending() == []
    assert plugged() == {g.name for g in edge}
    # Of a group that is not there any more nothing is asked.
    CLEANERS["scale"]({"uri": "qemu:///system", "members": {"gone": 2}})


def test_refusals(edge: list[LabGuest], tmp_path: Path) -> None:  # noqa: F811
    def check(configuration: Configuration) -> str:
        with pytest.raises(VsrtuneError) as caught:
            made.check([configuration])
        assert caught.value.hint
        return str(caught.value)

    with (
        BenchLedger.open(tmp_path / "ledger.jsonl") as ledger,
        Configurator(spec(edge), ledger) as made,
    ):
        assert "not 3 of them" in check(Configuration("x", scale={"edge": 3}))
        assert "no such group" in check(Configuration("x", scale={"other": 1}))
        group("drain", "edge", edge[0].name)
        assert "can only put back the first ones" in check(ONE)
        group("scale", "edge", "2")


def to_and_fro(ledger_path: Path) -> None:
    """One member, and then nothing until somebody ends this."""
    guests = [g for g in labhelp.lab_guests() if g.kind == "libvirt"]
    with BenchLedger.open(ledger_path) as ledger, Configurator(spec(guests), ledger) as made:
        made.check([ONE, BOTH])
        made.apply(ONE)
        time.sleep(600)


if __name__ == "__main__":
    to_and_fro(Path(sys.argv[1]))
