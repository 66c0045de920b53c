"""What reads what others wrote: one function a kind of input, each fed any bytes.

A target returns, whatever it is given: only the errors that its reader documents are
caught here. tests/unit/project/test_fuzz.py runs them with hypothesis, `make fuzz` with atheris.
``guarded`` makes sure that none of them writes, connects or starts anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from vsrtune.bench.spec import parser as spec
from vsrtune.core import codec
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import JournalError, PolicyError, VsrtuneError
from vsrtune.core.untrusted import json_value, kept
from vsrtune.execute import journal, ledger
from vsrtune.host import kubevirt, qemu_cmdline, qmp
from vsrtune.host.cpus import parse_books
from vsrtune.host.ethtool import parse_statistics
from vsrtune.host.interrupts import parse_counts
from vsrtune.host.libvirt import DomainText
from vsrtune.host.netdev import parse_softnet, parse_uevent
from vsrtune.host.procfs import (
    napi_device,
    parse_cgroup,
    parse_fdinfo_iff,
    parse_stat,
    parse_status_allowed,
    parse_status_uids,
    worker_owner,
)
from vsrtune.host.recorded import Answers, RecordedRoot, load
from vsrtune.host.recorded import parse as parse_recording
from vsrtune.model import domain_xml as interface_xml
from vsrtune.model.guest import Sched
from vsrtune.model.module_counters import parse as parse_counters
from vsrtune.model.plan import read_plan
from vsrtune.observe.observer import Observer
from vsrtune.observe.tracing import TraceMemory, TraceResults, count_by, parse_hist
from vsrtune.plan.planner import plan
from vsrtune.policy.parser import parse as parse_policy

Target = Callable[[bytes], None]

HOST = Path(__file__).resolve().parents[1] / "hosts" / "trixie-veth-multiqueue.json"
POLICIES = Path(__file__).resolve().parents[2] / "policies"
HEADER = json.dumps(journal.header_record("b")).encode() + b"\n"


def text(data: bytes) -> str:
    """As every reader of the host decodes."""
    return data.decode("utf-8", "backslashreplace")


# -- libvirt and QEMU


def domain_xml(data: bytes) -> None:
    with contextlib.suppress(VsrtuneError):
        interface_xml.parse_vcpus(text(data))
        for found in interface_xml.nics(text(data)):
            interface_xml.on_device(found, "nvt0")
            interface_xml.as_direct(found, "p0", "bridge")
            interface_xml.unsupported(found)
            interface_xml.lost(found)
            interface_xml.mode(found)
            interface_xml.differences(found.xml, "<interface/>")
            interface_xml.replaced(text(data), found.mac, found.xml)


def qmp_answer(data: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):  # the library's, of query_vcpus too
        answer = json.loads(data)
        with contextlib.suppress(ValueError):
            qmp.parse_cpus(answer)


def command_line(data: bytes) -> None:
    argv = text(data).split("\0")
    qemu_cmdline.parse(argv)
    qemu_cmdline.parse(qemu_cmdline.essential(argv))


# -- /proc, /sys, tracefs


def stat(data: bytes) -> None:
    with contextlib.suppress(ValueError, IndexError):
        parse_stat(text(data))
    # A thread gives itself its name: parentheses, newlines, anything but NUL.
    name = text(data[:15].replace(b"\0", b""))
    fields = "S 1 0 0 0 -1 64 0 0 0 0 3 2 0 0 20 0 1 0 77" + " 0" * 16 + " 1 0 0 0"
    found = parse_stat(f"7 ({name}) {fields}\n")
    assert (found.tid, found.comm, found.start_time, found.processor) == (7, name, 77, 1)
    worker_owner(name)
    napi_device(name)


def proc_texts(data: bytes) -> None:
    content = text(data)
    for parse in (parse_status_allowed, parse_status_uids, CpuSet.parse, CpuSet.from_mask):
        with contextlib.suppress(VsrtuneError, ValueError):
            parse(content)
    parse_cgroup(content)
    parse_fdinfo_iff(content)
    parse_uevent(content)
    parse_books(content)
    parse_hist(content)
    count_by(content, "common_pid")
    for read in (parse_counts, parse_softnet):
        with contextlib.suppress(ValueError, IndexError):
            read(content)


# -- the kernel's binary answers


def ethtool_statistics(data: bytes) -> None:
    half = len(data) // 16 * 8
    parse_counters(parse_statistics(data[half:], data[:half]))


# -- files


_PLACE = "kubepods/pod0f6c2d1e-7a3b-4c5d-8e9f-0123456789ab/" + "5a" * 32


def container_config(data: bytes) -> None:
    container = kubevirt.container_of(_PLACE)
    assert container is not None
    with contextlib.suppress(ValueError):
        kubevirt.machine_in(container, text(data))
    kubevirt.essential(text(data))


def policy(data: bytes) -> None:
    with contextlib.suppress(PolicyError):
        parse_policy(text(data), "fuzz.yaml")


def bench_spec(data: bytes) -> None:
    with contextlib.suppress(VsrtuneError):
        spec.load_text(text(data), "fuzz.yaml")


def journal_file(data: bytes) -> None:
    for content in (data, HEADER + data):
        with contextlib.suppress(JournalError):
            journal.read(Path("fuzz"), content, "b")


def ledger_file(data: bytes) -> None:
    with contextlib.suppress(VsrtuneError):
        ledger.read(Path("fuzz"), data)


def _json(data: bytes) -> object:
    try:
        return json_value(data)
    except ValueError:
        return None


def json_files(data: bytes) -> None:
    kept(TraceResults("b"), text(data))
    with contextlib.suppress(VsrtuneError):
        read_plan(text(data), "b")
    with contextlib.suppress(VsrtuneError):
        codec.decode(Sched, _json(data))
    with contextlib.suppress(VsrtuneError, ValueError):
        recorded = parse_recording(data)
        Observer(recorded.root(), recorded.virt(), TraceMemory(None)).observe()


# -- a whole host, one of whose files holds something else


class _Changed(RecordedRoot):
    """A recorded host with other content at one path."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self.where = ""
        self.content = b""

    def read(self, path: str) -> str:
        if path == self.where:
            return text(self.content)
        return super().read(path)


class _Domains:
    """libvirt's domains, the XML of each with other content."""

    def __init__(self, domains: tuple[DomainText, ...]) -> None:
        self._domains = domains

    def domains(self) -> tuple[DomainText, ...]:
        return self._domains


_RECORDING = load(HOST)
_ROOT = _Changed(_RECORDING.host)
_PATHS = sorted(p for p in _RECORDING.host.texts if p.startswith(("/proc/", "/sys/")))
_POLICY = parse_policy((POLICIES / "router.yaml").read_text(), "p.yaml")
_DOMAINS = _RECORDING.virt().domains()


def whole_host(data: bytes) -> None:
    """The first two bytes choose the file. What cannot be read is told as a problem; the
    other guests are planned for."""
    _ROOT.where = _PATHS[int.from_bytes(data[:2].rjust(2, b"\0")) % len(_PATHS)]
    _ROOT.content = data[2:]
    snapshot = Observer(_ROOT, _Domains(_DOMAINS), TraceMemory(None)).observe()
    with contextlib.suppress(VsrtuneError):
        plan(snapshot, (_POLICY,))


TARGETS: dict[str, Target] = {
    function.__name__: function
    for function in (
        domain_xml, qmp_answer, command_line, stat, proc_texts, ethtool_statistics,
        container_config, policy, bench_spec, journal_file, ledger_file, json_files, whole_host,
    )
}  # fmt: skip

_INTENT = (
    b'{"r":"intent","action":{"target":{"kind":"txqueuelen","guest":"vr1","device":"macvtap0",'
    b'"ifindex":9},"before":500,"after":300,"reason":"policy"}}\n'
)


def _bytes(path: Path) -> bytes:
    return path.read_bytes()


def _nests(opening: bytes, closing: bytes) -> bytes:
    """Deeper than a recursive reader can follow."""
    return opening * 20_000 + closing * 20_000


# Well-formed inputs to begin from, and the classic traps.
SEEDS: dict[str, tuple[bytes, ...]] = {
    "domain_xml": (
        _DOMAINS[0].live_xml.encode(),
        b'<!DOCTYPE d [<!ENTITY a "aaaaaaaaaa">'
        + b"".join(b'<!ENTITY %c "%s">' % (c, b"&%c;" % (c - 1) * 10) for c in range(98, 107))
        + b"]><domain><name>&j;</name></domain>",
        b"<domain><devices><interface>"
        + _nests(b"<a>", b"</a>")
        + b"</interface></devices></domain>",
    ),
    "qmp_answer": (
        b'[{"cpu-index": 0, "thread-id": 7}, {"cpu-index": 1, "thread-id": 8}]',
        b'[{"cpu-index": Infinity, "thread-id": 1e999}]',
        b'[{"cpu-index": %s, "thread-id": 1}]' % (b"9" * 5000),
        _nests(b"[", b"]"),
    ),
    "command_line": (
        _RECORDING.host.texts[next(p for p in _PATHS if p.endswith("/cmdline"))].encode(),
        b"qemu-system-x86_64\0-name\0x\0-netdev\0tap,id=a,fd=" + b"9" * 5000,
        b"qemu-system-x86_64\0-name\0" + _nests(b'{"a":', b"}"),
    ),
    "stat": (b"x) (y", b") S 1\n2 (", "\u202e\u0000é".encode(), b"\xff\xfe\xfd"),
    "proc_texts": (
        b"Name:\tx\nCpus_allowed_list:\t0-3,7\n",
        b"Cpus_allowed_list: " + b"9" * 5000,
        b"0::/machine.slice/a\n",
        b"{ name: p0, common_pid: " + b"9" * 5000 + b" } hitcount: " + b"9" * 5000,
        b"           CPU0\n " + b"9" * 5000 + b":  1  IO-APIC  2-edge  eth0",
        b"dl_rq[" + b"9" * 5000 + b"]:\n  .dl_bw->total_bw : " + b"9" * 5000 + b"\n",
    ),
    "ethtool_statistics": (struct.pack("=QQ", 1, 2) + b"rx_received".ljust(32, b"\0") * 2,),
    "container_config": (
        b'{"annotations": {"io.kubernetes.cri.sandbox-namespace": "x", '
        b'"io.kubernetes.cri.sandbox-name": "virt-launcher-a-bcdfg", '
        b'"io.kubernetes.cri.container-name": "compute"}, '
        b'"linux": {"cgroupsPath": "/%s"}}' % _PLACE.encode(),
        b'{"annotations": {"a": %s}, "linux": {"cgroupsPath": 1e999}}' % (b"9" * 4000),
        _nests(b"[", b"]"),
    ),
    "policy": (
        _bytes(POLICIES / "router.yaml"),
        b"guest: x\nprofile: none\ncpus: {irq: 0, vcpu: {0: 1}, vhost: auto}\nirq: {set: true}\n",
        b"guest: x\nscheduler:\n  vcpu: {class: rr, priority: 10, slice: 8ms}\n",
        b"a: &a [x,x]\nb: &b [*a,*a]\nguest: *b\n",
        b"guest: x\ncpus: {vcpu: " + b"9" * 5000 + b"}\n",
        b"guest: x\nscheduler: {vcpu: {class: rr, priority: 1, slice: " + b"9" * 400 + b"ms}}\n",
        b"guest: x\nscheduler: {budget: {cpu: " + b"9" * 5000 + b"%, period: 10ms}}\n",
        b'guest: "\\U00110000"\n',
        b'guest: x\ncpus: {vcpu: "' + b"0-8191," * 9000 + b'"}\n',
        b"guest: " + _nests(b"[", b"]")[:60_000],
        b"guest: " + _nests(b"{a: ", b"}")[:60_000],
        b"? " * 30_000,
        b"- " * 30_000,
    ),
    "bench_spec": (b"name: x\ngenerator: {device: g0}\n",),
    "journal_file": (
        _INTENT,
        b'{"r":"lag","seconds":1e999}\n{"r":"lag","seconds":NaN}\n',
        _nests(b"[", b"]") + b"\n",
    ),
    "ledger_file": (
        b'{"add": 1, "kind": "link", "data": {"name": "x"}}\n{"done": [1]}\n',
        b'{"add": Infinity, "kind": "", "data": {}}\n',
        b'[1]\n7\n{"done": 1e999}\n',
        _nests(b"[", b"]") + b"\n",
    ),
    "json_files": (
        b'{"version": 1, "boot_id": "b", "actions": [], "skipped": []}',
        json.dumps(_RECORDING.snapshot).encode(),
        _bytes(HOST),
        _nests(b"[", b"]"),
    ),
    "whole_host": tuple(
        struct.pack(">H", number) + content
        for number in range(0, len(_PATHS), 17)
        for content in (b"", b"9" * 5000, b"\xff(\n)\0x")
    ),
}


# -- nothing is written meanwhile

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = (
    "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "os.system", "os.exec", "os.fork", "os.posix_spawn",
    "os.setxattr", "subprocess.Popen", "socket.connect", "socket.bind", "shutil.rmtree",
)  # fmt: skip
_watching = False
_hooked = False


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if not _watching:
        return
    if event in _CHANGES:
        raise AssertionError(f"{event}{arguments}")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        raise AssertionError(f"open for writing: {arguments}")


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Within, Python's own audit events stop whatever would change the machine."""
    global _watching, _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    _watching = True
    try:
        yield
    finally:
        _watching = False
