"""A NIC with a receive ring and SoftIRQ of its own on a chosen CPU, made of a veth pair.

A veth end with GRO has a NAPI and a ring of 256 frames for each queue. Its SoftIRQ would run on
the CPU of the sender, which makes generator and router one. But with deferred
interrupts (napi_defer_hard_irqs, gro_flush_timeout) a timer polls it on the CPU where
it was polled first, and the sender only fills the ring: as a NIC with interrupt moderation,
whose interrupts go to that CPU. Under load its poll stays scheduled and no timer fires.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass

from .spaces import GENERATOR, HOST, Failure, attribute, batch, command, inside, read, write

# So often a timer must have found nothing before the sender's CPU polls again: never.
_FOR_EVER = 2_000_000_000
# Local experimental (IEEE 802): every receiver drops it.
_NOBODYS_PROTOCOL = 0x88B5
_PRIMER = bytes.fromhex("027672fe0001") + bytes.fromhex("027672fe0002")


@dataclass(frozen=True)
class Nic:
    """``device`` is the router's end, in ``space``; ``wire`` the generator's."""

    device: str
    wire: str
    space: str = HOST
    # An emulated e1000e of the lab, with interrupts of its own.
    real: bool = False


def make(nics: list[Nic]) -> None:
    """Create them, up and quiet: polled by nobody's timer yet."""
    batch([f"link add {n.device} type veth peer name {n.wire} netns {GENERATOR}" for n in nics])
    for nic in nics:
        # Frames of a sender that segments in hardware pass by the NAPI of its peer.
        with inside(GENERATOR):
            command("ethtool", "-K", nic.wire, "tso", "off")
        command("ethtool", "-K", nic.device, "gro", "on")
        # A forwarding host would answer here by itself.
        write(f"/proc/sys/net/ipv6/conf/{nic.device}/disable_ipv6", "1")
        write(attribute(HOST, nic.device, "napi_defer_hard_irqs"), str(_FOR_EVER))
    moved = [n for n in nics if n.space != HOST]
    batch([f"link set {n.device} netns {n.space}" for n in moved])
    for nic in nics:
        batch([f"link set {nic.device} up"], nic.space)
    batch([f"link set {n.wire} up" for n in nics], GENERATOR)


# The lab's pairs, and the namespaces where their wires are.
_LINK_SECONDS = 15
_LAB = {"p0": ("g0", "gen"), "p1": ("s0", "sink")}


def take(device: str, cpu: int, wire_cpu: int) -> Nic:
    """One of the lab's NICs, its interrupts on ``cpu`` and those of its wire's end elsewhere."""
    wire, space = _LAB[device]
    for name, where, target in ((device, HOST, cpu), (wire, space, wire_cpu)):
        for irq in os.listdir(attribute(where, name, "device/msi_irqs")):
            write(f"/proc/irq/{irq}/smp_affinity_list", str(target))
    batch([f"link set {wire} netns {GENERATOR}"], space)
    batch([f"link set {wire} up"], GENERATOR)
    end = time.monotonic() + _LINK_SECONDS
    while read(attribute(GENERATOR, wire, "carrier")).strip() != "1":
        if time.monotonic() > end:
            raise Failure(f"{wire} has had no link for {_LINK_SECONDS} s")
        time.sleep(0.1)
    return Nic(device, wire, real=True)


def give_back() -> None:
    """The wires of the lab's NICs go home; also after a run that failed."""
    for wire, space in _LAB.values():
        with contextlib.suppress(Failure):
            batch([f"link set {wire} netns {space}"], GENERATOR)
            batch([f"link set {wire} up"], space)


def interrupts(nic: Nic) -> list[str]:
    """The interrupts of a NIC, as /proc/interrupts numbers them."""
    return os.listdir(attribute(HOST, nic.device, "device/msi_irqs")) if nic.real else []


def poll_on(nic: Nic, cpu: int, interval_ns: int) -> None:
    """From now on a timer of ``cpu`` polls it, every ``interval_ns`` while it is idle. One
    with interrupts is left to them."""
    if nic.real:
        return
    write(attribute(nic.space, nic.device, "gro_flush_timeout"), str(interval_ns))
    kick(nic, cpu)


def poll_by_sender(nic: Nic) -> None:
    """No timer any more: the CPU that sends receives, one SoftIRQ for each burst."""
    if nic.real:
        return
    write(attribute(nic.space, nic.device, "gro_flush_timeout"), "0")


def kick(nic: Nic, cpu: int) -> None:
    """Have it polled on ``cpu`` once, by a frame that is sent there and means nothing."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        with inside(GENERATOR), socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sender:
            sender.bind((nic.wire, 0))
            frame = _PRIMER + _NOBODYS_PROTOCOL.to_bytes(2, "big")
            sender.send(frame.ljust(60, b"\0"))
    finally:
        os.sched_setaffinity(0, before)
