# SPDX-License-Identifier: GPL-2.0-or-later
"""The JSON Schema of a bench specification, as data (draft 2020-12).

As in the policy's schema, error messages are made from ``x-expects``, which says what to write
instead, and ``x-pattern``, which names what a text that does not match is not. ``spec.model`` and
docs/bench.md say what the keys mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vsrtune.bench.spec.model import BenchAttachment, Tuning
from vsrtune.core.cpuset import MAX_CPU
from vsrtune.policy.schema import DEVICE_PATTERN, MAC_PATTERN

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


def _text(expects: str, pattern: str = "", name: str = "") -> dict[str, Any]:
    """Text; one that does not match ``pattern`` is not ``name``."""
    matching = {"pattern": pattern, "x-pattern": name} if pattern else {}
    return {"type": "string", "minLength": 1, "maxLength": 255, "x-expects": expects, **matching}


def _number(low: int, high: int, unit: str = "") -> dict[str, Any]:
    expects = f"a whole number{unit} from {low} to {high}"
    return {"type": "integer", "minimum": low, "maximum": high, "x-expects": expects}


def _share(low: float, expects: str) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": 0.5, "x-expects": expects}


def _choice(values: Sequence[object]) -> dict[str, Any]:
    *most, last = map(str, values)
    return {"enum": list(values), "x-expects": f"{', '.join(most)} or {last}"}


def _list(items: dict[str, Any], expects: str) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items, "x-expects": expects}


def _by_name(values: dict[str, Any], expects: str) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values, "x-expects": expects}


def _mapping(
    expects: str, properties: dict[str, Any], required: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "x-expects": expects,
        "properties": properties,
    }


_FLAG = {"type": "boolean", "x-expects": "true or false"}
_RATE = _number(1, MAX_PPS, " of frames per second")
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
_COMMAND = _list(
    {"type": "string", "x-expects": "text, in quotes where YAML needs them"},
    "a command as a list, such as [tuned-adm, profile, virtual-host]",
)

_ENDPOINT = _mapping(
    "keys such as device: g0",
    {
        "device": _text("a device name such as eth1", DEVICE_PATTERN, "a device name"),
        "namespace": _text(
            "the name of a namespace of ip netns", r"^[^/\s]+$", "the name of a namespace"
        ),
        "host": _text("an ssh destination such as user@box", r"^[^\s-]\S*$", "an ssh destination"),
        "cpu": _number(0, MAX_CPU),
    },
    ("device",),
)

_LEG = _mapping(
    "{source: 10.10.1.2, destination: 10.20.1.100}",
    {
        "mac": _text("a MAC address such as 52:54:00:00:01:01", MAC_PATTERN, "a MAC address"),
        "source": _text("an address such as 10.10.1.2", _IPV4, "an IPv4 address"),
        "destination": _text("an address such as 10.20.1.100", _IPV4, "an IPv4 address"),
    },
    ("source", "destination"),
)

_ROUTER = _mapping(
    "a mapping with the keys guest and forth",
    {
        "guest": _text("the guest's name"),
        "guests": {
            **_list(_text("the guest's name as text"), "a list of guests such as [vr1, vr2]"),
            "maxItems": MAX_MEMBERS,
        },
        "native": _text("any name"),
        "forth": _LEG,
        "back": _LEG,
    },
    ("forth",),
)

_TRAFFIC = _mapping(
    "keys such as size: 60",
    {
        "size": _SIZE,
        "flows": _number(1, MAX_FLOWS),
        "destinations": _number(1, MAX_DESTINATIONS),
        "bidirectional": _FLAG,
        "burst": {**_DURATION, "maximum": 1},
    },
)

_METHOD = _mapping(
    "keys such as kind: sweep",
    {
        "kind": _choice(KINDS),
        "rates": _list(_RATE, "a list of frames per second such as [4000, 16000]"),
        "seconds": _DURATION,
        "repeats": _number(1, 1000),
        "low": _number(0, MAX_PPS),
        "high": _number(1, MAX_PPS),
        "loss": _share(0, "a share such as 0.005"),
        "precision": _share(0.001, "a share from 0.001 to 0.5, such as 0.05"),
        "trials": _number(1, 100),
        "duration": _DURATION,
        "by_router": _by_name(_RATE, "rates by router name such as {vr1: 8000}"),
        "latency": _FLAG,
        "sizes": _list(_SIZE, "a list of sizes such as [60, 508, 1496]"),
    },
    ("kind",),
)

_CONFIGURATION = _mapping(
    "keys such as tuning: untuned",
    {
        "tuning": _choice([t.value for t in Tuning]),
        "policy": _text("a path such as router.yaml"),
        "cpus": {
            "type": ["integer", "string"],
            "minimum": 0,
            "maximum": MAX_CPU,
            "x-expects": "a CPU number or a CPU list such as 1-2,5",
        },
        "apply": _COMMAND,
        "revert": _COMMAND,
        "attachment": _choice([a.value for a in BenchAttachment]),
        "vhost": _FLAG,
        "queues": _number(1, MAX_QUEUES),
        "ring": {"type": "integer", **_choice([256, 512, 1024])},
        "mergeable": _FLAG,
        "scale": _by_name(
            _number(1, MAX_MEMBERS), "a number of members by the group's name, such as {edge: 2}"
        ),
    },
)

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": SCHEMA_ID,
    **_mapping(
        "keys such as left, right and routers",
        {
            "name": _text("a name"),
            "left": _ENDPOINT,
            "right": _ENDPOINT,
            "routers": _list(_ROUTER, "a list of mappings with the keys guest and forth"),
            "traffic": _TRAFFIC,
            "method": _METHOD,
            "configuration": _CONFIGURATION,
            "limits": _mapping("keys such as pps: 200000", {"pps": _RATE, "seconds": _DURATION}),
            "warmup": _DURATION,
        },
        ("left", "right", "routers", "method"),
    ),
}


def schema(*, partial: bool = False) -> dict[str, Any]:
    """The schema; with ``partial``, that of a comparison's later file, which may leave out what
    it shares with the first."""
    return {**SCHEMA, "required": ["configuration"]} if partial else SCHEMA
