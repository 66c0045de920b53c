"""What the tests inside the lab share: the lab's guests, commands, waiting, policies."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import traceback
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hoststate
import pytest
from faulty import Fault

from vsrtune.bench.spec.model import Endpoint, Leg, Router, Spec
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.journal import read_entries

T = TypeVar("T")

POLICIES = Path("/etc/vsrtune/policies")
JOURNAL = Path("/var/lib/vsrtune/journal.jsonl")
DROPIN = Path("/run/systemd/system/vsrtune.service.d")
GUESTS = Path("/run/lab/guests")

PRIORITY = 10
QUEUE = 300

TUNED = f"""\
guest: "{{guest}}"
profile: none
cpus:
  irq: {{irq}}
  vcpu: {{vcpu}}
  vhost: auto
scheduler:
  vcpu: {{{{class: rr, priority: {PRIORITY}, slice: 8ms}}}}
  vhost: {{{{class: rr, priority: {PRIORITY}, slice: 8ms}}}}
  softirq: {{{{class: fifo, priority: {PRIORITY}}}}}
queue:
  macvtap: {QUEUE}
"""


@dataclass(frozen=True)
class LabGuest:
    """A router of this lab, as the lab lists it."""

    index: int
    kind: str
    macs: tuple[str, str]
    name: str

    @property
    def ref(self) -> str:
        """The name a policy uses."""
        return f"qemu:{self.name}" if self.kind == "qemu" else self.name

    @property
    def pid(self) -> int:
        """Its QEMU process; AssertionError when it does not run."""
        found = [pid for pid, name in hoststate.qemus().items() if name == self.name]
        assert len(found) == 1, f"{self.name}: {len(found)} QEMU processes"
        return found[0]

    @property
    def runs(self) -> bool:
        return self.name in hoststate.qemus().values()

    def device(self, nic: int) -> str:
        """The host device of its NIC, by MAC."""
        devices = [
            entry.name
            for entry in Path("/sys/class/net").iterdir()
            if (entry / "address").read_text().strip() == self.macs[nic]
        ]
        assert len(devices) == 1, f"{self.name} NIC {nic}: {devices}"
        return devices[0]

    def vcpus(self) -> dict[int, int]:
        """vcpu number -> tid, as QEMU itself says (QMP query-cpus-fast)."""
        if self.kind == "libvirt":
            text = hoststate.virsh(
                "qemu-monitor-command", self.name, '{"execute": "query-cpus-fast"}'
            )
            answer = json.loads(text)
        else:
            answer = qmp(f"/run/{self.name}.qmp", "query-cpus-fast")
        return {cpu["cpu-index"]: cpu["thread-id"] for cpu in answer["return"]}

    def workers(self) -> list[int]:
        """Thread ids of its vhost workers."""
        return hoststate.vhost_workers(self.pid)

    def data_plane(self) -> list[int]:
        """Threads that carry packets: vcpus and workers."""
        return [*self.vcpus().values(), *self.workers()]


def qmp(path: str, command: str) -> Any:
    """One QMP command on QEMU's own socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(path)
        stream = sock.makefile("rw", encoding="utf-8")
        stream.readline()
        for execute in ("qmp_capabilities", command):
            stream.write(json.dumps({"execute": execute}) + "\n")
            stream.flush()
            while "return" not in (answer := json.loads(stream.readline())):
                assert "error" not in answer, answer
        return answer


def lab_guests() -> list[LabGuest]:
    """Every router of this lab."""
    guests = []
    for line in GUESTS.read_text("utf-8").splitlines():
        index, kind, mac0, mac1, name = line.split("\t")
        guests.append(LabGuest(int(index), kind, (mac0, mac1), name))
    return guests


def sh(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command; with ``check`` a failure shows what the command said."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check:
        assert done.returncode == 0, (
            f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done


def program(fault: str = "") -> tuple[str, ...]:
    """How the installed vsrtune is called, with a fault (``faulty``) or without."""
    if not fault:
        return ("/usr/bin/vsrtune",)
    return ("/usr/bin/python3", "-B", str(Path(__file__).with_name("faulty.py")), fault)


def vsrtune(*words: str, check: bool = True, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run the installed vsrtune."""
    return sh(*program(fault), *words, check=check)


def show(*words: str) -> dict[str, Any]:
    """``vsrtune show --json``."""
    found: dict[str, Any] = json.loads(vsrtune("show", "--json", *words).stdout)
    return found


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 90) -> Any:
    """Poll until ``condition`` gives something true; its value. Fails with ``what``."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}\n{daemon_log()}"
        time.sleep(0.3)


@contextmanager
def repeating(look: Callable[[], None], every: float) -> Iterator[None]:
    """Call ``look`` every so many seconds, in a thread, while the block runs."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every):
            look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def daemon_log(lines: int = 40) -> str:
    """The last lines the daemon logged."""
    return sh("journalctl", "-u", "vsrtune", "-n", str(lines), "--no-pager", check=False).stdout


def write_policies(irq: int | str, guests: tuple[str, ...] = ("*", "qemu:*")) -> None:
    """One policy file for each guest pattern."""
    POLICIES.mkdir(parents=True, exist_ok=True)
    for number, guest in enumerate(guests):
        (POLICIES / f"test{number}.yaml").write_text(tuned_policy(guest, irq))


def tuned_policy(guest: str, irq: int | str) -> str:
    """A policy that sets everything."""
    return TUNED.format(guest=guest, irq=irq, vcpu=vcpu_cpus())


def vcpu_cpus() -> str:
    """``auto``; the last CPU in a lab whose routers have several vcpus, for which ``auto`` may
    find too few."""
    several = any(g.kind == "libvirt" and g.runs and len(g.vcpus()) > 1 for g in lab_guests())
    return str(lab_cpus() - 1) if several else "auto"


def bench_spec(guests: Sequence[LabGuest], **more: Any) -> Spec:
    """A bench through these routers, from the lab's generator to its sink and back."""
    routers = tuple(
        Router(
            g.ref,
            Leg(g.macs[0], f"10.10.{g.index}.2", f"10.20.{g.index}.100"),
            Leg(g.macs[1], f"10.20.{g.index}.2", f"10.10.{g.index}.100"),
        )
        for g in guests
    )
    return Spec("lab", Endpoint("g0", "gen"), Endpoint("s0", "sink"), routers, **more)


def realtime_start() -> str:
    """How hoststate tells the class of a tuned thread."""
    return f"policy=2 flags=1 nice=0 priority={PRIORITY} "


def clear_policies() -> None:
    """No policy at all."""
    for path in POLICIES.glob("*.yaml"):
        path.unlink()


def start() -> None:
    """Start the daemon; returns when it is READY."""
    done = sh("systemctl", "start", "vsrtune", check=False)
    assert done.returncode == 0, done.stderr + daemon_log()


def stop() -> None:
    """Stop the daemon; returns when it has restored the host."""
    sh("systemctl", "stop", "vsrtune")


def main_pid() -> int:
    """The daemon's process; 0 when there is none."""
    return int(sh("systemctl", "show", "-P", "MainPID", "vsrtune").stdout)


def started_again(first: int) -> None:
    """Wait until systemd has put another daemon in the place of process ``first``."""
    wait_for(
        lambda: (
            main_pid() not in (0, first)
            and sh("systemctl", "is-active", "vsrtune", check=False).stdout == "active\n"
        ),
        "systemd started the daemon again",
    )


def scrape() -> list[str]:
    """The lines of the daemon's metrics."""
    with urllib.request.urlopen("http://127.0.0.1:9178/metrics", timeout=30) as answer:
        lines: list[str] = answer.read().decode().splitlines()
    return lines


def samples(name: str, **labels: str) -> list[float]:
    """The samples of one of the daemon's metrics that have these labels."""
    found = []
    for line in scrape():
        sample, _, value = line.rpartition(" ")
        own, _, rest = sample.partition("{")
        if own == name and all(f'{key}="{text}"' in rest for key, text in labels.items()):
            found.append(float(value))
    return found


def status_page() -> dict[str, Any]:
    """What the daemon's status page tells, as data."""
    with urllib.request.urlopen("http://127.0.0.1:9178/status.json", timeout=30) as answer:
        page: dict[str, Any] = json.load(answer)
    return page


def last_pass() -> float:
    """When the daemon's last pass ended, in seconds since the epoch."""
    (told,) = samples("vsrtune_reconcile_last_timestamp_seconds")
    return told


def status_text() -> str:
    """What the daemon says of itself to systemd."""
    return sh("systemctl", "show", "-P", "StatusText", "vsrtune").stdout.strip()


def set_environment(**variables: str) -> None:
    """Environment of the next start of the service; none clears it."""
    shutil.rmtree(DROPIN, ignore_errors=True)
    if variables:
        DROPIN.mkdir(parents=True)
        lines = "".join(f"Environment={k}={v}\n" for k, v in variables.items())
        (DROPIN / "test.conf").write_text(f"[Service]\n{lines}")
    sh("systemctl", "daemon-reload")


@functools.cache
def codename() -> str:
    """The release of this lab host: bookworm or trixie."""
    found = re.search(r"^VERSION_CODENAME=(\w+)$", text("/etc/os-release"), re.MULTILINE)
    assert found is not None, "/etc/os-release has no VERSION_CODENAME"
    return found[1]


def core(release: str | None = None) -> pytest.MarkDecorator:
    """For a test that `make test` runs, on both releases or on ``release`` alone; `make test-all`
    runs every test."""
    return pytest.mark.core(release)


def shared(cases: Sequence[T]) -> Sequence[T]:
    """This release's half of the cases; the releases together try all of them. Not for a test
    that runs on one release."""
    return cases[codename() == "trixie" :: 2]


def one_release(why: str, release: str = "bookworm") -> pytest.MarkDecorator:
    """For a test that meets nothing of the release but its Python, which the unit tests
    meet too, or what another test shows there as well: it runs on ``release`` alone,
    ``why`` says what it is about."""
    return pytest.mark.skipif(codename() != release, reason=f"{why}: run on {release}")


def reset() -> None:
    """An untuned host: no daemon, nothing of ours left, no policy.

    Runs around every test, so it starts a command only when there is something to do.
    """
    if sh("systemctl", "show", "-P", "ActiveState", "vsrtune").stdout.strip() != "inactive":
        sh("systemctl", "stop", "vsrtune", check=False)
        sh("systemctl", "reset-failed", "vsrtune", check=False)
    if DROPIN.exists():
        set_environment()
    if journal_is_live():
        vsrtune("undo")
    clear_policies()


def journal_is_live() -> bool:
    """Whether `vsrtune undo` has something to put back, or to complain about."""
    try:
        return bool(read_entries(JOURNAL, text("/proc/sys/kernel/random/boot_id")))
    except VsrtuneError:
        return True


def text(path: str) -> str:
    """A small file of /proc or /sys."""
    return Path(path).read_text().strip()


def cpu_list(text: str) -> set[int]:
    """CPU numbers of a list such as 0-2,5."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def mask(tid: int) -> set[int]:
    """CPUs the kernel lets a thread run on."""
    return cpu_list(hoststate.status_field(tid, "Cpus_allowed_list"))


def partition_and_back(cpu: int) -> None:
    """Make a cpuset partition of a CPU, and end it: a kernel before 6.2 has then forgotten masks."""
    place = Path("/sys/fs/cgroup/lab-partition")
    place.mkdir()
    try:
        (place / "cpuset.cpus").write_text(str(cpu))
        (place / "cpuset.cpus.partition").write_text("root")
        assert (place / "cpuset.cpus.partition").read_text() == "root\n"
        (place / "cpuset.cpus.partition").write_text("member")
    finally:
        place.rmdir()


def console(index: int) -> Path:
    """What a guest of that index has written to its serial line."""
    return Path(f"/var/log/libvirt/qemu/router{index}.log")


def run_ns(tid: int) -> int:
    """Time a thread has run, in nanoseconds (/proc/TID/schedstat)."""
    return int(Path(f"/proc/{tid}/schedstat").read_text().split()[0])


def forwards(guest: LabGuest, tids: Sequence[int], irq_cpus: set[int]) -> None:
    """Traffic for a second: the router forwards, each of its threads runs, and none where packets
    arrive."""
    ran = {tid: run_ns(tid) for tid in tids}
    traffic = ("--rate", "2000", "--seconds", "1", "--flows", "8")
    done = sh("lab-traffic", "--guest", guest.name, *traffic)
    assert json.loads(done.stdout)["forwarded"] > 0
    for tid, was in ran.items():
        assert run_ns(tid) > was
        assert hoststate.last_cpu(tid) not in irq_cpus


@contextmanager
def traffic(
    guest: LabGuest, rate: int, seconds: float, *more: str, stdout: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    """Frames for a router, until the end of the block."""
    words = ["lab-traffic", "--guest", guest.name, "--rate", str(rate), "--seconds", str(seconds)]
    with subprocess.Popen([*words, *more], stdout=stdout, text=True) as sending:
        try:
            yield sending
        finally:
            sending.terminate()


def untuned_lines(guest: LabGuest, irq: set[int]) -> list[str]:
    """What is not as TUNED says; empty when the guest is tuned."""
    devices = map(guest.device, (0, 1))
    return different(guest.name, guest.data_plane(), devices, irq, realtime_start(), QUEUE)


def different(
    name: str, tids: Iterable[int], devices: Iterable[str], irq: set[int], start: str, queue: int
) -> list[str]:
    """The threads that may run on ``irq`` or whose class does not begin so, and the devices with
    another queue."""
    lines = []
    for tid in tids:
        if mask(tid) & irq:
            lines.append(f"{name} {tid}: mask {mask(tid)} has the interrupts' CPUs {irq}")
        sched = hoststate.sched(tid)
        if not sched.startswith(start):
            lines.append(f"{name} {tid}: {sched}")
    for device in devices:
        length = text(f"/sys/class/net/{device}/tx_queue_len")
        if length != str(queue):
            lines.append(f"{name} {device}: queue {length}")
    return lines


def softirq_thread(cpu: int) -> int:
    """ksoftirqd of a CPU."""
    return int(sh("pgrep", "-x", f"ksoftirqd/{cpu}").stdout)


def start_guest(guest: LabGuest) -> None:
    """Start a router and wait until it forwards."""
    sh("lab-guest", "start", guest.name)


def libvirt_talks(guest: LabGuest) -> None:
    """Wait until a libvirtd that was restarted talks to a guest: it lists its guests before
    that. One that is destroyed by then is gone too, but the request fails: whoever was
    talking has cleaned up."""
    ask = ("virsh", "qemu-monitor-command", guest.name, "--hmp", "info status")
    wait_for(lambda: sh(*ask, check=False).returncode == 0, "libvirt talks to its guests again")


def stop_guest(guest: LabGuest) -> None:
    """Stop a router the hard way."""
    sh("lab-guest", "stop", guest.name)
    wait_for(lambda: not guest.runs, f"{guest.name} is gone")


def router_words(guest: LabGuest, name: str, console: Path, taps: Sequence[str]) -> list[str]:
    """The arguments that make a QEMU this router of libvirt's, with these taps."""
    domain = ET.fromstring(hoststate.virsh("dumpxml", "--inactive", guest.name))
    words = ["-name", name, "-no-shutdown", "-serial", f"file:{console}"]
    words += ["-smp", "1,sockets=1,cores=1,maxcpus=1", "-nodefaults", "-display", "none"]
    words += ["-machine", "accel=kvm", "-cpu", "host", "-m", "256"]
    for option, path in (("kernel", "kernel"), ("initrd", "initrd"), ("append", "cmdline")):
        words += [f"-{option}", domain.findtext(f"os/{path}") or ""]
    for nic, tap in enumerate(taps):
        words += ["-netdev", f"type=tap,id=net{nic},{tap},vhost=on"]
        own = f"mac={guest.macs[nic].upper()},netdev=net{nic},id=net{nic}"
        words += ["-device", f"virtio-net-pci,{own},romfile="]
    return words


SENDER = """
import socket, sys
device, mac, count = sys.argv[1], bytes.fromhex(sys.argv[2].replace(":", "")), int(sys.argv[3])
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
sock.bind((device, 0))
frame = mac + bytes.fromhex("020000000001") + b"\\x88\\xb5" + bytes(46)
for _ in range(count):
    sock.send(frame)
"""


def send_frames(nic: int, mac: str, count: int) -> None:
    """Send frames that the guest receives on one NIC and drops: an ethertype for
    local experiments (IEEE 802), so nothing is forwarded or answered."""
    space, device = (("gen", "g0"), ("sink", "s0"))[nic]
    sh(
        "nsenter", f"--net=/run/netns/{space}",
        "python3", "-c", SENDER, device, mac, str(count),
    )  # fmt: skip


def lab_cpus() -> int:
    """CPUs of the lab host."""
    return os.cpu_count() or 1


def killed_after_each_write_then_undone() -> None:
    """Of what `vsrtune apply` does now: the host is then byte for byte what it was."""
    before = hoststate.capture()
    actions = json.loads(vsrtune("plan", "--json").stdout)["actions"]
    assert len(actions) > 5
    for writes in range(1, len(actions) + 1):
        assert vsrtune("apply", check=False, fault=f"crash:{writes}").returncode != 0, writes
        vsrtune("undo")
        changed = hoststate.differences(before, hoststate.capture())
        assert changed == [], "\n".join([f"killed after {writes} writes:", *changed])


def in_child(work: Callable[[], object], crash_after: int) -> bool:
    """Run ``work`` in a fork that is killed after so many writes; whether it came to that."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            Fault(f"crash:{crash_after}").arm()
            work()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0, "the child failed"
    return False
