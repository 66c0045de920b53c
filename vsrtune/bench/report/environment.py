# SPDX-License-Identifier: GPL-2.0-or-later
"""The environment block: what a figure was measured on, for comparison with another.

The block is gathered once for each configuration while that is in force, because
configurations change most of it (where threads may run, how interfaces are attached, queue
lengths).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vsrtune import __version__
from vsrtune.bench.setup import commands
from vsrtune.bench.spec.model import Configuration, Spec
from vsrtune.core.codec import encode
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.filesystem import HostRoot, LiveRoot, text_of
from vsrtune.model.guest import Guest, Role, Thread, thread_label
from vsrtune.model.host import Nic
from vsrtune.model.snapshot import Snapshot

Run = Callable[[Sequence[str]], str]

_TIMEOUT = 10.0
_INTERFACE = ("target", "kind", "lower", "mac", "model", "vhost", "queues", "txqueuelen")

# Names of the host's own settings, and their files.
_SETTINGS = {
    "netdev_max_backlog": "/proc/sys/net/core/netdev_max_backlog",
    "netdev_budget": "/proc/sys/net/core/netdev_budget",
    "sched_rt_runtime_us": "/proc/sys/kernel/sched_rt_runtime_us",
    "halt_poll_ns": "/sys/module/kvm/parameters/halt_poll_ns",
    "halt_poll_ns_grow": "/sys/module/kvm/parameters/halt_poll_ns_grow",
    "vhost_zcopy_tx": "/sys/module/vhost_net/parameters/experimental_zcopytx",
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "smt": "/sys/devices/system/cpu/smt/active",
    "clocksource": "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    "preempt": "/sys/kernel/debug/sched/preempt",
}


def _output(command: Sequence[str]) -> str:
    try:
        return commands.run(command, _TIMEOUT)
    except VsrtuneError:
        return ""


def environment(
    snapshot: Snapshot,
    spec: Spec,
    configuration: Configuration,
    tester: Mapping[str, Mapping[str, str]],
    *,
    root: HostRoot | None = None,
    run: Run = _output,
) -> dict[str, Any]:
    """The block as plain JSON data. Values that cannot be read are left out or "".

    ``snapshot`` shows the host with ``configuration`` in force, ``tester`` describes the devices
    of the two ends. ``run`` runs a command line and returns its output, "" when it fails;
    ``root`` of None means this host.
    """
    root = LiveRoot() if root is None else root
    names = {name for router in spec.routers for name in router.guests}
    guests = [g for g in snapshot.guests if g.ref in names]
    return {
        "label": label(spec, [device["driver"] for device in tester.values()]),
        "vsrtune": __version__,
        "kernel": snapshot.host.kernel,
        "os": _match(r'^PRETTY_NAME="?([^"\n]*)', text_of(root, "/etc/os-release")),
        "cpu": _match(r"^model name\s*: (.*)$", text_of(root, "/proc/cpuinfo")),
        "cpus": {
            "online": str(snapshot.host.online),
            "isolated": ",".join(str(c.id) for c in snapshot.host.cpus if c.isolated),
        },
        "qemu": _qemu(guests, run),
        "libvirt": run(("virsh", "--version")).strip(),
        "settings": {
            name: text for name, path in _SETTINGS.items() if (text := text_of(root, path))
        },
        "tester": tester,
        "nics": {nic.name: _nic(nic) for nic in snapshot.host.nics},
        "guests": {guest.ref: _guest(guest) for guest in guests},
        "ksoftirqd": {str(s.cpu): str(s.sched) for s in snapshot.host.softirq},
        "policy": _policy(configuration),
        "neighbours": [_fields(n, "name", "pid", "detail") for n in snapshot.host.neighbours],
        "load": text_of(root, "/proc/loadavg") or "",
        "problems": [f"{p.reader}: {p.what}" for p in snapshot.problems],
    }


def label(spec: Spec, drivers: Sequence[str]) -> str:
    """The label that warns a reader: one machine gives other results than a wire.

    ``drivers`` are the drivers of the two endpoints' devices.
    """
    if any(end.host is not None for end in (spec.left, spec.right)):
        return "pktgen on a second machine"
    if drivers and all(driver == "veth" for driver in drivers):
        return "one machine, veth and pktgen"
    return "one machine, pktgen"


def _nic(nic: Nic) -> dict[str, Any]:
    found = _fields(nic, "driver", "txqueuelen", "threaded_napi", "rps_cpus", "rx_cpus")
    return found | {"irqs": {str(irq.number): str(irq.effective) for irq in nic.irqs}}


def _guest(guest: Guest) -> dict[str, Any]:
    kinds = sorted({t.worker.value for t in guest.by_role(Role.VHOST) if t.worker is not None})
    return {
        "vhost": "+".join(kinds) or "none",
        "threads": [_thread(t) for t in guest.threads if t.role is not Role.WORKER],
        "interfaces": [_fields(i, *_INTERFACE) for i in guest.interfaces],
        "problems": list(guest.problems),
    }


def _thread(thread: Thread) -> dict[str, Any]:
    """Where a thread may run: its mask within its cgroup's CPUs."""
    cpus = thread.affinity
    if thread.cpuset_effective:
        cpus = cpus & thread.cpuset_effective or cpus
    return {"thread": thread_label(thread), "cpus": str(cpus), "class": str(thread.sched)}


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: encode(getattr(value, name)) for name in names}


def _policy(configuration: Configuration) -> dict[str, str] | None:
    if configuration.policy is None:
        return None
    digest = hashlib.sha256(configuration.policy.encode()).hexdigest()
    return {"sha256": digest, "file": configuration.policy_path or "", "text": configuration.policy}


def _qemu(guests: Sequence[Guest], run: Run) -> str:
    """The version of the program that runs the guests, not of one installed since."""
    command = f"/proc/{guests[0].pid}/exe" if guests else "qemu-system-x86_64"
    return _match(r"version (\S+( \([^)]*\))?)", run((command, "--version")))


def _match(pattern: str, text: str | None) -> str:
    found = re.search(pattern, text or "", re.MULTILINE)
    return found[1].strip() if found else ""
