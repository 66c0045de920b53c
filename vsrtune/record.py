"""Record a host, so that its observation can be repeated on any machine.

Whatever a real observation reads is kept, and nothing else: then the copy holds
exactly what the readers need. What could tell about the host's owner is taken
out before anything is written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import vsrtune
from vsrtune.backends import MACVTAP_FD, OTHER_VHOST_FDS, TUN_FD, VHOST_NET_FD
from vsrtune.carried import ours_in
from vsrtune.codec import encode
from vsrtune.deadline_books import BOOKS, book_lines
from vsrtune.errors import ObserveError, VsrtuneError
from vsrtune.model import Sched, Snapshot
from vsrtune.observe import Observer, live_observer
from vsrtune.policy_match import Scope
from vsrtune.proc import DAEMONS, napi_device, parse_stat
from vsrtune.qemu_args import essential
from vsrtune.rootfs import INDEX, DirRoot, FileStat, HostRoot, LiveRoot
from vsrtune.seen import DEFAULT_PATH, SeenMemory
from vsrtune.virt import (
    DEFAULT_URI,
    DomainText,
    LibvirtSource,
    RecordedDomains,
    RecordedVirt,
    VirtSource,
)

T = TypeVar("T")

SNAPSHOT = "snapshot.json"
NOTE = "NOTE"

_MAC = re.compile(r"(?<![0-9A-Fa-f:])[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}(?![0-9A-Fa-f:])")
_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_PROCESS = re.compile(r"/proc/(\d+)(?:/.*)?", re.ASCII)
_INTERRUPT = re.compile(r"\s*(\d+):", re.ASCII)

# What readers of the XML use; all else (disks, passwords, descriptions) is dropped.
_DOMAIN_PARTS = ("name", "uuid", "vcpu", "iothreads", "cputune")
_INTERFACE_PARTS = ("mac", "source", "target", "model", "driver", "alias")


class Recording:
    """Answers of a host by path. ``stats`` are user, mode, device and inode; ``sched`` is by
    tid, ``qmp`` by pid, ``ethtool`` by device."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.listings: dict[str, list[str]] = {}
        self.links: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.present: dict[str, bool] = {}
        self.stats: dict[str, list[int]] = {}
        self.sched: dict[int, Sched] = {}
        self.qmp: dict[int, dict[str, Any]] = {}
        self.ethtool: dict[str, dict[str, int]] = {}


class RecordingRoot:
    """A HostRoot that passes questions on and keeps the answers."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self.recording = Recording()

    def read(self, path: str) -> str:
        return self._keep(path, self._root.read, self.recording.texts)

    @property
    def owners_told(self) -> bool:
        return self._root.owners_told

    def listdir(self, path: str, most: int | None = None) -> list[str]:
        def ask(path: str) -> list[str]:
            return self._root.listdir(path, most)

        return self._keep(path, ask, self.recording.listings)

    def stat(self, path: str, *, follow: bool = True) -> FileStat:
        def ask(path: str) -> list[int]:
            found = self._root.stat(path, follow=follow)
            return [found.uid, found.mode, found.dev, found.ino]

        return FileStat(*self._keep(path, ask, self.recording.stats))

    def readlink(self, path: str) -> str:
        return self._keep(path, self._root.readlink, self.recording.links)

    def exists(self, path: str) -> bool:
        found = self._root.exists(path)
        if found:
            self.recording.present[path] = True
        else:
            self.recording.errors[path] = "ENOENT"
        return found

    def processes(self) -> list[tuple[str, int]]:
        found = self._root.processes()
        self.recording.listings["/proc"] = [name for name, _ in found]
        return found

    def link_count(self, path: str) -> int:
        return self._root.link_count(path)

    def sched_attr(self, tid: int) -> Sched:
        self.recording.sched[tid] = self._root.sched_attr(tid)
        return self.recording.sched[tid]

    def ethtool_statistics(self, device: str) -> dict[str, int]:
        self.recording.ethtool[device] = self._root.ethtool_statistics(device)
        return self.recording.ethtool[device]

    def qmp_vcpus(self, pid: int, socket: str, timeout: float) -> dict[int, int]:
        try:
            vcpus = self._root.qmp_vcpus(pid, socket, timeout)
        except ObserveError as error:
            self.recording.qmp[pid] = {"error": error.what}
            raise
        self.recording.qmp[pid] = {"vcpus": {str(i): tid for i, tid in vcpus.items()}}
        return vcpus

    def _keep(self, path: str, ask: Callable[[str], T], answers: dict[str, T]) -> T:
        try:
            answer = ask(path)
        except OSError as error:
            self.recording.errors[path] = errno.errorcode.get(error.errno or 0, "EIO")
            raise
        answers[path] = answer
        return answer


class RecordingVirt:
    """A VirtSource that passes the question on and keeps the answer."""

    def __init__(self, virt: VirtSource) -> None:
        self._virt = virt
        self.recorded = RecordedDomains(None, ())

    def domains(self) -> tuple[DomainText, ...]:
        try:
            domains = self._virt.domains()
        except ObserveError as error:
            self.recorded = RecordedDomains(str(error), ())
            raise
        self.recorded = RecordedDomains(None, domains)
        return domains

    def domain(self, name: str) -> DomainText | None:
        return self._virt.domain(name)


class Redactor:
    """Replaces UUIDs, and MAC addresses that are not locally made (02:...), by others:
    the same by the same within one recording."""

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
    directory: Path, uri: str = DEFAULT_URI, *, trace_seconds: float = 0.0, note: str = ""
) -> Snapshot:
    """Record this host in ``directory``, which must be new or empty.

    ``trace_seconds`` traces first, so that the recording remembers which worker
    serves which interface. ``note`` goes to the NOTE file. Returns what the
    recorded host shows, which is also in ``snapshot.json``. Raises VsrtuneError
    when the directory is in use, cannot be written, or does not replay.
    """
    with contextlib.suppress(FileNotFoundError):
        if any(directory.iterdir()):
            raise VsrtuneError(
                "the directory is not empty", where=str(directory), hint="name a new one"
            )
    if trace_seconds > 0:
        live_observer(uri).observe(trace_seconds)
    root = RecordingRoot(LiveRoot())
    virt = RecordingVirt(LibvirtSource(uri))
    memory = SeenMemory()
    # Processes that are not believed have no part in anything, and none in a recording.
    live = replace(Observer(root, virt, memory).observe(), strangers=())
    redact = Redactor(os.urandom(16))
    root.recording.texts[str(DEFAULT_PATH)] = json.dumps(encode(memory.seen))
    prune(root.recording)
    try:
        write(directory, root.recording, virt.recorded, redact)
        (directory / NOTE).write_text(_note(live, note), "utf-8")
        replayed = replay(directory)
        (directory / SNAPSHOT).write_text(replayed.to_json() + "\n", "utf-8")
    except OSError as error:
        raise VsrtuneError(
            f"cannot record: {error.strerror}", where=str(error.filename or directory)
        ) from error
    if replayed.to_json() != redact(live.to_json()):
        raise VsrtuneError(
            "the recording shows something else than the host did",
            where=str(directory),
            hint="please report this, with the recording",
        )
    return replayed


def replay(directory: Path, scope: Scope | None = None) -> Snapshot:
    """Observe a recorded host. ``scope`` says whose plain QEMUs may be guests: root's without."""
    root = DirRoot(directory)
    return Observer(root, RecordedVirt(root), scope=lambda: scope or Scope()).observe()


def prune(recording: Recording) -> None:
    """Drop what does not change the observation: other processes, a QEMU's other
    descriptors and arguments, interrupts of other devices."""
    kept = _processes_used(recording)
    every: tuple[dict[str, Any], ...] = (
        recording.texts,
        recording.listings,
        recording.links,
        recording.errors,
        recording.stats,
    )
    foreign = [
        path
        for answers in every
        for path in answers
        if (match := _PROCESS.fullmatch(path)) is not None and match[1] not in kept
    ]
    for path in foreign:
        for answers in every:
            answers.pop(path, None)
    if "/proc" in recording.listings:
        recording.listings["/proc"] = sorted(kept, key=int)
    for path, names in recording.listings.items():
        if path.endswith("/fd") and path.startswith("/proc/"):
            recording.listings[path] = [n for n in names if _matters(recording, f"{path}/{n}")]
    for path, text in recording.texts.items():
        if path.startswith("/proc/") and path.endswith("/cmdline"):
            argv = text.removesuffix("\0").split("\0")
            if PurePosixPath(argv[0]).name not in DAEMONS:
                argv = essential(argv)
            recording.texts[path] = "".join(f"{argument}\0" for argument in argv)
    _prune_interrupts(recording)
    _prune_books(recording)


def _processes_used(recording: Recording) -> set[str]:
    """QEMUs, kernel threads that were looked at closely, and known daemons."""
    used = set()
    for path, text in recording.texts.items():
        match = _PROCESS.fullmatch(path)
        if match is None or not path.endswith("/stat") or "/task/" in path:
            continue
        comm = parse_stat(text).comm
        read = f"/proc/{match[1]}/cmdline" in recording.texts
        close = f"/proc/{match[1]}/task/{match[1]}/stat" in recording.texts
        ours = napi_device(comm) in recording.ethtool
        if read or close or ours or comm in DAEMONS:
            used.add(match[1])
    return used


def _matters(recording: Recording, path: str) -> bool:
    link = recording.links.get(path, "")
    if MACVTAP_FD.fullmatch(link) or link in (TUN_FD, VHOST_NET_FD, *OTHER_VHOST_FDS):
        return True
    recording.links.pop(path, None)
    recording.errors.pop(path, None)
    return False


def _prune_books(recording: Recording) -> None:
    """The scheduler's state names every task that runs; only the books are needed."""
    text = recording.texts.get(BOOKS)
    if text is not None:
        recording.texts[BOOKS] = "".join(f"{line}\n" for line in book_lines(text))


def _prune_interrupts(recording: Recording) -> None:
    text = recording.texts.get("/proc/interrupts")
    if text is None:
        return
    used = {p.split("/")[3] for p in recording.texts if p.startswith("/proc/irq/")}
    lines = text.splitlines(keepends=True)
    recording.texts["/proc/interrupts"] = "".join(
        line
        for number, line in enumerate(lines)
        if number == 0 or ((m := _INTERRUPT.match(line)) is not None and m[1] in used)
    )


def prune_xml(text: str) -> str:
    """A domain XML with the parts that readers use. Raises ET.ParseError."""
    tree = ET.fromstring(text)
    kept = ET.Element(tree.tag, tree.attrib)
    kept.extend(part for part in tree if part.tag in _DOMAIN_PARTS)
    # Others' metadata is nobody's business; ours says which pins the guest brought.
    ET.SubElement(kept, "metadata").extend(ours_in(tree))
    devices = ET.SubElement(kept, "devices")
    for interface in tree.iterfind("./devices/interface"):
        element = ET.SubElement(devices, "interface", interface.attrib)
        element.extend(part for part in interface if part.tag in _INTERFACE_PARTS)
    ET.indent(kept)
    return ET.tostring(kept, encoding="unicode") + "\n"


def write(
    directory: Path,
    recording: Recording,
    domains: RecordedDomains,
    redact: Callable[[str], str],
) -> None:
    """Write a tree that DirRoot reads. Raises OSError."""
    for path, text in recording.texts.items():
        _write(directory, redact(path), redact(text))
    for tid, sched in recording.sched.items():
        if any(f"/task/{tid}/" in path for path in recording.texts):
            _write(directory, f"/sched_attr/{tid}.json", json.dumps(encode(sched)) + "\n")
    for device, statistics in recording.ethtool.items():
        _write(directory, f"/ethtool/{device}.json", json.dumps(statistics, indent=1) + "\n")
    for pid, answer in recording.qmp.items():
        _write(directory, f"/qmp/{pid}.json", redact(json.dumps(answer)) + "\n")
    bare = RecordedDomains(
        domains.error,
        tuple(replace(d, live_xml="") for d in domains.domains),
    )
    _write(directory, "/libvirt/domains.json", redact(_pretty(encode(bare))))
    for number, domain in enumerate(domains.domains):
        _write(directory, f"/libvirt/{number}.xml", redact(prune_xml(domain.live_xml)))
    index: dict[str, dict[str, Any]] = {
        "links": dict(sorted(recording.links.items())),
        "listings": dict(sorted(recording.listings.items())),
        "errors": dict(sorted(recording.errors.items())),
        "present": dict(sorted(recording.present.items())),
        "stats": dict(sorted(recording.stats.items())),
    }
    _write(directory, f"/{INDEX}", redact(_index_text(index)))


def _index_text(index: dict[str, dict[str, Any]]) -> str:
    """JSON with one path a line, so that recordings can be compared."""
    parts = []
    for name, answers in index.items():
        lines = ",\n".join(f"  {_json(path)}: {_json(answer)}" for path, answer in answers.items())
        parts.append(f"{_json(name)}: {{\n{lines}\n}}" if lines else f"{_json(name)}: {{}}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _pretty(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"


def _write(directory: Path, path: str, text: str) -> None:
    file = directory / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode("utf-8", "backslashreplace"))


def _note(snapshot: Snapshot, note: str) -> str:
    host = snapshot.host
    guests = ", ".join(f"{g.ref} ({len(g.interfaces)} NICs)" for g in snapshot.guests) or "none"
    lines: Iterable[str] = (
        note or "A recorded host.",
        "",
        f"Kernel: {host.kernel}",
        f"Machine: {platform.machine()}, CPUs {host.online}",
        f"Guests: {guests}",
        f"Recorded by: vsrtune {vsrtune.__version__}",
        "",
        "Redactions: UUIDs and the boot id are replaced by others, and so are MAC addresses",
        "that do not begin with 02:; of command lines and domain XML only what names the",
        "guest, its monitors and its NICs is kept; processes, descriptors and interrupts that",
        "have no part in the observation are left out. Names of guests, devices and cgroups",
        "and the paths of monitor sockets are as they were.",
    )
    return "\n".join(lines) + "\n"
