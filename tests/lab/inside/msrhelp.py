"""Balancers of the lab, the outside of a multistage router as its neighbours see it, and what
its guests cost."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hoststate
import labhelp
import pvrhelp
from kmodhelp import counters
from labhelp import LabGuest
from pvrhelp import space

# Of a balancer's console, plus its number.
INDEX = 220
# Namespace, device, and what the net of a side begins with.
SIDES = (("gen", "g0", "10.10"), ("sink", "s0", "10.20"))

# What of the frames that come to neighbours does not come from the one router that they know.
# Not what is IPv6: the host solicits routers out of each macvtap, under the guest's MAC.
WATCH = """
table netdev msr
delete table netdev msr
table netdev msr {{
    counter every {{ }}
    counter strange {{ }}
    chain arrives {{
        type filter hook ingress device "{device}" priority -10;
        counter name every
        ether type {{ ip, arp }} ether saddr != {mac} counter name strange
        arp saddr ether != {mac} counter name strange
    }}
}}
"""


def balancer(number: int) -> LabGuest:
    """Balancer lbN: not in the lab's list, for it is no router. Without a MAC where it has
    no side."""
    started = Path(f"/run/lab/domains/lb{number}.xml").read_text()
    found = re.findall(r"<mac address='(.*?)'/>\s+<source dev='(p\d)'", started)
    macs = {device: mac for mac, device in found}
    return LabGuest(0, "libvirt", (macs.get("p0", ""), macs.get("p1", "")), f"lb{number}")


def ask(number: int, verb: str, text: str) -> str:
    """``lab-balancer load`` or ``run``: what the guest printed."""
    done = subprocess.run(
        ["lab-balancer", verb, str(number)], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"lb{number}: {done.stdout}{done.stderr}\n{text}"
    return done.stdout


def start(number: int, *sides: int) -> None:
    """Start a balancer with a macvtap on each of these sides; returns when its kernel runs."""
    labhelp.sh("lab-balancer", "start", str(number), *map(str, sides))
    ask(number, "run", "true")


def stop(number: int) -> None:
    labhelp.sh("lab-balancer", "stop", str(number))


def unplug(number: int, side: int) -> None:
    """Take a balancer from the lower device of a side."""
    guest = balancer(number)
    words = ("--mac", guest.macs[side], "--live", "--config")
    workers = len(guest.workers())
    labhelp.sh("virsh", "detach-interface", guest.name, "direct", *words)
    labhelp.wait_for(lambda: len(guest.workers()) < workers, f"{guest.name} has let it go", 60)


@contextmanager
def unknown(router: LabGuest) -> Iterator[None]:
    """Neighbours have to ask for the router's addresses, as they do not in this lab."""
    for side, (name, device, net) in enumerate(SIDES):
        words = (f"{net}.{router.index}.1", "dev", device)
        labhelp.sh("ip", "-n", name, "neigh", "del", *words, "lladdr", router.macs[side])
    try:
        yield
    finally:
        for side, (name, device, net) in enumerate(SIDES):
            words = (f"{net}.{router.index}.1", "dev", device, "lladdr", router.macs[side])
            labhelp.sh("ip", "-n", name, "neigh", "replace", *words, "nud", "permanent")


def known_as(router: LabGuest) -> list[str]:
    """The MACs that neighbours have resolved the router's addresses to, one of each side."""
    found = []
    for name, device, net in SIDES:
        words = ("neigh", "show", f"{net}.{router.index}.1", "dev", device)
        told = re.search(r"lladdr (\S+)", labhelp.sh("ip", "-n", name, *words).stdout)
        found.append(told[1] if told else "")
    return found


class Watched:
    """Looks at what comes to the neighbours; ``macs`` are those they may know, of each side."""

    def __init__(self, macs: Sequence[str]) -> None:
        self._captures = []
        for (name, device, _), mac in zip(SIDES, macs, strict=True):
            rules = WATCH.format(device=device, mac=mac)
            subprocess.run([*space(name), "nft", "-f", "-"], input=rules, text=True, check=True)
            words = (
                "tcpdump",
                "-Q",
                "in",
                "-lenqi",
                device,
                f"(ip or arp) and not ether src {mac}",
            )
            self._captures.append(
                subprocess.Popen(
                    [*space(name), *words],
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                )
            )  # fmt: skip

    def end(self) -> tuple[list[tuple[int, int]], str]:
        """(all frames, those from a strange MAC) of each side, and what the strange ones were."""
        found, strange = [], ""
        for (name, _, _), capture in zip(SIDES, self._captures, strict=True):
            capture.terminate()
            strange += capture.communicate(timeout=30)[0]
            words = ("nft", "list", "counters", "table", "netdev", "msr")
            told = labhelp.sh(*space(name), *words).stdout
            count = dict(re.findall(r"counter (\w+) \{\s+packets (\d+)", told))
            found.append((int(count["every"]), int(count["strange"])))
            labhelp.sh(*space(name), "nft", "delete", "table", "netdev", "msr")
        return found, strange


def taken(routers: Iterable[LabGuest]) -> dict[str, list[int]]:
    """Frames that each router has received, of each side."""
    return {
        guest.name: [counters(guest.device(nic))["tapq0_received"] for nic in (0, 1)]
        for guest in routers
    }


def cpu_seconds(guests: Iterable[LabGuest]) -> dict[str, tuple[float, float]]:
    """Seconds that the vcpus and the workers of each guest have run."""
    return {
        guest.name: (
            sum(map(labhelp.run_ns, guest.vcpus().values())) / 1e9,
            sum(map(labhelp.run_ns, guest.workers())) / 1e9,
        )
        for guest in guests
    }


def data_plane(guest: LabGuest) -> dict[int, str]:
    """Its threads that carry packets, and how each is scheduled and where it may run."""
    return {tid: f"{hoststate.sched(tid)} on {labhelp.mask(tid)}" for tid in guest.data_plane()}


def forwards(index: int, seconds: float = 90) -> float:
    """Wait until the router forwards; how long that took."""
    begin = time.monotonic()
    labhelp.wait_for(lambda: pvrhelp.all_forward(index), "the router forwards", seconds)
    return time.monotonic() - begin
