"""Which settings a tuning of a bench stands for."""

from __future__ import annotations

import pytest
from planning_samples import cpus, router, snapshot

from vsrtune.bench.setup.tuning import libvirt_pins, pin_cpus
from vsrtune.bench.spec.model import Configuration, Tuning
from vsrtune.bench.spec.parser import policies
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.targets import EmulatorPin, Pin, VcpuPin
from vsrtune.policy.model import PolicyErrors


def policy(text: str) -> Configuration:
    return Configuration("x", Tuning.POLICY, policy=text, policy_path="p.yaml")


def test_one_policy_or_several() -> None:
    assert [p.guest for p in policies(policy("guest: a\n"))] == ["a"]
    assert [p.guest for p in policies(policy("---\nguest: a\n---\nguest: b\n"))] == ["a", "b"]


def test_a_wrong_policy_is_named_with_its_line() -> None:
    with pytest.raises(PolicyErrors, match=r"p\.yaml:4"):
        policies(policy("guest: a\n---\nguest: b\ncpu: 1\n"))
    with pytest.raises(VsrtuneError, match="no policy"):
        policies(Configuration("x", Tuning.POLICY))


def test_pins_are_to_cpus_that_are_online() -> None:
    pins = Configuration("x", Tuning.LIBVIRT_PINS, cpus="2")
    assert pin_cpus(pins, cpus("0-3")) == cpus("2")
    with pytest.raises(VsrtuneError, match="not all online"):
        pin_cpus(pins, cpus("0-1"))


def test_libvirt_pins_are_those_of_vcpus_and_emulator() -> None:
    seen = snapshot(router("vr1"))
    plan = libvirt_pins(seen, ["vr1"], cpus("1"))
    assert {type(a.target) for a in plan.actions} == {VcpuPin, EmulatorPin}
    for action in plan.actions:
        assert isinstance(action.after, Pin)
        assert action.after.cpus == cpus("1")
    with pytest.raises(VsrtuneError, match="no running libvirt guest"):
        libvirt_pins(seen, ["vr2"], cpus("1"))
