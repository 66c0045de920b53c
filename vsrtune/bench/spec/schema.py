# SPDX-License-Identifier: GPL-2.0-or-later
"""The JSON Schema of a bench specification, as data (draft 2020-12).

As in the policy's schema, error messages are made from ``x-expects``, which says what to write
instead, and ``x-pattern``, which names what a text that does not match is not. ``spec.model`` and
docs/bench.md say what the keys mean.
"""

from __future__ import annotations

from typing import Any

from vsrtune.bench.spec.model import BenchAttachment, Tuning
from vsrtune.core.cpuset import MAX_CPU
from vsrtune.policy.schema import DEVICE_PATTERN, MAC_PATTERN
from vsrtune.policy.subschemas import FLAG, by_name, choice, mapping, name, sequence, text, whole

SCHEMA_ID = "https://vsrtune.invalid/schema/bench.json"
MIN_SIZE = 60
MAX_SIZE = 1514
MAX_FLOWS = 1_000_000
MAX_DESTINATIONS = 65536
# The smallest frames on a 100 Gbit/s line; a greater number is a typing error.
MAX_PPS = 150_000_000
MAX_QUEUES = 256
MAX_MEMBERS = 256
KINDS = ("sweep", "ndr", "pdr", "back-to-back", "fairness", "soak")
DURATION_PATTERN = r"^\s*([0-9]+(\.[0-9]*)?|\.[0-9]+)\s*(ms|s|min)\s*$"

_IPV4 = r"^[0-9]{1,3}(\.[0-9]{1,3}){3}$"

_RATE = whole(1, MAX_PPS, " of frames per second")
_DURATION = {
    "type": ["number", "string"],
    "minimum": 0,
    "maximum": 30 * 86400,
    "pattern": DURATION_PATTERN,
    "x-pattern": "a duration",
    "x-expects": "a number of seconds, or a number with ms, s or min such as 500ms",
}
_SIZE = {
    "type": ["integer", "string"],
    "minimum": MIN_SIZE,
    "maximum": MAX_SIZE,
    "pattern": "^imix$",
    "x-pattern": "a frame size",
    "x-expects": f"imix, or a number of bytes from {MIN_SIZE} to {MAX_SIZE}",
}
_SHARE = {"type": "number", "minimum": 0, "maximum": 0.5, "x-expects": "a share such as 0.005"}
_COMMAND = sequence(
    text("text, in quotes where YAML needs them"),
    "a command as a list, such as [tuned-adm, profile, virtual-host]",
)

_ENDPOINT = mapping(
    "keys such as device: g0",
    {
        "device": name("a device name such as eth1", DEVICE_PATTERN, "a device name"),
        "namespace": name(
            "the name of a namespace of ip netns", r"^[^/\s]+$", "the name of a namespace"
        ),
        "host": name("an ssh destination such as user@box", r"^[^\s-]\S*$", "an ssh destination"),
        "cpu": whole(0, MAX_CPU),
    },
    ("device",),
)

_LEG = mapping(
    "{source: 10.10.1.2, destination: 10.20.1.100}",
    {
        "mac": name("a MAC address such as 52:54:00:00:01:01", MAC_PATTERN, "a MAC address"),
        "source": name("an address such as 10.10.1.2", _IPV4, "an IPv4 address"),
        "destination": name("an address such as 10.20.1.100", _IPV4, "an IPv4 address"),
    },
    ("source", "destination"),
)

_ROUTER = mapping(
    "a mapping with the keys guest and forth",
    {
        "guest": name("the guest's name"),
        "guests": sequence(
            name("the guest's name as text"),
            "a list of guests such as [vr1, vr2]",
            maxItems=MAX_MEMBERS,
        ),
        "native": name("any name"),
        "forth": _LEG,
        "back": _LEG,
    },
    ("forth",),
)

_TRAFFIC = mapping(
    "keys such as size: 60",
    {
        "size": _SIZE,
        "flows": whole(1, MAX_FLOWS),
        "destinations": whole(1, MAX_DESTINATIONS),
        "bidirectional": FLAG,
        "burst": {**_DURATION, "maximum": 1},
    },
)

_METHOD = mapping(
    "keys such as kind: sweep",
    {
        "kind": choice(*KINDS),
        "rates": sequence(_RATE, "a list of frames per second such as [4000, 16000]"),
        "seconds": _DURATION,
        "repeats": whole(1, 1000),
        "low": whole(0, MAX_PPS),
        "high": whole(1, MAX_PPS),
        "loss": _SHARE,
        "precision": {
            **_SHARE,
            "minimum": 0.001,
            "x-expects": "a share from 0.001 to 0.5, such as 0.05",
        },
        "trials": whole(1, 100),
        "duration": _DURATION,
        "by_router": by_name(_RATE, "rates by router name such as {vr1: 8000}"),
        "latency": FLAG,
        "sizes": sequence(_SIZE, "a list of sizes such as [60, 508, 1496]"),
    },
    ("kind",),
)

_CONFIGURATION = mapping(
    "keys such as tuning: untuned",
    {
        "tuning": choice(*map(str, Tuning)),
        "policy": name("a path such as router.yaml"),
        "cpus": {
            "type": ["integer", "string"],
            "minimum": 0,
            "maximum": MAX_CPU,
            "x-expects": "a CPU number or a CPU list such as 1-2,5",
        },
        "apply": _COMMAND,
        "revert": _COMMAND,
        "attachment": choice(*map(str, BenchAttachment)),
        "vhost": FLAG,
        "queues": whole(1, MAX_QUEUES),
        "ring": choice(256, 512, 1024, type="integer"),
        "mergeable": FLAG,
        "scale": by_name(
            whole(1, MAX_MEMBERS), "a number of members by the group's name, such as {edge: 2}"
        ),
    },
)

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": SCHEMA_ID,
    **mapping(
        "keys such as left, right and routers",
        {
            "name": name("a name"),
            "left": _ENDPOINT,
            "right": _ENDPOINT,
            "routers": sequence(_ROUTER, "a list of mappings with the keys guest and forth"),
            "traffic": _TRAFFIC,
            "method": _METHOD,
            "configuration": _CONFIGURATION,
            "limits": mapping("keys such as pps: 200000", {"pps": _RATE, "seconds": _DURATION}),
            "warmup": _DURATION,
        },
        ("left", "right", "routers", "method"),
    ),
}


def schema(*, partial: bool = False) -> dict[str, Any]:
    """The schema; with ``partial``, that of a comparison's later file, which may leave out what
    it shares with the first."""
    return {**SCHEMA, "required": ["configuration"]} if partial else SCHEMA
