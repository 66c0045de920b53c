"""events/changes.py: what the kernel's lines say, whom they name, and how soon the daemon looks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import shell_samples as samples
from planning_samples import host, nic

from vsrtune.daemon.events import changes
from vsrtune.daemon.events.changes import (
    ChangeEvents,
    Seen,
    culprit,
    parse,
    places,
    probes,
    thread_filter,
)
from vsrtune.daemon.scope import FULL, NOTHING, Scope
from vsrtune.model.guest import Role
from vsrtune.model.host import SoftirqThread
from vsrtune.model.plan import Culprit, Place

BEGIN = "           <...>-812     [001] ...1.   263.516023: "
AFFINITY = f'{BEGIN}affinity: (__x64_sys_sched_setaffinity+0x0/0x100) tid=704 comm="taskset"'


@pytest.mark.parametrize(
    ("rest", "place", "comm"),
    [
        ('affinity: (f+0x0/0x1) tid=704 comm="taskset"', ("cpus", 704), "taskset"),
        ('class: (f+0x0/0x1) tid=704 comm="chrt"', ("scheduler", 704), "chrt"),
        ('parameters: (f+0x0/0x1) tid=704 comm="x"', ("scheduler", 704), "x"),
        ('attributes: (f+0x0/0x1) tid=704 comm="x"', ("scheduler", 704), "x"),
        ('nice: (f+0x0/0x1) which=0 tid=704 comm="renice"', ("scheduler", 704), "renice"),
        ('queue: (f+0x0/0x1) device="macvtap0" comm="ip"', ("txqueuelen", "macvtap0"), "ip"),
        ('threaded: (f+0x0/0x1) device="eth0" comm="sh"', ("napi-threaded", "eth0"), "sh"),
        ('irq: (f+0x0/0x1) irq=24 comm="irqbalance"', ("irq", 24), "irqbalance"),
        ('rr: (f+0x0/0x1) write=1 comm="sysctl"', ("rr-timeslice", ""), "sysctl"),
        ('rt: (f+0x0/0x1) write=1 comm="sysctl"', ("realtime-limit", ""), "sysctl"),
        (
            "cgroup_attach_task: dst_root=0 dst_id=9 dst_level=2 dst_path=/a b pid=704 comm=CPU 0/KVM",
            ("cpus", 704),
            "",
        ),
        # A name may hold anything but a zero byte.
        ('affinity: (f+0x0/0x1) tid=704 comm="a tid=1 b"', ("cpus", 704), "a tid=1 b"),
        ('affinity: (f+0x0/0x1) tid=704 comm="', ("cpus", 704), ""),
    ],
)
def test_a_line_says_what_is_changed(rest: str, place: Place, comm: str) -> None:
    seen = parse(BEGIN + rest)
    assert seen is not None
    assert (seen.when, seen.tid, seen.place, seen.comm) == (263.516023, 812, place, comm)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "CPU:1 [LOST 12 EVENTS]",
        'b"',
        f"{BEGIN}sched_switch: prev_comm=x",
        f"{BEGIN}affinity: (f+0x0/0x1) comm=x",
        f'{BEGIN}queue: (f+0x0/0x1) device="../x" comm="ip"',
    ],
)
def test_another_line_says_nothing(line: str) -> None:
    assert parse(line) is None


def test_a_name_with_a_line_feed_makes_no_event() -> None:
    lines = AFFINITY.replace("taskset", "a\n<...>-1 [0] ").splitlines()
    assert [parse(line) is not None for line in lines] == [True, False]


@pytest.mark.parametrize("process", ["", "(    800) ", "(-------) "])
@pytest.mark.parametrize(
    "name", ["taskset", "a b-3", "-1 [0] x 1.0: ", "a-1  [000] ", "-1 (", "", "\u202e"]
)
def test_a_name_before_the_event_does_not_pass_for_another_thread(name: str, process: str) -> None:
    line = AFFINITY.replace("<...>", name).replace("[001]", f"{process}[001]")
    assert parse(line) == parse(AFFINITY)


@pytest.mark.parametrize("lacks", ["", "fields"])
def test_lines_have_the_usual_form_whatever_another_tracer_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    (tmp_path / "instances").mkdir()
    (tmp_path / "kprobe_events").touch()
    (tmp_path / "trace_options").touch()
    known = {"latency-format", "context-info", "irq-info", "fields", "raw", "hex", "bin"} - {lacks}
    found = {"record-tgid", "latency-format", "raw", "hex", "bin"}

    def write(path: str, text: str, flags: int = 0) -> None:
        if path.startswith(f"{tmp_path}/instances/") and path.endswith("/trace_options"):
            name = text.removeprefix("no")
            if name not in known:
                raise OSError(22, "Invalid argument", path)
            (found.add if name == text else found.discard)(name)

    monkeypatch.setattr(changes, "write_file", write)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    # There is no pipe to listen to.
    ChangeEvents(lambda: None, lambda _change: None, str(tmp_path)).run()
    assert found == {"record-tgid", "context-info", "irq-info"}


def test_the_offset_of_a_devices_name_is_used_only_where_it_is_known() -> None:
    for release, argument in (((6, 1), "+0($arg1)"), ((6, 8), "dev->name")):
        (queue,) = (p for p in probes("x86_64", release) if p.event == "queue")
        assert queue.arguments == f"device={argument}:string"
    assert {p.event for p in probes("riscv64", (6, 12))} == {"queue", "threaded", "irq", "rr", "rt"}


def test_places_are_those_of_policies_and_name_what_to_read() -> None:
    snapshot = samples.snapshot()
    guest = snapshot.guests[0]
    soft = SoftirqThread(replace(guest.threads[0].key, tid=15), 0, guest.threads[0].sched)
    on = replace(host(nics=[nic("p0", "2")]), softirq=(soft,))
    found = places(replace(snapshot, host=on))
    tid = guest.by_role(Role.VHOST)[0].key.tid
    assert found["cpus", tid] == found["scheduler", tid] == Scope.of(guest.name)
    assert found["txqueuelen", guest.interfaces[0].target] == Scope.of(guest.name)
    assert found["irq", on.nics[0].irqs[0].number] == found["scheduler", 15] == FULL
    assert ("cpus", 1) not in found


def test_plain_qemu_is_read_with_everything() -> None:
    snapshot = samples.snapshot()
    plain = replace(snapshot.guests[0], source="qemu")
    found = places(replace(snapshot, guests=(plain,)))
    assert found["cpus", plain.threads[0].key.tid] == FULL


def test_a_culprit_is_a_process_in_a_unit_while_it_lives() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    its = Seen(1.0, child.pid, "x", ("cpus", child.pid))
    found = culprit(its)
    own = culprit(replace(its, tid=os.getpid()))
    child.communicate(b"\n")
    assert own is not None
    assert found == replace(own, pid=child.pid)
    assert culprit(its) == Culprit(child.pid, "x")
    assert str(culprit(its)) == f"x (pid {child.pid}, which has ended)"


HIS = "/user.slice/user-1000.slice/user@1000.service/app.slice"


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/system.slice/libvirtd.service", "libvirtd.service"),
        ("/machine.slice/machine-qemu.scope/libvirt/emulator", "machine-qemu.scope"),
        (f"{HIS}/libvirtd.service", "user@1000.service"),
        (f"{HIS}/x/libvirt.service/y.scope", "user@1000.service"),
        ("/", ""),
    ],
)
def test_a_unit_is_systemds_and_none_that_a_user_makes_in_his_own(
    texts: dict[tuple[int, str], str], cgroup: str, unit: str
) -> None:
    texts[8, "cgroup"] = f"0::{cgroup}\n"
    assert culprit(Seen(1.0, 8, "x", ("cpus", 7))) == Culprit(8, "x", unit, 1.0)


@pytest.mark.parametrize(
    ("caller", "place", "may"),
    [
        ((0, 0), ("cpus", 7), True),
        ((1000, 0), ("cpus", 7), True),
        ((64055, 64055), ("scheduler", 7), True),
        ((1000, 1000), ("scheduler", 7), False),
        ((0, 1000), ("cpus", 7), False),
        # The kernel tells of these once it has permitted them.
        ((1000, 1000), ("txqueuelen", "macvtap0"), True),
        ((1000, 1000), ("napi-threaded", "elsewhere"), False),
        ((0, 0), ("txqueuelen", "elsewhere"), True),
        # It has ended: nobody knows.
        ((1000, 1000), ("cpus", 9), True),
    ],
)
def test_who_may_not_change_a_thread_is_no_culprit(
    texts: dict[tuple[int, str], str], monkeypatch: pytest.MonkeyPatch,
    caller: tuple[int, int], place: Place, may: bool,
) -> None:  # fmt: skip
    """The kernel tells of his call before it refuses it."""
    network = "vsrtune.daemon.events.changes._network"
    monkeypatch.setattr(network, lambda tid=None: str(place[1] == "elsewhere" and tid))
    texts[8, "status"] = "Name:\tx\nTgid:\t8\nUid:\t{}\t{}\t0\t0\n".format(*caller)
    assert (culprit(Seen(1.0, 8, "x", place)) is not None) is may


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], str]:
    """What /proc says of the thread 7 of a QEMU and of the caller 8; more can be written."""
    found = {
        (7, "status"): "Tgid:\t7\nUid:\t64055\t64055\t64055\t64055\n",
        (8, "status"): "Tgid:\t8\nUid:\t0\t0\t0\t0\n",
        (8, "cgroup"): "0::/system.slice/x.service\n",
    }

    def text(tid: int, name: str) -> str:
        if (tid, name) not in found:
            raise FileNotFoundError(2, "No such file or directory")
        return found[tid, name]

    monkeypatch.setattr("vsrtune.daemon.events.changes._text", text)
    return found


@pytest.mark.parametrize(
    ("tids", "passing"),
    [
        ([], []),
        ([7], [7]),
        ([7, 8, 9, 20], [7, 8, 9, 20]),
        (range(1, 2000, 2), None),
        ([t for g in range(300) for t in range(g * 100, g * 100 + 7)], None),
    ],
)
def test_a_filter_lets_threads_pass_and_fits_a_page(
    tids: Iterable[int], passing: list[int] | None
) -> None:
    text = thread_filter(tids, "tid")
    assert len(f"which == 0 && ({text})") < 4096
    python = compile(text.replace("&&", "and").replace("||", "or"), "filter", "eval")
    let = [t for t in range(-1, 31000) if eval(python, {"tid": t})]
    assert set(tids) <= set(let)
    assert passing is None or let == (passing or [-1])


def test_only_hurried_scopes_stay_hurried() -> None:
    hurried = Scope(frozenset(["a"]), hurried=True)
    assert NOTHING.merge(hurried) == hurried.merge(NOTHING) == hurried
    assert hurried.merge(Scope(frozenset(["b"]), hurried=True)).hurried
    assert not hurried.merge(Scope.of("b")).hurried
    assert not hurried.merge(FULL).hurried


def test_two_scopes_name_what_has_changed_only_if_both_do() -> None:
    cpus, both = frozenset({("cpus", 7)}), frozenset({("cpus", 7), ("scheduler", 8)})
    one = Scope(frozenset(["a"]), hurried=True, places=cpus)
    other = Scope(frozenset(["b"]), hurried=True, places=frozenset({("scheduler", 8)}))
    assert NOTHING.merge(one) == one
    assert one.merge(other).places == both
    assert not one.merge(replace(other, places=frozenset())).places


def test_on_another_architecture_the_checks_are_not_made_rare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "instances").mkdir()
    (tmp_path / "kprobe_events").touch()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    events = ChangeEvents(lambda: None, lambda _change: None, str(tmp_path))
    events.run()
    assert not events.watching.is_set()
    assert "registers of riscv64 are not known; they are found within a minute" in caplog.text


def test_a_name_with_a_carriage_return_is_no_line_of_its_own() -> None:
    """The kernel escapes line feeds and backslashes in it, and nothing else."""
    code = (
        "import time; open('/proc/self/comm', 'w').write('\\rUid:\\t7\\t7\\t7'); print(flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        lines = changes._text(process.pid, "status").split("\n")
        process.kill()
    assert [line for line in lines if line.startswith("Uid:")] == [
        f"Uid:\t{os.getuid()}\t{os.getuid()}\t{os.getuid()}\t{os.getuid()}"
    ]
