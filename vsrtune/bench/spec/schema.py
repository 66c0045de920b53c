"""The JSON Schema of a bench specification, as data (draft 2020-12).

As in the policy's schema, error messages are made from ``x-expects``, which says what to write
instead, and ``x-pattern``, which names what a text that does not match is not.
"""

from __future__ import annotations

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


def _text(description: str, expects: str, **more: Any) -> dict[str, Any]:
    return {
        "description": description,
        "type": "string",
        "minLength": 1,
        "maxLength": 255,
        "x-expects": expects,
        **more,
    }


def _number(description: str, low: int, high: int, unit: str = "") -> dict[str, Any]:
    what = f" {unit}" if unit else ""
    return {
        "description": description,
        "type": "integer",
        "minimum": low,
        "maximum": high,
        "x-expects": f"a whole number{what} from {low} to {high}",
    }


def _flag(description: str) -> dict[str, Any]:
    return {"description": description, "type": "boolean", "x-expects": "true or false"}


def _choice(description: str, values: list[str]) -> dict[str, Any]:
    *most, last = values
    return {"description": description, "enum": values, "x-expects": f"{', '.join(most)} or {last}"}


def _duration(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "type": ["number", "string"],
        "minimum": 0,
        "maximum": 30 * 86400,
        "pattern": DURATION_PATTERN,
        "x-pattern": "a duration",
        "x-expects": "a number of seconds, or a number with ms, s or min such as 500ms",
    }


def _mapping(
    description: str, expects: str, properties: dict[str, Any], required: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {
        "description": description,
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "x-expects": expects,
        "properties": properties,
    }


def _endpoint(side: str) -> dict[str, Any]:
    return _mapping(
        f"The device on the {side} of the routers: it sends, and it counts and drops "
        "what comes back. Nothing is ever sent to another one.",
        "keys such as device: g0",
        {
            "device": _text(
                "Name of the network device.",
                "a device name such as eth1",
                pattern=DEVICE_PATTERN,
                **{"x-pattern": "a device name"},
            ),
            "namespace": _text(
                "Network namespace of the device (ip netns); the host's own when left out.",
                "the name of a namespace of ip netns",
                pattern=r"^[^/\s]+$",
                **{"x-pattern": "the name of a namespace"},
            ),
            "host": _text(
                "ssh destination of the machine that has the device; this one when left out.",
                "an ssh destination such as user@box",
                pattern=r"^[^\s-]\S*$",
                **{"x-pattern": "an ssh destination"},
            ),
            "cpu": _number("The CPU whose pktgen thread sends.", 0, MAX_CPU),
        },
        ("device",),
    )


def _leg(description: str) -> dict[str, Any]:
    address = {"pattern": _IPV4, "x-pattern": "an IPv4 address"}
    return _mapping(
        description,
        "{source: 10.10.1.2, destination: 10.20.1.100}",
        {
            "mac": _text(
                "MAC address that frames are sent to. Left out for a guest: that of its first "
                "interface (of its second for the way back).",
                "a MAC address such as 52:54:00:00:01:01",
                pattern=MAC_PATTERN,
                **{"x-pattern": "a MAC address"},
            ),
            "source": _text("IPv4 source address.", "an address such as 10.10.1.2", **address),
            "destination": _text(
                "IPv4 destination address, the first of as many as the flows need.",
                "an address such as 10.20.1.100",
                **address,
            ),
        },
        ("source", "destination"),
    )


def _argv(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "type": "array",
        "minItems": 1,
        "items": {"type": "string", "x-expects": "text, in quotes where YAML needs them"},
        "x-expects": "a command as a list, such as [tuned-adm, profile, virtual-host]",
    }


_SIZE = {
    "description": "Bytes of a frame without its check sequence (60 is a 64-byte frame on "
    "the wire), or imix: 7 of 60, 4 of 566, 1 of 1514.",
    "type": ["integer", "string"],
    "minimum": MIN_SIZE,
    "maximum": MAX_SIZE,
    "pattern": "^imix$",
    "x-pattern": "a frame size",
    "x-expects": f"imix, or a number of bytes from {MIN_SIZE} to {MAX_SIZE}",
}

_ROUTER = _mapping(
    "A router under test.",
    "a mapping with the keys guest and forth",
    {
        "guest": _text("Name of the guest.", "the guest's name"),
        "guests": {
            "description": "Names of the guests that are one router together (a group). Frames "
            "go to the MAC of the first unless mac says otherwise; the threads and counters of "
            "all are the router's.",
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_MEMBERS,
            "items": _text("Name of a guest.", "the guest's name as text"),
            "x-expects": "a list of guests such as [vr1, vr2]",
        },
        "native": _text("This host itself forwards; any name for it.", "any name"),
        "forth": _leg("Frames from left to right."),
        "back": _leg("Frames from right to left, for traffic both ways."),
    },
    ("forth",),
)

_RATE = _number("Frames per second.", 1, MAX_PPS, "of frames per second")

_TRAFFIC = _mapping(
    "What the frames are like.",
    "keys such as size: 60",
    {
        "size": _SIZE,
        "flows": _number("Flows of each router and direction.", 1, MAX_FLOWS),
        "destinations": _number(
            "Destination addresses of each leg, sent to in turn; flows should be a multiple of it.",
            1,
            MAX_DESTINATIONS,
        ),
        "bidirectional": _flag("Send both ways at once; half of the rate each way."),
        "burst": _duration(
            "Send at twice the rate for this long, then hardly anything for as long, in turn. 0 is "
            "an even rate."
        )
        | {"maximum": 1},
    },
)

_METHOD = _mapping(
    "Which trials are made.",
    "keys such as kind: sweep",
    {
        "kind": _choice(
            "sweep: forwarded against offered load. ndr, pdr: the highest rate without loss, or "
            "with at most `loss`. back-to-back: the longest burst without loss (RFC 9004). "
            "fairness: what each router, or each flow of a single one, gets of a load. soak: one "
            "rate for a long time.",
            list(KINDS),
        ),
        "rates": {
            "description": "Offered loads, frames per second over all routers and directions; with "
            "fairness, to each router (each flow of a single one).",
            "type": "array",
            "minItems": 1,
            "items": _RATE,
            "x-expects": "a list of frames per second such as [4000, 16000]",
        },
        "seconds": _duration("Length of one trial."),
        "repeats": _number("How often each load is tried.", 1, 1000),
        "low": _number("Lowest rate (or burst, in frames) of a search.", 0, MAX_PPS),
        "high": _number("Highest rate (or burst, in frames) of a search.", 1, MAX_PPS),
        "loss": {
            "description": "pdr: the share of frames that may be lost, 0.005 is 0.5 %.",
            "type": "number",
            "minimum": 0,
            "maximum": 0.5,
            "x-expects": "a share such as 0.005",
        },
        "precision": {
            "description": "A search ends when its bounds are this share apart.",
            "type": "number",
            "minimum": 0.001,
            "maximum": 0.5,
            "x-expects": "a share from 0.001 to 0.5, such as 0.05",
        },
        "trials": _number("A search tries each rate this often; the worst decides.", 1, 100),
        "duration": _duration("soak: how long in all."),
        "by_router": {
            "description": "fairness: the load of these routers, frames per second, whatever the "
            "rate of the others.",
            "type": "object",
            "additionalProperties": _RATE,
            "x-expects": "rates by router name such as {vr1: 8000}",
        },
        "latency": _flag("Send time-stamped probes beside the load."),
        "sizes": {
            "description": "sweep: try each rate with frames of each of these sizes, instead of "
            "traffic.size.",
            "type": "array",
            "minItems": 1,
            "items": _SIZE,
            "x-expects": "a list of sizes such as [60, 508, 1496]",
        },
    },
    ("kind",),
)

_CONFIGURATION = _mapping(
    "How the routers are run; it is applied before and undone after.",
    "keys such as tuning: untuned",
    {
        "tuning": _choice("How their threads are tuned.", [t.value for t in Tuning]),
        "policy": _text("tuning policy: path of the policy file.", "a path such as router.yaml"),
        "cpus": {
            "description": "tuning libvirt-pins: CPUs of the guests' vcpus and emulators, as with "
            "virsh vcpupin and emulatorpin.",
            "type": ["integer", "string"],
            "minimum": 0,
            "maximum": MAX_CPU,
            "x-expects": "a CPU number or a CPU list such as 1-2,5",
        },
        "apply": _argv("tuning command: what applies it; else run after the tuning."),
        "revert": _argv("What takes back what apply did."),
        "attachment": _choice(
            "What connects the guests' interfaces to the devices below them.",
            [a.value for a in BenchAttachment],
        ),
        "vhost": _flag("Whether vhost-net carries the frames; as it is when left out."),
        "queues": _number(
            "Queues of each guest interface; as they are when left out.", 1, MAX_QUEUES
        ),
        "ring": _number(
            "Slots of each receive ring between host and guest, 256, 512 or 1024; as they are "
            "when left out.",
            256,
            1024,
        ),
        "mergeable": _flag(
            "Mergeable receive buffers; off, a guest also gets no frame above its MTU. As they are "
            "when left out."
        ),
        "scale": {
            "description": "How many members of these groups (vsrtune group) are plugged in; as "
            "they are when left out.",
            "type": "object",
            "additionalProperties": _number("Members, the first ones.", 1, MAX_MEMBERS),
            "x-expects": "a number of members by the group's name, such as {edge: 2}",
        },
    },
)

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": SCHEMA_ID,
    "title": "vsrtune bench specification",
    **_mapping(
        "What is measured, through which routers, with which traffic.",
        "keys such as left, right and routers",
        {
            "name": _text("What reports call this run; the file's name when left out.", "a name"),
            "left": _endpoint("left"),
            "right": _endpoint("right"),
            "routers": {
                "description": "The routers between left and right.",
                "type": "array",
                "minItems": 1,
                "items": _ROUTER,
                "x-expects": "a list of mappings with the keys guest and forth",
            },
            "traffic": _TRAFFIC,
            "method": _METHOD,
            "configuration": _CONFIGURATION,
            "limits": _mapping(
                "What no trial may exceed.",
                "keys such as pps: 200000",
                {"pps": _RATE, "seconds": _duration("Length of one trial.")},
            ),
            "warmup": _duration("Traffic before each trial, not counted."),
        },
        ("left", "right", "routers", "method"),
    ),
}


def schema(*, partial: bool = False) -> dict[str, Any]:
    """The schema; with ``partial``, that of a comparison's later file, which may leave out what
    it shares with the first."""
    return {**SCHEMA, "required": ["configuration"]} if partial else SCHEMA
