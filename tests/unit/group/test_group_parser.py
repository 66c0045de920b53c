"""Group files: what a good one means, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from vsrtune.cli.group import load_group, name_of
from vsrtune.core.errors import VsrtuneError
from vsrtune.group.health import HealthCheck
from vsrtune.group.parser import parse
from vsrtune.policy.model import PolicyErrors

GOOD = """\
group:
  name: edge
  kind: pvr
  members: [vr1, vr2]
  lower: {in: p0, out: p1}
"""


def test_a_group() -> None:
    group = parse(GOOD, "edge.yaml")
    assert (group.name, group.kind) == ("edge", "pvr")
    assert group.members == ("vr1", "vr2")
    assert group.lowers == (("in", "p0"), ("out", "p1"))
    assert group.device("in") == "edge-in"
    assert group.at("group", "lower") == "edge.yaml:5"
    assert (group.template, group.overlays) == ("", "")
    more = "  template: router\n  overlays: /srv/clones\n"
    group = parse(GOOD + more, "edge.yaml")
    assert (group.template, group.overlays) == ("router", "/srv/clones")


STAGED = """\
group:
  name: edge
  kind: msr
  lower: {in: p0, out: p1}
  balancers: {lb1: [in], lb2: [out]}
  routers: [vr1, vr2]
"""


def test_a_multistage_router() -> None:
    group = parse(STAGED, "edge.yaml")
    assert group.balancers == (("lb1", ("in",)), ("lb2", ("out",)))
    assert (group.balancer("in"), group.balancer("out")) == ("lb1", "lb2")
    assert (group.members, group.links) == (("vr1", "vr2"), "bridge")
    assert group.at_member(1) == "edge.yaml:6"
    assert parse(f"{STAGED}  links: vlan\n", "edge.yaml").links == "vlan"
    assert group.health is None
    assert parse(f"{STAGED}  health: {{leave: 1.5s}}\n", "g").health == HealthCheck(1.5, 10)
    text = f"{STAGED}  health: {{leave: 60s, return: 1s}}\n"
    assert parse(text, "g").health == HealthCheck(60, 1)


SIDES = ", ".join(f"s{n}: p{n}" for n in range(10))


BAD_STAGED = [
    ("kind: msr", "kind: hub", "g:3: group.kind: 'hub' is not accepted; write pvr or msr"),
    ("  kind: msr\n", "", "g:1: group: the key 'kind' is missing; add it: pvr or msr"),
    ("routers", "members", "g:6: group.members: unknown key; the keys here are name, kind,"),
    ("lb2: [out]", "lb2: [in]", "g:5: group.balancers.lb2.0: the side 'in' is served by 'lb1'"),
    ("lb2: [out]", "lb2: [in]", "g:5: group.balancers: no balancer serves the side 'out'"),
    ("lb2: [out]", "lb2: [up]", "g:5: group.balancers.lb2.0: there is no side 'up' under lower"),
    ("lb2: [out]", "lb2: [o-t]", "g:5: group.balancers.lb2.0: 'o-t' is not a name of a side"),
    ("lb2: [out]", "lb2: out", "g:5: group.balancers.lb2: 'out' stands where a list is"),
    ("lb2: [out]", "vr2: [out]", "g:5: group.balancers.vr2: 'vr2' is a router of the group"),
    ("lb2:", "'qemu:a':", "g:5: group.balancers.'qemu:a': plain QEMU cannot be given other"),
    ("vr1, vr2", "vr1, vr1", "g:6: group.routers.1: 'vr1' stands here twice"),
    ("in: p0, out: p1", SIDES, "g:4: group.lower: a mapping is not accepted; write up to 9"),
    ("  kind", "  links: star\n  kind", "g:3: group.links: 'star' is not accepted; write"),
    ("  kind", "  health: on\n  kind", "g:3: group.health: 'on' stands where a mapping is"),
    ("  kind", "  health: {return: 9s}\n  kind", "g:3: group.health: the key 'leave' is missing"),
    ("  kind", "  health: {leave: 2}\n  kind", "g:3: group.health.leave: 2 stands where text is"),
    ("  kind", "  health: {leave: 2m}\n  kind", "g:3: group.health.leave: '2m' is not a time"),
    ("  kind", "  health: {leave: 999ms}\n  kind", "g:3: group.health.leave: 999ms is outside"),
    ("  kind", "  health: {leave: 61s}\n  kind", "g:3: group.health.leave: 61s is outside the"),
    ("  kind", "  health: {leave: 1.0000000001s}\n  kind", "g:3: group.health.leave: '1.0000000001"),
    ("  kind", "  health:\n    leave: 2s\n    return: 601s\n  kind", "g:5: group.health.return: 60"),
]  # fmt: skip
BAD = [
    ("kind: pvr", "kind: msr", "g:1: group: the key 'balancers' is missing"),
    ("name: edge", "name: Edge", "g:2: group.name: 'Edge' is not a name of a group"),
    ("name: edge", "name: verylongname", "g:2: group.name: 'verylongname' is not a name"),
    ("[vr1, vr2]", "[]", "g:4: group.members: the value is empty"),
    ("[vr1, vr2]", "[vr1, 2]", "g:4: group.members.1: 2 stands where text is expected"),
    ("[vr1, vr2]", "[vr1, vr1]", "g:4: group.members.1: 'vr1' stands here twice"),
    ("[vr1, vr2]", "['qemu:a']", "g:4: group.members.0: plain QEMU"),
    ("out: p1", "out: p0", "g:5: group.lower.out: p0 is the device of another side"),
    ("out: p1", "outside: p1", "g:5: group.lower.outside: this key does not fit here"),
    ("out: p1", "out: a/b", "g:5: group.lower.out: 'a/b' is not a name of a device"),
    ("  kind", "  colour: red\n  kind", "g:3: group.colour: unknown key"),
    ("  kind", "  health: {leave: 2s}\n  kind", "g:3: group.health: unknown key"),
    ("  lower", "  template: vr2\n  lower", "g:5: group.template: the template cannot be a member"),
    ("  lower", "  template: ''\n  lower", "g:5: group.template: the value is empty"),
    ("  lower", "  overlays: images\n  lower", "g:5: group.overlays: 'images' is not an absolute"),
    ("  kind", "  colour:\n  kind", "g:3: group.colour: unknown key"),
    ("name: edge", "name:", "g:2: group.name: the key has no value; write a small letter"),
    ("  lower", "  template:\n  lower", "g:5: group.template: the key has no value; write"),
    ("out: p1", "out", "g:5: group.lower.out: the key has no value; write a device"),
    (GOOD, "group:\n", "g:1: group: the key has no value; write the keys name"),
    (GOOD, "guest: vr1\n", "g:1: guest: unknown key"),
    (GOOD, "", "g:1: the file holds no group"),
    (GOOD, "- 1\n", "g:1: the file holds no group"),
    (GOOD, "group: [1\n", "g:"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [*((GOOD, *bad) for bad in BAD), *((STAGED, *bad) for bad in BAD_STAGED)],
)
def test_errors_name_the_place(text: str, old: str, new: str, said: str) -> None:
    with pytest.raises(PolicyErrors) as caught:
        parse(text.replace(old, new), "g")
    assert any(str(error).startswith(said) for error in caught.value.errors), str(caught.value)


def test_a_file_or_the_name_of_one(tmp_path: Path) -> None:
    file = tmp_path / "edge.yaml"
    file.write_text(GOOD)
    (tmp_path / "bad.yaml").write_text("group: 1\n")
    assert load_group(str(file), Path("/nowhere")).name == "edge"
    assert load_group("edge", tmp_path).path == str(file)
    assert name_of(str(file)) == name_of("edge") == "edge"
    with pytest.raises(VsrtuneError, match="there is no file"):
        load_group("core", tmp_path)
    file.rename(tmp_path / "core.yaml")
    with pytest.raises(VsrtuneError, match="is called edge"):
        load_group("core", tmp_path)
