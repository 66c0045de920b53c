# SPDX-License-Identifier: GPL-2.0-or-later
"""Keeps multistage routers whole: watches their guests, and gives balancers other rules.

A thread of the daemon samples the devices of groups whose file has ``health``, every EVERY
seconds, with more than MANY of them less often, and applies the rule of group/health.py. It reads
counters of the kernel module alone, asks neither libvirt nor a guest, and waits for nobody. A
balancer whose rules are not those that the rule wants loads them in a thread of its own, one at a
time, through its guest agent; that may hang or fail. Where it fails, the log says what an operator
has to load.

The daemon's passes know nothing of this, and it nothing of them but the snapshot, which tells on
what device a balancer stands outside.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vsrtune.attach.host import LiveHost
from vsrtune.attach.ledger import GROUP, ORIGIN, STEP
from vsrtune.attach.plan.steps import MsrRole, Origin
from vsrtune.attach.survey import known_origins, survey
from vsrtune.core.codec import decode
from vsrtune.core.errors import VsrtuneError, WriteError, each
from vsrtune.core.retry import Pause, SaidOnce
from vsrtune.daemon.events.thread import Sampler
from vsrtune.daemon.guest_agent import GuestAgent
from vsrtune.daemon.systemd import LOGGER, fields
from vsrtune.execute.ledger import read_pending
from vsrtune.group import health
from vsrtune.group.health import Fault, Health, HealthCheck, Look
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.libvirt import Connection
from vsrtune.model.daemon_state import GroupGuest
from vsrtune.model.guest import NicKind
from vsrtune.model.module_counters import parse as parse_counters
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.config_files import files_in, read_text

# What only hosts with such groups need is imported late: the daemon starts without.
if TYPE_CHECKING:
    from vsrtune.group.msr_rules import Rulebook
    from vsrtune.group.parser import Group

# Seconds between two samples, and between looks at the ledger and the group files.
EVERY, REFRESH = 0.25, 5.0
MANY = 100
# Seconds until rules are loaded again that do not make the balancer forward.
RELOAD = 30.0
GROUPS_PATH = Path("/run/vsrtune/groups.json")

# Has a balancer load the rules for routers, both by name, and returns once it has.
Load = Callable[[str, str, tuple[str, ...]], None]


class RuleLoader:
    """Loads rules through guest agents. Several threads may call it, for a balancer each."""

    def __init__(self, uri: str, ledger: Path, journal: Path) -> None:
        self._uri = uri
        self._ledger = ledger
        self._journal = journal
        self._host = LiveHost(uri, files=False)
        # By group: the rules, and the ledger that they are of. Surveys take long on large hosts.
        self._books: dict[str, tuple[object, Rulebook]] = {}
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}

    def __call__(self, group: str, balancer: str, routers: tuple[str, ...]) -> None:
        """Have the balancer load the rules for these routers and list them. Raises
        VsrtuneError."""
        from vsrtune.group.msr_rules import choosers

        agent = self._agent(group, balancer)
        called = agent.interfaces()
        with self._lock:
            book = self._book(group)
        without = [r for r in book.routers if r not in routers]
        try:
            rules = book.text(balancer, len(book.routers), without, called)
        except VsrtuneError:
            # Somebody has given the balancer another interface.
            self._books.pop(group, None)
            raise
        agent.run(("nft", "-f", "-"), rules)
        listed = agent.run(("nft", "list", "table", "netdev", f"vsrtune_{group}"))
        if choosers(listed) != choosers(rules):
            raise WriteError("it lists other rules than it was given", where=balancer)

    def _book(self, group: str) -> Rulebook:
        from vsrtune.group.msr_rules import of_group

        state = _changed(self._ledger)
        known = self._books.get(group)
        if known is None or known[0] != state:
            found = survey(self._host, known_origins(self._ledger), self._journal)
            known = state, of_group(group, None, found)
            self._books[group] = known
        return known[1]

    def _agent(self, group: str, balancer: str) -> GuestAgent:
        uuid = next(
            o.uuid for o in known_origins(self._ledger) if o.group == group and o.guest == balancer
        )
        if balancer not in self._connections:
            self._connections[balancer] = Connection(self._uri, WriteError)
        return GuestAgent(self._connections[balancer], uuid, balancer)


class _Balancer:
    """A balancer, and the rules that it has loaded as far as the daemon knows."""

    def __init__(self, group: str, name: str, routers: tuple[str, ...], load: Load) -> None:
        self._group = group
        self._name = name
        self._routers = routers
        self._load = load
        self._loaded: tuple[str, ...] | None = None
        self._pause = Pause()
        self._thread: threading.Thread | None = None
        # The rules of the last attempt, and whether nobody has removed them since.
        self._tried: tuple[str, ...] = ()
        self._kept = True
        self._again = 0.0
        self._since = math.inf
        self._error = ""

    def forget(self) -> None:
        """Its rules are gone, also those that it is loading."""
        self._loaded, self._kept = None, False

    def due(self, now: float, wanted: tuple[str, ...], lacks: bool) -> float:
        """Have it load the rules for the routers ``wanted`` if it is time. Returns for how long it
        has not had what is wanted, in seconds. ``lacks``: it forwards nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._pause = self._pause.longer(now) if self._error else Pause()
            self._loaded = self._tried if self._kept and not self._error else None
            self._again = now + RELOAD
        if lacks and self._thread is None and now >= self._again:
            self._loaded = None
        if self._thread is None and self._loaded != wanted:
            if wanted != self._tried:
                self._pause = Pause()
            if not self._pause.left(now):
                self._tried, self._kept = wanted, True
                self._thread = threading.Thread(target=self._run, name="rules", daemon=True)
                self._thread.start()
        self._since = now if self._loaded == wanted else min(now, self._since)
        return now - self._since

    @property
    def hint(self) -> str:
        """Why it has not what it was to load, and what an operator can do."""
        without = "".join(f" --without {r}" for r in self._routers if r not in self._tried)
        return (
            f"{self._error or 'no answer yet'}; load in it what this prints: vsrtune group rules "
            f"{self._group} {self._name}{without}"
        )

    def _run(self) -> None:
        begin = time.monotonic()
        try:
            self._load(self._group, self._name, self._tried)
        except Exception as error:
            # Whatever a guest makes of it, an operator hears the reason, and the next try follows.
            self._error = str(error) if isinstance(error, VsrtuneError) else repr(error)
        else:
            self._error = ""
            LOGGER.info(
                "group %s: %s has loaded the rules for %s, in %.1f s",
                self._group, self._name, ", ".join(self._tried), time.monotonic() - begin,
                extra=fields(group=self._group, guest=self._name),
            )  # fmt: skip


class _Group:
    """A group that is watched. ``origins`` are its devices."""

    def __init__(self, name: str, origins: tuple[Origin, ...], load: Load) -> None:
        self.origins = origins
        self._name = name
        self._health = Health()
        self._outside: health.Samples = ()
        self._begin = math.inf
        self._devices: dict[MsrRole, dict[str, list[Origin]]] = {role: {} for role in MsrRole}
        for origin in origins:
            if origin.guest and origin.stage is not None:
                self._devices[origin.stage.role].setdefault(origin.guest, []).append(origin)
        routers = tuple(self._devices[MsrRole.ROUTER])
        self._balancers = {
            guest: _Balancer(name, guest, routers, load)
            for guest in self._devices[MsrRole.BALANCER]
        }
        self._told: dict[str, GroupGuest] = {}

    def step(
        self, now: float, check: HealthCheck, root: HostRoot, snapshot: Snapshot | None
    ) -> Iterator[GroupGuest]:
        """Take a sample, and do what follows from it. Yields the routers and balancers as they
        are now."""
        try:
            looks = {g: _look(root, of) for g, of in self._devices[MsrRole.ROUTER].items()}
            ends = {
                name: replace(_look(root, of), arrived=_from_outside(root, of, snapshot))
                for name, of in self._devices[MsrRole.BALANCER].items()
            }
        except OSError:
            yield from self._told.values()
            return
        self._health = health.update(self._health, now, looks, check)
        for router, record in self._health.routers.items():
            fault = self._health.faults.get(router)
            kept = fault is not None and record.fault is None
            hint = "it stays in the rules, because too few others are better" if kept else ""
            yield self._state(router, MsrRole.ROUTER, fault.value if fault else "", hint)
        self._outside = health.remembered(self._outside, now, ends, check)
        self._begin = min(now, self._begin)
        # The first rules, too, are without a router that hangs, and wait until one is there.
        judged = now - self._begin >= check.leave / 2 and bool(self._health.used)
        for name, balancer in self._balancers.items():
            wrong = health.balancer_fault(name, self._outside, check)
            lacks = wrong is Fault.SILENT
            if wrong is Fault.UNPLUGGED:
                balancer.forget()
                yield self._state(name, MsrRole.BALANCER, wrong.value, f"virsh start {name}")
            elif judged and balancer.due(now, self._health.used, lacks) > check.leave:
                yield self._state(name, MsrRole.BALANCER, "rules due", balancer.hint)
            else:
                yield self._state(name, MsrRole.BALANCER, wrong.value if wrong else "")

    def _state(self, guest: str, role: MsrRole, fault: str, hint: str = "") -> GroupGuest:
        before = self._told.get(guest) or GroupGuest(self._name, guest, role.value)
        now = replace(before, fault=fault, hint=hint)
        if fault != before.fault:
            now = replace(now, since=time.time(), faults=before.faults + bool(fault))
            level = logging.WARNING if fault else logging.INFO
            LOGGER.log(
                level, "group %s: %s %s%s", self._name, guest, _MEANS[role, fault],
                f"; {hint}" if hint else "",
                extra=fields(group=self._name, guest=guest, fault=fault or None),
            )  # fmt: skip
        self._told[guest] = now
        return now


# What happens because of a fault, or without one.
_MEANS = {
    (MsrRole.ROUTER, "unplugged"): "does not run, or is drained; its flows go to the others",
    (MsrRole.ROUTER, "stalled"): "takes no frames; its flows go to the others",
    (MsrRole.ROUTER, "silent"): "takes frames and forwards none; its flows go to the others",
    (MsrRole.ROUTER, "slow"): "loses most of what comes for it; its flows go to the others",
    (MsrRole.ROUTER, ""): "gets frames again",
    (MsrRole.BALANCER, "unplugged"): "does not run, so its sides forward nothing",
    (MsrRole.BALANCER, "stalled"): "takes no frames, so its sides forward nothing",
    (MsrRole.BALANCER, "silent"): "forwards nothing of what comes from outside",
    (MsrRole.BALANCER, "rules due"): "has not loaded its rules",
    (MsrRole.BALANCER, ""): "forwards again, or has its rules",
}


class GroupKeeper(Sampler):
    """Watches from ``start`` to ``stop``. The groups are those that the ledger has as created,
    their files in ``directory``. ``latest`` gives the last snapshot. This thread calls ``tell``
    with the guests of all watched groups when something about them has changed."""

    def __init__(
        self,
        root: HostRoot,
        ledger: Path,
        directory: Path,
        load: Load,
        latest: Callable[[], Snapshot | None],
        tell: Callable[[tuple[GroupGuest, ...]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            "groups",
            "groups are not watched: until a check succeeds, the balancers keep their rules",
        )
        self._root = root
        self._ledger = ledger
        self._directory = directory
        self._load = load
        self._latest = latest
        self._tell = tell
        self._clock = clock
        self._said = SaidOnce()
        self._due = -math.inf
        self._seen: object = None
        self._origins: dict[str, tuple[Origin, ...]] = {}
        self._files: dict[Path, tuple[object, Group | None]] = {}
        self._watched: dict[str, tuple[_Group, HealthCheck]] = {}
        self._told: tuple[GroupGuest, ...] = ()

    def _pause(self) -> float:
        devices = sum(len(group.origins) for group, _ in self._watched.values())
        return EVERY * max(1.0, devices / MANY) if devices else REFRESH

    def update(self) -> None:
        """Sample all watched groups once."""
        now = self._clock()
        if now >= self._due:
            self._due = now + REFRESH
            self._choose()
        snapshot = self._latest()
        told = tuple(
            guest
            for group, check in self._watched.values()
            for guest in group.step(now, check, self._root, snapshot)
        )
        if told != self._told:
            self._told = told
            self._tell(told)

    def _choose(self) -> None:
        """The groups whose file asks for it."""
        try:
            changed = _changed(self._ledger)
            if changed != self._seen:
                self._origins = _created(self._ledger)
                self._seen = changed
            checks = self._asked() if self._origins else {}
        except VsrtuneError as error:
            self._say("groups are watched as before", error)
            return
        finally:
            self._said.end_of_pass()
        watched = {}
        for name, origins in self._origins.items():
            if (check := checks.get(name)) is not None:
                group = self._watched[name][0] if name in self._watched else None
                if group is None or group.origins != origins:
                    group = _Group(name, origins, self._load)
                watched[name] = group, check
        self._watched = watched

    def _say(self, what: str, why: VsrtuneError) -> None:
        for one in each(why):
            if self._said.new(str(one)):
                LOGGER.error("%s: %s", what, one, extra=fields(error=one))

    def _asked(self) -> dict[str, HealthCheck]:
        """What the files of created groups ask for, of a wrong one what it asked for before. Raises
        VsrtuneError."""
        from vsrtune.group.parser import parse

        found = {}
        for path in files_in([self._directory]):
            changed, (known, group) = _changed(path), self._files.get(path, (None, None))
            if changed != known:
                try:
                    group = parse(read_text(path), str(path))
                except VsrtuneError as error:
                    if path.stem in self._origins:
                        how = "as before" if path.stem in self._watched else "not"
                        self._say(f"group {path.stem} is watched {how}", error)
                else:
                    self._files[path] = changed, group
            if group is None or group.health is None or group.name not in self._origins:
                continue
            if group.name == path.stem:
                found[group.name] = group.health
            else:
                hint = f"call the file {group.name}.yaml"
                why = VsrtuneError("its file has another name", where=str(path), hint=hint)
                self._say(f"group {group.name} is not watched", why)
        return found


def _created(ledger: Path) -> dict[str, tuple[Origin, ...]]:
    """The devices of each multistage router whose create is complete. Its GROUP entry counts once
    the steps before it are retired. Raises VsrtuneError."""
    entries = read_pending(ledger)
    begun = min((e.id for e in entries if e.kind == STEP), default=math.inf)
    names = {e.data["name"] for e in entries if e.kind == GROUP and e.id < begun}
    found: dict[str, tuple[Origin, ...]] = {}
    for origin in (decode(Origin, e.data) for e in entries if e.kind == ORIGIN):
        if origin.group in names and origin.stage is not None:
            found[origin.group] = (*found.get(origin.group, ()), origin)
    return found


def _changed(path: Path) -> object:
    """Something that differs after a file was changed or replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _look(root: HostRoot, origins: Iterable[Origin]) -> Look:
    """What the devices of a guest count. One that is gone, or that nobody has open, is
    unplugged. Raises OSError when one changes at every attempt to read it."""
    plugged, stalled, arrived, sent, lost = True, False, 0, 0, 0
    for origin in origins:
        try:
            found = parse_counters(root.ethtool_statistics(origin.device.name))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            found = None
        if found is None or not found.queues:
            plugged = False
            continue
        stalled |= any(q.stalled for q in found.queues)
        arrived += found.rx_received or 0
        lost += found.rx_dropped_ring_full or 0
        sent += sum(n or 0 for n in (found.tx_packets_lower, found.tx_to_sibling, found.tx_dropped))
    return Look(plugged, stalled, arrived, sent, lost)


def _from_outside(root: HostRoot, origins: Sequence[Origin], snapshot: Snapshot | None) -> int:
    """Frames that came to a balancer's macvtaps from outside; 0 where that is not known."""
    lowers = {origin.outside for origin in origins}
    uuid = origins[0].uuid
    total = 0
    for guest in snapshot.guests if snapshot is not None else ():
        for nic in guest.interfaces if guest.uuid == uuid else ():
            if nic.kind is NicKind.MACVTAP and nic.lower[:1] and nic.lower[0] in lowers:
                try:
                    total += int(root.read(f"/sys/class/net/{nic.target}/statistics/rx_packets"))
                except (OSError, ValueError):
                    return 0
    return total
