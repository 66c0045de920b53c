"""The environment block on recorded hosts, and the labels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import bench_samples as samples
import pytest
import recorded_hosts

from vsrtune.bench.report.files import environment, label
from vsrtune.bench.session import with_macs
from vsrtune.bench.spec.model import Endpoint, Router
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.recorded import load
from vsrtune.observe.recording import replay

VETH = {"driver": "veth", "mtu": "1500", "txqueuelen": "1000"}


def answers(command: object) -> str:
    """A host with known programs."""
    assert isinstance(command, tuple)
    match command[0]:
        case "virsh":
            return "11.3.0\n"
        case str() as program if program.endswith("exe"):
            return "QEMU emulator version 10.0.3 (Debian 1:10.0.3+ds-0+deb13u1)\nCopyright\n"
    return ""


@pytest.fixture(params=["bookworm-veth-plain", "trixie-veth-multiqueue"])
def host(request: pytest.FixtureRequest) -> Path:
    return recorded_hosts.file(request.param)


def test_block_describes_the_guest_under_test(host: Path) -> None:
    snapshot = replay(host)
    guest = snapshot.guests[0]
    spec = replace(samples.SPEC, routers=(replace(samples.SPEC.routers[0], name=guest.ref),))
    block = environment(
        snapshot, spec, samples.TUNED, {"gen/g0": VETH, "sink/s0": VETH},
        root=load(host).root(), run=answers,
    )  # fmt: skip
    assert json.loads(json.dumps(block)) == block
    assert block["label"] == "one machine, veth and pktgen"
    assert block["kernel"] == snapshot.host.kernel
    assert list(block["guests"]) == [guest.ref]
    inside = block["guests"][guest.ref]
    expected = "kthread" if host.name.startswith("bookworm") else "task"
    assert inside["vhost"] == expected
    assert any(t["thread"].startswith("vhost") for t in inside["threads"])
    assert {i["txqueuelen"] for i in inside["interfaces"]} == {500}
    assert len(block["policy"]["sha256"]) == 64
    assert block["qemu"].startswith("10.0.3")


def test_a_host_that_tells_nothing_gives_a_block_all_the_same(host: Path) -> None:
    block = environment(
        replay(host), samples.SPEC, samples.UNTUNED, {}, root=load(host).root(), run=lambda _: ""
    )
    assert block["policy"] is None
    assert block["label"] == "one machine, pktgen"


def test_labels() -> None:
    assert label(samples.SPEC, ["veth", "veth"]) == "one machine, veth and pktgen"
    assert label(samples.SPEC, ["e1000e", "e1000e"]) == "one machine, pktgen"
    remote = replace(samples.SPEC, left=Endpoint("eth1", None, "root@box"))
    assert label(remote, ["igb", "igb"]) == "pktgen on a second machine"


class TestMacs:
    snapshot = replay(recorded_hosts.file("bookworm-veth-plain"))

    def spec(self, name: str, mac: str = "") -> samples.Spec:
        leg = replace(samples.SPEC.routers[0].forth, mac=mac)
        return replace(samples.SPEC, routers=(Router(name, leg, back=leg),))

    def test_first_interface_forth_second_back(self) -> None:
        guest = self.snapshot.guests[0]
        (router,) = with_macs(self.spec(guest.ref), self.snapshot).routers
        assert router.back is not None
        assert [router.forth.mac, router.back.mac] == [i.mac for i in guest.interfaces[:2]]

    def test_of_several_guests_the_first_ones(self) -> None:
        guest = self.snapshot.guests[0]
        others = tuple(g.ref for g in self.snapshot.guests[1:])
        spec = self.spec("all")
        many = replace(spec.routers[0], members=(guest.ref, *others))
        (router,) = with_macs(replace(spec, routers=(many,)), self.snapshot).routers
        assert router.forth.mac == guest.interfaces[0].mac
        ghost = replace(many, members=(guest.ref, "ghost"))
        with pytest.raises(VsrtuneError, match="ghost"):
            with_macs(replace(spec, routers=(ghost,)), self.snapshot)

    def test_what_is_written_stays(self) -> None:
        spec = self.spec(self.snapshot.guests[0].ref, "02:00:00:00:00:01")
        assert with_macs(spec, self.snapshot) == spec

    def test_a_guest_that_does_not_run(self) -> None:
        with pytest.raises(VsrtuneError, match="no such guest"):
            with_macs(self.spec("ghost"), self.snapshot)
