"""Who is a guest: pretenders beside real guests, on imitated hosts."""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import replace

import pytest
import recorded_hosts
from hosttree import HostTree, scope
from moving_host import MovingHost
from test_observer import FakeVirt, domain, libvirt_qemu, two_guests

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.filesystem import FileStat
from vsrtune.host.libvirt import DomainText
from vsrtune.host.procfs import MOST_THREADS, PF_IO_WORKER, PF_USER_WORKER
from vsrtune.host.recorded import Answers, RecordedRoot, load
from vsrtune.model.guest import Guest, Role, Sched, SchedClass
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe import guests, one_pass
from vsrtune.observe.guests import FOREIGN, MOST_DATA_PLANE, NOT_ASKED, NOT_LISTED
from vsrtune.observe.observer import Observer
from vsrtune.observe.trust import PID_FILES
from vsrtune.plan.planner import plan
from vsrtune.policy.matching import qemu_filter as filter_of
from vsrtune.policy.parser import parse

NOBODY = 65534
FILE, DIRECTORY = 0o100755, 0o040755
QEMU = "/usr/bin/qemu-system-x86_64"
POLICY = """\
guest: "{guest}"
cpus: {{irq: 0, vcpu: auto, vhost: auto}}
scheduler:
  vcpu: {{class: fifo, priority: 10}}
  vhost: {{class: fifo, priority: 10}}
profile: none
"""


@pytest.fixture
def tree() -> HostTree:
    """Both of them are real."""
    return two_guests("vr1")


def pretender(tree: HostTree, pid: int, *arguments: str, uid: int = NOBODY, exe: str = "") -> None:
    """A process that says it is a guest, with threads that say they are vcpu and worker."""
    exe = exe or f"/home/nobody/{pid}/qemu-system-x86_64"
    tree.qemu(pid, *arguments, start=200, uid=uid)
    tree.homes[pid] = "/user.slice/user-65534.slice/session-1.scope"
    tree.thread(pid, pid, "qemu-system-x86", start=200, uid=uid)
    tree.thread(pid, pid + 1, "CPU 0/KVM", start=200, uid=uid)
    tree.thread(pid, pid + 2, f"vhost-{pid}", start=200, uid=uid, flags=0x40)
    tree.links[f"/proc/{pid}/exe"] = exe
    tree.stats["/home/nobody"] = FileStat(NOBODY, DIRECTORY, 1, 9)


def observer(tree: HostTree, virt: FakeVirt, *guests: str) -> Observer:
    policies = tuple(parse(POLICY.format(guest=g), f"{n}.yaml") for n, g in enumerate(guests))
    return Observer(tree.root(), virt, qemu_filter=lambda: filter_of(policies))


def refs(snapshot: Snapshot) -> list[tuple[str, int]]:
    return [(g.ref, g.pid) for g in snapshot.guests]


REAL = [("vr1", 50), ("qemu:pq1", 70)]


@pytest.mark.parametrize("exe", ["", QEMU], ids=["his own executable", "the host's QEMU"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("-name", "pq1,debug-threads=on"),
        ("-name", "guest=vr9", "-object", "secret,id=master", "-chardev", "id=charmonitor"),
    ],
    ids=["plain", "libvirt's traces"],
)
def test_a_process_of_another_user_is_no_guest(
    tree: HostTree, arguments: tuple[str, ...], exe: str
) -> None:
    pretender(tree, 90, *arguments, exe=exe)
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*", "qemu:*").observe()
    assert refs(snapshot) == REAL
    assert snapshot.problems == ()
    (stranger,) = snapshot.strangers
    assert (stranger.pid, stranger.uid) == (90, NOBODY)
    assert "it is user 65534's, and no policy for plain QEMU has `user: 65534`" in stranger.why


class Watching(RecordedRoot):
    """Remembers what was asked of a host."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self.asked: list[str] = []

    def read(self, path: str) -> str:
        self.asked.append(path)
        return super().read(path)

    def listdir(self, path: str, most: int | None = None) -> list[str]:
        self.asked.append(path)
        return super().listdir(path, most)

    def qmp_vcpus(self, pid: int, socket: str, timeout: float) -> dict[int, int]:
        self.asked.append(f"qmp {pid}")
        return super().qmp_vcpus(pid, socket, timeout)


def test_nothing_that_a_stranger_chooses_is_read(tree: HostTree) -> None:
    pretender(tree, 90, "-name", "x", "-qmp", "unix:/tmp/q,server=on")
    tree.qemu(80, "-name", "unnamed", "-qmp", "unix:/run/u,server=on")
    root = Watching(tree.answers)
    policy = parse(POLICY.format(guest="qemu:pq1"), "p.yaml")
    snapshot = Observer(root, None, qemu_filter=lambda: filter_of([policy])).observe()
    of_him = {p.removeprefix("/proc/90/") for p in root.asked if p.startswith("/proc/90/")}
    assert of_him == {"stat", "task/90/status", "task/90/cgroup"}
    # Nor is the monitor of a guest that no policy names.
    assert not [a for a in root.asked if a.startswith("qmp")]
    assert NOT_ASKED in {p for g in snapshot.guests for p in g.problems}


def test_a_guest_whose_main_thread_has_ended_stays_one(tree: HostTree) -> None:
    """Its other threads run on, with the classes that they have, and must be guarded."""
    seen = observer(tree, FakeVirt(domain("vr1")), "*", "qemu:*")
    seen.observe()
    line = tree.root().read("/proc/70/stat")
    for threads, there in ((2, True), (1, False)):
        gone = line.replace(") S ", ") Z ").replace(" 20 0 1 ", f" 20 0 {threads} ")
        tree.file("/proc/70/stat", gone).file("/proc/70/cmdline", "")
        tree.links.pop("/proc/70/exe", None)
        assert (("qemu:pq1", 70) in refs(seen.observe())) is there


def test_a_command_line_without_end_is_not_read(tree: HostTree) -> None:
    """prctl(2) lets a process show any part of its memory as its command line."""

    class Endless(Watching):
        def read(self, path: str) -> str:
            if path == "/proc/80/cmdline":
                raise OSError(errno.E2BIG, "more than 1048576 bytes", path)
            return super().read(path)

    tree.qemu(80, "-name", "vast")
    tree.qemu(81, "-name", "small")
    observer = Observer(
        Endless(tree.answers),
        None,
        qemu_filter=lambda: filter_of([parse(POLICY.format(guest="qemu:*"), "p.yaml")]),
    )
    snapshot = observer.observe()
    assert [ref for ref, _ in refs(snapshot)] == ["vr1", "qemu:pq1", "qemu:small"]
    assert [s.why for s in snapshot.strangers] == ["its command line is longer than 1 MiB"]


def test_who_says_a_name_that_no_file_has_is_no_guest(tree: HostTree) -> None:
    """The name is in every line of the journal."""
    uuid = "c0ffee00-0000-4000-8000-000000000001"
    tree.qemu(80, "-name", "a" * 255, "-uuid", uuid)
    tree.qemu(81, "-name", "\u00e4" * 128)
    tree.qemu(82, "-name", "few", "-uuid", uuid * 3000)
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*", "qemu:*").observe()
    assert {pid for _, pid in refs(snapshot)} == {50, 70, 80}
    assert [(s.pid, s.why) for s in snapshot.strangers] == [
        (81, "its name is longer than 255 bytes: start it with a shorter -name"),
        (82, "its UUID has 108000 characters, not 36"),
    ]


PATHS = [
    (
        {"/usr/bin": FileStat(0, DIRECTORY | 0o020, 1, 2)},
        "others than root may write /usr/bin (mode 0775)",
    ),
    ({"/usr": FileStat(0, DIRECTORY | 0o002, 1, 2)}, "others than root may write /usr (mode 0757)"),
    ({"/usr/bin": FileStat(NOBODY, DIRECTORY, 1, 2)}, "/usr/bin belongs to user 65534"),
    ({QEMU: FileStat(NOBODY, FILE, 1, 3)}, f"{QEMU} belongs to user 65534"),
    ({QEMU: FileStat(0, FILE | 0o022, 1, 3)}, f"others than root may write {QEMU} (mode 0777)"),
    ({QEMU: FileStat(0, 0o120777, 1, 3)}, f"{QEMU} is no regular file"),
    ({"/proc/70/exe": FileStat(0, FILE, 7, 3)}, f"it runs another file than {QEMU} is"),
    ({"/proc/70/exe": FileStat(0, FILE, 1, 4)}, f"it runs another file than {QEMU} is"),
]


@pytest.mark.parametrize(("stats", "why"), PATHS, ids=[why for _, why in PATHS])
def test_an_executable_that_others_than_root_could_change(
    tree: HostTree, stats: dict[str, FileStat], why: str
) -> None:
    for pid in (50, 70):
        tree.stats[f"/proc/{pid}/exe"] = FileStat(0, FILE, 1, 3)
    tree.stats[QEMU] = FileStat(0, FILE, 1, 3)
    tree.stats |= stats
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*", "qemu:*").observe()
    assert ("qemu:pq1", 70) not in refs(snapshot)
    assert why in {s.why for s in snapshot.strangers if s.pid == 70}
    if "/proc/70/exe" not in stats:
        (problem,) = snapshot.problems
        assert problem.what == (
            f"vr1 runs according to libvirt, but its process 50 is not believed: {why}"
        )


def replaced(tree: HostTree, *pids: int, uid: int = 0) -> None:
    """A package upgrade: they run a file that no path names any more."""
    for pid in pids:
        tree.links[f"/proc/{pid}/exe"] = f"{QEMU} (deleted)"
        tree.stats[f"/proc/{pid}/exe"] = FileStat(uid, FILE, 1, 1000)
        tree.stats[f"/proc/{pid}/root"] = tree.stats["/proc/1/root"] = FileStat(0, DIRECTORY, 1, 2)
    tree.errors[f"{QEMU} (deleted)"] = "ENOENT"


def test_guests_outlive_an_upgrade_of_qemu(tree: HostTree) -> None:
    replaced(tree, 50, 70)
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*", "qemu:*").observe()
    assert refs(snapshot) == REAL
    assert not snapshot.guests[0].unconfirmed
    # Root of a container calls his own file so, and his user number is root's.
    tree.stats["/proc/70/root"] = FileStat(0, DIRECTORY, 9, 2)
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*", "qemu:*").observe()
    assert refs(snapshot) == REAL[:1]
    # Somebody else's file that is gone is nobody's word.
    replaced(tree, 50, 70, uid=NOBODY)
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*", "qemu:*").observe()
    assert refs(snapshot) == []


def test_libvirt_in_a_container_has_its_qemu_there(tree: HostTree) -> None:
    """The path is the container's; a plain QEMU's must be the host's."""
    for pid in (50, 70):
        tree.links[f"/proc/{pid}/exe"] = "/opt/its/qemu-kvm"
        tree.stats[f"/proc/{pid}/exe"] = FileStat(0, FILE, 5, 5)
    tree.errors["/opt"] = "ENOENT"
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*", "qemu:*").observe()
    assert refs(snapshot) == REAL[:1]
    assert [s.why for s in snapshot.strangers] == ["/opt: there is no such file on this host"]
    tree.stats["/proc/50/exe"] = FileStat(NOBODY, FILE, 5, 5)
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*", "qemu:*").observe()
    assert refs(snapshot) == []


@pytest.mark.parametrize("late", [False, True], ids=["of a whole look", "of a look at changes"])
def test_an_upgrade_needs_a_word_for_a_users_guest(tree: HostTree, late: bool) -> None:
    """One that was believed before stays believed; a process met first like this does not."""
    policy = replace(parse(f"user: 1000\n{POLICY.format(guest='qemu:*')}", "p.yaml"))
    started = Observer(tree.root(), None, qemu_filter=lambda: filter_of([policy]))
    if late:
        started.observe()
    tree.qemu(80, "-name", "own,debug-threads=on", uid=1000)
    before = started.observe_unannounced()
    assert ("qemu:own@1000", 80) in refs(before.snapshot) and (before.names is not None) is late
    replaced(tree, 80)
    tree.qemu(85, "-name", "late,debug-threads=on", uid=1000)
    replaced(tree, 80, 85)
    later = started.observe()
    assert ("qemu:own@1000", 80) in refs(later)
    (stranger,) = later.strangers
    assert stranger.pid == 85
    assert stranger.why.endswith("nothing of root's vouches for it: start it again")


def test_users_that_change_are_not_believed(tree: HostTree) -> None:
    """A process that may take another user's place at any time is nobody's."""
    status = "Name:\tx\nUid:\t0\t1000\t1000\t0\nCpus_allowed_list:\t0-7\n"
    tree.file("/proc/70/task/70/status", status)
    snapshot = observer(tree, FakeVirt(domain("vr1")), "qemu:*").observe()
    assert refs(snapshot) == REAL[:1]
    assert snapshot.strangers[0].why == "it runs as the users 0, 1000 at once"


def test_a_policy_names_the_user(tree: HostTree) -> None:
    """One name, two users: each policy has its own, and root's is not the other's."""
    tree.qemu(80, "-name", "pq1,debug-threads=on", uid=1000)
    tree.thread(80, 81, "CPU 0/KVM", uid=1000)
    roots = parse(POLICY.format(guest="qemu:pq1"), "root.yaml")
    others = parse(f"user: 1000\n{POLICY.format(guest='qemu:pq1')}", "user.yaml")
    for policies, tuned in (
        ([roots], {"qemu:pq1"}),
        ([others], {"qemu:pq1@1000"}),
        ([roots, others], {"qemu:pq1", "qemu:pq1@1000"}),
    ):
        started = Observer(tree.root(), None, qemu_filter=lambda p=policies: filter_of(p))
        made = plan(started.observe(), policies)
        assert {a.target.guest for a in made.actions if a.target.guest != "host"} == tuned
        assert made.refusals == ()


def test_two_of_one_name_are_both_refused(tree: HostTree) -> None:
    tree.qemu(80, "-name", "pq1,debug-threads=on")
    tree.thread(80, 81, "CPU 0/KVM")
    policy = parse(POLICY.format(guest="qemu:*"), "p.yaml")
    made = plan(Observer(tree.root(), None).observe(), [policy])
    assert made.actions == ()
    assert {r.reason for r in made.refusals} == {
        "2 processes have this name: 70 and 80; none of them is tuned"
    }


# -- libvirt


def tuned(snapshot: Snapshot) -> set[str]:
    """Guests of which something would be set."""
    policies = [parse(POLICY.format(guest=g), f"{n}.yaml") for n, g in enumerate(("*", "qemu:*"))]
    return {a.target.guest for a in plan(snapshot, policies).actions} - {"host"}


def in_libvirts_cgroup(tree: HostTree, pid: int, name: str) -> None:
    """A process that came into a cgroup of libvirt's, as a child of a guest's QEMU does."""
    tree.homes[pid] = f"{scope(name)}/libvirt/emulator"
    for tid in (pid, pid + 1, pid + 2):
        tree.file(f"/proc/{pid}/task/{tid}/cgroup", f"0::{tree.homes[pid]}\n")


COPY = ("-name", "guest=vr9,debug-threads=on", "-object", "secret,id=masterKey0")


def test_a_pretender_never_passes_for_libvirts(tree: HostTree) -> None:
    pretender(tree, 90, *COPY)
    tree.remove("/run/libvirt/qemu/vr9.pid")
    virt = FakeVirt(domain("vr1"))
    for virt.fails in (False, True):
        snapshot = observer(tree, virt, "*", "qemu:*").observe()
        assert refs(snapshot) == REAL
    # Of libvirt's cgroup, but not written down: another libvirt's, which no policy reaches.
    in_libvirts_cgroup(tree, 90, "vr1")
    tree.links["/proc/90/exe"] = QEMU
    for virt.fails in (False, True):
        snapshot = observer(tree, virt, "*", "qemu:*").observe()
        assert refs(snapshot) == [("foreign:vr9", 90), *REAL]
        assert FOREIGN in snapshot.guests[0].problems
        assert "foreign:vr9" not in tuned(snapshot) and "vr9" not in tuned(snapshot)


class Strict(RecordedRoot):
    """Takes no path that os takes not."""

    def stat(self, path: str, *, follow: bool = True) -> FileStat:
        if b"\0" in os.fsencode(path):
            raise ValueError("stat: embedded null character in path")
        return super().stat(path, follow=follow)


@pytest.mark.parametrize("name", [r"a\u0000b", r"a\ud800b"])
@pytest.mark.parametrize("pid_files", [0, NOBODY], ids=["root's pid files", "QEMU's pid files"])
def test_a_name_that_nothing_can_have_keeps_no_pass_from_the_others(
    tree: HostTree, name: str, pid_files: int
) -> None:
    """A QEMU that was taken over may write over its own command line."""

    class Virt(FakeVirt):
        def domain(self, name: str) -> DomainText | None:
            if b"\0" in name.encode():
                raise ValueError("embedded null character")
            return super().domain(name)

    pretender(tree, 90, *COPY, exe=QEMU)
    in_libvirts_cgroup(tree, 90, "vr1")
    text = tree.text("/proc/90/cmdline").replace("guest=vr9", f'{{"guest": "{name}"}}')
    tree.file("/proc/90/cmdline", text.replace(",debug-threads=on", ""))
    tree.stats[PID_FILES] = FileStat(pid_files, DIRECTORY, 1, 6)
    virt = Virt(replace(domain("vr1"), live_xml=f"<domain id='1'>{domain('vr1').live_xml[8:]}"))
    for virt.fails in (False, True):
        seen = Observer(Strict(tree.answers), virt).observe()
        assert [(g.name, g.pid) for g in seen.guests if g.pid != 90] == [("vr1", 50), ("pq1", 70)]
        assert [p.what for p in seen.problems] == virt.fails * [
            "qemu:///system: libvirt does not answer"
        ]


@pytest.mark.parametrize(
    "name",
    [
        "machine.slice/libvirt/emulator",
        # What splitlines() takes for the end of a line, and the kernel for a letter.
        *(
            f"x{end}0::/machine.slice/machine-qemu\\x2d1\\x2dvr1.scope"
            for end in "\v\f\x1c\x85\u2028"
        ),
    ],
)
def test_a_cgroup_of_a_users_own_is_not_libvirts(tree: HostTree, name: str) -> None:
    pretender(tree, 90, *COPY, exe=QEMU)
    home = "/user.slice/user-65534.slice/user@65534.service"
    tree.file("/proc/90/task/90/cgroup", f"0::{home}/{name}\n")
    tree.stats[f"/sys/fs/cgroup{home}"] = FileStat(NOBODY, DIRECTORY, 1, 5)
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*").observe()
    assert refs(snapshot) == REAL
    assert [s.pid for s in snapshot.strangers] == [90]


def test_a_cgroup_in_thousands_of_others_is_no_more_than_a_strangers(tree: HostTree) -> None:
    """Whoever has a cgroup makes as many in it as he likes."""
    pretender(tree, 90, *COPY, exe=QEMU)
    home = "/user.slice/user-65534.slice/user@65534.service"
    tree.stats[f"/sys/fs/cgroup{home}"] = FileStat(NOBODY, DIRECTORY, 1, 5)
    for owner in (NOBODY, 0):
        tree.stats[f"/sys/fs/cgroup{home}"] = FileStat(owner, DIRECTORY, 1, 5)
        tree.file("/proc/90/task/90/cgroup", f"0::{home}{'/a' * 1900}\n")
        snapshot = observer(tree, FakeVirt(domain("vr1")), "*").observe()
        assert refs(snapshot) == REAL
        assert [s.pid for s in snapshot.strangers] == [90]


@pytest.mark.parametrize("cpuset", [False, True], ids=["without cpusets", "with cpusets"])
def test_a_guest_in_thousands_of_cgroups_keeps_no_pass_from_the_others(
    tree: HostTree, cpuset: bool
) -> None:
    """Its user has a policy, and may have been given the cpuset controller."""
    home = "/user.slice/user-65534.slice/user@65534.service"
    deep = f"{home}{'/a' * 1900}"
    tree.homes[90] = deep
    tree.qemu(90, "-name", "hers,debug-threads=on", uid=NOBODY)
    tree.thread(90, 91, "CPU 0/KVM", uid=NOBODY)
    tree.file("/sys/fs/cgroup/cpuset.cpus.effective", "0-3\n")
    for end in (n for n, letter in enumerate(f"{deep}/") if letter == "/" and n and cpuset):
        tree.file(f"/sys/fs/cgroup{deep[:end]}/cpuset.cpus.effective", "0-3\n")
    tree.stats[f"/sys/fs/cgroup{home}"] = FileStat(NOBODY, DIRECTORY, 1, 5)
    policies = [
        parse(POLICY.format(guest="*"), "0.yaml"),
        parse(f"user: 65534\n{POLICY.format(guest='qemu:*')}", "1.yaml"),
    ]
    started = Observer(
        tree.root(), FakeVirt(domain("vr1")), qemu_filter=lambda: filter_of(policies)
    )
    snapshot = started.observe()
    assert refs(snapshot) == [REAL[0], ("qemu:hers@65534", 90), REAL[1]]
    assert {t.cpuset_effective for t in snapshot.guests[1].threads} == {CpuSet(range(4))}
    assert {a.target.guest for a in plan(snapshot, policies).actions} >= {"vr1", "qemu:hers@65534"}


@pytest.mark.parametrize("name", ["tuned", "irqbalance"])
def test_a_guest_stays_one_whatever_its_qemu_calls_itself(tree: HostTree, name: str) -> None:
    for path in ("/proc/50/stat", "/proc/50/task/50/stat"):
        tree.file(path, tree.text(path).replace("(qemu-system-x86)", f"({name})"))
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*").observe()
    assert refs(snapshot) == REAL
    assert snapshot.host.neighbours == ()


@pytest.mark.parametrize(
    ("users", "found"), [((0, 0, 0), True), ((7, 7, 7), False), ((7, 0, 0), False)]
)
def test_only_root_runs_what_competes_for_settings(
    tree: HostTree, users: tuple[int, int, int], found: bool
) -> None:
    """A program of root's that anybody may run has the name by which he runs it."""
    tree.thread(90, 90, "irqbalance")
    status = tree.text("/proc/90/task/90/status")
    written = "Uid:\t{}\t{}\t{}\t0\n".format(*users)
    tree.file("/proc/90/task/90/status", re.sub(r"Uid:.*\n", written, status))
    tree.file("/proc/90/cmdline", "irqbalance\0--banirq=41\0")
    neighbours = observer(tree, FakeVirt(domain("vr1")), "*").observe().host.neighbours
    assert [n.banned_irqs for n in neighbours] == ([(41,)] if found else [])
    # Root of a container has the number 0 too, and its own irqbalance.
    for words in (f"--banirq={'9' * 4000}", "-i\0001\0" * 100_000):
        tree.file("/proc/90/cmdline", f"irqbalance\0{words}\0")
        neighbours = observer(tree, FakeVirt(domain("vr1")), "*").observe().host.neighbours
        assert [n.banned_irqs for n in neighbours] == ([()] if found else [])


@pytest.mark.parametrize(
    ("stats", "text", "why"),
    [
        ({}, "90\n", "its process 90 runs in no cgroup of libvirt's"),
        ({}, "51\n", "has no QEMU process"),
        ({}, "no\n", "its pid file /run/libvirt/qemu/vr1.pid holds no pid"),
        (
            {"/run/libvirt/qemu": FileStat(NOBODY, DIRECTORY, 1, 1)}, "50\n",
            "its pid file is not to be trusted: /run/libvirt/qemu belongs to user 65534",
        ),
        (
            {f"{PID_FILES}/vr1.pid": FileStat(0, 0o100666, 1, 1)}, "50\n",
            f"its pid file is not to be trusted: others than root may write {PID_FILES}/vr1.pid (mode 0666)",
        ),
    ],
)  # fmt: skip
def test_libvirts_answer_alone_is_not_enough(
    tree: HostTree, stats: dict[str, FileStat], text: str, why: str
) -> None:
    """Its pid file and its cgroup are looked at always."""
    tree.qemu(90, "-name", "guest=vr1,debug-threads=on", "-uuid", domain("vr1").uuid)
    tree.file("/run/libvirt/qemu/vr1.pid", text)
    tree.stats |= stats
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*").observe()
    assert "vr1" not in {g.ref for g in snapshot.guests}
    assert [p.what for p in snapshot.problems] == [f"vr1 runs according to libvirt, but {why}"]


def test_a_name_without_a_letter_of_ascii_leaves_the_scope_its_id_alone() -> None:
    name = "роутер"
    tree = HostTree().host()
    libvirt_qemu(tree, 50, name)
    tree.stats[PID_FILES] = FileStat(NOBODY, DIRECTORY, 1, 1)
    told = replace(domain(name), live_xml="<domain type='kvm' id='1'/>")
    assert tuned(observer(tree, FakeVirt(told), "*").observe()) == {name}


@pytest.mark.parametrize("above", ["machine.slice/machine-routers.slice", "routers.slice"])
def test_a_guest_in_a_resource_partition_has_its_scope_there(
    above: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """<resource><partition>/machine/routers</partition></resource> in its definition."""
    made = scope("vr1").replace("machine.slice", above)
    monkeypatch.setattr("hosttree.scope", lambda _name: made)
    tree = HostTree().host()
    libvirt_qemu(tree, 50, "vr1")
    tree.stats[PID_FILES] = FileStat(NOBODY, DIRECTORY, 1, 1)
    told = replace(domain("vr1"), live_xml="<domain type='kvm' id='1'/>")
    assert tuned(observer(tree, FakeVirt(told), "*").observe()) == {"vr1"}


def test_where_qemus_user_owns_the_pid_files_the_scope_tells(tree: HostTree) -> None:
    """As on Debian 13. A guest's QEMU can then name any process in them, and start others."""
    tree.stats[PID_FILES] = FileStat(NOBODY, DIRECTORY, 1, 1)
    tree.file(f"{PID_FILES}/vr1.pid", "90\n")
    told = replace(domain("vr1"), live_xml="<domain type='kvm' id='1'/>")
    pretender(tree, 90, "-name", "guest=vr1,debug-threads=on", exe=QEMU)
    in_libvirts_cgroup(tree, 90, "vr1")
    snapshot = observer(tree, FakeVirt(told), "*").observe()
    assert [(g.ref, g.pid) for g in snapshot.guests if g.ref == "vr1"] == [("vr1", 50)]
    assert tuned(snapshot) == {"vr1", "qemu:pq1"}
    other = replace(told, live_xml="<domain type='kvm' id='7'/>")
    snapshot = observer(tree, FakeVirt(other), "*").observe()
    assert "vr1" not in tuned(snapshot), "this is the scope of another domain"


def test_while_libvirt_is_silent_nothing_new_is_tuned(tree: HostTree) -> None:
    virt = FakeVirt(domain("vr1"))
    virt.fails = True
    snapshot = observer(tree, virt, "*", "qemu:*").observe()
    (vr1,) = [g for g in snapshot.guests if g.ref == "vr1"]
    assert vr1.unconfirmed and NOT_LISTED in vr1.problems
    assert tuned(snapshot) == {"qemu:pq1"}


def test_what_libvirt_has_confirmed_stays_while_it_is_silent(tree: HostTree) -> None:
    virt = FakeVirt(domain("vr1"))
    started = observer(tree, virt, "*", "qemu:*")
    before = started.observe()
    virt.fails = True
    silent = started.observe()
    assert silent.guests == before.guests
    assert tuned(silent) == {"vr1", "qemu:pq1"}
    # Another process of the same pid was not confirmed.
    libvirt_qemu(tree, 50, "vr1")
    tree.thread(50, 50, "qemu-system-x86", start=5000)
    assert tuned(started.observe()) == {"qemu:pq1"}


def test_what_libvirt_keeps_while_silent_is_not_another_process_of_the_look(
    tree: HostTree,
) -> None:
    """What was decided was decided of the process that is then read."""
    tree.file("/proc/70/stat", tree.text("/proc/70/stat").replace(" 100 ", " 99 "))
    snapshot = observer(tree, FakeVirt(domain("vr1")), "qemu:*").observe()
    assert refs(snapshot) == REAL[:1]


# -- threads


def of(snapshot: Snapshot, ref: str) -> Guest:
    (found,) = [g for g in snapshot.guests if g.ref == ref]
    return found


def test_only_the_kernels_threads_are_vhost_workers(tree: HostTree) -> None:
    tree.thread(50, 53, "vhost-50", start=102, flags=0x40)
    tree.thread(50, 54, "vhost-50", start=102, flags=PF_USER_WORKER | PF_IO_WORKER)
    guest = of(observer(tree, FakeVirt(domain("vr1"))).observe(), "vr1")
    assert [t.key.tid for t in guest.by_role(Role.VHOST)] == [51]
    assert {t.role for t in guest.threads if t.key.tid in (53, 54)} == {Role.WORKER}


def test_a_class_that_every_user_may_choose_costs_no_guest(tree: HostTree) -> None:
    """sched_ext's, of a thread beside the vcpus."""
    tree.answers.sched["70"] = Sched(SchedClass.EXT)
    guest = of(observer(tree, FakeVirt(domain("vr1")), "qemu:*").observe(), "qemu:pq1")
    assert [str(t.sched) for t in guest.threads] == ["ext", "other"]
    assert [t.key.tid for t in guest.by_role(Role.VCPU)] == [71]


def test_no_more_workers_than_descriptors(tree: HostTree) -> None:
    """A thread of the kernel's that is renamed, as KVM's own can be."""
    tree.thread(50, 53, "vhost-50", start=105)
    guest = of(observer(tree, FakeVirt(domain("vr1"))).observe(), "vr1")
    assert [t.key.tid for t in guest.by_role(Role.VHOST)] == [51]
    (problem,) = guest.problems
    assert problem.endswith("for 1 vhost descriptors: the youngest 1 are left alone")


def hers(tree: HostTree, workers: int, *, by_kernel: bool = False) -> Guest:
    """A user's guest with so many workers, of each of which it has the descriptor."""
    tree.qemu(90, "-name", "hers,debug-threads=on", uid=NOBODY)
    tree.thread(90, 91, "CPU 0/KVM", uid=NOBODY)
    for tid in range(1000, 1000 + workers):
        flags = 0x00200000 if by_kernel else 0
        tree.thread(tid if by_kernel else 90, tid, "vhost-90", start=200 + tid, flags=flags)
        tree.fd(90, tid, "/dev/vhost-net")
    policy = parse(f"user: 65534\n{POLICY.format(guest='qemu:*')}", "p.yaml")
    seen = Observer(tree.root(), FakeVirt(), qemu_filter=lambda: filter_of([policy])).observe()
    return of(seen, "qemu:hers@65534")


def test_a_user_decides_to_a_limit_how_many_threads_are_placed(tree: HostTree) -> None:
    guest = hers(tree, 3000)
    placed = [t.key.tid for t in guest.threads if t.role in (Role.VCPU, Role.VHOST)]
    assert placed == [91, *range(1000, 1000 + MOST_DATA_PLANE - 1)]
    assert guest.problems[0] == (
        "3001 vcpus and vhost workers, of which vsrtune tunes 1024: the youngest 1977 are left "
        "alone; start it with fewer queues or vcpus"
    )


def test_a_user_decides_to_a_limit_how_many_kernel_threads_are_read(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "MOST_THREADS", 20)
    assert len(hers(tree, 30, by_kernel=True).by_role(Role.VHOST)) == 20


def test_no_more_vcpus_than_the_domain_has(tree: HostTree) -> None:
    tree.homes[50] = ""
    for number in range(1, 9):
        tree.thread(50, 60 + number, f"CPU {number}/KVM", start=102, cgroup="/elsewhere")
    text = domain("vr1")
    two = replace(text, live_xml=text.live_xml.replace("<devices>", "<vcpu>2</vcpu><devices>", 1))
    guest = of(observer(tree, FakeVirt(two)).observe(), "vr1")
    assert [t.index for t in guest.by_role(Role.VCPU)] == [0, 1]
    assert "7 threads call themselves vcpus beyond its 2: left alone" in guest.problems


def test_a_name_does_not_make_a_vcpu_where_libvirt_says_otherwise(tree: HostTree) -> None:
    tree.thread(50, 60, "CPU 1/KVM", start=102)
    tree.file("/proc/50/task/60/cgroup", f"0::{scope('vr1')}/libvirt/emulator\n")
    text = domain("vr1")
    two = replace(text, live_xml=text.live_xml.replace("<devices>", "<vcpu>2</vcpu><devices>", 1))
    guest = of(observer(tree, FakeVirt(two)).observe(), "vr1")
    assert [t.index for t in guest.by_role(Role.VCPU)] == [0]


@pytest.mark.parametrize(
    ("smp", "most"),
    [
        ((), 1), (("-smp", "2"), 2), (("-smp", "1,maxcpus=3"), 3),
        (("-smp", "cores=2,threads=2"), 4), (("-smp", "cpus=" + "9" * 50), 1),
    ],
)  # fmt: skip
def test_no_more_vcpus_than_smp(tree: HostTree, smp: tuple[str, ...], most: int) -> None:
    tree.qemu(80, "-name", "many,debug-threads=on", *smp)
    for number in range(6):
        tree.thread(80, 81 + number, f"CPU {number}/KVM")
    guest = of(observer(tree, FakeVirt(), "qemu:*").observe(), "qemu:many")
    assert len(guest.by_role(Role.VCPU)) == most


# -- devices


def with_devices(tree: HostTree, uid: int) -> None:
    """A plain QEMU that holds what has the names of a bridge, a tap and a macvtap of this host."""
    tree.qemu(90, "-name", "hers,debug-threads=on", "-netdev", "tap,id=n,fd=12", uid=uid)
    tree.thread(90, 91, "CPU 0/KVM", uid=uid)
    for number, name in ((12, "br1"), (13, "vnet7"), (14, "vnet7")):
        tree.fd(90, number, "/dev/net/tun", f"iff:\t{name}\n")
    tree.fd(90, 15, "/dev/tap8").fd(90, 16, "/dev/tap4")
    tree.device("br1", 20, has="bridge lower_p0").device("vnet7", 21, has="tun_flags")
    tree.file("/sys/devices/virtual/net/vnet7/owner", "-1\n")
    tree.file("/sys/devices/virtual/net/macvtap0/tap8/dev", "236:8\n")
    tree.stats["/proc/90/fd/15"] = FileStat(0, 0o020600, 5, 6, os.makedev(236, 9))


def devices_of_hers(tree: HostTree, uid: int) -> tuple[list[str], tuple[str, ...]]:
    policy = parse(f"user: {uid}\n{POLICY.format(guest='qemu:hers')}", "p.yaml")
    seen = Observer(tree.root(), FakeVirt(domain("vr1")), qemu_filter=lambda: filter_of([policy]))
    (guest,) = [g for g in seen.observe().guests if g.pid == 90]
    return [i.target for i in guest.interfaces], guest.problems


def test_devices_of_another_namespace_are_not_those_of_their_name(tree: HostTree) -> None:
    """Whoever has a namespace of his own chooses names and numbers there."""
    with_devices(tree, NOBODY)
    found, problems = devices_of_hers(tree, NOBODY)
    assert found == []
    assert (
        "br1, vnet7, macvtap0, ...: this host's device of that name is not the one that it holds, "
        "and left alone; its own must be in this network namespace, a tap its user's "
        "(ip tuntap add dev NAME mode tap user 65534)"
    ) in problems


def test_a_user_has_his_own_devices(tree: HostTree) -> None:
    with_devices(tree, NOBODY)
    tree.file("/sys/devices/virtual/net/vnet7/owner", f"{NOBODY}\n")
    tree.stats["/proc/90/fd/15"] = FileStat(0, 0o020600, 5, 6, os.makedev(236, 8))
    assert devices_of_hers(tree, NOBODY)[0] == ["vnet7", "macvtap0"]


@pytest.mark.parametrize(("namespace", "taps"), [(1, ["vnet7"]), (2, [])])
def test_roots_qemu_in_another_network_namespace(
    tree: HostTree, namespace: int, taps: list[str]
) -> None:
    """As ``ip netns exec`` starts it."""
    with_devices(tree, 0)
    tree.link("/proc/self/ns/net", "net:[1]").link("/proc/90/ns/net", f"net:[{namespace}]")
    assert devices_of_hers(tree, 0)[0] == taps


# -- the cost of a look


def test_a_process_with_too_many_threads_is_a_problem(tree: HostTree) -> None:
    root = tree.root()
    crowd = tuple(str(n) for n in range(1000, 1001 + MOST_THREADS))
    tree.answers.listings["/proc/70/task"] = crowd
    snapshot = Observer(root, None).observe()
    assert "qemu:pq1" not in {g.ref for g in snapshot.guests}
    (problem,) = [p for p in snapshot.problems if p.reader == "guest pq1"]
    assert f"more than {MOST_THREADS} entries" in problem.what


def test_foreign_guests_take_a_bounded_share_of_a_look(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "FOREIGN_THREADS", 7)
    for pid in (10, 20):  # ahead of our own guests, which are read all the same
        pretender(tree, pid, *COPY, exe=QEMU)
        in_libvirts_cgroup(tree, pid, "vr1")
    tree.remove("/run/libvirt/qemu/vr9.pid")
    snapshot = observer(tree, FakeVirt(domain("vr1")), "*", "qemu:*").observe()
    assert refs(snapshot) == [("foreign:vr9", 10), *REAL]
    assert [p.what for p in snapshot.problems] == [
        "more than 7 threads of other libvirts' guests: not read"
    ]


def test_two_hundred_strangers_cost_next_to_nothing(tree: HostTree) -> None:
    """With 10,000 threads and a monitor that never answers each."""
    for number in range(200):
        pretender(tree, 1000 + 10 * number, "-name", "pq1", "-qmp", "unix:q,server=on")
    root = Watching(tree.answers)
    crowd = tuple(str(n) for n in range(10_000))
    for number in range(200):
        tree.answers.listings[f"/proc/{1000 + 10 * number}/task"] = crowd
    policies = [parse(POLICY.format(guest="qemu:*"), "p.yaml")]
    started = Observer(root, FakeVirt(domain("vr1")), qemu_filter=lambda: filter_of(policies))
    started.observe()
    root.asked.clear()
    begin = time.process_time()
    snapshot = started.observe()
    assert time.process_time() - begin < 2
    assert refs(snapshot) == REAL
    assert len(snapshot.strangers) == one_pass.MOST_STRANGERS
    theirs = {re.sub(r"\d{4}", "N", p) for p in root.asked if re.search(r"[12]\d{3}\b", p)}
    assert theirs == {"/proc/N/stat", "/proc/N/task/N/status", "/proc/N/task/N/cgroup"}


BUDGET = """\
guest: vr1
cpus: {irq: 0, vcpu: 1}
scheduler:
  vcpu: {class: deadline, runtime: 2ms, period: 10ms}
profile: none
"""


@pytest.mark.parametrize("uid", [NOBODY, 0])
def test_strangers_do_not_stand_in_the_way_of_partitions(uid: int) -> None:
    """A partition would push threads that are bound to its CPUs off them, which refuses it:
    those of a guest that no policy names do, those of strangers do not."""
    host = MovingHost(load(recorded_hosts.file("trixie-napi")))
    policy = parse(BUDGET, "p.yaml")
    alone = plan(Observer(host.root, host).observe(), [policy])
    assert alone.refusals == ()
    host.copy("vr1", 4000, "user.slice/user-0.slice/session-1.scope")
    for path, text in host.texts.items():
        if re.fullmatch(r"/proc/4000/task/\d+/status", path):
            text = re.sub(r"Cpus_allowed_list:.*", "Cpus_allowed_list:\t1", text)
            host.texts[path] = re.sub(r"Uid:.*", f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}", text)
    made = plan(Observer(host.root, host).observe(), [policy])
    assert bool(made.refusals) == (uid == 0)
    assert [a.target for a in made.actions] == (
        [] if uid == 0 else [a.target for a in alone.actions]
    )
