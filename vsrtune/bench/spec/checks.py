# SPDX-License-Identifier: GPL-2.0-or-later
"""Checks of a bench specification beyond its schema: values that do not go together."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any

from vsrtune.bench.spec.model import MAX_PPS, Configuration, Leg, Method, Spec, Tuning
from vsrtune.bench.spec.streams import COUNTED_FLOWS
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.policy.yaml_reader import KeyPath

# The key, what is wrong, and what to write instead.
Mistake = tuple[KeyPath, str, str]

# The keys of a method that each kind needs, and those that it may have, beside seconds and
# reordering.
_KEYS = {
    "sweep": (("rates",), ("repeats", "latency", "sizes")),
    "ndr": (("high",), ("low", "precision", "trials", "latency")),
    "pdr": (("high",), ("low", "precision", "trials", "latency", "loss")),
    "fairness": (("rates",), ("repeats", "by_router", "latency")),
}
_EXAMPLES = {
    "rates": "rates: [4000, 16000]",
    "high": "high: 100000",
}
_TUNING_KEYS = {
    Tuning.POLICY: ("policy_path",),
    Tuning.LIBVIRT_PINS: ("cpus",),
    Tuning.COMMAND: ("apply", "revert"),
}
# These go with any other tuning as well, but only both together.
_COMMANDS = ("apply", "revert")
_UNICAST_END = int(ipaddress.IPv4Address("224.0.0.0"))


def fair_loads(spec: Spec, rate: float) -> dict[str, float]:
    """The load of each router at one rate of a fairness test: ``rate`` for each router or,
    with a single router, for each of its flows."""
    alone = len(spec.routers) == 1
    each = rate * spec.traffic.flows if alone else rate
    by_router = spec.method.by_router
    return {r.name: float(by_router.get(r.name, each)) for r in spec.routers}


def mistakes(spec: Spec, written: Collection[KeyPath]) -> Iterator[Mistake]:
    """What is wrong with a specification: the key, what, and what to write instead. ``written``
    are the keys that stand in it."""
    if str(spec.left) == str(spec.right):
        yield (("right",), "left and right are the same device", "name the one on the other side")
    yield from _routers(spec, written)
    yield from _method(spec)
    yield from _configuration(spec)


def differences(stated: dict[str, Any], base: Spec) -> Iterator[Mistake]:
    """Check that a later file of a comparison differs in name and configuration only;
    otherwise the ratio would compare different measurements."""
    for key, value in stated.items():
        if key not in ("name", "configuration", "path") and value != getattr(base, key):
            yield (
                (key,),
                f"this differs from {base.path or base.name}, with which it is compared",
                "leave it out; it is taken from the first file",
            )


def _routers(spec: Spec, written: Collection[KeyPath]) -> Iterator[Mistake]:
    names: set[str] = set()
    for number, router in enumerate(spec.routers):
        here = ("routers", str(number))
        kinds = [k for k in ("guest", "guests", "native") if (*here, k) in written]
        if not router.name or len(kinds) > 1:
            yield (here, "a router is a guest, guests or native", "write one of the three")
        else:
            for name in router.guests or (router.name,):
                if name in names:
                    yield (here, f"router {name} stands here twice", "keep one of the two")
                names.add(name)
        legs = {"forth": router.forth} | ({"back": router.back} if router.back else {})
        for name, leg in legs.items():
            yield from _leg((*here, name), leg, router.native, spec.traffic.destinations)
        if spec.traffic.bidirectional and router.back is None:
            yield (
                here,
                "traffic goes both ways, and this router has no way back",
                "add back: {source: .., destination: ..}, or write bidirectional: false",
            )


def _leg(keys: KeyPath, leg: Leg, native: bool, destinations: int) -> Iterator[Mistake]:
    if native and not leg.mac:
        yield (keys, "the key 'mac' is missing", "add it: no guest's XML tells it here")
    if leg.mac and int(leg.mac[:2], 16) & 1:
        yield (
            (*keys, "mac"),
            f"{leg.mac} is a group address",
            "write the address of the router's own interface",
        )
    for name, count in (("source", 1), ("destination", destinations)):
        here = (*keys, name)
        try:
            address = ipaddress.IPv4Address(getattr(leg, name))
        except ValueError:
            yield (here, "this is not an IPv4 address", "write it as 10.10.1.2")
            continue
        if address.is_multicast or address.is_loopback or address.is_unspecified:
            yield (here, f"{address} cannot be routed", "write a unicast address")
        # Multicast begins where unicast ends, so the last address decides for all.
        elif int(address) + count > _UNICAST_END:
            yield (
                here,
                f"{count} addresses from {address} on reach beyond unicast",
                "write a lower address, or fewer traffic.destinations",
            )


def _method(spec: Spec) -> Iterator[Mistake]:
    method = spec.method
    needs, may = _KEYS[method.kind]
    for key in needs:
        if not getattr(method, key):
            yield (("method",), f"{method.kind} needs the key {key!r}", f"add {_EXAMPLES[key]}")
    default = Method(kind=method.kind)
    for key in {field.name for field in fields(Method)} - {"seconds", "reordering", *needs, *may}:
        if getattr(method, key) != getattr(default, key):
            yield (("method", key), f"{method.kind} has no use for this key", "remove it")
    yield from _method_values(spec)
    yield from _limits(spec)


def _method_values(spec: Spec) -> Iterator[Mistake]:
    method = spec.method
    if method.seconds <= 0:
        yield (("method", "seconds"), "a trial takes time", "write seconds: 2")
    for key, what in (("rates", "rate"), ("sizes", "size")):
        values = getattr(method, key)
        if len(set(values)) != len(values):
            yield (("method", key), f"a {what} stands here twice", "use repeats instead")
    if method.high and method.low >= method.high:
        yield (("method", "low"), "low is not below high", "search from low to high")
    if method.kind == "pdr" and method.loss <= 0:
        yield (("method", "loss"), "pdr allows some loss", "write kind: ndr for none")
    if method.kind == "fairness":
        yield from _fairness(spec)


def _fairness(spec: Spec) -> Iterator[Mistake]:
    names = [router.name for router in spec.routers]
    for name in spec.method.by_router:
        if name not in names:
            yield (
                ("method", "by_router", name),
                "no router has this name",
                f"the routers are {', '.join(names)}",
            )
    if len(names) == 1 and not 2 <= spec.traffic.flows <= COUNTED_FLOWS:
        yield (
            ("method", "kind"),
            "there is nothing to share between",
            f"list several routers, or write traffic.flows from 2 to {COUNTED_FLOWS}",
        )


def _limits(spec: Spec) -> Iterator[Mistake]:
    method, limits = spec.method, spec.limits
    key = "high" if method.kind in ("ndr", "pdr") else "rates"
    most: float = method.high if key == "high" else max(method.rates, default=0)
    if method.kind == "fairness":
        most = sum(fair_loads(spec, most).values())
    if most > limits.pps:
        what = f"{most:.0f} frames per second are above the limit of {limits.pps}"
        yield (("method", key), what, f"offer less, or write limits.pps (up to {MAX_PPS})")
    if method.seconds > limits.seconds:
        what = f"a trial of {method.seconds:g} s is above the limit of {limits.seconds:g} s"
        yield (("method", "seconds"), what, "shorten it, or write limits.seconds")


def _configuration(spec: Spec) -> Iterator[Mistake]:
    configuration = spec.configuration
    for tuning, names in _TUNING_KEYS.items():
        for name in names:
            key = name.removesuffix("_path")
            there = bool(getattr(configuration, name))
            if tuning is configuration.tuning and not there:
                yield (
                    ("configuration",),
                    f"tuning {tuning} needs the key {key!r}",
                    "add it, or write another tuning",
                )
            elif tuning is not configuration.tuning and there and key not in _COMMANDS:
                yield (
                    ("configuration", key),
                    f"this belongs to tuning {tuning}, not to {configuration.tuning}",
                    f"remove it, or write tuning: {tuning}",
                )
    if configuration.tuning is not Tuning.COMMAND and (
        bool(configuration.apply) != bool(configuration.revert)
    ):
        present, missing = _COMMANDS if configuration.apply else _COMMANDS[::-1]
        yield (
            ("configuration", present),
            f"{present} needs the key {missing!r} beside it",
            "add it: what is changed for a measurement is taken back",
        )
    several = next((r.name for r in spec.routers if r.members), None)
    if several is not None:
        for key in ("attachment", "vhost", "queues", "ring", "mergeable"):
            if getattr(configuration, key) != getattr(Configuration(""), key):
                yield (
                    ("configuration", key),
                    f"the interfaces of {several} are those of a group, and stay as they are",
                    "remove it, or measure a router of one guest",
                )
    if configuration.cpus:
        try:
            CpuSet.parse(configuration.cpus)
        except VsrtuneError as error:
            yield (("configuration", "cpus"), error.what, error.hint or "write CPUs as 1-2,5")
