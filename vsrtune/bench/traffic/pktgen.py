# SPDX-License-Identifier: GPL-2.0-or-later
"""The kernel's packet generator, in the network namespace of this process.

It sends only during a write of "start" to its control file: the kernel stops all threads
when that write is interrupted, even by SIGKILL. A thread of this process therefore makes the
write, and traffic cannot outlive the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from vsrtune.bench.setup.commands import run
from vsrtune.bench.spec.model import IMIX_WEIGHTS
from vsrtune.bench.spec.streams import FIRST_SOURCE_PORT, Stream
from vsrtune.core.errors import Lasting, VsrtuneError


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a stream at the generator: ``frames`` offered to the device, in
    ``seconds`` by the generator's own clock."""

    key: str
    frames: int
    seconds: float


DIRECTORY = "/proc/net/pktgen"
MODULE = "/sys/module/pktgen"
# pktgen sleeps this long between the order to start and the start.
START_DELAY = 0.125
# How long a stop may take: a thread checks for it between two frames, and the writer
# every 0.1 s. Beside real-time threads a stop takes its time.
STOP_SECONDS = 10.0
# How much longer than asked a thread that began late may send, and how often it is checked.
_LATE, _LOOK = 1.0, 0.05

_THREAD = re.compile(r"kpktgend_(\d+)")
_KTHREADD = 2
_SOFAR = re.compile(r"pkts-sofar: (\d+)\s+errors: (\d+)")
# Microseconds; 0 before the start. "Result:" does not do: any later command overwrites it.
_TIMES = re.compile(r"started: (\d+)us\s+stopped: (\d+)us")
_LABELS = "Running|Stopped"
_NO_DELAY_LIMIT = 0x7FFFFFFF - 1


def load_module() -> bool:
    """Make pktgen available; True when it was not before. Raises VsrtuneError."""
    if os.path.isdir(MODULE) or os.path.isdir(DIRECTORY):
        return False
    try:
        run(["modprobe", "pktgen"])
    except VsrtuneError as error:
        raise VsrtuneError(
            f"the kernel's packet generator cannot be loaded: {error.what}",
            where="pktgen",
            hint="the module comes with the kernel's package (CONFIG_NET_PKTGEN)",
        ) from error
    return True


def unload_module() -> None:
    """Unload the module again, unless somebody else uses it by now."""
    if os.path.isdir(MODULE):
        with contextlib.suppress(VsrtuneError):
            run(["modprobe", "-r", "pktgen"])


class Pktgen:
    """Sends streams from the devices that it was made with, and from no other device. One
    process in a network namespace may use it at a time. Methods raise VsrtuneError."""

    def __init__(self, devices: Iterable[str]) -> None:
        """Raises VsrtuneError when somebody else uses pktgen in this namespace."""
        self._devices = frozenset(devices)
        self._streams: dict[str, Stream] = {}
        for cpu in threads():
            foreign = [name for name in _listed(cpu) if name.partition("@")[0] not in self._devices]
            if foreign:
                raise VsrtuneError(
                    f"somebody else has set up the packet generator for {' '.join(foreign)}",
                    where=_thread(cpu),
                    hint="end that, or write rem_device_all there",
                    lasting=Lasting.TRANSIENT,
                )
        self.close()

    def configure(self, streams: Sequence[Stream]) -> None:
        """Replace the earlier streams by these."""
        self.close()
        available = threads()
        numbers = dict.fromkeys(self._devices, 0)
        for stream in streams:
            if stream.cpu not in available:
                raise VsrtuneError(
                    f"CPU {stream.cpu} has no thread of the packet generator",
                    where=stream.device,
                    hint=f"`cpu` may be one of {' '.join(map(str, available))}",
                )
            name = f"{stream.device}@{numbers[stream.device]}"
            numbers[stream.device] += 1
            _write(_thread(stream.cpu), f"add_device {name}")
            self._streams[name] = stream
            for command in commands(stream):
                _write(f"{DIRECTORY}/{name}", command)

    def run(self, seconds: float, cancel: int) -> tuple[Sent, ...]:
        """Send all streams, each until its frames are sent. End after ``seconds`` at the
        latest, or when the descriptor ``cancel`` is readable."""
        if not self._streams:
            return ()
        (done, closed) = os.pipe()
        failed: list[VsrtuneError] = []
        writer = threading.Thread(target=_start, args=(closed, failed), daemon=True)
        writer.start()
        until = time.monotonic() + START_DELAY + seconds
        try:
            (ready, _, _) = select.select([done, cancel], [], [], START_DELAY + seconds)
            if done in ready and not failed:
                self._await_late_ones(until + _LATE, cancel)
            left = self._left()
        finally:
            _stop(writer)
            os.close(done)
        if failed:
            raise failed[0]
        if late := self._left():
            left |= late
            _write(f"{DIRECTORY}/pgctrl", "stop")
            self._await_late_ones(time.monotonic() + STOP_SECONDS)
        sent = tuple(parse_result(s.key, _text(name)) for name, s in self._streams.items())
        cancelled = select.select([cancel], [], [], 0)[0]
        for (name, stream), one in zip(self._streams.items(), sent, strict=True):
            if one.frames < stream.frames and name not in left and not cancelled:
                raise VsrtuneError(
                    f"the generator stopped after {one.seconds:.2f} of {seconds:g} s",
                    where=stream.device,
                    hint="it stops when the device has no carrier: see dmesg(1)",
                )
        return sent

    def close(self) -> None:
        """Leave nothing configured."""
        self._streams = {}
        for cpu in threads():
            if _listed(cpu):
                _write(_thread(cpu), "rem_device_all")
                _await_empty(cpu)

    def _await_late_ones(self, until: float, *cancel: int) -> None:
        """Wait for threads that found no CPU for 125 ms: they begin after `start` has returned
        as if they had ended (pktgen_run_all_threads)."""
        while self._left() and (left := until - time.monotonic()) > 0:
            if select.select(cancel, [], [], min(_LOOK, left))[0]:
                return

    def _left(self) -> set[str]:
        """The streams that have not ended by themselves, or not begun."""
        cpus = {stream.cpu for stream in self._streams.values()}
        running = {name for cpu in cpus for name in _listed(cpu, "Running")}
        return {n for n in self._streams if n in running or _seconds(_text(n)) is None}


def _text(name: str) -> str:
    with open(f"{DIRECTORY}/{name}", encoding="ascii") as file:
        return file.read()


def commands(stream: Stream) -> list[str]:
    """The commands for pktgen's file of a stream."""
    if int(stream.leg.mac.split(":")[0], 16) & 1:
        raise VsrtuneError("refused: it is a group address, every host would get it",
                           where=stream.leg.mac)  # fmt: skip
    delay = min(round(1e9 / stream.pps), _NO_DELAY_LIMIT)
    if stream.size:
        size = [f"pkt_size {stream.size}"]
    else:
        size = ["imix_weights " + " ".join(f"{size},{weight}" for size, weight in IMIX_WEIGHTS)]
    return [
        f"count {stream.frames}",
        f"delay {delay}",
        *size,
        "clone_skb 0",
        "burst 1",
        f"dst_mac {stream.leg.mac}",
        f"src_min {stream.leg.source}",
        f"src_max {stream.leg.source}",
        f"dst_min {stream.leg.destination}",
        f"dst_max {stream.last_destination}",
        # pktgen does not use the upper ends themselves.
        f"udp_src_min {FIRST_SOURCE_PORT}",
        f"udp_src_max {FIRST_SOURCE_PORT + stream.source_ports}",
        f"udp_dst_min {stream.destination_port}",
        f"udp_dst_max {stream.destination_port + stream.destination_ports}",
    ]


def parse_result(key: str, text: str) -> Sent:
    """Read a stream's file after a run.

    Whether pktgen counts a frame that the device refused (its peer's backlog was full)
    as sent or as an error depends on the kernel; the frame was offered in both cases.
    """
    sofar = _SOFAR.search(text)
    seconds = _seconds(text)
    if sofar is None or seconds is None:
        raise VsrtuneError("the packet generator did not run", where=key, hint=text.strip())
    return Sent(key, int(sofar[1]) + int(sofar[2]), seconds)


def _seconds(text: str) -> float | None:
    """How long a stream ran, or has run so far; None when it has not begun."""
    times = _TIMES.search(text)
    if times is None or not int(times[1]) or int(times[2]) < int(times[1]):
        return None
    return (int(times[2]) - int(times[1])) / 1e6


def adrift() -> list[str]:
    """The generator's threads, in all network namespaces, that may run elsewhere than on their own
    CPUs."""
    kernels = (p for p in psutil.process_iter(["name", "ppid"]) if p.info["ppid"] == _KTHREADD)
    found = [(m, p.pid) for p in kernels if (m := _THREAD.fullmatch(p.info["name"]))]
    return [m[0] for m, pid in found if os.sched_getaffinity(pid) != {int(m[1])}]


def threads() -> tuple[int, ...]:
    """The CPUs that have a pktgen thread. Raises VsrtuneError without pktgen."""
    try:
        names = os.listdir(DIRECTORY)
    except OSError as error:
        raise VsrtuneError(
            f"the kernel's packet generator is not there: {error.strerror}", where=DIRECTORY
        ) from error
    return tuple(sorted(int(m[1]) for name in names if (m := _THREAD.fullmatch(name))))


def parse_thread(text: str, labels: str = _LABELS) -> list[str]:
    """The devices that a thread's file lists."""
    lines = re.findall(rf"^(?:{labels}):(.*)", text, re.MULTILINE)
    return [name for line in lines for name in line.split()]


def _listed(cpu: int, labels: str = _LABELS) -> list[str]:
    return parse_thread(_text(f"kpktgend_{cpu}"), labels)


def _await_empty(cpu: int) -> None:
    """Wait until a thread has removed its devices. The thread does so once it has a CPU; the
    write returns after 100 ms (pktgen_thread_write), and devices added until then would be
    removed too. Raises VsrtuneError."""
    until = time.monotonic() + STOP_SECONDS
    while _listed(cpu):
        if time.monotonic() > until:
            raise VsrtuneError(
                f"the generator's thread found no CPU for {STOP_SECONDS:g} s",
                where=_thread(cpu),
                hint="leave CPUs to the generator that no real-time thread keeps busy",
                lasting=Lasting.TRANSIENT,
            )
        time.sleep(_LOOK)


def _thread(cpu: int) -> str:
    return f"{DIRECTORY}/kpktgend_{cpu}"


def _start(closed: int, failed: list[VsrtuneError]) -> None:
    try:
        _write(f"{DIRECTORY}/pgctrl", "start")  # returns when all have stopped
    except VsrtuneError as error:
        failed.append(error)
    finally:
        os.close(closed)


def _stop(writer: threading.Thread) -> None:
    # A stop before the threads have begun is lost, so it is repeated.
    waited = 0.0
    while writer.is_alive() and waited < STOP_SECONDS:
        with contextlib.suppress(VsrtuneError):
            _write(f"{DIRECTORY}/pgctrl", "stop")
        writer.join(0.2)
        waited += 0.2
    if writer.is_alive():
        raise VsrtuneError("the packet generator does not stop", where=DIRECTORY)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "r+b", buffering=0) as file:
            file.write(f"{text}\n".encode("ascii"))
    except OSError as error:
        raise VsrtuneError(f"{text!r}: {error.strerror}", where=path) from error


def enter(namespace: str | None, *, must_exist: bool = True) -> bool:
    """Move the calling thread, and the threads and processes that it then starts, to a network
    namespace of `ip netns`; None is the one where it is. True when it is there.

    /proc/net of a process is that of its first thread, so a program enters in its main
    thread before it does anything else. /sys stays as it was. Raises VsrtuneError, for one that
    does not exist if it ``must_exist``.
    """
    if namespace is None:
        return True
    from pyroute2 import netns

    if namespace not in netns.listnetns():
        if must_exist:
            raise VsrtuneError(
                f"there is no network namespace {namespace!r}",
                hint="`ip netns list` shows those there are",
            )
        return False
    try:
        netns.setns(namespace, flags=0)
    except OSError as error:
        what = f"cannot enter the network namespace: {os.strerror(error.errno or 0)}"
        raise VsrtuneError(what, where=namespace) from error
    return True
