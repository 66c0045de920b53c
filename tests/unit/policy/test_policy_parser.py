"""Reading policies: what is accepted, and the files around it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from planning_samples import host, nic, router, snapshot

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import PolicyError
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.model.targets import TxQueueLen
from vsrtune.observe.config_files import files_in, load_dirs, read_all, read_policy, unsafe
from vsrtune.plan.planner import plan
from vsrtune.policy.model import AUTO, Policy, PolicyErrors, SchedRule
from vsrtune.policy.parser import literal, parse
from vsrtune.policy.schema import SCHEMA
from vsrtune.policy.yaml_reader import MAX_BYTES, dotted, read, shown

ROOT = Path(__file__).resolve().parents[3]
READY = sorted((ROOT / "policies").glob("*.yaml"))

FULL = """\
guest: vr1
cpus:
  irq: 0, 5
  vcpu: {0: 1, 1: 2-3}
  vhost:
    52:54:00:AA:bb:01: 4
    macvtap7: 6-7
  napi: {"52:54:00:AA:bb:02": 4, nvt0: 6}
  emulator: auto
scheduler:
  vcpu: {class: fifo, priority: 10}
  vhost:
    class: other
  napi: {class: rr, priority: 3}
napi:
  threaded: false
queue:
  macvtap: 50
profile: none
"""


def test_every_key() -> None:
    policy = parse(FULL, "full.yaml")
    assert policy == Policy(
        path="full.yaml",
        guest="vr1",
        irq=CpuSet([0, 5]),
        vcpu=(("0", CpuSet([1])), ("1", CpuSet([2, 3]))),
        vhost=(("52:54:00:aa:bb:01", CpuSet([4])), ("macvtap7", CpuSet([6, 7]))),
        napi=(("52:54:00:aa:bb:02", CpuSet([4])), ("nvt0", CpuSet([6]))),
        emulator=AUTO,
        vcpu_sched=SchedRule(SchedClass.FIFO, 10),
        vhost_sched=SchedRule(SchedClass.OTHER),
        napi_sched=SchedRule(SchedClass.RR, 3),
        devices={"queue.macvtap": 50, "napi.threaded": False},
    )
    assert policy.at("cpus", "vcpu", "1") == "full.yaml:4"
    assert policy.at("queue", "macvtap") == "full.yaml:18"


def test_a_key_that_is_not_written_is_unset() -> None:
    policy = parse("guest: vr1\nprofile: none\n", "p")
    assert policy == Policy("p", "vr1")
    assert policy.lines == {("guest",): 1, ("profile",): 2}


def test_place_of_an_unwritten_key_is_the_nearest_above() -> None:
    policy = parse("guest: vr1\ncpus:\n  vcpu: auto\nprofile: none\n", "p")
    assert policy.at("cpus", "irq") == "p:2"
    assert policy.at("scheduler", "vcpu") == "p:1"


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("3", "3"), ("'3'", "3"), ("1-3", "1-3"), ("0,2-3", "0,2-3"), ("0-7:1/2", "0,2,4,6")],
)
def test_cpu_lists(text: str, cpus: str) -> None:
    assert parse(f"guest: a\ncpus:\n  emulator: {text}\n", "p").emulator == CpuSet.parse(cpus)


def test_interrupt_cpus_by_device_and_node() -> None:
    text = "guest: a\ncpus:\n  irq:\n    eth0: 0\n    node1: 8, 10-11\nirq: {set: true}\n"
    policy = parse(text, "p")
    assert policy.irq == (("eth0", CpuSet([0])), ("node1", CpuSet([8, 10, 11])))
    assert policy.moves_irqs
    assert policy.at("cpus", "irq", "node1") == "p:5"
    assert not parse(text.replace("true", "false"), "p").moves_irqs


@pytest.mark.parametrize(
    "name", ["Röuter 1.2", "vr.1", "a b", "日本", "on", "1e3 router", "x: y", "#1", "vr*", "[ab]?"]
)
def test_guest_names_survive_quoting(name: str) -> None:
    assert parse(f"guest: {json.dumps(name)}\n", "p").guest == name


DEADLINE = "scheduler: {vcpu: {class: deadline, %s}}"


@pytest.mark.parametrize(
    "text",
    [
        "cpus: {emulator: 0}",
        "cpus: {emulator: 8191}",
        "cpus: {vcpu: {9999: 1}}",
        "cpus: {vhost: {abcdefghijklmno/9999: 1}}",
        "cpus: {irq: {abcdefghijklmno: 1}}",
        "scheduler: {napi: {class: rr, priority: 1, slice: 1ms}}",
        "scheduler: {softirq: {class: rr, priority: 99, slice: 100ms}}",
        "queue: {macvtap: 1}",
        "queue: {macvtap: 32767}",
        "user: 0",
        "user: 4294967294",
        DEADLINE % "runtime: 1024ns, period: 100us",
        DEADLINE % "runtime: 1ms, deadline: 1ms, period: 4s",
        DEADLINE % "bandwidth: 100%, period: 100us",
        "scheduler: {budget: {cpu: 300%, period: 100us}}",
        "scheduler: {budget: {cpu: 100%, period: 4s}}",
    ],
)
def test_bounds_are_accepted(text: str) -> None:
    """tests/bad_policies has what lies beyond them."""
    assert parse(f"guest: qemu:vr1\n{text}\n", "p").asks


def test_bounds_of_the_text() -> None:
    """The nesting, the bytes, and what of a long value a message shows."""

    def nested(depth: int) -> str:
        return "{a: " * depth + "1" + "}" * depth

    assert read(nested(8), "p").errors == []
    assert [e.what for e in read(nested(9), "p").errors] == ["the nesting is deeper than 8 levels"]
    assert read("a: 1\n".ljust(MAX_BYTES, "#"), "p").errors == []
    assert len(read("a: 1\n".ljust(MAX_BYTES + 1, "#"), "p").errors) == 1
    assert shown(40 * "x") == f"'{40 * 'x'}'"
    assert shown(41 * "x") == f"'{37 * 'x'}...'"


@pytest.mark.parametrize(("key", "most"), [("guest", 255), ("user", 64)])
def test_the_longest_name(key: str, most: int) -> None:
    def text(length: int) -> str:
        return f"{key}: {'r' * length}\n" + ("guest: qemu:vr1\n" if key == "user" else "")

    assert parse(text(most), "p")
    with pytest.raises(PolicyErrors, match=f"longer than {most} characters"):
        parse(text(most + 1), "p")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("vr1", "vr1"),
        ("vr[*]", "vr*"),
        ("[[]x]", "[x]"),
        ("a[?]", "a?"),
        ("vr*", None),
        ("vr?", None),
        ("vr[12]", None),
        ("a]b", "a]b"),
    ],
)
def test_literal(pattern: str, name: str | None) -> None:
    assert literal(pattern) == name


def test_realtime_rules_reset_on_fork() -> None:
    assert SchedRule(SchedClass.RR, 7).sched == Sched(SchedClass.RR, 7, reset_on_fork=True)
    assert SchedRule(SchedClass.OTHER).sched == Sched()


def test_every_key_and_item_has_the_line_on_which_it_stands() -> None:
    lines = read("a:\n- 1\n- b: 2\n\nc: 3\n", "p").lines
    assert lines == {("a",): 1, ("a", "0"): 2, ("a", "1"): 3, ("a", "1", "b"): 3, ("c",): 5}


def test_byte_order_mark_is_no_error() -> None:
    assert parse("\ufeffguest: vr1\n", "p").guest == "vr1"


def test_comment_line_with_tab_is_told_as_such() -> None:
    with pytest.raises(PolicyErrors, match="p:2: the indentation contains a tab"):
        parse("guest: vr1\n\t# note\ncpus:\n  vcpu: auto\n", "p")


def test_errors_of_a_file_come_together_in_order_of_lines() -> None:
    with pytest.raises(PolicyErrors) as caught:
        parse("guest: 3\ncpus: {irq: x}\nqueue: {macvtap: 0}\n", "p")
    assert [e.where for e in caught.value.errors] == ["p:1", "p:2", "p:3"]
    assert str(caught.value).count("\n") == 2


# -- the schema


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_key_is_described() -> None:
    def walk(part: dict[str, object], path: str) -> None:
        assert part.get("description"), path
        assert part.get("x-expects"), path
        below = part.get("properties", {})
        assert isinstance(below, dict)
        for key, sub in below.items():
            walk(sub, f"{path}.{key}")

    for key, part in SCHEMA["properties"].items():
        walk(part, key)


def _paths(part: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    for key, below in part.get("properties", {}).items():
        yield (*above, key)
        yield from _paths(below, *above, key)


@pytest.mark.parametrize("keys", list(_paths(SCHEMA)), ids=".".join)
def test_no_key_may_go_without_a_value(keys: tuple[str, ...]) -> None:
    text = "" if keys == ("guest",) else "guest: vr1\n"
    text += "".join(f"{'  ' * depth}{key}:\n" for depth, key in enumerate(keys))
    with pytest.raises(PolicyErrors) as caught:
        parse(text, "p")
    place = f"p:{len(text.splitlines())}: {dotted(keys)}: the key has no value; write "
    told = [str(e) for e in caught.value.errors if str(e).startswith(place)]
    assert len(told) == 1, str(caught.value)
    needed = keys[-1] in ("guest", "class") or keys[:-1] == ("scheduler", "budget")
    assert told[0].endswith((", or remove the key", ", or leave it out")) != needed


# -- the ready policies


@pytest.mark.parametrize("path", READY, ids=lambda p: p.stem)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_ready_policies_are_good(path: Path, count: int) -> None:
    online = f"0-{count - 1}"
    on = snapshot(router(online=online), on=host(count, [nic("p0", "0"), nic("p1", "0")]))
    assert read_all([path])[1] == []
    policy = read_policy(path)
    assert policy.desired(TxQueueLen) is None
    made = plan(on, (policy,))
    assert made.refusals == ()
    assert made.actions
    assert made.warnings == ()
    header = path.read_text().split("\n\n")[0]
    assert header.startswith("#")
    assert "section" in path.read_text()


def test_there_are_ready_policies() -> None:
    names = {p.stem for p in READY}
    assert names >= {"router"}


# -- files


def test_directories(tmp_path: Path) -> None:
    vendor, own = tmp_path / "vendor", tmp_path / "own"
    vendor.mkdir()
    own.mkdir()
    (vendor / "a.yaml").write_text("guest: a\nqueue: {macvtap: 10}\n")
    (vendor / "b.yml").write_text("guest: b\n")
    (vendor / ".hidden.yaml").write_text("no policy")
    (vendor / "a.yaml~").write_text("no policy")
    (own / "a.yaml").write_text("guest: a\nqueue: {macvtap: 20}\n")
    dirs = [vendor, own, tmp_path / "absent"]
    assert files_in(dirs) == [own / "a.yaml", vendor / "b.yml"]
    assert [p.desired(TxQueueLen) for p in load_dirs(dirs)] == [20, None]
    assert read_all(files_in([vendor]))[1] == []


def test_same_guest_twice_names_both_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("guest: vr1\n")
    (tmp_path / "b.yaml").write_text("# two\nguest: vr1\n")
    with pytest.raises(PolicyErrors) as caught:
        load_dirs([tmp_path])
    assert str(caught.value) == (
        f"{tmp_path}/b.yaml:2: guest: 'vr1' is the guest of {tmp_path}/a.yaml:1 too; "
        "keep one policy per guest"
    )


def test_errors_of_all_files_come_together(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("guest: 1\n")
    (tmp_path / "b.yaml").write_text("")
    with pytest.raises(PolicyErrors) as caught:
        load_dirs([tmp_path])
    assert len(caught.value.errors) == 2


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_that_others_may_write(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("guest: vr1\n")
    path.chmod(mode)
    with pytest.raises(PolicyErrors) as caught:
        load_dirs([tmp_path])
    (error,) = caught.value.errors
    assert (error.where, error.hint) == (str(path), f"chmod go-w {path}")
    assert f"mode {mode:04o}" in error.what
    assert [e.where for e in unsafe([path])] == [error.where]
    assert read_all([path])[1] == [], "a file that is named is somebody's draft"
    path.chmod(0o644)
    assert len(load_dirs([tmp_path])) == 1


def test_a_directory_that_others_may_write(tmp_path: Path) -> None:
    """That of a symbolic link's target too; each is told once."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    for name in "ab":
        (shared / f"{name}.yaml").write_text(f"guest: {name}\n")
        (own / f"{name}.yaml").symlink_to(shared / f"{name}.yaml")
    assert len(load_dirs([own])) == 2
    shared.chmod(0o777)
    for directory in (own, shared):
        with pytest.raises(PolicyErrors) as caught:
            load_dirs([directory])
        (error,) = caught.value.errors
        assert (error.where, error.hint) == (str(shared), f"chmod go-w {shared}")
    shared.chmod(0o1777)
    (error,) = unsafe([shared / "a.yaml"])
    assert error.hint == "move the policies to a directory of root's own", "as /tmp, nobody's alone"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away, which needs root")
def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("guest: vr1\n")
    os.chown(path, 65534, -1)
    with pytest.raises(PolicyErrors, match="belongs to user 65534"):
        load_dirs([tmp_path])


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "dir.yaml").mkdir()
    (tmp_path / "gone.yaml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "null.yaml").symlink_to("/dev/null")
    assert unsafe(files_in([tmp_path])) == [], "a device that all may write is none either"
    errors = read_all(files_in([tmp_path]))[1]
    assert [(e.where, e.what) for e in errors] == [
        (f"{tmp_path}/dir.yaml:1", "this is no regular file"),
        (f"{tmp_path}/gone.yaml:1", "the file cannot be read: No such file or directory"),
        (f"{tmp_path}/null.yaml:1", "this is no regular file"),
    ]
    assert read_all([tmp_path / "absent.yaml"])[1][0].what.startswith("the file cannot be read")


def test_large_file_cut_within_a_character(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"#" + "é".encode() * MAX_BYTES)
    with pytest.raises(PolicyErrors, match="larger than 64 KiB"):
        read_policy(path)


def test_hostile_numbers_and_depths_end_quickly() -> None:
    for text in ("guest: " + "9" * 50_000, "guest: " + "[" * 5_000, "guest: a\nx: " + "{a: " * 900):
        with pytest.raises(PolicyError):
            parse(text, "p")
