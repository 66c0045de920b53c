# SPDX-License-Identifier: GPL-2.0-or-later
"""Outcomes as files: JSON and back, and one HTML page with tables and plots, which fetches nothing
from elsewhere. The environment says what a figure was measured on, once for each configuration."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from vsrtune import __version__
from vsrtune.bench.report import plots, tables
from vsrtune.bench.setup import commands
from vsrtune.bench.spec.model import Configuration, Outcome, Spec
from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import InputError, VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.host.filesystem import HostRoot, LiveRoot, text_of
from vsrtune.model.guest import Guest, Role, Thread, thread_label
from vsrtune.model.host import Nic
from vsrtune.model.snapshot import Snapshot
from vsrtune.views.tables import filled

FORMAT = "vsrtune-bench/1"


def outcome_to_json(outcome: Outcome) -> str:
    """The outcome as JSON text, indented, ending in a newline."""
    data = {"format": FORMAT, **encode(outcome)}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def outcome_from_json(text: str, path: str = "") -> Outcome:
    """Read the text of ``outcome_to_json``; ``path`` is used in messages. Raises InputError."""
    hint = "name a file that vsrtune bench wrote with --json"
    try:
        data = json_value(text)
    except ValueError:
        raise InputError("the file is not JSON", where=path, hint=hint) from None
    if not isinstance(data, dict) or "format" not in data:
        raise InputError("the file is not a bench result", where=path, hint=hint)
    if data.pop("format") != FORMAT:
        raise InputError(
            "the result has another version's format", where=path, hint=f"this one reads {FORMAT}"
        )
    try:
        return decode(Outcome, data)
    except VsrtuneError as error:
        where = f"{path}: {error.where}" if path else error.where
        raise InputError(error.what, where=where, hint=hint) from None


def page(outcome: Outcome) -> str:
    """The whole document. Raises VsrtuneError when matplotlib is missing."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    label = tables.label(outcome)
    note = " | ".join(t for t in (label, outcome.started, f"vsrtune {outcome.version}") if t)
    found = tables.outcome_tables(outcome)
    first = 1 + len(filled(*tables.summary_tables(outcome)))
    figures = [
        (caption, Markup(plots.svg(figure, f"f{index}")))  # noqa: S704 (matplotlib escapes)
        for index, (caption, figure) in enumerate(plots.of_outcome(outcome, note))
    ]
    source = files("vsrtune.bench.report").joinpath("page.html.j2").read_text("utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(source).render(
        name=outcome.spec.name,
        label=label,
        first=found[:first],
        figures=figures,
        rest=found[first:],
        # With the text of every policy, without which no figure can be repeated.
        configurations=outcome.configurations,
    )


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
    """The version of what runs the guests, not of one installed since; a pod's is not run."""
    if guests and guests[0].source == "kubevirt":
        return ""
    command = f"/proc/{guests[0].pid}/exe" if guests else "qemu-system-x86_64"
    return _match(r"version (\S+( \([^)]*\))?)", run((command, "--version")))


def _match(pattern: str, text: str | None) -> str:
    found = re.search(pattern, text or "", re.MULTILINE)
    return found[1].strip() if found else ""
