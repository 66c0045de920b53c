"""Every switch of every kind of group: done whole, or taken back whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import clone_group
import msr_group as msr
import pvr_group as pvr
import pytest
from attach_host import BOOT
from switch_faults import Switches, crash, start_all

from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.plan.model import AttachHostState, Switch
from vsrtune.attach.transaction import Switcher
from vsrtune.group import planner
from vsrtune.group import scale as group_scale


def create_one(host: AttachHostState) -> Switch:
    """With VLANs, and one router."""
    return planner.create(msr.edge("vlan", msr.FILE.replace("[a, b]", "[a]")), host)


def drain(member: str, host: AttachHostState) -> Switch:
    return group_scale.drain("edge", member, host)


scale = partial(group_scale.scale, "edge", 1)
KINDS = {
    "pvr": Switches(
        pvr.fresh,
        {"create": pvr.create, "delete": pvr.delete, "drain": partial(drain, "b"), "scale": scale},
        {
            "create": (),
            "delete": (pvr.create,),
            "drain": (pvr.create,),
            "scale": (pvr.create, partial(drain, "a")),
        },
    ),
    "msr": Switches(
        msr.fresh,
        {"create": msr.create, "create vlan": create_one, "delete": msr.delete, "scale": scale},
        {
            "create": (),
            "create vlan": (),
            "delete": (create_one,),
            "scale": (msr.create, partial(drain, "a")),
        },
    ),
    "clones": clone_group.SWITCHES,
}
CASES = [
    pytest.param(switches, what, id=f"{kind}-{what}")
    for kind, switches in KINDS.items()
    for what in switches.choices
]


@pytest.mark.parametrize(("switches", "what"), CASES)
def test_a_change_that_fails_is_taken_back(switches: Switches, what: str, tmp_path: Path) -> None:
    switches.fail(what, tmp_path)


@pytest.mark.parametrize(("switches", "what"), CASES)
def test_killed_after_any_change_it_is_recovered(
    switches: Switches, what: str, tmp_path: Path
) -> None:
    done = switches.ready(what, tmp_path / "end")
    switches.do(done, tmp_path / "end", switches.choices[what])
    for killing in switches.kill(what, tmp_path):
        with AttachLedger.open(killing.path) as ledger:
            switcher = Switcher(killing.host, ledger, BOOT)
            assert switcher.recover() == []
            assert switcher.sweep().failed == ()
            assert not switcher.unfinished()
            if "create" in what and killing.undone:
                assert ledger.pending() == []
        switches.undone(killing, what)
        if switches is not KINDS["msr"] or what == "delete":  # links made anew have other numbers
            assert killing.host.picture() == done.picture(), killing.host.log
        if what not in ("drain", "scale"):
            assert killing.host.problems() == [], killing.host.log


@pytest.mark.parametrize(
    ("switches", "what"), [case for case in CASES if case.values[0] is not KINDS["clones"]]
)
def test_guests_that_start_after_a_crash_of_the_host_forward(
    switches: Switches, what: str, tmp_path: Path
) -> None:
    """libvirt starts them, but no clones, before anybody takes the switch back."""
    for killing in switches.kill(what, tmp_path):
        host = killing.host
        crash(host, killing.path)
        start_all(host)
        with AttachLedger.open(killing.path) as ledger:
            switcher = Switcher(host, ledger, "boot-2")
            assert switcher.recover() == [], host.log
            assert switcher.sweep().failed == ()
        assert host.problems() == [], host.log
