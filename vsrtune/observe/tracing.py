# SPDX-License-Identifier: GPL-2.0-or-later
"""Traces: the kernel counts for a moment who transmits and where frames are received.

Each trace has its own tracefs instance with hist triggers, so the kernel counts without copying
anything per frame, and the tracing of others stays as it is. A guest transmits in its vhost worker
(``tap_sendmsg`` -> ``dev_queue_xmit`` for macvtap, so ``net:net_dev_queue`` fires; ``tun_sendmsg``
-> ``netif_receive_skb`` for a tap). Every frame of a lower device passes ``net:netif_receive_skb``
on the CPU of its receive SoftIRQ.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from vsrtune.core.codec import encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import Lasting, ObserveError
from vsrtune.core.untrusted import kept
from vsrtune.host.state_files import replace_volatile
from vsrtune.model.guest import ThreadKey

TRACEFS = "/sys/kernel/tracing"
PREFIX = "vsrtune-"

# kernel/events/hist: one write to "trigger" is at most a page.
_MAX_FILTER = 3000
_ENTRIES = 4096

# A CPU counts as receiving with this share of a device's frames, once this many were counted. With
# fewer, chance decides.
MIN_FRAMES = 50
MIN_SHARE = 0.10

_ENTRY = re.compile(r"\{\s*(.*?)\s*\}\s*hitcount:\s*(\d{1,20})")


# Guests' macvtaps, guests' taps, and the lower devices.
TracedDevices = tuple[Collection[str], Collection[str], Collection[str]]
# Frames by (device, tid or CPU).
Counts = Mapping[tuple[str, int], int]


def parse_hist(text: str) -> list[tuple[dict[str, str], int]]:
    """Entries of a tracefs ``hist`` file: their keys, and the hit count."""
    entries = []
    for match in _ENTRY.finditer(text):
        keys: dict[str, str] = {}
        for part in re.split(r"\s*,\s+", match[1]):
            key, _, value = part.partition(":")
            keys[key.strip()] = value.strip()
        entries.append((keys, int(match[2])))
    return entries


def count_by(text: str, field: str) -> dict[tuple[str, int], int]:
    """Hit counts by (device, ``field``), of the entries that have that key."""
    counts: dict[tuple[str, int], int] = {}
    for keys, hits in parse_hist(text):
        number = keys.get(field, "")
        if "name" in keys and number.isdecimal() and len(number) < 20:
            key = (keys["name"], int(number))
            counts[key] = counts.get(key, 0) + hits
    return counts


def rx_cpus(received: Counts, device: str) -> CpuSet | None:
    """CPUs that carry a tenth or more of the device's frames; None below 50 frames."""
    by_cpu = {cpu: hits for (name, cpu), hits in received.items() if name == device}
    total = sum(by_cpu.values())
    if total < MIN_FRAMES:
        return None
    return CpuSet(cpu for cpu, hits in by_cpu.items() if hits >= MIN_SHARE * total)


def sender_device(sent: Counts, tid: int, devices: Iterable[str]) -> str | None:
    """The guest's device on which a worker transmitted most."""
    wanted = set(devices)
    found = [(hits, name) for (name, t), hits in sent.items() if t == tid and name in wanted]
    return max(found)[1] if found else None


class Tracer:
    """Runs one short trace at a time in an instance named after this process."""

    def __init__(self, tracefs: str = TRACEFS, sleep: Callable[[float], None] = time.sleep) -> None:
        self._instances = f"{tracefs}/instances"
        self._sleep = sleep

    def trace(self, devices: TracedDevices, seconds: float) -> tuple[Counts, Counts]:
        """Count for ``seconds`` the frames sent from guests' devices, by task, and those received
        by lower devices, by CPU. The instance is removed afterwards in any case.

        Raises ObserveError when tracefs is absent, locked down or refuses.
        """
        instance = f"{self._instances}/{PREFIX}{os.getpid()}"
        try:
            self.remove_stale()
            os.mkdir(instance)
        except OSError as error:
            raise ObserveError(
                f"tracing is unavailable: {error.strerror}",
                where=self._instances,
                hint="mount tracefs there, run as root, and see whether the kernel is "
                "locked down (/sys/kernel/security/lockdown)",
            ) from error
        try:
            return self._count(instance, devices, seconds)
        except OSError as error:
            raise ObserveError(
                f"tracing failed: {error.strerror}",
                where=str(error.filename or instance),
                hint="see: dmesg; until a trace succeeds, workers are told apart by their order",
                lasting=Lasting.TRANSIENT,
            ) from error
        finally:
            _remove(instance)

    def remove_stale(self) -> None:
        """Remove instances that a crashed vsrtune process left. Raises OSError when there is no
        tracefs."""
        for name in os.listdir(self._instances):
            pid = name.removeprefix(PREFIX)
            known = name.startswith(PREFIX) and pid.isdecimal()
            if known and (int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}")):
                _remove(f"{self._instances}/{name}")

    def _count(
        self, instance: str, devices: TracedDevices, seconds: float
    ) -> tuple[Counts, Counts]:
        macvtaps, taps, lowers = devices
        # The ring buffers stay empty, so their memory may go at once.
        with contextlib.suppress(OSError):
            write_file(f"{instance}/buffer_size_kb", "4")
        queue = f"{instance}/events/net/net_dev_queue"
        receive = f"{instance}/events/net/netif_receive_skb"
        if macvtaps:
            _trigger(queue, "common_pid", macvtaps)
        if taps:
            _trigger(receive, "common_pid", taps)
        if lowers:
            _trigger(receive, "common_cpu", lowers)
        self._sleep(seconds)
        sent: dict[tuple[str, int], int] = {}
        received: dict[tuple[str, int], int] = {}
        if macvtaps:
            sent |= count_by(read_file(f"{queue}/hist"), "common_pid")
        if taps or lowers:
            text = read_file(f"{receive}/hist")
            sent |= count_by(text, "common_pid")
            received |= count_by(text, "common_cpu")
        return sent, received


def _trigger(event: str, field: str, names: Iterable[str]) -> None:
    condition = " || ".join(f'name == "{name}"' for name in sorted(names))
    suffix = f" if {condition}" if len(condition) <= _MAX_FILTER else ""
    write_file(f"{event}/trigger", f"hist:keys=name,{field}:size={_ENTRIES}{suffix}")


def _remove(instance: str) -> None:
    for event in ("net_dev_queue", "netif_receive_skb"):
        trigger = f"{instance}/events/net/{event}/trigger"
        with contextlib.suppress(OSError):
            for line in read_file(trigger).splitlines():
                if line and not line.startswith("#"):
                    write_file(trigger, "!" + line.removesuffix(" [active]"))
    with contextlib.suppress(OSError):
        os.rmdir(instance)


def read_file(path: str) -> str:
    """A file of tracefs."""
    with open(path, encoding="utf-8", errors="backslashreplace") as file:
        return file.read()


def write_file(path: str, text: str, flags: int = 0) -> None:
    """Write to a file of tracefs, opened with these ``flags`` too. Raises OSError with the path."""
    # Not open(path, "w"): opening with O_TRUNC removes the triggers that are there already
    # (event_trigger_regex_open), and everybody's probes (kprobe_events).
    descriptor = os.open(path, os.O_WRONLY | flags)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(descriptor)


RESULTS_PATH = Path("/run/vsrtune/trace-results.json")

_VERSION = 2
# Characters. A longer file is cut off there and counts as damaged.
_MOST = 4 << 20


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A vhost worker that a trace found transmitting on a device."""

    key: ThreadKey
    device: str
    ifindex: int


@dataclass(frozen=True, slots=True)
class SeenNic:
    """The CPUs on which a trace found a lower device's receive SoftIRQ."""

    nic: str
    ifindex: int
    cpus: CpuSet


@dataclass(frozen=True, slots=True)
class TraceResults:
    """The content of the file. Text that is damaged, of another version or of another boot counts
    as empty, because it can be traced again. ``irqs`` are the interrupts that the kernel refused
    to move, number to name."""

    boot_id: str
    workers: tuple[SeenWorker, ...] = ()
    nics: tuple[SeenNic, ...] = ()
    irqs: Mapping[str, str] = field(default_factory=dict)
    version: int = _VERSION


class TraceMemory:
    """Trace results that outlive a trace. With ``path`` None they are kept in memory, beginning
    with ``text``."""

    def __init__(self, path: Path | None = RESULTS_PATH, text: str = "") -> None:
        self.path = path
        self.results = TraceResults("")
        self._text = text
        # What the file held when it was last read, and for which boot.
        self._read: tuple[str, str] | None = None
        self._by_key: tuple[TraceResults, dict[ThreadKey, SeenWorker]] | None = None

    def load(self, boot_id: str) -> None:
        """Read the file again: another process may have traced since."""
        if self.path is not None:
            try:
                with self.path.open(encoding="utf-8", errors="replace") as file:
                    text = file.read(_MOST)
            except OSError:
                self.results = TraceResults(boot_id)
                self._read = None
                return
            if self._read != (text, boot_id):
                self.results = kept(TraceResults(boot_id), text)
                self._read = (text, boot_id)
        elif self.results.boot_id != boot_id:
            self.results = kept(TraceResults(boot_id), self._text)

    def worker(self, key: ThreadKey) -> tuple[str, int] | None:
        """The (device, ifindex) of the worker's last trace result; None without one."""
        if self._by_key is None or self._by_key[0] is not self.results:
            self._by_key = self.results, {w.key: w for w in self.results.workers}
        found = self._by_key[1].get(key)
        return (found.device, found.ifindex) if found is not None else None

    def rx_cpus(self, nic: str, ifindex: int) -> CpuSet | None:
        """The receiving CPUs of the device's last trace result; None without one."""
        found = (n for n in self.results.nics if (n.nic, n.ifindex) == (nic, ifindex))
        return next((n.cpus for n in found), None)

    def fixed(self, number: int, name: str) -> bool:
        """Whether the kernel refused to move that interrupt."""
        return self.results.irqs.get(str(number)) == name

    def remember_fixed(self, irqs: Iterable[tuple[int, str]]) -> None:
        """Add interrupts that the kernel refused to move, by number and name. Raises
        ObserveError when the file cannot be replaced; memory is updated anyway."""
        added = {str(number): name for number, name in irqs}
        self.results = replace(self.results, irqs={**self.results.irqs, **added})
        self._save()

    def remember(
        self,
        workers: Iterable[SeenWorker],
        nics: Iterable[SeenNic],
        alive: Iterable[ThreadKey],
    ) -> None:
        """Merge new results over old ones, and forget workers that are not ``alive`` and lower
        devices whose names others have now. Raises ObserveError when the file cannot be replaced;
        memory is updated anyway."""
        living = set(alive)
        by_key = {w.key: w for w in self.results.workers if w.key in living}
        by_key.update((w.key, w) for w in workers)
        by_nic = {n.nic: n for n in self.results.nics}
        by_nic.update((n.nic, n) for n in nics)
        self.results = replace(
            self.results,
            workers=tuple(w for _, w in sorted(by_key.items())),
            nics=tuple(n for _, n in sorted(by_nic.items())),
        )
        self._save()

    def _save(self) -> None:
        self._read = None
        if self.path is not None:
            try:
                text = json.dumps(encode(self.results), ensure_ascii=False)
                replace_volatile(self.path, text.encode(), 0o600)
            except OSError as error:
                raise ObserveError(
                    f"cannot store the trace results: {error.strerror}", where=str(self.path)
                ) from error
