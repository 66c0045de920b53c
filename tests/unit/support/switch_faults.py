"""What a switch of any kind of group has to stand: every change of the host fails once, and
once it is killed after every change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from attach_host import BOOT, FakeAttachHost, Killed

from vsrtune.attach.errors import SwitchError
from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.libvirt_hotplug import RefusedError
from vsrtune.attach.plan.model import AttachHostState, Switch
from vsrtune.attach.survey import known_origins
from vsrtune.attach.transaction import Switcher
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute import jsonl_log

Choose = Callable[[AttachHostState], Switch]
# Of the host's log: what the kernel refuses with an errno. The rest is libvirt's.
_KERNELS = ("make", "set", "remove", "queue", "file")


def survey(host: FakeAttachHost, ledger: AttachLedger) -> AttachHostState:
    origins = Switcher(host, ledger, BOOT).origins()
    return AttachHostState(host.guests(), host.links().values(), origins)


def do(
    host: FakeAttachHost,
    path: Path,
    choose: Choose,
    seen: Callable[[FakeAttachHost, AttachLedger], AttachHostState] = survey,
) -> Switch:
    """Carry a switch out, whole."""
    with AttachLedger.open(path) as ledger:
        switch = choose(seen(host, ledger))
        assert Switcher(host, ledger, BOOT).carry_out(switch).failed == ()
    return switch


def refused(
    host: FakeAttachHost,
    path: Path,
    choose: Choose,
    seen: Callable[[FakeAttachHost, AttachLedger], AttachHostState] = survey,
) -> str:
    """Why a switch is not begun; nothing is changed."""
    before = host.picture()
    with pytest.raises(VsrtuneError) as caught:
        do(host, path, choose, seen)
    assert host.picture() == before
    with AttachLedger.open(path) as ledger:
        assert not Switcher(host, ledger, BOOT).unfinished()
    return str(caught.value)


def crash(host: FakeAttachHost, path: Path) -> None:
    """The host boots, and libvirt is not there yet."""
    host.reboot()
    host.away_until = 1e9
    with AttachLedger.open(path) as ledger:
        assert Switcher(host, ledger, "boot-2").boot_devices().failed == ()
    host.away_until = -1


def start_all(host: FakeAttachHost) -> None:
    for guest in host.fakes.values():
        if guest.live is None:
            host.start(guest)


@contextmanager
def before_lines(fault: Callable[[int], None]) -> Iterator[None]:
    """Call ``fault`` before every line that a log takes, with its number from 1 on."""
    numbers, write = itertools.count(1), jsonl_log.write_all

    def faulty(fd: int, data: bytes) -> None:
        fault(next(numbers))
        write(fd, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl_log, "write_all", faulty)
        yield


@dataclass(frozen=True)
class Killing:
    """A host that lost its switch after one change. ``undone``: that was before its end, so
    recovery takes it back to ``before``."""

    host: FakeAttachHost
    path: Path
    undone: bool
    before: Any


@dataclass(frozen=True)
class Switches:
    """What to try: switches by name, those that come before each, on a host that is made
    anew each time."""

    fresh: Callable[[], FakeAttachHost]
    choices: Mapping[str, Choose]
    starts: Mapping[str, Sequence[Choose]]
    seen: Callable[[FakeAttachHost, AttachLedger], AttachHostState] = survey

    def do(self, host: FakeAttachHost, path: Path, choose: Choose) -> Switch:
        return do(host, path, choose, self.seen)

    def prepare(self, what: str, host: FakeAttachHost) -> None:
        """What some switches need of a new host."""

    def late(self, switch: Switch) -> int:
        """How many of its changes come after its end."""
        return len(switch.leaves)

    def ready(self, what: str, path: Path) -> FakeAttachHost:
        host = self.fresh()
        self.prepare(what, host)
        for choose in self.starts[what]:
            self.do(host, path, choose)
        for link in list(host.table.values()):
            if any(o.group and o.device.name == link.name for o in known_origins(path)):
                host.set_queue(link.index, 777)  # somebody's choice, which a take-back leaves
        host.changes = 0
        return host

    def changes(self, what: str, path: Path) -> tuple[int, int]:
        """How many changes of the host it takes, and how many of them come after its end."""
        host = self.ready(what, path)
        switch = self.do(host, path, self.choices[what])
        return host.changes, self.late(switch)

    def fail(self, what: str, place: Path) -> None:
        """Each change fails in its turn, and is taken back with those before it."""
        total, after = self.changes(what, place / "0")
        for n in range(1, total - after + 1):
            path = place / f"{n}"
            host = self.ready(what, path)
            before = host.picture()

            def fail(number: int, n: int = n, host: FakeAttachHost = host) -> None:
                if number == n:
                    kernels = host.log[-1].split()[0] in _KERNELS
                    raise OSError(5, "no") if kernels else RefusedError("refused")

            host.before = fail
            with AttachLedger.open(path) as ledger:
                switch = self.choices[what](self.seen(host, ledger))
                with pytest.raises(SwitchError) as caught:
                    Switcher(host, ledger, BOOT).carry_out(switch)
                assert caught.value.put_back, (n, host.log)
            assert host.picture() == before, (n, host.log)

    def kill(self, what: str, place: Path) -> Iterator[Killing]:
        """Killed after each change in its turn; to be recovered."""
        total, after = self.changes(what, place / "0")
        for n in range(1, total + 1):
            path = place / f"{n}"
            host = self.ready(what, path)
            before = host.picture()

            def kill(number: int, n: int = n) -> None:
                if number == n:
                    raise Killed

            host.after = kill
            with AttachLedger.open(path) as ledger:
                switch = self.choices[what](self.seen(host, ledger))
                with pytest.raises(Killed):
                    Switcher(host, ledger, BOOT).carry_out(switch)
            host.after = lambda n: None
            yield Killing(host, path, n <= total - after, before)

    def undone(self, killing: Killing, what: str) -> None:
        """After a recovery: as before where it was undone, and then it can be done anew."""
        if killing.undone:
            assert killing.host.picture() == killing.before, killing.host.log
            self.do(killing.host, killing.path, self.choices[what])
