# SPDX-License-Identifier: GPL-2.0-or-later
"""What the keys of a bench specification may hold: the JSON Schemas that the fields of spec.model
carry as their metadata.

As in the policy's schema, error messages are made from ``x-expects``, which says what to write
instead, and ``x-pattern``, which names what a text that does not match is not. ``spec.model`` and
docs/bench.md say what the keys mean.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vsrtune.core.cpuset import MAX_CPU
from vsrtune.policy.schema import DEVICE_PATTERN, MAC_PATTERN
from vsrtune.policy.subschemas import mapping, sequence, short_text, text, whole

MIN_SIZE = 60
MAX_SIZE = 1514
MAX_FLOWS = 1_000_000
MAX_DESTINATIONS = 65536
# The smallest frames on a 100 Gbit/s line; a greater number is a typing error.
MAX_PPS = 150_000_000
MAX_QUEUES = 256
MAX_MEMBERS = 256
KINDS = ("sweep", "ndr", "pdr", "fairness")
DURATION_PATTERN = r"^\s*([0-9]+(\.[0-9]*)?|\.[0-9]+)\s*(ms|s|min)\s*$"

_IPV4 = r"^[0-9]{1,3}(\.[0-9]{1,3}){3}$"

DEVICE = short_text("a device name such as eth1", DEVICE_PATTERN, "a device name")
NAMESPACE = short_text(
    "the name of a namespace of ip netns", r"^[^/\s]+$", "the name of a namespace"
)
HOST = short_text("an ssh destination such as user@box", r"^[^\s-]\S*$", "an ssh destination")
MAC = short_text("a MAC address such as 52:54:00:00:01:01", MAC_PATTERN, "a MAC address")
ADDRESS = short_text("an address such as 10.10.1.2", _IPV4, "an IPv4 address")

RATE = whole(1, MAX_PPS, " of frames per second")
DURATION = {
    "type": ["number", "string"],
    "minimum": 0,
    "maximum": 30 * 86400,
    "pattern": DURATION_PATTERN,
    "x-pattern": "a duration",
    "x-expects": "a number of seconds, or a number with ms, s or min such as 500ms",
}
SIZE = {
    "type": ["integer", "string"],
    "minimum": MIN_SIZE,
    "maximum": MAX_SIZE,
    "pattern": "^imix$",
    "x-pattern": "a frame size",
    "x-expects": f"imix, or a number of bytes from {MIN_SIZE} to {MAX_SIZE}",
}
SHARE = {"type": "number", "minimum": 0, "maximum": 0.5, "x-expects": "a share such as 0.005"}
PRECISION = {
    **SHARE,
    "minimum": 0.001,
    "x-expects": "a share from 0.001 to 0.5, such as 0.05",
}
RATES = sequence(RATE, "a list of frames per second such as [4000, 16000]")
COMMAND = sequence(
    text("text, in quotes where YAML needs them"),
    "a command as a list, such as [tuned-adm, profile, virtual-host]",
)
CPUS = {
    "type": ["integer", "string"],
    "minimum": 0,
    "maximum": MAX_CPU,
    "x-expects": "a CPU number or a CPU list such as 1-2,5",
}


def keys_of(part: type, expects: str, *required: str) -> dict[str, Any]:
    """The schema of a mapping with the keys that a part of a specification has."""
    keys = {f.name: dict(f.metadata) for f in fields(part) if f.metadata}
    return mapping(expects, keys, required)
