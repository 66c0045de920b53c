"""Processes that say they are guests, beside guests: the user nobody's, with the names, threads and
sockets of a router's QEMU. None of them gets a class, a CPU or the daemon's time, whether libvirt
answers or not, and the routers stay tuned."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

PLACE = Path("/var/tmp/strangers")
UNIT = "strangers"
# What a pass may cost more beside them, seconds.
MORE = 2.0

# Makes COUNT processes, each with THREADS threads named as vcpu and as worker, a vhost descriptor
# where it may open one, and a monitor of its own that never says a word. They are
# nobody's children, as a real QEMU is, and their command line is what follows -name.
CODE = """
import _thread, ctypes, os, socket, sys, time
count, threads = int(os.environ["COUNT"]), int(os.environ["THREADS"])
libc = ctypes.CDLL(None)
def name(text):
    libc.prctl(15, text.encode(), 0, 0, 0)
def idle(text):
    name(text)
    while True:
        time.sleep(3600)
def pretend(number):
    os.mkdir(f"{os.getpid()}")
    os.chdir(f"{os.getpid()}")
    name("stranger")
    monitor = socket.socket(socket.AF_UNIX)
    monitor.bind("q")
    monitor.listen()
    try:
        os.open("/dev/vhost-net", os.O_RDWR)
    except OSError:
        pass
    _thread.stack_size(65536)
    for number in range(threads):
        own = f"CPU {number}/KVM" if number % 2 else f"vhost-{os.getpid()}"
        _thread.start_new_thread(idle, (own,))
    open("ready", "w").close()
    idle("stranger")
name("stranger")
for number in range(count):
    if os.fork() == 0:
        if os.fork() == 0:
            pretend(number)
        os._exit(0)
    os.wait()
idle("stranger")
"""

LIBVIRTS = ("-name", "guest=vr9,debug-threads=on", "-object", "secret,id=masterKey0")
MONITOR = ("-qmp", "unix:q,server=on,wait=off")


class Strangers:
    """They live in services of their own, so that they end together."""

    def __init__(self) -> None:
        self.units: list[str] = []
        PLACE.mkdir(exist_ok=True)
        self.program = PLACE / "qemu-system-x86_64"
        shutil.copy(os.path.realpath(sys.executable), self.program)
        labhelp.sh("chown", "-R", "nobody", str(PLACE))

    def come(self, count: int, threads: int, *arguments: str) -> None:
        """So many that say the same; returns when all have what they pretend with."""
        before = len(self._ready())
        self._run(
            f"COUNT={count}", f"THREADS={threads}",
            command=(str(self.program), "-S", "-c", CODE, *arguments, *MONITOR),
        )  # fmt: skip
        labhelp.wait_for(
            lambda: len(self._ready()) >= before + count, f"{count} strangers are there", 240
        )

    def come_as_qemu(self, *arguments: str) -> None:
        """A real QEMU, which anybody may start."""
        emulator = "qemu-system-x86_64 -machine pc -accel tcg -S -m 16 -nodefaults -display none"
        self._run(command=(*emulator.split(), *arguments))
        labhelp.wait_for(lambda: len(self.threads()) > 1, "the strangers' QEMU runs")

    def _run(self, *variables: str, command: tuple[str, ...]) -> None:
        unit = f"{UNIT}{len(self.units)}"
        self.units.append(unit)
        options = ["--uid=nobody", f"--unit={unit}", "--property=TasksMax=infinity"]
        options += [f"--property=WorkingDirectory={PLACE}", "--property=LimitNPROC=infinity"]
        options += [f"--setenv={variable}" for variable in (*variables, "PYTHONHOME=/usr")]
        labhelp.sh("systemd-run", "--quiet", *options, *command)

    def _ready(self) -> list[Path]:
        return list(PLACE.glob("*/ready"))

    def threads(self) -> list[int]:
        """All their threads."""
        found = []
        for unit in self.units:
            place = Path(f"/sys/fs/cgroup/system.slice/{unit}.service/cgroup.procs")
            with contextlib.suppress(FileNotFoundError):
                for pid in place.read_text().split():
                    found += [int(tid) for tid in os.listdir(f"/proc/{pid}/task")]
        return found

    def touched(self) -> list[str]:
        """What was given to them."""
        every = set(range(labhelp.lab_cpus()))
        lines = []
        for tid in self.threads():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if not hoststate.sched(tid).startswith("policy=0 "):
                    lines.append(f"{tid}: {hoststate.sched(tid)}")
                if labhelp.mask(tid) != every:
                    lines.append(f"{tid}: mask {labhelp.mask(tid)}")
        return lines

    def go(self) -> None:
        """All of them end."""
        for unit in self.units:
            labhelp.sh("systemctl", "kill", "-s", "KILL", unit, check=False)
            labhelp.sh("systemctl", "stop", unit, check=False)
            labhelp.sh("systemctl", "reset-failed", unit, check=False)
        self.units.clear()
        shutil.rmtree(PLACE, ignore_errors=True)


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    they = Strangers()
    try:
        yield they
    finally:
        they.go()


@contextlib.contextmanager
def silent_libvirt() -> Iterator[None]:
    """libvirtd is there, takes connections, and says nothing."""
    labhelp.sh("virsh", "version")  # it is there only while somebody needs it
    labhelp.sh("systemctl", "kill", "-s", "STOP", "libvirtd")
    try:
        yield
    finally:
        labhelp.sh("systemctl", "kill", "-s", "CONT", "libvirtd")


def passes() -> tuple[float, float]:
    """How many passes there were, and their seconds in all."""
    lines = [line for line in labhelp.scrape() if line[0] != "#"]
    # A label may hold blanks, as a router's name does.
    told = {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines)}
    name = "vsrtune_reconcile_duration_seconds"
    return told[f"{name}_count"], told[f"{name}_sum"]


def mean_pass(number: int = 2) -> float:
    """Seconds that the next passes take, in the mean."""
    first, spent = passes()
    labhelp.wait_for(lambda: passes()[0] >= first + number, f"{number} more passes", 150)
    last, total = passes()
    return (total - spent) / (last - first)


def untuned(guests: list[LabGuest], irq: set[int]) -> list[str]:
    return [line for guest in guests for line in labhelp.untuned_lines(guest, irq)]


def restarts() -> str:
    return labhelp.sh("systemctl", "show", "-P", "NRestarts", "vsrtune").stdout.strip()


def test_strangers_get_nothing(
    tuned: set[int],
    guests: list[LabGuest],
    strangers: Strangers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """40 and then 200 of them, each name of a router's beside the router, with libvirt there,
    silent and restarted."""
    pid = labhelp.main_pid()
    alone = mean_pass()
    names = [guest.name for guest in guests]
    plain = ("-name", f"{names[-1]},debug-threads=on")

    def holds(when: str) -> None:
        mean = mean_pass()
        with capsys.disabled():
            threads = len(strangers.threads())
            print(
                f"\n{when}: {threads} threads, a pass {mean:.2f} s, {alone:.2f} alone", flush=True
            )
        assert mean < alone + MORE, when
        assert strangers.touched() == [], when
        # What libvirt itself is asked for cannot be told while it is silent.
        assert untuned([g for g in guests if g.kind == "qemu"], tuned) == [], when
        assert (labhelp.main_pid(), restarts()) == (pid, "0"), when

    strangers.come(20, 10, *plain)
    strangers.come(20, 10, *LIBVIRTS)
    # The tests tell routers by name: this one has no router's.
    strangers.come_as_qemu("-name", "other,debug-threads=on")
    holds("40 with silent monitors")
    assert untuned(guests, tuned) == []
    strangers.come(160, 10, *plain)
    holds("200 with silent monitors")
    assert untuned(guests, tuned) == []
    shown = labhelp.show()
    assert {g["name"] for g in shown["guests"]} == set(names)
    assert all("no policy for plain QEMU has" in s["why"] for s in shown["strangers"])
    assert len(shown["strangers"]) == 16
    before = {tid: hoststate.sched(tid) for g in guests for tid in g.data_plane()}
    with silent_libvirt():
        strangers.come(2, 10, *LIBVIRTS)
        strangers.come_as_qemu("-name", "guest=vr9", "-object", "secret,id=masterKey0,data=x")
        # The first question waits until the daemon's patience ends.
        labhelp.wait_for(lambda: mean_pass(1) < alone + MORE, "passes go on without libvirt", 60)
        holds("libvirt is silent")
        assert {tid: hoststate.sched(tid) for tid in before} == before
    labhelp.wait_for(lambda: labhelp.status_text().endswith(" 0 drift"), "libvirt is back", 60)
    labhelp.sh("systemctl", "restart", "libvirtd")
    labhelp.libvirt_talks(guests[0])
    # The first question waits until libvirtd has started.
    labhelp.wait_for(lambda: mean_pass(1) < alone + MORE, "passes go on with libvirt", 60)
    holds("libvirtd was restarted")
    assert untuned(guests, tuned) == []


def test_a_start_while_libvirt_is_silent(
    restored: None,
    guests: list[LabGuest],
    libvirt_guest: LabGuest,
    irq_cpus: set[int],
    strangers: Strangers,
) -> None:
    """Nobody confirms anything then: plain guests of root's are tuned, libvirt's own follow when
    it answers."""
    labhelp.write_policies("auto")
    strangers.come(3, 4, *LIBVIRTS)
    before = {tid: hoststate.sched(tid) for tid in libvirt_guest.data_plane()}
    with silent_libvirt():
        labhelp.start()
        assert {tid: hoststate.sched(tid) for tid in before} == before
        assert untuned([g for g in guests if g.kind == "qemu"], irq_cpus) == []
        assert strangers.touched() == []
    labhelp.wait_for(lambda: untuned(guests, irq_cpus) == [], "tuned once libvirt answers", 90)
    assert strangers.touched() == []
    assert restarts() == "0"


@contextlib.contextmanager
def command_line_ends(pid: int, words: bytes) -> Iterator[None]:
    """The last words of a process's command line are others meanwhile: it may overwrite them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    place = int(fields[46]) - len(words)  # arg_end of proc(5), the 49th field
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(place)
        before = memory.read(len(words))
        memory.seek(place)
        memory.write(words)
        try:
            yield
        finally:
            memory.seek(place)
            memory.write(before)


@pytest.mark.parametrize("kind", ["libvirt", "qemu"])
def test_a_router_that_hides_keeps_no_realtime_class(
    tuned: set[int], guests: list[LabGuest], kind: str
) -> None:
    """Its QEMU says that it has no machine. The guard watches guests that are seen."""
    hiding = next(g for g in guests if g.kind == kind)
    others = [g for g in guests if g is not hiding]
    masks = {tid: labhelp.mask(tid) for tid in hiding.data_plane()}

    def classes() -> set[str]:
        return {hoststate.sched(tid).split()[0] for tid in masks}

    assert "policy=0" not in classes()
    with command_line_ends(hiding.pid, b"\0-M\0none\0"):
        labhelp.wait_for(lambda: classes() == {"policy=0"}, "its classes are given back", 180)
        assert {tid: labhelp.mask(tid) for tid in masks} == masks
        assert untuned(others, tuned) == []
    labhelp.wait_for(lambda: untuned([hiding], tuned) == [], "tuned once it is seen again", 180)


def test_a_cgroup_of_a_users_own_in_the_form_of_two_lines(
    tuned: set[int], guests: list[LabGuest], libvirt_guest: LabGuest, strangers: Strangers
) -> None:
    """Its name holds what many take for the end of a line, and then the scope of a router."""
    text = Path(f"/proc/{libvirt_guest.pid}/cgroup").read_text()
    scope = text.strip().removeprefix("0::/").partition(".scope")[0] + ".scope"
    home = Path("/sys/fs/cgroup/strangers")
    place = home / "x\v0::" / scope
    place.mkdir(parents=True)
    labhelp.sh("chown", "-R", "nobody", str(home))
    # The tests tell routers by name.
    strangers.come_as_qemu(
        "-name", "guest=vr9,debug-threads=on", "-object", "secret,id=masterKey0,data=x"
    )
    (pid,) = {
        int(Path(f"/proc/{tid}/status").read_text().partition("Tgid:\t")[2].split()[0])
        for tid in strangers.threads()
    }
    (place / "cgroup.procs").write_text(str(pid))
    try:
        first, _ = passes()
        labhelp.wait_for(lambda: passes()[0] >= first + 3, "three more passes", 150)
        shown = labhelp.show()
        assert pid in {s["pid"] for s in shown["strangers"]}
        assert pid not in {g["pid"] for g in shown["guests"]}
        assert untuned(guests, tuned) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        for path in (place, *place.parents):
            if home in (path, *path.parents):
                labhelp.wait_for(
                    lambda path=path: labhelp.sh("rmdir", str(path), check=False).returncode == 0,
                    f"{path} is gone",
                )


@labhelp.core("bookworm")
def test_two_of_roots_with_one_name(
    restored: None, plain_guest: LabGuest, irq_cpus: set[int]
) -> None:
    """Neither is tuned, and the plan says why."""
    labhelp.write_policies("auto")
    first = plain_guest.pid  # told by its name, which two have soon
    emulator = "qemu-system-x86_64 -machine pc -accel tcg -S -m 16 -nodefaults -display none"
    name = f"{plain_guest.name},debug-threads=on"
    labhelp.sh("systemd-run", "--quiet", f"--unit={UNIT}", *emulator.split(), "-name", name)
    try:
        labhelp.wait_for(
            lambda: len(hoststate.qemus()) > len(labhelp.lab_guests()), "the second one runs"
        )
        plan = labhelp.vsrtune("plan", "--json", check=False).stdout
        assert "2 processes have this name" in plan
        labhelp.start()
        for tid in map(int, os.listdir(f"/proc/{first}/task")):
            assert hoststate.sched(tid).startswith("policy=0 ")
    finally:
        labhelp.sh("systemctl", "stop", UNIT, check=False)
        labhelp.sh("systemctl", "reset-failed", UNIT, check=False)
    labhelp.wait_for(lambda: untuned([plain_guest], irq_cpus) == [], "tuned once it is alone", 60)
