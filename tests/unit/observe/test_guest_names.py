"""A guest may have any name. libvirt refuses a newline, a slash and more than 247 bytes, for it writes
NAME.xml.new; QEMU itself takes any text."""

from __future__ import annotations

import glob
import json
from pathlib import Path

import pytest
from hosttree import HostTree

from vsrtune.execute.journal import Journal, read_entries
from vsrtune.model.plan import Plan
from vsrtune.observe.observer import Observer
from vsrtune.plan import planner
from vsrtune.policy.parser import parse

NAMES = [
    "a\nb", "a\r\x1b[2Jb", "a\"b'c", "a,b", "a\\b", "n" * 250, "ü" * 125, " ", "-x", "a%s{b}",
    "a: b # c", "\u202ebackwards",
]  # fmt: skip
POLICY = "cpus: {irq: 0, vcpu: 1}\nscheduler: {vcpu: {class: rr, priority: 5}}\nprofile: none\n"


def plan_for(name: str) -> tuple[Plan, str]:
    """The plan of a host with one plain QEMU, whose policy names it exactly, and its boot."""
    tree = HostTree().host()
    tree.qemu(70, "-name", f"{name.replace(',', ',,')},debug-threads=on")
    tree.thread(70, 71, "CPU 0/KVM")
    snapshot = Observer(tree.root(), None).observe()
    (guest,) = snapshot.guests
    assert (guest.name, guest.ref) == (name, f"qemu:{name}")
    exactly = json.dumps(f"qemu:{glob.escape(name)}")
    return planner.plan(snapshot, [parse(f"guest: {exactly}\n{POLICY}", "p.yaml")], {}), (
        snapshot.host.boot_id
    )


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_it_is_found_planned_for_and_journalled(name: str, tmp_path: Path) -> None:
    plan, boot = plan_for(name)
    assert {a.target.guest for a in plan.actions} == {f"qemu:{name}"}
    assert plan.refusals == ()
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, boot) as journal:
        journal.reserve(plan.actions)
        for action in plan.actions:
            journal.intent(action)
    assert [e.target for e in read_entries(path, boot)] == [a.target for a in plan.actions]
