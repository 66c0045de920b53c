# SPDX-License-Identifier: GPL-2.0-or-later
"""The JSON Schema of a policy file, as data (draft 2020-12).

Beyond the standard keywords, a subschema carries ``x-expects``, the text on what to write instead,
``x-keys``, the keys of a free mapping, ``x-moved``, where keys that do not stand here belong, and
``x-pattern``, a name for its pattern. Validators ignore them; the error messages and the reference
use them.
"""

from __future__ import annotations

from typing import Any

from vsrtune.core.cpuset import MAX_CPU
from vsrtune.core.text import TIME_PATTERN
from vsrtune.model.deadline import PERCENT_PATTERN
from vsrtune.model.plan import DriftRule
from vsrtune.policy.subschemas import FLAG, choice, mapping, short_text, text, whole

SCHEMA_ID = "https://vsrtune.invalid/schema/policy.json"
MAX_QUEUE = 32767
MAX_PRIORITY = 99
# uid_t; -1 means no user (setreuid(2)).
MAX_UID = 2**32 - 2

CPU_RANGE = r"[0-9]+(-[0-9]+(:[0-9]+/[0-9]+)?)?"
_CPU_LIST = rf"{CPU_RANGE}(\s*,\s*{CPU_RANGE})*"
MAC_PATTERN = r"^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$"
DEVICE_PATTERN = r"^[^/:\s]{1,15}$"
# One of these, and after a slash the number of a queue.
_QUEUE_PATTERNS = [f"{p[:-1]}(/(0|[1-9][0-9]{{0,3}}))?$" for p in (MAC_PATTERN, DEVICE_PATTERN)]

# The key of ``drift`` for settings that are not named.
DEFAULT = "default"
# The settings that ``drift`` knows, named like the sections of docs/policy.md.
SETTINGS = {
    "cpus.vcpu": "CPUs of vcpu threads",
    "cpus.vhost": "CPUs of vhost workers",
    "cpus.napi": "CPUs of NAPI threads",
    "cpus.emulator": "CPUs of the emulator",
    "cpus.iothread": "CPUs of iothreads",
    "scheduler.vcpu": "class and priority of vcpu threads",
    "scheduler.vhost": "class and priority of vhost workers",
    "scheduler.napi": "class and priority of NAPI threads",
    "scheduler.softirq": "class and priority of ksoftirqd threads",
    "scheduler.slice": "time slice of class rr",
    "scheduler.rest": "limit of realtime threads",
    "irq.set": "interrupts, and RPS, XPS and NAPI threads of lower devices",
    "napi.threaded": "threaded NAPI of the guest's devices",
    "queue.macvtap": "length of the macvtap queues",
}
SECTIONS = tuple(dict.fromkeys(name.partition(".")[0] for name in SETTINGS))

_TURNS = {"class": "rr", "priority": 10, "slice": "8ms"}
# The values of each profile, by section and key. A value that a policy writes replaces the whole
# value of that key. Only what docs/results supports is a profile.
PROFILES: dict[str, dict[tuple[str, str], Any]] = {
    "router": {
        ("cpus", "irq"): "auto",
        ("cpus", "vcpu"): "auto",
        ("cpus", "vhost"): "auto",
        ("cpus", "emulator"): "auto",
        ("scheduler", "vcpu"): _TURNS,
        ("scheduler", "vhost"): _TURNS,
        ("scheduler", "softirq"): {"class": "fifo", "priority": 10},
        ("scheduler", "rest"): "10ms",
    },
    "none": {},
}
# The profile of a policy that names none.
DEFAULT_PROFILE = "router"
_RULES = [rule.value for rule in DriftRule]
_EXPECTS = "enforce, adopt or report"


def _cpus(description: str, *, auto: bool, **more: Any) -> dict[str, Any]:
    """A CPU number, a CPU list, or ``auto`` where that has a meaning. The keywords of each type
    apply to that type only, so no ``anyOf`` hides the place of an error."""
    expects = "a CPU number or a CPU list such as 1-2,5"
    choice = f"auto|{_CPU_LIST}" if auto else _CPU_LIST
    return {
        "description": description,
        "type": ["integer", "string"],
        "minimum": 0,
        "maximum": MAX_CPU,
        "pattern": rf"^\s*({choice})\s*$",
        "x-expects": f"auto, {expects}" if auto else expects,
        **more,
    }


def _cpu_map(
    description: str, keys: list[str], key_text: str, expects: str, of: str = "thread"
) -> dict[str, Any]:
    value = _cpus(f"The CPUs of this {of}.", auto=False)
    schema = _cpus(description, auto=True)
    return schema | {
        "type": ["integer", "string", "object"],
        "minProperties": 1,
        "patternProperties": dict.fromkeys(keys, value),
        "additionalProperties": False,
        "x-keys": key_text,
        "x-expects": f"{schema['x-expects']}, or a mapping such as {expects}",
    }


def _time(description: str) -> dict[str, Any]:
    return text(
        "a time with its unit, such as 10ms",
        TIME_PATTERN,
        "a time with its unit",
        description=f"{description}. Units: ns, us, ms, s.",
    )


def _budget(whose: str) -> dict[str, Any]:
    """Scheduling that includes class deadline, which gives each thread a budget of CPU time."""
    schema = _scheduler(whose)
    schema["x-expects"] += " or {class: deadline, runtime: 8ms, period: 10ms}"
    cls = schema["properties"]["class"]
    cls["description"] += (
        " deadline gives each thread a budget of CPU time (SCHED_DEADLINE with its "
        "constant bandwidth server; Abeni et al., section 3.4)."
    )
    cls |= choice("other", "batch", "rr", "fifo", "deadline")
    schema["properties"] |= {
        "runtime": _time("CPU time in each period; class deadline only"),
        "period": _time("The period of the budget, 100us to 4s; required with class deadline"),
        "deadline": _time("When in each period the runtime is due; the period when not written"),
        "bandwidth": text(
            "a percentage such as 85%",
            PERCENT_PATTERN,
            "a percentage",
            description="The runtime in percent of the period, instead of runtime.",
        ),
    }
    return schema


def _scheduler(whose: str) -> dict[str, Any]:
    return mapping(
        "{class: rr, priority: 10, slice: 8ms} or {class: other}",
        {
            "class": choice(
                "other",
                "batch",
                "rr",
                "fifo",
                description="other (the ordinary scheduler, nice 0), batch (the same, but a "
                "thread that wakes waits for the running one's slice to end), or rr or fifo "
                "(realtime, sched(7)); realtime threads are set to reset-on-fork.",
            ),
            "priority": whole(
                1,
                MAX_PRIORITY,
                description="Realtime priority; required with fifo and rr, not allowed "
                "with other classes. Equal priorities of vcpu and vhost measured best "
                "(Abeni et al., section 3.3).",
            ),
            "slice": _time(
                "How long a thread of class rr runs before its equals get their turn, 1ms to "
                "100ms in whole milliseconds; not allowed with other classes. The kernel rounds "
                "up to its tick. It has one for the whole host: the shortest that a policy asks "
                "for. Unset leaves it alone"
            ),
        },
        ("class",),
        description=f"Scheduling of {whose}.",
    )


def _rule(description: str) -> dict[str, Any]:
    return choice(*_RULES, description=description)


def _drift() -> dict[str, Any]:
    """The subschema of the key ``drift``."""
    return {
        "description": "What the daemon does when somebody changes a setting: enforce puts it "
        "back, adopt accepts the new value until a reload, report leaves it alone, warns and "
        "counts it. One word for all settings, or a mapping. Unset: report for pins that an "
        "operator sets through libvirt, enforce for everything else.",
        "type": ["string", "object"],
        "pattern": f"^({'|'.join(_RULES)})$",
        "x-pattern": "a drift rule",
        "minProperties": 1,
        "additionalProperties": False,
        "x-expects": f"{_EXPECTS}, or a mapping such as {{default: enforce, queue: adopt}}",
        "properties": {
            DEFAULT: _rule("The rule of settings that are not named."),
            **{name: _rule(f"The rule of all settings of {name}.") for name in SECTIONS},
            **{name: _rule(f"The rule of the {what}.") for name, what in SETTINGS.items()},
        },
    }


def as_written(value: Any) -> str:
    """A value of a profile as a policy writes it."""
    if not isinstance(value, dict):
        return str(value)
    return f"{{{', '.join(f'{key}: {below}' for key, below in value.items())}}}"


def _profiles() -> str:
    """The description of the key ``profile``."""
    keys: dict[str, list[str]] = {}
    for key, value in PROFILES["router"].items():
        keys.setdefault(as_written(value), []).append(".".join(key))
    router = "; ".join(f"{value} for {', '.join(names)}" for value, names in keys.items())
    return (
        f"The values of the keys that the file does not write. router: {router}. none: nothing. "
        "What the file writes replaces the profile's whole value of that key. There is no profile "
        "of CPUs without classes: three threads of a router pinned to one CPU forwarded less than "
        "an untuned one in overload. There is none for low delay or with budgets: no values for "
        "routers of all sizes are known that do not lose."
    )


SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": SCHEMA_ID,
    "title": "vsrtune policy",
    "description": "How the threads and queues of the guests that `guest` names are tuned. "
    "A key that neither the file nor its profile has is unset: what it governs is left alone.",
    "type": "object",
    "required": ["guest"],
    "additionalProperties": False,
    "x-expects": "keys such as guest: NAME",
    "properties": {
        "guest": short_text(
            "the guest's name, UUID or glob as text, in quotes where YAML needs them"
        )
        | {
            "description": "libvirt name, UUID, or glob of names (*, ?, [abc]); a literal *, ? or "
            "[ is written [*], [?], [[]. qemu:NAME means plain QEMU processes, "
            "proxmox:VMID guests of Proxmox VE, kubevirt:NAMESPACE/NAME those of KubeVirt.",
        },
        "user": {
            "description": "The user, by name or number, that runs the plain QEMU of guest: "
            "qemu:NAME; root when unset. A process of any other user is no guest.",
            "type": ["string", "integer"],
            "minimum": 0,
            "maximum": MAX_UID,
            "pattern": r"^[a-zA-Z_][a-zA-Z0-9_.-]*\$?$",
            "maxLength": 64,
            "x-pattern": "a user",
            "x-expects": "a user name or number, such as qemu or 64055",
        },
        "profile": {
            "description": _profiles(),
            "enum": list(PROFILES),
            "x-expects": " or ".join(PROFILES),
            "default": DEFAULT_PROFILE,
        },
        "attachment": choice(
            "macvtap",
            "napi-macvlan",
            description="What the guest's macvtap interfaces stand on: macvtap, or our "
            "module's devices (napi-macvlan). A switch unplugs and plugs them in the running "
            "guest, once, and changes its persistent definition.",
        ),
        "standstill": {
            "description": "accept: carry out a plan in which a vcpu of class fifo or rr could "
            "keep other threads of a router from running for good. Only for trials: the guest can "
            "stop forwarding. Unset: refuse such a plan.",
            "enum": ["accept"],
            "x-expects": "accept, or leave it out",
        },
        "others": {
            "description": "keep-off: guests of libvirt that no policy names leave the CPUs of "
            "this guest's vcpu, vhost and NAPI threads, unless somebody has bound them to CPUs. "
            "Unset: they run where the host lets them.",
            "enum": ["keep-off"],
            "x-expects": "keep-off, or leave it out",
        },
        "placement": {
            "description": "auto: the CPUs of all vcpu, vhost and NAPI threads for which cpus has "
            "no list are chosen by the measured load of each thread and the host's topology, and "
            "follow the load. Unset: as cpus says.",
            "enum": ["auto"],
            "x-expects": "auto, or leave it out",
        },
        "cpus": mapping(
            "keys such as vcpu: auto",
            {
                "irq": _cpu_map(
                    "CPUs that serve the interrupts of the NICs below the guest; no vcpu or "
                    "vhost thread is put there. Unset is auto: the CPUs are read from the host. "
                    "A list is for all these NICs; a mapping is for each, by device or NUMA node. "
                    "A device's own key wins over its node's; a NIC without a key is as with auto.",
                    [DEVICE_PATTERN],
                    "devices below the guest or their NUMA nodes, such as {eth0: 0, eth1: 8} or "
                    "{node0: 0-1}",
                    "{eth0: 0, eth1: 8}",
                    "device or node",
                ),
                "pool": _cpus(
                    "The CPUs among which auto chooses for vcpu, vhost and NAPI threads. Unset: "
                    "all that are online.",
                    auto=False,
                ),
                "cores": {
                    "description": "whole: auto gives each vcpu and vhost thread a physical core "
                    "of its own, whose SMT siblings no thread gets that vsrtune places. Unset: "
                    "siblings are used as well.",
                    "enum": ["whole"],
                    "x-expects": "whole, or leave it out",
                },
                "vcpu": _cpu_map(
                    "CPUs of the vcpu threads: auto (one CPU each while CPUs last), one list "
                    "for all, or a mapping from vcpu number to CPUs.",
                    ["^(0|[1-9][0-9]{0,3})$"],
                    "vcpu numbers, such as {0: 1, 1: 2}",
                    "{0: 1, 1: 2}",
                ),
                "vhost": _cpu_map(
                    "CPUs of the vhost-net workers: auto, one list for all, or a mapping from "
                    "the interface's host device or MAC address to CPUs, for one queue with its "
                    "number: {macvtap0/0: 2, macvtap0/1: 3}.",
                    _QUEUE_PATTERNS,
                    "host devices or MAC addresses, such as {macvtap0: 2}, {macvtap0/1: 3} or "
                    "{52:54:00:12:34:56: 2}",
                    "{macvtap0: 2}",
                ),
                "napi": _cpu_map(
                    "CPUs of the NAPI threads of the guest's napi_macvtap devices (see "
                    "napi.threaded): auto, one list for all, or a mapping from host device or MAC "
                    "address to CPUs.",
                    [MAC_PATTERN, DEVICE_PATTERN],
                    "host devices or MAC addresses, such as {nvt0: 2} or {52:54:00:12:34:56: 2}",
                    "{nvt0: 2}",
                ),
                "emulator": _cpus(
                    "CPUs of QEMU's other threads: auto (housekeeping CPUs, those without "
                    "pinned vcpu or vhost threads) or a list.",
                    auto=True,
                ),
                "iothread": _cpus(
                    "CPUs of QEMU's iothreads, which serve disks: auto (as for the emulator) or a "
                    "list. Unset: as libvirt says (iothreadpin).",
                    auto=True,
                ),
            },
            description="Which CPUs serve what.",
        ),
        "drift": _drift(),
        "scheduler": mapping(
            "keys such as vcpu: {class: rr, priority: 10, slice: 8ms}",
            {
                "budget": mapping(
                    "{cpu: 120%, period: 10ms}",
                    {
                        "cpu": text(
                            "a percentage such as 120%",
                            PERCENT_PATTERN,
                            "a percentage",
                            description="The CPU time of all these threads together, in percent "
                            "of one CPU.",
                        ),
                        "period": _time("The period of the budget, 100us to 4s"),
                    },
                    ("cpu", "period"),
                    description="A budget for the whole guest: class deadline for its vcpu and "
                    "vhost threads, each with an equal part. It excludes vcpu and vhost; the "
                    "profile's values of these do not apply.",
                ),
                "vcpu": _budget("the guest's vcpu threads"),
                "vhost": _budget("the guest's vhost threads"),
                "napi": _scheduler("the NAPI threads of the guest's napi_macvtap devices"),
                "softirq": _scheduler(
                    "the host's ksoftirqd threads, on the CPUs that the guest's realtime "
                    "threads are pinned to: frames they send to other guests wait for it"
                ),
                "rest": _time(
                    "How much of each second realtime threads leave to others on their CPU, 1ms "
                    "to 50ms; 0ms asks for nothing. Any other value needs a thread of class rr or "
                    "fifo in the policy. The host has one: the longest that a policy asks for. "
                    "Kernels from 6.12 on need none; beside a policy with class deadline it stays "
                    "as it is"
                ),
            },
            description="Scheduling classes of the guest's threads.",
        ),
        "irq": mapping(
            "set: true or set: false",
            {
                "set": {
                    **FLAG,
                    "description": "true: they are moved to the CPUs that cpus.irq lists, and with "
                    "them RPS, XPS and NAPI threads of these NICs; false or unset: they stay where "
                    "they are.",
                },
            },
            description="The interrupts of the NICs below the guest.",
        )
        | {"x-moved": {"cpus": "cpus.irq"}},
        "napi": mapping(
            "keys such as threaded: true",
            {
                "threaded": {
                    **FLAG,
                    "description": "true: in a kernel thread of each device, which has CPUs and a "
                    "class of its own (cpus.napi, scheduler.napi); false: in the SoftIRQ of the "
                    "CPU that sent the frame.",
                }
            },
            description="The NAPI of the guest's napi_macvtap devices: it hands frames from "
            "other guests, broadcast and multicast to the guest.",
        ),
        "queue": mapping(
            "keys such as macvtap: 500",
            {
                "macvtap": {
                    **whole(1, MAX_QUEUE),
                    "description": "txqueuelen of the guest's macvtap and napi_macvtap devices, in "
                    "frames: the length of each of its rings. 0 would drop every frame.",
                    "x-expects": f"a whole number from 1 to {MAX_QUEUE}, or leave it out",
                },
            },
            description="Lengths of the queues between host and guest.",
        ),
    },
}
