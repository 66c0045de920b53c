"""Bench specifications: what is read, and the exact message of each mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vsrtune.bench.spec import model
from vsrtune.bench.spec.model import KINDS
from vsrtune.bench.spec.parser import load_text, schema, with_policy
from vsrtune.core.errors import PolicyError
from vsrtune.policy.model import PolicyErrors

WHOLE = """\
name: overload
left:  {device: g0, namespace: gen, cpu: 1}
right: {device: s0, namespace: sink, host: user@box}
routers:
  - guest: vr1
    forth: {mac: "52:54:00:AA:01:01", source: 10.10.1.2, destination: 10.20.1.100}
    back:  {source: 10.20.1.2, destination: 10.10.1.100}
  - native: host
    forth: {mac: "52:54:00:aa:02:01", source: 10.10.250.2, destination: 10.20.250.100}
    back:  {mac: "52:54:00:aa:02:02", source: 10.20.250.2, destination: 10.10.250.100}
traffic: {size: imix, flows: 4, bidirectional: true}
method: {kind: sweep, rates: [4000, 16000], seconds: 500ms, repeats: 3}
configuration: {tuning: libvirt-pins, cpus: 1, vhost: true, queues: 2, ring: 512,
                mergeable: false, attachment: bridge, apply: [a], revert: [b, c]}
limits: {pps: 200000, seconds: 1 min}
warmup: 0.25
"""

SMALL = """\
left: {device: g0}
right: {device: s0}
routers:
  - guest: vr1
    forth: {source: 10.10.1.2, destination: 10.20.1.100}
method: {kind: sweep, rates: [4000]}
"""


def test_whole() -> None:
    spec = load_text(WHOLE, "specs/x.yaml")
    assert spec.left == model.Endpoint("g0", "gen", None, 1)
    assert str(spec.right) == "user@box:sink/s0"
    assert spec.routers[0] == model.Router(
        "vr1",
        model.Leg("52:54:00:aa:01:01", "10.10.1.2", "10.20.1.100"),
        model.Leg("", "10.20.1.2", "10.10.1.100"),
    )
    assert spec.routers[1].native and spec.routers[1].name == "host"
    assert spec.traffic == model.Traffic("imix", 4, True)
    assert spec.method == model.Method("sweep", (4000, 16000), 0.5, 3)
    assert spec.configuration == model.Configuration(
        "overload", model.Tuning.LIBVIRT_PINS, cpus="1", vhost=True, queues=2, ring=512,
        mergeable=False, apply=("a",), revert=("b", "c"), attachment=model.BenchAttachment.BRIDGE,
    )  # fmt: skip
    assert spec.limits == model.Limits(200000, 60.0)
    assert (spec.name, spec.warmup, spec.path) == ("overload", 0.25, "specs/x.yaml")


def test_defaults() -> None:
    spec = load_text(SMALL, "specs/small.one.yaml")
    assert spec.name == spec.configuration.name == "small.one"
    assert spec.traffic == model.Traffic()
    assert spec.limits == model.Limits()
    assert spec.configuration.tuning is model.Tuning.UNTUNED
    pdr = SMALL.replace("sweep, rates: [4000]", "pdr, high: 100000")
    assert load_text(pdr, "x").method.loss == 0.005


def test_policy_is_named_and_then_given() -> None:
    text = SMALL + "configuration: {tuning: policy, policy: ../p.yaml}\n"
    spec = load_text(text, "specs/x.yaml")
    assert spec.configuration.policy_path == "specs/../p.yaml"
    assert spec.configuration.policy is None
    assert with_policy(spec, "guest: vr1\n").configuration.policy == "guest: vr1\n"
    with pytest.raises(PolicyError, match=r"specs/\.\./p\.yaml:1"):
        with_policy(spec, "gust: vr1\n")


def test_later_file_of_a_comparison() -> None:
    base = load_text(WHOLE, "a.yaml")
    later = load_text(
        "name: tuned\nlimits: {pps: 200000, seconds: 60}\nconfiguration: {tuning: untuned}\n",
        "b.yaml",
        base,
    )
    assert later.configuration == model.Configuration("tuned")
    assert (later.method, later.routers, later.traffic) == (
        base.method, base.routers, base.traffic,
    )  # fmt: skip
    assert load_text("configuration: {vhost: false}\n", "b.yaml", base).name == "b"
    with pytest.raises(PolicyErrors) as caught:
        load_text("traffic:\n  size: imix\n  flows: 1\nconfiguration: {}\n", "b.yaml", base)
    assert str(caught.value) == (
        "b.yaml:1: traffic: this differs from a.yaml, with which it is compared; "
        "leave it out; it is taken from the first file"
    )
    with pytest.raises(PolicyErrors, match="the key 'configuration' is missing"):
        load_text("name: x\n", "b.yaml", base)


def changed(old: str, new: str, text: str = SMALL) -> str:
    assert old in text
    return text.replace(old, new)


ROUTER = "    forth: {source: 10.10.1.2, destination: 10.20.1.100}\n"

MISTAKES = [
    ("", "x.yaml:1: the file holds no bench specification; write keys such as left, right and routers"),
    ("[]", "x.yaml:1: the file holds a list, not a mapping; write keys such as left, right and routers"),
    (SMALL + "a: b: c\n", "x.yaml:7: the text cannot be read as YAML from here on; check indentation, quotes, brackets and colons here and on the line before"),
    (SMALL + "trafic: {}\n", "x.yaml:7: trafic: unknown key; did you mean traffic? the keys here are name, left, right, routers, traffic, method, configuration, limits, warmup"),
    (changed("right: {device: s0}\n", ""), "x.yaml:1: the key 'right' is missing; add it: keys such as device: g0"),
    (changed("device: s0", "device: g0"), "x.yaml:2: right: left and right are the same device; name the one on the other side"),
    (changed("device: s0", "device: a/b"), "x.yaml:2: right.device: 'a/b' is not a device name; write a device name such as eth1"),
    (changed("[4000]", "[4000, x]"), "x.yaml:6: method.rates.1: 'x' stands where a whole number is expected; write a whole number of frames per second from 1 to 150000000"),
    (changed("[4000]", "[]"), "x.yaml:6: method.rates: the value is empty; write a list of frames per second such as [4000, 16000]"),
    (changed("[4000]", "4000"), "x.yaml:6: method.rates: 4000 stands where a list is expected; write a list of frames per second such as [4000, 16000]"),
    (changed("sweep", "swep"), "x.yaml:6: method.kind: 'swep' is not accepted; did you mean sweep? write sweep, ndr, pdr or fairness"),
    (SMALL + "traffic: {size: 64k}\n", "x.yaml:7: traffic.size: '64k' is not a frame size; write imix, or a number of bytes from 60 to 1514"),
    (SMALL + "traffic: {size: 1518}\n", "x.yaml:7: traffic.size: 1518 is above 1514; write imix, or a number of bytes from 60 to 1514"),
    (SMALL + "warmup: 5 h\n", "x.yaml:7: warmup: '5 h' is not a duration; write a number of seconds, or a number with ms, s or min such as 500ms"),
    (SMALL + "traffic: {bidirectional: 1}\n", "x.yaml:7: traffic.bidirectional: 1 stands where true or false is expected; write true or false"),
    (SMALL + "traffic: {bidirectional: true}\n", "x.yaml:4: routers.0: traffic goes both ways, and this router has no way back; add back: {source: .., destination: ..}, or write bidirectional: false"),
    (changed("guest: vr1", "native: vr1"), "x.yaml:5: routers.0.forth: the key 'mac' is missing; add it: no guest's XML tells it here"),
    (changed("guest: vr1", "guest: vr1\n    native: vr1"), "x.yaml:4: routers.0: a router is a guest, guests or native; write one of the three"),
    (changed("  - guest: vr1\n  ", "  -"), "x.yaml:4: routers.0: a router is a guest, guests or native; write one of the three"),
    (changed("10.10.1.2", "10.10.1.256"), "x.yaml:5: routers.0.forth.source: this is not an IPv4 address; write it as 10.10.1.2"),
    (changed("10.20.1.100", "224.0.0.1"), "x.yaml:5: routers.0.forth.destination: 224.0.0.1 cannot be routed; write a unicast address"),
    (changed("{source", '{mac: "ff:ff:ff:ff:ff:ff", source'), "x.yaml:5: routers.0.forth.mac: ff:ff:ff:ff:ff:ff is a group address; write the address of the router's own interface"),
    (changed(ROUTER, ROUTER + "  - guest: vr1\n" + ROUTER), "x.yaml:6: routers.1: router vr1 stands here twice; keep one of the two"),
    (changed("10.20.1.100", "223.255.255.0") + "traffic: {destinations: 257}\n", "x.yaml:5: routers.0.forth.destination: 257 addresses from 223.255.255.0 on reach beyond unicast; write a lower address, or fewer traffic.destinations"),
    (changed("kind: sweep, rates: [4000]", "kind: ndr"), "x.yaml:6: method: ndr needs the key 'high'; add high: 100000"),
    (changed("kind: sweep, rates: [4000]", "kind: ndr, high: 9, low: 9"), "x.yaml:6: method.low: low is not below high; search from low to high"),
    (changed("kind: sweep, rates: [4000]", "kind: ndr, high: 9, loss: 0.1"), "x.yaml:6: method.loss: ndr has no use for this key; remove it"),
    (changed("kind: sweep", "kind: fairness"), "x.yaml:6: method.kind: there is nothing to share between; list several routers, or write traffic.flows from 2 to 16"),
    (changed("[4000]", "[4000, 4000]"), "x.yaml:6: method.rates: a rate stands here twice; use repeats instead"),
    (changed("[4000]", "[4000], seconds: 0"), "x.yaml:6: method.seconds: a trial takes time; write seconds: 2"),
    (SMALL + "limits: {pps: 3999}\n", "x.yaml:6: method.rates: 4000 frames per second are above the limit of 3999; offer less, or write limits.pps (up to 150000000)"),
    (SMALL + "limits: {seconds: 1}\n", "x.yaml:6: method.seconds: a trial of 2 s is above the limit of 1 s; shorten it, or write limits.seconds"),
    (SMALL + "configuration: {tuning: policy}\n", "x.yaml:7: configuration: tuning policy needs the key 'policy'; add it, or write another tuning"),
    (SMALL + "configuration: {policy: p}\n", "x.yaml:7: configuration.policy: this belongs to tuning policy, not to untuned; remove it, or write tuning: policy"),
    (SMALL + "configuration: {tuning: libvirt-pins, cpus: 3-}\n", "x.yaml:7: configuration.cpus: "),
    (SMALL + "configuration: {tuning: command, apply: [a]}\n", "x.yaml:7: configuration: tuning command needs the key 'revert'; add it, or write another tuning"),
    (SMALL + "configuration: {revert: [a]}\n", "x.yaml:7: configuration.revert: revert needs the key 'apply' beside it; add it: what is changed for a measurement is taken back"),
    (changed("[4000]", "[4000], sizes: [60, 60]"), "x.yaml:6: method.sizes: a size stands here twice; use repeats instead"),
    (changed("[4000]", "[4000], sizes: [59]"), "x.yaml:6: method.sizes.0: 59 is below 60; write imix, or a number of bytes from 60 to 1514"),
    (changed("kind: sweep, rates: [4000]", "kind: ndr, high: 9, sizes: [60]"), "x.yaml:6: method.sizes: ndr has no use for this key; remove it"),
    (changed("guest: vr1", "guests: []"), "x.yaml:4: routers.0.guests: the value is empty; write a list of guests such as [vr1, vr2]"),
    (changed("guest: vr1", "guests: [vr1, vr1]"), "x.yaml:4: routers.0: router vr1 stands here twice; keep one of the two"),
    (changed("guest: vr1", "guest: vr1\n    guests: [vr2, vr3]"), "x.yaml:4: routers.0: a router is a guest, guests or native; write one of the three"),
    (changed(ROUTER, ROUTER + "  - guests: [vr2, vr1]\n" + ROUTER), "x.yaml:6: routers.1: router vr1 stands here twice; keep one of the two"),
    (changed("guest: vr1", "guests: [a, b]") + "configuration: {attachment: macvtap}\n", "x.yaml:7: configuration.attachment: the interfaces of a+b are those of a group, and stay as they are; remove it, or measure a router of one guest"),
    (SMALL + "configuration: {scale: {edge: 0}}\n", "x.yaml:7: configuration.scale.edge: 0 is below 1; write a whole number from 1 to 256"),
    (SMALL + "warmup:\n", "x.yaml:7: warmup: the key has no value; write a number of seconds, or a number with ms, s or min such as 500ms, or remove the key"),
    (SMALL + "configuration: {scale: {edge: }}\n", "x.yaml:7: configuration.scale.edge: the key has no value; write a whole number from 1 to 256, or remove the key"),
    (SMALL + "configuration: {tuning: libvirt-pins, cpus: 1,3-4}\n", "x.yaml:7: configuration.3-4: unknown key; between { and } quote a list with a comma: \"1,2\""),
    (SMALL + "warm:\n", "x.yaml:7: warm: unknown key; "),
    (SMALL + "configuration: {ring: 300}\n", "x.yaml:7: configuration.ring: 300 is not accepted; write 256, 512 or 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[m[1][8:60] for m in MISTAKES])
def test_mistake(text: str, message: str) -> None:
    with pytest.raises(PolicyErrors) as caught:
        load_text(text, "x.yaml")
    assert caught.value.exit_code == 2
    assert all(e.what and e.where and e.hint for e in caught.value.errors)
    assert str(caught.value).startswith(message)
    assert len(caught.value.errors) == 1


def test_a_router_of_several_guests() -> None:
    text = changed("guest: vr1", "guests: [vr1, vr2]").replace(
        "[4000]", "[4000], sizes: [60, imix]"
    )
    spec = load_text(text + "configuration: {scale: {edge: 2}}\n", "x.yaml")
    (router,) = spec.routers
    assert router.name == "vr1+vr2"
    assert router.guests == ("vr1", "vr2")
    assert not router.native
    assert spec.method.sizes == (60, "imix")
    assert spec.configuration.scale == {"edge": 2}
    later = load_text("configuration: {scale: {edge: 1}}\n", "y.yaml", spec)
    assert (later.routers, later.method) == (spec.routers, spec.method)
    assert later.configuration.scale == {"edge": 1}


def test_every_mistake_is_told_by_line() -> None:
    text = WHOLE.replace("vhost: true", "cpu: 1").replace("kind: sweep", "kind: no")
    with pytest.raises(PolicyErrors) as caught:
        load_text(text, "x.yaml")
    assert [e.where for e in caught.value.errors] == ["x.yaml:12", "x.yaml:13"]


def test_fairness_of_flows_and_of_routers() -> None:
    text = changed("sweep", "fairness") + "traffic: {flows: 2}\n"
    assert load_text(text, "x").method.kind == "fairness"
    two = WHOLE.replace("kind: sweep", "kind: fairness, by_router: {vr9: 5}")
    with pytest.raises(PolicyErrors, match="the routers are vr1, host"):
        load_text(two, "x")


def keys_of(part: dict[str, Any]) -> set[str]:
    """Every key of a schema, those of mappings below it too."""
    below = [*part.get("properties", {}).values(), *([part["items"]] if "items" in part else [])]
    found = set(part.get("properties", {}))
    return found.union(*(keys_of(one) for one in below))


def test_the_manual_names_every_key_and_choice() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "bench.md").read_text()
    told = set(re.findall(r"[\w-]+", text))
    choices = {*KINDS, *(str(t) for t in model.Tuning), *(str(a) for a in model.BenchAttachment)}
    assert keys_of(schema()) | choices <= told


def test_the_example_of_the_manual_is_accepted() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "bench.md").read_text()
    [example] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert load_text(example, "docs/x.yaml").configuration.policy_path == "docs/router.yaml"
