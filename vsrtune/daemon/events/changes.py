# SPDX-License-Identifier: GPL-2.0-or-later
"""Changes of what vsrtune set, told by the kernel when they happen, with the process that makes
them.

The kernel's entry points of such changes get kprobes. Their events go to a tracefs instance of this
process, so the tracing of others stays as it is, and nothing runs while nobody changes anything.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import platform
import re
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from vsrtune.daemon.events.kernel import whose
from vsrtune.daemon.events.thread import Background
from vsrtune.daemon.scope import FULL, Scope
from vsrtune.daemon.systemd import LOGGER
from vsrtune.host.filesystem import unified_cgroup
from vsrtune.host.procfs import parse_status_uids
from vsrtune.model.host import release_of
from vsrtune.model.plan import Culprit, Place
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import NapiThreaded, RealtimeLimit, RrTimeslice, TxQueueLen
from vsrtune.observe.tracing import TRACEFS, read_file, write_file

_INSTANCE = "vsrtune-changes-"
_GROUP = re.compile(r"p\S*:vsrtune_(\d{1,10})/(\w+)\s")
# The size of the buffer of each CPU in KiB, about a hundred events.
_BUFFER = 16
# A program sets several settings in a row, and one read gives a page. Whoever calls the kernel in a
# loop fills the buffers and must not keep the daemon busy; the checks find what is lost.
_BATCH, _BURST, _MANY = 0.005, 0.5, 24
_TURN = 1.0
_MOST = 1 << 16
# A filter is at most a page (event_filter_write); a range takes up to 44 characters of it.
_RANGES = 64

# Where struct pt_regs has the first and second argument of a system call (syscall wrappers of
# arch/*/include/asm/syscall_wrapper.h).
_REGISTERS = {"x86_64": ("x64", 112, 104), "aarch64": ("arm64", 0, 8)}
# struct net_device began with the name until 6.8.
_NAME_FIRST = (6, 8)


@dataclass(frozen=True, slots=True)
class Probe:
    """One kprobe: its event, the kernel function, what it records beside the caller, and which
    of that is kept."""

    event: str
    function: str
    arguments: str = ""
    only: str = ""


def probes(machine: str, release: tuple[int, int]) -> Iterator[Probe]:
    """The kprobes for a machine of this architecture and kernel release. Without a known
    architecture, changes of threads are missing."""
    if machine in _REGISTERS:
        wrapper, first, second = _REGISTERS[machine]
        for event, call in (
            ("affinity", "sched_setaffinity"),
            ("class", "sched_setscheduler"),
            ("parameters", "sched_setparam"),
            ("attributes", "sched_setattr"),
        ):
            yield Probe(event, f"__{wrapper}_sys_{call}", f"tid=+{first}($arg1):s32")
        yield Probe(
            "nice",
            f"__{wrapper}_sys_setpriority",
            f"which=+{first}($arg1):s32 tid=+{second}($arg1):s32",
            "which == 0",
        )
    name = "+0($arg1):string" if release < _NAME_FIRST else "dev->name:string"
    yield Probe("queue", "dev_change_tx_queue_len", f"device={name}")
    yield Probe("threaded", "dev_set_threaded", f"device={name}")
    yield Probe("irq", "irq_set_affinity", "irq=$arg1:u32")
    for event in _OF_HOST:
        yield Probe(event, f"sched_{event}_handler", "write=$arg2:s32", "write == 1")


# Of the threads that events name, what may have changed.
_OF_THREADS = {
    "affinity": "cpus",
    "class": "scheduler",
    "parameters": "scheduler",
    "attributes": "scheduler",
    "nice": "scheduler",
    "cgroup_attach_task": "cpus",
}
_OF_DEVICES = {"queue": TxQueueLen.kind, "threaded": NapiThreaded.kind}
_OF_HOST = {"rr": RrTimeslice.kind, "rt": RealtimeLimit.kind}

# The kernel writes the name of the task, which another tracer may have recorded, and a dash. A name
# has 15 characters at most: none can imitate all of the rest.
_LINE = re.compile(
    r".{0,40}?-(\d{1,10})\s+(?:\([-\d ]+\) )?\[\d+\]\s+\S+\s+(\d+\.\d+): (\w+): (.*)"
)
# An instance inherits the options of the top level, which another tracer may have changed. These
# make lines of that form. The process in parentheses stays where it is recorded (record-tgid): the
# kernel would take it from the events of all instances (trace_event_enable_tgid_record).
_OPTIONS = ("nolatency-format", "context-info", "irq-info", "nofields", "noraw", "nohex", "nobin")
_NUMBER = re.compile(r"\b(?:tid|pid|irq)=(\d{1,10})(?: |$)")
_DEVICE = re.compile(r'\bdevice="([^"/\s]{1,15})"')
_COMM = re.compile(r' comm="([^"]{0,15})')


@dataclass(frozen=True, slots=True)
class Seen:
    """An event: when it was, in seconds of the monotonic clock; the thread that caused it and
    the name it had; and what is changed."""

    when: float
    tid: int
    comm: str
    place: Place


def parse(line: str) -> Seen | None:
    """The event of one line of a trace; None for a line that is none of ours."""
    found = _LINE.match(line)
    if found is None:
        return None
    event, rest = found[3], found[4]
    number, device, comm = _NUMBER.search(rest), _DEVICE.search(rest), _COMM.search(rest)
    place: Place
    if event in _OF_THREADS and number is not None:
        place = _OF_THREADS[event], int(number[1])
    elif event in _OF_DEVICES and device is not None:
        place = _OF_DEVICES[event], device[1]
    elif event == "irq" and number is not None:
        place = "irq", int(number[1])
    elif event in _OF_HOST:
        place = _OF_HOST[event], ""
    else:
        return None
    return Seen(float(found[2]), int(found[1]), comm[1] if comm is not None else "", place)


def places(snapshot: Snapshot) -> dict[Place, Scope]:
    """What the policies of a snapshot's guests may set, and what to read again when somebody
    else sets it."""
    found: dict[Place, Scope] = {(kind, ""): FULL for kind in _OF_HOST.values()}
    for nic in snapshot.host.nics:
        found |= {("irq", irq.number): FULL for irq in nic.irqs}
        found |= {("cpus", t.key.tid): FULL for t in nic.napi}
        found |= {("scheduler", t.key.tid): FULL for t in nic.napi}
    for soft in snapshot.host.softirq:
        found["scheduler", soft.key.tid] = FULL
    for guest in snapshot.guests:
        scope = whose(guest)
        for thread in guest.threads:
            found["cpus", thread.key.tid] = found["scheduler", thread.key.tid] = scope
        for device in guest.passed:
            found |= {("irq", irq.number): scope for irq in device.irqs}
        for interface in guest.interfaces:
            for setting in _OF_DEVICES.values():
                found[setting, interface.target] = scope
    return found


def thread_filter(tids: Iterable[int], field: str) -> str:
    """A filter of events that lets threads pass, and as few others as its length permits: ranges
    with the widest gaps between them."""
    known = sorted(set(tids))
    if not known:
        return f"{field} < 0"
    gaps = sorted(range(1, len(known)), key=lambda i: known[i] - known[i - 1])[-(_RANGES - 1) :]
    cuts = [0, *sorted(i for i in gaps if known[i] - known[i - 1] > 1), len(known)]
    ranges = [(known[a], known[b - 1]) for a, b in itertools.pairwise(cuts)]
    return " || ".join(f"({field} >= {low} && {field} <= {high})" for low, high in ranges)


@dataclass(frozen=True, slots=True)
class Change:
    """A change that is none of this process's: what is changed, who did it, and what to read
    again."""

    place: Place
    culprit: Culprit
    scope: Scope


_REMEDY = (
    ". Mount tracefs, and see whether the kernel is locked down (/sys/kernel/security/lockdown)"
)


class ChangeEvents(Background):
    """Listens from ``start`` to ``stop``, and removes its probes at the end: join it.

    ``snapshot`` returns the latest snapshot. ``changed`` is called from this thread. ``watching``
    says whether threads are watched.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot | None],
        changed: Callable[[Change], None],
        tracefs: str = TRACEFS,
    ) -> None:
        super().__init__("change-events")
        self._snapshot = snapshot
        self._changed = changed
        self._tracefs = tracefs
        self._places: tuple[Snapshot | None, Mapping[Place, Scope]] = (None, {})
        self._filtered: frozenset[int] | None = None
        self.watching = threading.Event()
        # Whether the kernel does not tell of some settings of the host.
        self.missing = False

    def run(self) -> None:
        """Listen. Where the kernel refuses, say so once: the checks find the changes then."""
        with contextlib.ExitStack() as stack:
            try:
                remove_stale(self._tracefs)
                stack.callback(remove, self._tracefs, os.getpid())
                pipe = self._open()
                stack.callback(os.close, pipe)
            except OSError as error:
                LOGGER.warning(
                    "changes by other programs are not noticed at once: %s: %s; they are found "
                    "within a minute, without who made them%s",
                    error.filename or self._tracefs,
                    error.strerror,
                    "" if error.errno == errno.EOPNOTSUPP else _REMEDY,
                )
                return
            self.watching.set()
            stack.callback(self.watching.clear)
            self._listen(pipe)

    def _open(self) -> int:
        if platform.machine() not in _REGISTERS:
            # Half of it would make the checks rare.
            what = f"the registers of {platform.machine()} are not known"
            raise OSError(errno.EOPNOTSUPP, what, "kprobes")
        pid = os.getpid()
        instance = _instance(self._tracefs, pid)
        with _nameless(f"{self._tracefs}/trace_options"):
            os.mkdir(instance)
        for option in _OPTIONS:
            with contextlib.suppress(OSError):  # before 6.4 there is no "fields"
                write_file(f"{instance}/trace_options", option)
        for file, text in (
            ("buffer_size_kb", str(_BUFFER)),
            ("trace_clock", "mono"),
            # Wake the reader for every event.
            ("buffer_percent", "0"),
        ):
            write_file(f"{instance}/{file}", text)
        for probe in probes(platform.machine(), release_of(platform.release())):
            try:
                self._add(pid, probe)
                events = f"{instance}/events/vsrtune_{pid}/{probe.event}"
                if probe.only:
                    write_file(f"{events}/filter", probe.only)
                write_file(f"{events}/enable", "1")
            except OSError as error:
                if probe.event in _OF_THREADS:
                    raise
                # What it would tell is also found by a check, which then has to come often.
                self.missing = True
                LOGGER.warning("no kprobe at %s: %s; files are read for it", probe.function, error)
        write_file(f"{instance}/events/cgroup/cgroup_attach_task/enable", "1")
        return os.open(f"{instance}/trace_pipe", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def _add(self, pid: int, probe: Probe) -> None:
        definition = f"p:vsrtune_{pid}/{probe.event} {probe.function} {probe.arguments}"
        write_file(f"{self._tracefs}/kprobe_events", f"{definition} comm=$comm\n", os.O_APPEND)

    def _listen(self, pipe: int) -> None:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while not self._stopping.is_set():
            self._filter()
            if not poll.poll(_TURN * 1000):
                continue
            lines = _read(pipe).split("\n")
            self._hear(lines)
            self._stopping.wait(_BURST if len(lines) > _MANY else _BATCH)

    def _filter(self) -> None:
        """Have the kernel tell of the threads of the latest snapshot alone."""
        tids = frozenset(n for kind, n in self._of() if kind == "scheduler" and isinstance(n, int))
        if tids == self._filtered:
            return
        self._filtered = tids
        events = f"{_instance(self._tracefs, os.getpid())}/events"
        for event in _OF_THREADS:
            attach = event == "cgroup_attach_task"
            where = f"cgroup/{event}" if attach else f"vsrtune_{os.getpid()}/{event}"
            text = thread_filter(tids, "pid" if attach else "tid")
            only = f"which == 0 && ({text})" if event == "nice" else text
            with contextlib.suppress(OSError):
                write_file(f"{events}/{where}/filter", only)

    def _hear(self, lines: Iterable[str]) -> None:
        for line in lines:
            seen = parse(line)
            scope = self._of().get(seen.place) if seen is not None else None
            if seen is None or scope is None or os.path.exists(f"/proc/self/task/{seen.tid}"):
                continue
            who = culprit(seen)
            if who is not None:
                self._changed(Change(seen.place, who, scope))

    def _of(self) -> Mapping[Place, Scope]:
        snapshot = self._snapshot()
        if snapshot is not None and self._places[0] is not snapshot:
            self._places = snapshot, places(snapshot)
        return self._places[1]


def culprit(seen: Seen) -> Culprit | None:
    """Who caused an event; None for somebody whom the kernel refuses the change, because he is
    neither root nor the thread's owner (check_same_owner): it tells of the call before it judges.
    None, too, for a user in another network, whose device is another one. Of a thread that has
    ended meanwhile only its own id and name are known."""
    tid = seen.tid
    try:
        cgroup = unified_cgroup(_text(tid, "cgroup"))
        status = _text(tid, "status")
        group = re.search(r"^Tgid:\s*(\d+)$", status, re.MULTILINE)
        _, user, _ = parse_status_uids(status)
        if user and seen.place[0] in _OF_THREADS.values():
            real, effective, _ = parse_status_uids(_text(int(seen.place[1]), "status"))
            if user not in (real, effective):
                return None
        elif user and seen.place[0] in _OF_DEVICES.values() and _network(tid) != _network():
            # In a network of his own a user has devices of any name.
            return None
    except (OSError, ValueError):
        return Culprit(tid, seen.comm, when=seen.when)
    # The first unit is systemd's; in its own a user makes others of any name.
    units = (part for part in cgroup.split("/") if part.endswith((".service", ".scope")))
    return Culprit(int(group[1]) if group else tid, seen.comm, next(units, ""), seen.when)


def _network(tid: int | None = None) -> str:
    """The network namespace of a thread, or of this process."""
    return os.readlink(f"/proc/{'self' if tid is None else tid}/ns/net")


def _text(tid: int, name: str) -> str:
    with open(f"/proc/{tid}/{name}", encoding="utf-8", errors="replace", newline="\n") as file:
        return file.read(_MOST)


def remove_stale(tracefs: str = TRACEFS) -> None:
    """Remove what a daemon left that was killed. Raises OSError without tracefs."""
    names = os.listdir(f"{tracefs}/instances")
    pids = {n.removeprefix(_INSTANCE) for n in names if n.startswith(_INSTANCE)}
    pids |= {pid for pid, _ in _defined(tracefs)}
    for pid in pids:
        if pid.isdecimal() and (int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}")):
            try:
                remove(tracefs, int(pid))
            except OSError as error:
                # Somebody reads its instance. It is in the way of no other.
                LOGGER.warning("%s: %s", error.filename, error.strerror)


def remove(tracefs: str, pid: int) -> None:
    """Remove the instance of a process, which disables its events, and then its probes."""
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(_instance(tracefs, pid))
    for owner, event in _defined(tracefs):
        if owner == str(pid):
            write_file(f"{tracefs}/kprobe_events", f"-:vsrtune_{pid}/{event}\n", os.O_APPEND)


@contextlib.contextmanager
def _nameless(options: str) -> Iterator[None]:
    """Instances made meanwhile do not record the names of tasks, for which the kernel would hook
    every context switch. They inherit this from the top level, which alone has the option
    (TOP_LEVEL_TRACE_FLAGS)."""
    recording = "record-cmd" in read_file(options).split()
    if recording:
        write_file(options, "norecord-cmd")
    try:
        yield
    finally:
        if recording:
            write_file(options, "record-cmd")


def _instance(tracefs: str, pid: int) -> str:
    return f"{tracefs}/instances/{_INSTANCE}{pid}"


def _defined(tracefs: str) -> list[tuple[str, str]]:
    """The probes of all daemons: process and event."""
    lines = read_file(f"{tracefs}/kprobe_events").splitlines()
    return [(m[1], m[2]) for m in map(_GROUP.match, lines) if m is not None]


def _read(pipe: int) -> str:
    try:
        return os.read(pipe, _MOST).decode(errors="replace")
    except BlockingIOError:
        return ""
