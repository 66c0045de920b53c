"""Group files: what a good one means, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from vsrtune import group_files
from vsrtune.errors import VsrtuneError
from vsrtune.groups import parse
from vsrtune.policy import PolicyErrors

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


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kind: pvr", "kind: msr", "g:3: group.kind: the multistage router (msr) is not supported"),
        ("kind: pvr", "kind: hub", "g:3: group.kind: 'hub' is not accepted; write pvr"),
        ("  kind: pvr\n", "", "g:1: group: the key 'kind' is missing"),
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
        (GOOD, "guest: vr1\n", "g:1: guest: unknown key"),
        (GOOD, "", "g:1: the file holds no group"),
        (GOOD, "- 1\n", "g:1: the file holds no group"),
        (GOOD, "group: [1\n", "g:"),
    ],
)
def test_errors_name_the_place(old: str, new: str, said: str) -> None:
    with pytest.raises(PolicyErrors) as caught:
        parse(GOOD.replace(old, new), "g")
    assert any(str(error).startswith(said) for error in caught.value.errors), str(caught.value)


def test_a_file_or_the_name_of_one(tmp_path: Path) -> None:
    file = tmp_path / "edge.yaml"
    file.write_text(GOOD)
    (tmp_path / "bad.yaml").write_text("group: 1\n")
    assert group_files.load(str(file), Path("/nowhere")).name == "edge"
    assert group_files.load("edge", tmp_path).path == str(file)
    assert group_files.name(str(file)) == group_files.name("edge") == "edge"
    with pytest.raises(VsrtuneError, match="there is no file"):
        group_files.load("core", tmp_path)
    file.rename(tmp_path / "core.yaml")
    with pytest.raises(VsrtuneError, match="is called edge"):
        group_files.load("core", tmp_path)
