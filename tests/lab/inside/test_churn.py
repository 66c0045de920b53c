"""What happens to a host in months, in random order: guests come and go, NICs are plugged, an operator
works with virsh, libvirtd and the daemon are restarted or die.

Beside the lab's routers, guests that never boot come, go and are plugged (crowd.py), so that there
are many.

LAB_CHURN is how many things happen (3), between any two of which LAB_CROWD happen to those that never
boot (3); LAB_SEED repeats a run: the seed is printed. Without any the run is always the same
one, so that a failure tells of a change. LAB_SOAK=1800 goes on for so many seconds with traffic and
watches the daemon (`make soak`).
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from crowd import Crowd
from labhelp import LabGuest

STEPS = int(os.environ.get("LAB_CHURN") or "3")
CROWD = int(os.environ.get("LAB_CROWD") or "3")
MOST = 20
SOAK = float(os.environ.get("LAB_SOAK") or "0")
MAC = "52:54:00:ab:{:02x}:{:02x}"
PIN, EVERY_CPU = "2", "0-2"
LENGTH, USUAL_LENGTH = "77", "500"
USUAL_SEED = 714017


def seed() -> int:
    by_chance = random.randrange(10**6) if os.environ.get("LAB_CHURN") or SOAK else USUAL_SEED
    chosen = int(os.environ.get("LAB_SEED") or by_chance)
    print(f"LAB_SEED={chosen}")
    return chosen


class Router:
    """What may happen to one of libvirt's routers."""

    def __init__(self, guest: LabGuest) -> None:
        self.guest = guest
        self.plugged: list[str] = []
        self.count = 0
        # The operator chose a length since the guest's start. One that was put back is
        # forgotten; one that was there ahead of the daemon, as while it was killed right after
        # the guest's start, undo gives him.
        self.lengthened = False

    def changes(self) -> list[Callable[[], None]]:
        return [
            self.restart_guest,
            self.unplug if self.plugged else self.plug,
            self.pin_vcpu,
            self.overwrite_queue,
            self.overwrite_class,
        ]

    def restart_guest(self) -> None:
        # What is plugged live is not in the definition.
        labhelp.stop_guest(self.guest)
        self.plugged.clear()
        self.lengthened = False
        labhelp.start_guest(self.guest)

    def plug(self) -> None:
        self.count += 1
        mac = MAC.format(self.guest.index, self.count % 256)
        before = len(self.guest.workers())
        labhelp.libvirt_talks(self.guest)
        labhelp.sh(
            "virsh", "attach-interface", self.guest.name, "direct", "p0",
            "--mac", mac, "--model", "virtio", "--live",
        )  # fmt: skip
        self.plugged.append(mac)
        labhelp.wait_for(
            lambda: len(self.guest.workers()) > before, "the guest drives its new NIC", 120
        )

    def unplug(self) -> None:
        mac = self.plugged.pop()
        before = len(self.guest.workers())
        labhelp.libvirt_talks(self.guest)
        labhelp.sh("virsh", "detach-interface", self.guest.name, "direct", "--mac", mac, "--live")
        labhelp.wait_for(
            lambda: len(self.guest.workers()) < before, "the unplugged NIC's worker ended", 120
        )

    def pin_vcpu(self) -> None:
        labhelp.libvirt_talks(self.guest)
        labhelp.sh("virsh", "vcpupin", self.guest.name, "0", PIN)

    def overwrite_queue(self) -> None:
        labhelp.sh("ip", "link", "set", self.guest.device(0), "txqueuelen", LENGTH)
        self.lengthened = True

    def overwrite_class(self) -> None:
        labhelp.sh("chrt", "-o", "-p", "0", str(self.guest.workers()[0]))

    def take_back(self) -> None:
        """The operator undoes what he did by hand; the daemon has stopped."""
        if self.lengthened:
            device = self.guest.device(0)
            assert labhelp.text(f"/sys/class/net/{device}/tx_queue_len") in (LENGTH, USUAL_LENGTH)
            labhelp.sh("ip", "link", "set", device, "txqueuelen", USUAL_LENGTH)
        self.pin_everywhere()

    def pin_everywhere(self) -> None:
        labhelp.sh("virsh", "vcpupin", self.guest.name, "0", EVERY_CPU)


class Host:
    """What may happen to this lab; every change leaves a line in ``done``."""

    def __init__(self, chance: random.Random, guests: list[LabGuest]) -> None:
        self.chance = chance
        self.routers = [Router(g) for g in guests if g.kind == "libvirt"]
        self.crowd = Crowd(random.Random(chance.random()), MOST)
        self.done: list[str] = []

    def something(self) -> None:
        router = self.chance.choice(self.routers)
        changes: list[Callable[[], None]] = [
            *router.changes(),
            self.restart_libvirtd,
            self.kill_daemon,
            self.reload,
            self.touch_policy,
        ]
        change = self.chance.choice(changes)
        self.done.append(change.__name__)
        who = f" {router.guest.name}" if change in router.changes() else ""
        print(f"churn {len(self.done)}: {change.__name__}{who}", flush=True)
        change()

    def unplug_everything(self) -> None:
        for router in self.routers:
            while router.plugged:
                router.unplug()

    def restart_libvirtd(self) -> None:
        labhelp.sh("systemctl", "restart", "libvirtd")

    def kill_daemon(self) -> None:
        pid = labhelp.main_pid()
        if pid:
            labhelp.sh("kill", "-KILL", str(pid))
        labhelp.wait_for(lambda: labhelp.main_pid() not in (0, pid), "systemd starts it again")

    def reload(self) -> None:
        labhelp.sh("systemctl", "reload", "vsrtune")

    def touch_policy(self) -> None:
        path = min(labhelp.POLICIES.glob("*.yaml"))
        path.write_text(path.read_text() + "# churn\n")


def anonymous(state: dict[str, str]) -> Counter[str]:
    """A host's state without the numbers that a new process or device gets."""
    return Counter(
        re.sub(r"vhost-\d+|macvtap\d+|qemu-\d+|qemu\\x2d\d+", "N", f"{re.sub(r'thread [0-9]+', 'thread', what)}: {value}")
        for what, value in state.items()
        if "(worker)" not in what
    )  # fmt: skip


@contextlib.contextmanager
def daemon_here(host: Host) -> Iterator[None]:
    """Tuned meanwhile; afterwards the host is what it was but for numbers of processes."""
    # His pin is taken back by another pin: a cgroup that had no list of its own has one then.
    for router in host.routers:
        router.pin_everywhere()
    before = anonymous(hoststate.capture())
    labhelp.write_policies("auto")
    # Killed again and again, it must be started again and again.
    labhelp.set_environment(VSRTUNE_INTERVAL="10")
    with (labhelp.DROPIN / "test.conf").open("a") as file:
        file.write("[Unit]\nStartLimitIntervalSec=0\n")
    labhelp.sh("systemctl", "daemon-reload")
    try:
        labhelp.start()
        yield
        labhelp.stop()
        assert not labhelp.journal_is_live()
        assert [line for m in host.crowd.members for line in m.touched_lines()] == []
    finally:
        host.crowd.end()
    for router in host.routers:
        router.take_back()
    after = anonymous(hoststate.capture())
    assert sorted((after - before).elements()) == []
    assert sorted((before - after).elements()) == []


def everything_tuned(host: Host, guests: list[LabGuest], irq_cpus: set[int]) -> None:
    """The model and the host agree, by our own word and by what the kernel says."""
    reloads()
    for guest in guests:
        labhelp.wait_for(
            lambda guest=guest: labhelp.untuned_lines(guest, irq_cpus) == [],
            f"{guest.name} is as its policy says",
        )
    for member in host.crowd.members:
        labhelp.wait_for(
            lambda member=member: member.untuned_lines(irq_cpus) == [],
            f"{member.name} is as its policy says",
        )
    labhelp.wait_for(
        lambda: labhelp.vsrtune("verify", check=False).returncode == 0, "verify finds no drift"
    )


def reloads() -> None:
    """What an operator holds a reload takes back; but one that comes while systemd starts the
    daemon again is the same job to systemd, which then starts only."""
    labhelp.wait_for(
        lambda: labhelp.sh("systemctl", "is-active", "vsrtune", check=False).returncode == 0,
        "the daemon is ready",
    )
    labhelp.wait_for(
        lambda: labhelp.sh("systemctl", "reload", "vsrtune", check=False).returncode == 0,
        "the daemon reloads",
    )


def test_random_changes_end_in_what_the_policies_say_and_then_in_what_was(
    guests: list[LabGuest], irq_cpus: set[int]
) -> None:
    begin = time.monotonic()
    host = Host(random.Random(seed()), guests)
    with daemon_here(host):
        for _ in range(STEPS):
            for _ in range(CROWD):
                host.crowd.something()
            host.something()
        everything_tuned(host, guests, irq_cpus)
        here = len(host.crowd.members)
        host.unplug_everything()
        everything_tuned(host, guests, irq_cpus)
    print(
        f"churn: {time.monotonic() - begin:.0f} s, {len(guests)} routers, {here} others at the end; "
        f"{told(host.done)}; of the others: {told(host.crowd.done)}"
    )


def told(done: list[str]) -> str:
    """How often each thing happened."""
    counted = sorted(Counter(done).items())
    return ", ".join(f"{number} {what.replace('_', ' ')}" for what, number in counted)


class Watch(threading.Thread):
    """Looks at the daemon every few seconds: its memory, descriptors and journal, and whether
    a guest that is not tuned is called tuned."""

    PAUSE = 5.0
    # So many looks on end: longer than the daemon waits when no event told it.
    LATE = 4

    def __init__(self, guest: LabGuest, irq_cpus: set[int]) -> None:
        super().__init__(daemon=True)
        self._guest, self._irq = guest, irq_cpus
        self._end = threading.Event()
        self.rss: list[tuple[int, int]] = []
        self.descriptors: list[tuple[int, int]] = []
        self.journal = 0
        self.unreported: list[str] = []

    def run(self) -> None:
        seen: Counter[str] = Counter()
        while not self._end.wait(self.PAUSE):
            pid = labhelp.main_pid()
            # Guests and libvirtd go while it looks.
            with contextlib.suppress(OSError, AssertionError, ValueError):
                status = Path(f"/proc/{pid}/status").read_text()
                (rss,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
                self.rss.append((pid, int(rss)))
                self.descriptors.append((pid, len(os.listdir(f"/proc/{pid}/fd"))))
                self.journal = max(self.journal, labhelp.JOURNAL.stat().st_size)
                untuned = labhelp.untuned_lines(self._guest, self._irq)
                unreported = set(untuned) if untuned and self._called_tuned() else set()
                seen = Counter({line: seen[line] + 1 for line in unreported})
                late = [line for line, looks in seen.items() if looks >= self.LATE]
                if late:
                    self.unreported.append(f"{time.strftime('%T')} {late}")

    def _called_tuned(self) -> bool:
        text = "\n".join(labhelp.scrape())
        line = rf'vsrtune_guest_(tuned|drift){{[^}}]*domain="{re.escape(self._guest.ref)}"[^}}]*}} (\S+)'
        found = {name: float(value) for name, value in re.findall(line, text)}
        return found.get("tuned") == 1.0 and found.get("drift") == 0.0

    def stop(self) -> None:
        self._end.set()
        self.join()

    def grown(
        self, samples: list[tuple[int, int]], of: Callable[[list[int]], float] = statistics.median
    ) -> float:
        """The last third over the first, of the process that lived longest."""
        pid = Counter(pid for pid, _ in samples).most_common(1)[0][0]
        values = [value for p, value in samples if p == pid]
        third = max(1, len(values) // 3)
        return of(values[-third:]) / of(values[:third])


@pytest.mark.skipif(not SOAK, reason="half an hour: make soak runs it")
def test_soak(libvirt_guest: LabGuest, guests: list[LabGuest], irq_cpus: set[int]) -> None:
    host = Host(random.Random(seed()), [libvirt_guest])
    # Its death would begin its memory anew; the other test has that.
    host.kill_daemon = host.reload  # type: ignore[method-assign]
    balanced = labhelp.sh("systemctl", "start", "irqbalance", check=False).returncode == 0
    print("irqbalance runs" if balanced else "irqbalance is not installed here")
    watch = Watch(libvirt_guest, irq_cpus)
    with daemon_here(host):
        end = time.monotonic() + SOAK
        watch.start()
        while time.monotonic() < end:
            labhelp.sh(
                "lab-traffic", "--guest", libvirt_guest.name, "--rate", "4000", "--seconds", "5"
            )
            host.something()
        watch.stop()
        everything_tuned(host, guests, irq_cpus)
        host.unplug_everything()
    if balanced:
        labhelp.sh("systemctl", "stop", "irqbalance")
    # Descriptors come and go with what happens; what is never given back raises the least.
    memory, files = watch.grown(watch.rss), watch.grown(watch.descriptors, min)
    print(
        f"soak: {len(host.done)} changes, {len(watch.rss)} looks; last third over first: "
        f"memory {memory:.3f}, descriptors {files:.3f}; journal at most {watch.journal} bytes"
    )
    print(
        "resident kB, every twentieth part:",
        [kb for _, kb in watch.rss][:: len(watch.rss) // 20 or 1],
    )
    assert watch.unreported == []
    assert files <= 1
    # It went on looking.
    assert len(watch.rss) > SOAK / watch.PAUSE / 4
    assert memory < 1.1
    assert watch.journal < 2 << 20
