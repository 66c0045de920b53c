"""One emulated machine: its QEMU command line and its process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from . import linked
from .emulator import Emulator
from .guests import FRR_MEMORY_MIB, MEMORY_MIB, nic_mac
from .image import Image
from .options import Options
from .serial_log import Complaint, complaints

_PORTS = ("lab.ctl", "lab.out", "lab.err")

# udev would load them, one after another, for devices that nothing here uses.
_UNUSED_MODULES = (
    "acpi_cpufreq aesni_intel ata_generic ata_piix button crc32_pclmul crct10dif_pclmul evdev"
    " floppy ghash_clmulni_intel i2c_piix4 loop pcspkr powernow_k8 psmouse qemu_fw_cfg"
    " sha1_ssse3 sha256_ssse3 sha512_ssse3"
)

_KERNEL_ARGUMENTS = (
    "root=/dev/vda console=ttyS0 loglevel=5 net.ifnames=0 mitigations=off"
    " nokaslr no_timer_check tsc=reliable random.trust_cpu=on cryptomgr.notests"
    " 8250.nr_uarts=1 i8042.noaux i8042.nokbd"
    # With -no-reboot a panic ends QEMU, and the run, at once.
    " oops=panic panic=-1"
    " systemd.unit=multi-user.target systemd.show_status=0 systemd.log_target=journal-or-kmsg"
    f" module_blacklist={','.join(_UNUSED_MODULES.split())}"
)


class MainLoop:
    """The main loop of a QEMU, which runs the timers of all its CPUs."""

    def __init__(self, pid: int) -> None:
        self._schedstat = Path(f"/proc/{pid}/task/{pid}/schedstat")
        # What it has run and waited for a CPU, and since when that is so.
        self._ran = "", 0.0

    def asleep(self, seconds: float) -> bool:
        """Whether it has neither run nor waited to run for so long, as when this machine was stopped
        and its clocks jumped: each CPU of a kernel has a timer that fires every four seconds
        (watchdog_timer_fn). Call it often: it compares with what it saw. Raises OSError once the
        process has been waited for."""
        now, ran = time.monotonic(), self._schedstat.read_text()
        if self._ran[0] != ran:
            self._ran = ran, now
        return now - self._ran[1] > seconds


class Machine:
    """A running lab. Use as a context manager: leaving it ends the process."""

    def __init__(
        self,
        options: Options,
        emulator: Emulator,
        image: Image,
        control: Path,
        share: Path,
        tests: Path,
    ):
        # AF_UNIX paths are short; `control` is in the system's temporary directory.
        self._run = control.parent
        self.serial = self._run / "serial.log"
        self.ports: dict[str, socket.socket] = {}
        self._listeners = {}
        for name in _PORTS:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(self._run / name))
            listener.listen(1)
            self._listeners[name] = listener
        self._command = _command(options, emulator, image, self._run, control, share, tests)
        self._interactive = options.mode == "shell"
        self._process: subprocess.Popen[bytes] | None = None
        self._log = (self._run / "qemu.log").open("wb")
        self._main_loop: MainLoop | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=None if self._interactive else subprocess.DEVNULL,
            stdout=None if self._interactive else self._log,
            stderr=self._log,
            # Ctrl-C is for the tool, which then ends QEMU in its own time.
            start_new_session=not self._interactive,
        )
        self._main_loop = MainLoop(self._process.pid)
        for name, listener in self._listeners.items():
            listener.settimeout(0.2)
            while name not in self.ports and self.alive():
                try:
                    self.ports[name] = listener.accept()[0]
                except TimeoutError:
                    continue
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for connection in (*self.ports.values(), *self._listeners.values()):
            connection.close()
        self._log.close()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self, seconds: float) -> None:
        assert self._process is not None
        self._process.wait(seconds)

    def settle(self, seconds: float) -> None:
        """Wait until QEMU ends, at most that long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)

    def killed(self) -> int:
        """The signal that ended QEMU, 0 when it runs or ended by itself."""
        status = self._process.poll() if self._process is not None else None
        return -status if status is not None and status < 0 else 0

    def complaints(self) -> list[Complaint]:
        """What the kernel has complained of so far; a kernel that crashed may hang, not end."""
        if not self.serial.exists():
            return []
        return complaints(self.serial.read_text(errors="replace"))

    def asleep(self, seconds: float) -> bool:
        """As MainLoop.asleep."""
        assert self._main_loop is not None
        return self._main_loop.asleep(seconds)

    def serial_tail(self, lines: int) -> list[str]:
        text = ""
        for path in (self._run / "qemu.log", self.serial):
            if path.exists():
                text += path.read_text(errors="replace")
        return [line.rstrip() for line in text.splitlines()][-lines:]


def _command(
    options: Options,
    emulator: Emulator,
    image: Image,
    run: Path,
    control: Path,
    share: Path,
    tests: Path,
) -> list[str]:
    guests = options.guests + options.plain_qemu
    command = ["setpriv", "--pdeathsig", "KILL", "--", *emulator.command]
    command += ["-name", "vsrtune-lab,debug-threads=on", "-nodefaults", "-no-user-config"]
    # TCG emulates AMD's SVM, so KVM inside is the real one. Five-level page tables
    # only make its software page walks longer.
    command += ["-accel", "tcg,thread=multi", "-cpu", "max,la57=off"]
    machine = "q35" if options.nic == "igb" else "pc"
    # CPUs of two NUMA nodes share no socket, or the kernel warns (topology_sane).
    sockets = f",sockets={options.cpus}" if options.nic == "igb" else ""
    command += ["-machine", f"{machine},vmport=off,hpet=off", "-smp", f"{options.cpus}{sockets}"]
    each = FRR_MEMORY_MIB + 320 if options.frr else MEMORY_MIB + 160
    memory = 2560 + guests * each
    command += ["-m", str(memory)]
    if options.nic == "igb":
        command += _nodes(options.cpus, memory)
    command += ["-display", "none", "-serial", f"file:{run / 'serial.log'}"]
    if not options.reboots:
        command += ["-no-reboot"]
    command += ["-kernel", str(image.vmlinux), "-initrd", str(run / "boot.cpio")]
    security = "audit=1 apparmor=1" if options.apparmor else "audit=0 apparmor=0"
    iommu = " intel_iommu=on iommu=pt" if options.nic == "igb" else ""
    command += ["-append", f"{_KERNEL_ARGUMENTS} {security}{iommu}"]
    snapshot = "off" if options.mode == "bake" else "on"
    drive = f"file={image.disk},format=raw,if=none,id=disk,cache=unsafe,snapshot={snapshot}"
    command += ["-drive", drive, "-device", "virtio-blk-pci,drive=disk"]
    command += ["-device", "virtio-rng-pci"]
    for tag, path, extra in (
        ("control", control, ",readonly=on"),
        ("tests", tests, ",readonly=on"),
        ("share", share, ""),
    ):
        command += ["-fsdev", f"local,id={tag},path={path},security_model=none{extra}"]
        command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    command += ["-device", "virtio-serial-pci"]
    for name in _PORTS:
        command += ["-chardev", f"socket,id={name},path={run / name}"]
        command += ["-device", f"virtserialport,chardev={name},name={name}"]
    if options.mode == "shell":
        command += [
            "-chardev",
            "stdio,id=console,signal=off",
            "-device",
            "virtconsole,chardev=console",
        ]
    if options.nic != "veth":
        command += _nics(options.host, passed=options.nic == "igb")
    if options.member is not None:
        command += linked.devices(options.member)
    return command


def _nodes(cpus: int, memory: int) -> list[str]:
    """Two NUMA nodes. The last CPU is on node 1, as p0 is (_nics)."""
    arguments = []
    for node, of in enumerate((f"0-{cpus - 2}", str(cpus - 1))):
        arguments += ["-object", f"memory-backend-ram,id=ram{node},size={memory // 2}M"]
        arguments += ["-numa", f"node,nodeid={node},memdev=ram{node},cpus={of}"]
    return arguments


def _nics(host: int, *, passed: bool) -> list[str]:
    """Four e1000e, the first two and the last two joined by a hub each. With ``passed``, p0 is an
    igb below a root port of NUMA node 1, whose virtual functions an IOMMU lets go to guests."""
    arguments = []
    bus = ""
    if passed:
        bus = ",bus=pcie.0"
        # The IOMMU has to be there before the devices behind it.
        far = "pxb-pcie,id=far,bus=pcie.0,bus_nr=64,numa_node=1"
        for device in ("intel-iommu,intremap=on", far, "pcie-root-port,id=root1,bus=far"):
            arguments += ["-device", device]
    for number in range(4):
        net = f"hubport,id=net{number},hubid={number // 2}"
        device = "igb,bus=root1" if passed and number == 1 else f"e1000e{bus}"
        device += f",netdev=net{number},mac={nic_mac(host, number)},romfile="
        arguments += ["-netdev", net, "-device", device]
    return arguments
