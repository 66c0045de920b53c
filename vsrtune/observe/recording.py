# SPDX-License-Identifier: GPL-2.0-or-later
"""Record a host, so that its observation can be repeated on any machine.

A recording keeps everything that a real observation reads and nothing else, so it holds exactly
the data that readers need. Data that could tell about the host's owner is removed before anything
is written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import vsrtune
from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import ObserveError, VsrtuneError
from vsrtune.host.cpus import BOOKS, book_lines
from vsrtune.host.filesystem import FileStat, HostRoot, LiveRoot
from vsrtune.host.kubevirt import essential as essential_config
from vsrtune.host.libvirt import DEFAULT_URI, LibvirtSource
from vsrtune.host.procfs import DAEMONS, napi_device, parse_stat
from vsrtune.host.qemu_cmdline import essential
from vsrtune.host.recorded import (
    MAX_SIZE,
    Answers,
    RecordedVirt,
    Recording,
    Told,
    dumps,
    load,
)
from vsrtune.host.state_files import create_file
from vsrtune.model.domain_xml import metadata_in, parse
from vsrtune.model.guest import Sched
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.observer import Observer, live_observer
from vsrtune.observe.passed_devices import GROUP_FD
from vsrtune.observe.tap_backends import MACVTAP_FD, OTHER_VHOST_FDS, TUN_FD, VHOST_NET_FD
from vsrtune.observe.tracing import RESULTS_PATH, TraceMemory
from vsrtune.policy.matching import QemuFilter

T = TypeVar("T")

_MAC = re.compile(r"(?<![0-9A-Fa-f:])[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}(?![0-9A-Fa-f:])")
_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_PROCESS = re.compile(r"/proc/(\d+)(?:/.*)?", re.ASCII)
_TASK = re.compile(r"/proc/\d+/task/(\d+)/", re.ASCII)

# The parts of the XML that readers use; everything else (disks, passwords, descriptions) is
# dropped.
_DOMAIN_PARTS = ("name", "uuid", "vcpu", "iothreads", "cputune")
_INTERFACE_PARTS = ("mac", "source", "target", "model", "driver", "backend", "alias")


class RecordingRoot(HostRoot):
    """A HostRoot that passes questions on and keeps the answers."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self.answers = Answers()

    def read(self, path: str) -> str:
        return self._keep(path, self._root.read, self.answers.texts)

    def listdir(self, path: str, most: int | None = None) -> list[str]:
        def ask(path: str) -> tuple[str, ...]:
            return tuple(self._root.listdir(path, most))

        names: tuple[str, ...] = self._keep(path, ask, self.answers.listings)
        return list(names)

    def stat(self, path: str, *, follow: bool = True) -> FileStat:
        return self._keep(path, partial(self._root.stat, follow=follow), self.answers.stats)

    def readlink(self, path: str) -> str:
        return self._keep(path, self._root.readlink, self.answers.links)

    def exists(self, path: str) -> bool:
        found = self._root.exists(path)
        if found:
            self.answers.present[path] = True
        else:
            self.answers.errors[path] = "ENOENT"
        return found

    def processes(self) -> list[tuple[str, int]]:
        found = self._root.processes()
        self.answers.listings["/proc"] = tuple(name for name, _ in found)
        return found

    def link_count(self, path: str) -> int:
        return self._root.link_count(path)

    def sched_attr(self, tid: int) -> Sched:
        sched = self.answers.sched[str(tid)] = self._root.sched_attr(tid)
        return sched

    def ethtool_statistics(self, device: str) -> dict[str, int]:
        found = self.answers.ethtool[device] = self._root.ethtool_statistics(device)
        return found

    def napi_thread(self, device: str) -> int | None:
        found = self._root.napi_thread(device)
        if found is not None:
            self.answers.napi[device] = found
        return found

    def qmp_vcpus(self, pid: int, socket: str, timeout: float) -> dict[int, int]:
        try:
            vcpus = self._root.qmp_vcpus(pid, socket, timeout)
        except ObserveError as error:
            self.answers.qmp[str(pid)] = error.what
            raise
        self.answers.qmp[str(pid)] = {str(i): t for i, t in vcpus.items()}
        return vcpus

    def _keep(self, path: str, ask: Callable[[str], T], answers: dict[str, T]) -> T:
        try:
            answer = ask(path)
        except OSError as error:
            self.answers.errors[path] = errno.errorcode.get(error.errno or 0, "EIO")
            raise
        answers[path] = answer
        return answer


class Redactor:
    """Replaces UUIDs, and MAC addresses that are not locally made (02:...), by others. Within one
    recording, equal values get equal replacements."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt

    def __call__(self, text: str) -> str:
        return _UUID.sub(self._uuid, _MAC.sub(self._mac, text))

    def _hash(self, text: str) -> bytes:
        return hashlib.sha256(self._salt + text.lower().encode()).digest()

    def _mac(self, match: re.Match[str]) -> str:
        mac = match[0].lower()
        if mac.startswith("02:") or len(set(mac.split(":"))) == 1:
            return match[0]
        return "02:" + ":".join(f"{byte:02x}" for byte in self._hash(mac)[:5])

    def _uuid(self, match: re.Match[str]) -> str:
        return str(uuid.UUID(bytes=self._hash(match[0])[:16], version=4))


def record(
    file: Path, uri: str = DEFAULT_URI, *, trace_seconds: float = 0.0, note: str = ""
) -> Snapshot:
    """Record this host in a new file.

    ``trace_seconds`` traces first, so that the recording knows which worker serves which
    interface. ``note`` stands at the head of the recording. Returns the snapshot of the recorded
    host, which is in the recording too. Raises VsrtuneError when the file exists, cannot be
    written, or does not replay.
    """
    if os.path.lexists(file):
        raise _exists(file)
    if trace_seconds > 0:
        live_observer(uri).observe(trace_seconds)
    root = RecordingRoot(LiveRoot())
    memory = TraceMemory()
    try:
        libvirt: Told = LibvirtSource(uri).domains()
    except ObserveError as error:
        libvirt = str(error)
    # Processes that are not believed are not recorded.
    live = replace(Observer(root, RecordedVirt(libvirt), memory).observe(), strangers=())
    redact = Redactor(os.urandom(16))
    root.answers.texts[str(RESULTS_PATH)] = json.dumps(encode(memory.results))
    prune(root.answers)
    recording = Recording(
        _note(live, note),
        decode(Answers, _redacted(encode(root.answers), redact)),
        decode(Told, _redacted(encode(_pruned(libvirt)), redact)),  # type: ignore[arg-type]
    )
    replayed = _observe(recording)
    recording.snapshot = encode(replayed)
    _write(file, recording)
    if replayed.to_json() != redact(live.to_json()):
        raise VsrtuneError(
            "the recording shows something else than the host did",
            where=str(file),
            hint="please report this, with the recording",
        )
    return replayed


def replay(file: Path, qemu_filter: QemuFilter | None = None) -> Snapshot:
    """Observe a recorded host. ``qemu_filter`` says whose plain QEMUs may be guests; without it,
    root's. Raises ObserveError when the file holds no recording."""
    return _observe(load(file), qemu_filter)


def _observe(recording: Recording, qemu_filter: QemuFilter | None = None) -> Snapshot:
    observer = Observer(
        recording.root(), recording.virt(), qemu_filter=lambda: qemu_filter or QemuFilter()
    )
    return observer.observe()


def _write(file: Path, recording: Recording) -> None:
    data = dumps(recording).encode("utf-8", "backslashreplace")
    if len(data) > MAX_SIZE:
        raise VsrtuneError(
            f"the recording would be larger than {MAX_SIZE >> 20} MiB",
            where=str(file),
            hint="record a host with fewer guests",
        )
    try:
        create_file(file, data, 0o644)
    except FileExistsError:
        raise _exists(file) from None
    except OSError as error:
        raise VsrtuneError(f"cannot record: {error.strerror}", where=str(file)) from error


def _exists(file: Path) -> VsrtuneError:
    return VsrtuneError(
        "the file exists and is left as it is", where=str(file), hint="name a new one"
    )


def _redacted(value: Any, redact: Callable[[str], str]) -> Any:
    """A JSON value with every text redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact(key): _redacted(item, redact) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item, redact) for item in value]
    return value


def _pruned(told: Told) -> Told:
    if isinstance(told, str):
        return told
    return tuple(replace(d, live_xml=prune_xml(d.live_xml)) for d in told)


def prune(answers: Answers) -> None:
    """Drop data that does not change the observation: other processes, a QEMU's other descriptors
    and arguments."""
    kept = _processes_used(answers)
    every: tuple[dict[str, Any], ...] = (
        answers.texts,
        answers.listings,
        answers.links,
        answers.errors,
        answers.stats,
    )
    foreign = [
        path
        for known in every
        for path in known
        if (match := _PROCESS.fullmatch(path)) is not None and match[1] not in kept
    ]
    for path in foreign:
        for known in every:
            known.pop(path, None)
    if "/proc" in answers.listings:
        answers.listings["/proc"] = tuple(sorted(kept, key=int))
    for path, names in answers.listings.items():
        if path.endswith("/fd") and path.startswith("/proc/"):
            matter = tuple(n for n in names if _matters(answers, f"{path}/{n}"))
            answers.listings[path] = matter
    for path, text in answers.texts.items():
        if path.startswith("/proc/") and path.endswith("/cmdline"):
            argv = text.removesuffix("\0").split("\0")
            if PurePosixPath(argv[0]).name not in DAEMONS:
                argv = essential(argv)
            answers.texts[path] = "".join(f"{argument}\0" for argument in argv)
        elif path.endswith("/config.json"):
            answers.texts[path] = essential_config(text)
    threads = {match[1] for path in answers.texts if (match := _TASK.match(path)) is not None}
    answers.sched = {tid: sched for tid, sched in answers.sched.items() if tid in threads}
    _prune_books(answers)


def _processes_used(answers: Answers) -> set[str]:
    """The pids of QEMUs, of kernel threads that were read closely, and of known daemons."""
    used = set()
    for path, text in answers.texts.items():
        match = _PROCESS.fullmatch(path)
        if match is None or not path.endswith("/stat") or "/task/" in path:
            continue
        comm = parse_stat(text).comm
        read = f"/proc/{match[1]}/cmdline" in answers.texts
        close = f"/proc/{match[1]}/task/{match[1]}/stat" in answers.texts
        known = napi_device(comm) in answers.ethtool
        if read or close or known or comm in DAEMONS:
            used.add(match[1])
    return used


def _matters(answers: Answers, path: str) -> bool:
    link = answers.links.get(path, "")
    if (
        GROUP_FD.fullmatch(link)
        or MACVTAP_FD.fullmatch(link)
        or link in (TUN_FD, VHOST_NET_FD, *OTHER_VHOST_FDS)
    ):
        return True
    answers.links.pop(path, None)
    answers.errors.pop(path, None)
    return False


def _prune_books(answers: Answers) -> None:
    """Keep the books only: the scheduler's state names every task that runs."""
    text = answers.texts.get(BOOKS)
    if text is not None:
        answers.texts[BOOKS] = "".join(f"{line}\n" for line in book_lines(text))


def prune_xml(text: str) -> str:
    """A domain XML with the parts that readers use. Raises ObserveError when it is not XML."""
    tree = parse(text)
    kept = ET.Element(tree.tag, tree.attrib)
    kept.extend(part for part in tree if part.tag in _DOMAIN_PARTS)
    # Only vsrtune's metadata stays: it says which pins the guest brought.
    ET.SubElement(kept, "metadata").extend(metadata_in(tree))
    devices = ET.SubElement(kept, "devices")
    for interface in tree.iterfind("./devices/interface"):
        element = ET.SubElement(devices, "interface", interface.attrib)
        element.extend(part for part in interface if part.tag in _INTERFACE_PARTS)
    ET.indent(kept)
    return ET.tostring(kept, encoding="unicode") + "\n"


def _note(snapshot: Snapshot, note: str) -> tuple[str, ...]:
    host = snapshot.host
    guests = ", ".join(f"{g.ref} ({len(g.interfaces)} NICs)" for g in snapshot.guests) or "none"
    return (
        note or "A recorded host.",
        "",
        f"Kernel: {host.kernel}",
        f"Machine: {platform.machine()}, CPUs {host.online}",
        f"Guests: {guests}",
        f"Recorded by: vsrtune {vsrtune.__version__}",
        "",
        "Redactions: UUIDs and the boot id are replaced by others, and so are MAC addresses",
        "that do not begin with 02:; of command lines, domain XML and containers only what names",
        "the guest, its monitors and its NICs is kept; processes and descriptors that have no",
        "part in the observation are left out. Names of guests, devices and cgroups and the",
        "paths of monitor sockets are as they were.",
    )
