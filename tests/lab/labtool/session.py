"""One run: prepare what the machine is given, boot it, relay what it says."""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import cpio, guests, progress
from .emulator import Emulator
from .errors import BootFailure, LabError
from .image import Image
from .linked import HOST_KEY, KEY, Member
from .machine import Machine
from .options import Options
from .serial_log import Trouble

_LAB = Path(__file__).resolve().parent.parent
_TESTS = _LAB.parent

_BOOT_TIMEOUT = 240
# The agent stops the command in time; this is for a lab that no longer can.
_GRACE = 30
_TAIL = 150
# Seconds after which the main loop has lost its timers.
_ASLEEP = 100.0
# Seconds for a crashing kernel to finish its dump, on which the verdict rests.
_DUMP = 5.0
TIMED_OUT = 124
# The emulator died, by a signal or because its main loop sleeps: the lab may boot again.
EMULATOR_DIED = 123
# The kernel of the lab crashed, or was reset without a word.
KERNEL_CRASHED = 122
# The command ended well, but the kernel complained while it ran.
KERNEL_WARNED = 121
# Left in the share, when it is kept: the serial log, and why a lab booted twice.
SERIAL = "serial.log"
BOOTS = "boots"


@dataclass(frozen=True)
class Brought:
    """What a lab is brought: the package of the working tree, what kmod.get returned, what
    inimage/pack-frr left, what container.brought returned, and what inimage/pack-agent left."""

    package: Path | None = None
    modules: Path | None = None
    frr: Path | None = None
    container: dict[str, Path] = field(default_factory=dict)
    agent: Path | None = None


def run(options: Options, emulator: Emulator, image: Image, brought: Brought) -> int:
    """Boot, run the command, return its status. A boot that fails is tried once more, unless the
    lab's kernel crashed."""
    try:
        return _attempt(options, emulator, image, brought)
    except BootFailure as failure:
        progress.error(str(failure))
        if failure.kernel:
            return KERNEL_CRASHED
        if options.share is not None:
            (options.share / BOOTS).write_text(f"{failure}\n")
        progress.step("booting once more")
        return _attempt(options, emulator, image, brought)


def bake(options: Options, emulator: Emulator, image: Image) -> None:
    """Boot once with a writable disk, and keep what that boot leaves there.

    libvirt asks QEMU for its capabilities when it first starts a guest, which
    takes longer than all the rest; the answer stays valid for this image.
    """
    fresh = image.disk.with_suffix(".fresh")
    image.disk.rename(fresh)
    for attempt in (1, 2):
        # A boot that fails leaves a file system without a journal in any state.
        subprocess.run(["cp", "--sparse=always", fresh, image.disk], check=True)
        try:
            status = _attempt(options, emulator, image, Brought())
        except BootFailure as failure:
            if attempt == 2:
                raise
            progress.error(str(failure))
            continue
        if status != 0:
            raise LabError(f"the first boot of the image ended with status {status}")
        break
    fresh.unlink()


def _attempt(options: Options, emulator: Emulator, image: Image, brought: Brought) -> int:
    with tempfile.TemporaryDirectory(prefix="vsrtune-lab-") as name:
        work = Path(name)
        control = work / "control"
        _prepare(control, options, brought)
        boot = image.boot_modules.read_bytes() + _script_archive("boot-init", work)
        (work / "boot.cpio").write_bytes(boot)
        router = image.router_modules.read_bytes() + _script_archive("router-init", work)
        if brought.frr is not None:
            # Of two files of one name the last counts.
            router += (brought.frr / "router.cpio").read_bytes()
            router += _script_archive("frr-init", work, "frr-init")
        (control / "router.cpio").write_bytes(router)
        share = options.share
        if share is None:
            share = work / "share"
            share.mkdir()
        progress.step(f"booting {options.release}, {options.cpus} CPUs")
        with Machine(options, emulator, image, control, share, _TESTS) as machine:
            try:
                return _Conversation(machine, options).hold()
            finally:
                if machine.serial.exists():
                    shutil.copy(machine.serial, share / SERIAL)


def _script_archive(script: str, work: Path, name: str = "init") -> bytes:
    archive = cpio.Archive()
    archive.file(name, (_LAB / "inlab" / script).read_bytes(), 0o755)
    target = work / f"{script}.cpio"
    archive.write(target)
    return target.read_bytes()


def _prepare(control: Path, options: Options, brought: Brought) -> None:
    """Fill the share that the lab copies to /run/lab before systemd starts."""
    shutil.copytree(_LAB / "inlab", control)
    (control / "domains").mkdir()
    routers = guests.of(options)
    (control / "guests").write_text("".join(f"{guest.row()}\n" for guest in routers))
    if routers:
        (control / "bench.yaml").write_text(guests.bench_spec(routers))
    (control / "bench-native.yaml").write_text(guests.native_bench_spec(options.host))
    for guest in routers:
        if guest.kind == "libvirt":
            (control / "domains" / f"{guest.index}.xml").write_text(guests.domain(guest))
        else:
            (control / f"{guest.name}-launcher").write_text(guests.plain_launcher(guest))
            (control / f"{guest.name}.service").write_text(guests.plain_unit(guest))
    if brought.package is not None:
        for package in brought.package.parent.glob("*.deb"):
            shutil.copy(package, control)
    if brought.modules is not None:
        shutil.copytree(brought.modules, control / "modules")
        shutil.copytree(_TESTS.parent / "kmod" / "tests", control / "kmod-tests")
        shutil.copy(_LAB / "labtool" / "serial_log.py", control / "kmod-tests")
    if brought.frr is not None:
        shutil.copytree(brought.frr / "root", control / "frr", symlinks=True)
    if brought.agent is not None:
        shutil.copytree(brought.agent / "root", control / "guest-agent")
    for name, path in brought.container.items():
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, control / name)
    if options.member is not None:
        _prepare_link(control, options, options.member)
    (control / "command").write_text("exec " + shlex.join(options.command) + "\n")
    (columns, rows) = shutil.get_terminal_size()
    settings = {
        "MODE": options.mode,
        "NIC": options.nic,
        "IPV6": str(int(options.ipv6)),
        "PACKAGE": "" if brought.package is None else brought.package.name,
        "TIMEOUT": str(options.timeout),
        "QUIET": str(int(options.quiet_failure)),
        "HOST": "" if options.member is None else str(options.member.number),
        "GEN_MAC": guests.gen_mac(options.host),
        "SINK_MAC": guests.sink_mac(options.host),
        "P0_MAC": guests.port_macs(options.host)[0],
        "P1_MAC": guests.port_macs(options.host)[1],
        "NATIVE_INDEX": str(guests.NATIVE_INDEX),
        "ROWS": str(rows),
        "COLUMNS": str(columns),
        "TERM": os.environ.get("TERM", "dumb"),
    }
    lines = (f"LAB_{name}={shlex.quote(value)}\n" for name, value in settings.items())
    (control / "config").write_text("".join(lines))


def _prepare_link(control: Path, options: Options, member: Member) -> None:
    """What `link` and `serve-ssh` read."""
    rows = (f"{g.index}\t{g.mac(0)}\t{g.mac(1)}\n" for g in guests.of_all(options))
    (control / "linked-routers").write_text("".join(rows))
    ssh = control / "ssh"
    shutil.copytree(member.place / "debs", ssh / "debs")
    shutil.copy(member.place / HOST_KEY, ssh)
    shutil.copy(member.place / f"{KEY}.pub", ssh)


class _Conversation:
    """What the agent reports, and the command's output, until there is a status."""

    def __init__(self, machine: Machine, options: Options) -> None:
        self._machine = machine
        self._options = options
        self._up = False
        self._ready = False
        self._rebooting = False
        self._status: int | None = None
        self._journal: list[str] = []
        self._partial = b""
        # Those of a pair boot at once, and detectors make a kernel slow.
        slow = options.member is not None or options.kernel
        self._patience = 2 * _BOOT_TIMEOUT if slow else _BOOT_TIMEOUT
        self._deadline = time.monotonic() + self._patience

    def hold(self) -> int:
        with selectors.DefaultSelector() as selector:
            for name, port in self._machine.ports.items():
                selector.register(port, selectors.EVENT_READ, name)
            while self._status is None:
                self._check_time_and_process(selector)
                for key, _ in selector.select(timeout=1.0):
                    assert isinstance(key.fileobj, socket.socket)
                    self._receive(key.data, key.fileobj, selector)
            # The agent reports only after every byte has passed the ports.
            while ready := selector.select(timeout=0):
                for key, _ in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    self._receive(key.data, key.fileobj, selector)
        if self._options.mode == "bake":
            self._machine.wait(60)
        if self._options.mode == "run":
            self._status = self._with_complaints(self._status)
        if self._status != 0 and self._options.mode == "run":
            self._explain(self._status)
        return self._status

    def _receive(self, name: str, port: socket.socket, selector: selectors.BaseSelector) -> None:
        data = port.recv(1 << 16)
        if not data:
            selector.unregister(port)
        elif name == "lab.ctl":
            (*lines, self._partial) = (self._partial + data).split(b"\n")
            for line in lines:
                self._report(line.decode(errors="replace"))
        else:
            _write(1 if name == "lab.out" else 2, data)

    def _report(self, line: str) -> None:
        (verb, _, text) = line.partition(" ")
        match verb:
            case "step" | "note":
                progress.step(text)
                if text == "system up":
                    self._came_up()
            case "reboot":
                progress.step("rebooting")
                self._ready = False
                self._rebooting = True
                self._deadline = time.monotonic() + self._patience
            case "ready":
                self._ready = True
                self._deadline = time.monotonic() + self._options.timeout + _GRACE
                if self._options.mode == "run":
                    progress.step("running " + shlex.join(self._options.command))
            case "fail":
                self._boot_failure(text)
            case "journal":
                self._journal.append(text)
            case "exit":
                self._status = int(text)

    def _came_up(self) -> None:
        """The lab's first boot, or a reboot that the command has asked for. Any other is a reset."""
        if self._up and not self._rebooting:
            progress.error("the lab was reset before the command ended")
            self._status = KERNEL_CRASHED
        self._up = True
        self._rebooting = False

    def _with_complaints(self, status: int) -> int:
        """The status, with what the kernel complained of while the command ran."""
        for complaint in self._machine.complaints():
            progress.error(str(complaint))
            if status == 0 and complaint.trouble is not Trouble.STALL:
                status = KERNEL_WARNED
        return status

    def _check_time_and_process(self, selector: selectors.BaseSelector) -> None:
        # First, so that what a kernel wrote before it ended is read.
        alive = self._machine.alive()
        complaints = self._machine.complaints()
        troubles = {c.trouble for c in complaints}
        # A CPU that hangs before there is a process never comes back.
        lost = not self._up and Trouble.STALL in troubles
        if not self._ready and (lost or any("soft lockup" in c.line for c in complaints)):
            self._boot_failure("its CPUs are stuck")
        if self._ready and alive and self._machine.asleep(_ASLEEP):
            progress.error(f"emulator death: its main loop has slept for {_ASLEEP:.0f} s")
            self._status = EMULATOR_DIED
            return
        late = time.monotonic() > self._deadline and self._options.mode != "shell"
        broken = Trouble.CRASH in troubles
        if alive and not late and not broken:
            return
        if not alive and selector.select(timeout=0):
            return
        if broken:
            self._machine.settle(_DUMP)
        if not self._ready:
            what = f"not ready after {self._patience} s" if late else "QEMU ended"
            self._boot_failure(Trouble.CRASH if broken else what, kernel=broken)
        if self._options.mode == "shell":
            self._status = 0
        elif self._machine.killed() and not broken:
            self._status = EMULATOR_DIED
        elif late and not broken:
            progress.error("the lab hangs")
            self._status = TIMED_OUT
        else:
            # A reset ends QEMU, and nothing in the lab asks for one: it was a triple fault.
            what = "the kernel of the lab crashed" if broken else "the lab was reset"
            progress.error(f"{what} before the command ended")
            self._status = KERNEL_CRASHED

    def _boot_failure(self, what: str, *, kernel: bool = False) -> None:
        progress.block("serial log", self._machine.serial_tail(_TAIL))
        raise BootFailure(f"the lab did not come up: {what}", kernel=kernel)

    def _explain(self, status: int) -> None:
        if self._options.quiet_failure:
            return
        if status == TIMED_OUT:
            progress.error(f"the command was stopped after {self._options.timeout} s")
        progress.block("serial log", self._machine.serial_tail(_TAIL))
        if self._journal:
            progress.block("journalctl -b", self._journal[-_TAIL:])
        progress.step(f"status {status}")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
