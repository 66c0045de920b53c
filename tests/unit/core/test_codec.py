"""JSON round trips of the frozen classes, and the errors of broken input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from vsrtune.core.codec import decode, encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.model import host as host_module
from vsrtune.model import plan
from vsrtune.model import targets as act
from vsrtune.model.guest import (
    Guest,
    Interface,
    NicKind,
    Role,
    Sched,
    SchedClass,
    Thread,
    ThreadKey,
)
from vsrtune.model.snapshot import Problem, Snapshot

KEY = ThreadKey(10, 11, 12)
FIFO = Sched(SchedClass.FIFO, 10, reset_on_fork=True)


def snapshot() -> Snapshot:
    thread = Thread(
        key=KEY, name="CPU 0/KVM", role=Role.VCPU, sched=FIFO, affinity=CpuSet([1]),
        last_cpu=1, cpu_ns=5, cgroup="/a b/ü", cpuset_cpus="", cpuset_effective=CpuSet([0, 1]),
        index=0, pin=CpuSet([1]),
    )  # fmt: skip
    tap = Interface(
        "macvtap0", 5, NicKind.MACVTAP, "02:00:00:00:00:01", "virtio", True, 1, 500, 0,
        ("p0",),
    )  # fmt: skip
    guest = Guest("vr 1.ü", "u", "libvirt", 10, 12, (thread,), (tap,))
    irq = host_module.Irq(24, "p0-rx-0", CpuSet([0, 1]), CpuSet([0]))
    nic = host_module.Nic("p0", 3, "e1000e", 0, 1000, False, CpuSet(), (irq,), CpuSet([0]))
    host = host_module.Host(
        "boot",
        "6.1",
        100,
        (host_module.Cpu(0, True, False, CpuSet([0]), 0),),
        (nic,),
        950000,
        1000000,
    )
    return Snapshot(host, (guest,), (Problem("virt", "no libvirt"),))


def test_snapshot_round_trip() -> None:
    assert decode(Snapshot, json.loads(snapshot().to_json())) == snapshot()


@pytest.mark.parametrize(
    ("target", "before", "after"),
    [
        (act.ThreadAffinity("g", KEY, "vhost"), CpuSet([0, 1]), CpuSet([1])),
        (act.ThreadSched("g", KEY, "vcpu 0"), Sched(), FIFO),
        (act.ThreadCgroup("g", KEY, "vhost"), "/a/emulator", "/a/vsrtune"),
        (act.CgroupDir("g", "/a/vsrtune"), False, True),
        (act.VcpuPin("g", "u", 0, KEY), act.Pin(CpuSet([0, 1]), ""), act.Pin(CpuSet([1]), "1")),
        (act.EmulatorPin("g", "u", KEY), act.Pin(CpuSet([0]), None), act.Pin(CpuSet([1]), None)),
        (act.TxQueueLen("g", "macvtap0", 5), 500, 50),
        (act.NapiThreaded("g", "nvt0", 5), 0, 1),
        (act.IrqAffinity(act.HOST_REF, 41, "p0-rx-0"), CpuSet([0, 1]), CpuSet([0])),
        (act.QueueCpus(act.HOST_REF, "p0", 3, "rx-0"), CpuSet(), CpuSet([0])),
    ],
)
def test_action_round_trip(target: act.Target, before: act.Value, after: act.Value) -> None:
    action = plan.Action(target, before, after, "why")
    data = json.loads(json.dumps(action.to_data()))
    assert plan.Action.from_data(data) == action


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "1"}, "$.version: expected int, found str"),
        ({"guests": {}}, "$.guests: expected a list, found dict"),
        ({"extra": 1}, "$: unknown field 'extra'"),
        ({"host": None}, "$.host: expected Host, found NoneType"),
    ],
)
def test_broken_snapshot_names_the_field(change: dict[str, Any], message: str) -> None:
    data = encode(snapshot()) | change
    with pytest.raises(VsrtuneError) as caught:
        decode(Snapshot, data)
    assert str(caught.value) == message


def test_missing_field_and_unknown_kind() -> None:
    data = encode(snapshot())
    del data["host"]["kernel"]
    with pytest.raises(VsrtuneError, match=r"\$\.host\.kernel: missing"):
        decode(Snapshot, data)
    with pytest.raises(VsrtuneError, match="unknown kind 'x'"):
        act.decode_target({"kind": "x"})


@dataclass(frozen=True)
class Loose:
    size: int | Literal["imix"]
    by_name: Mapping[str, float]
    rest: Mapping[str, Any]


def test_mappings_and_literals() -> None:
    value = Loose("imix", {"a": 1.5}, {"b": [1, None, {"c": "d"}]})
    assert decode(Loose, json.loads(json.dumps(encode(value)))) == value
    assert decode(Loose, {"size": 60, "by_name": {"a": 1}, "rest": {}}).by_name == {"a": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "mix"}, "$.size: 'mix' is not accepted here"),
        ({"by_name": []}, "$.by_name: expected a mapping, found list"),
        ({"by_name": {"a": "x"}}, "$.by_name.a: expected float, found str"),
    ],
)
def test_broken_mappings_and_literals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(VsrtuneError) as caught:
        decode(Loose, {"size": 60, "by_name": {}, "rest": {}} | change)
    assert str(caught.value) == message
