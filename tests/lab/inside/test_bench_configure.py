"""Configurations of a bench: each is what it says, and leaves nothing behind, even killed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import deadlinehelp
import hoststate
import labhelp
import pytest
from labhelp import LabGuest

from vsrtune.bench.cleanup.cleaners import CLEANERS, BenchLedger
from vsrtune.bench.setup.configurator import Configurator
from vsrtune.bench.spec.model import BenchAttachment, Configuration, Tuning
from vsrtune.core.errors import VsrtuneError

NET = Path("/sys/class/net")
UNTUNED = Configuration("untuned")
BRIDGE = Configuration("bridge", attachment=BenchAttachment.BRIDGE)
EMULATED = Configuration("emulated", vhost=False)
MODULE = Configuration("module", attachment=BenchAttachment.NAPI_MACVTAP)
OVS = Configuration("openvswitch", attachment=BenchAttachment.OPENVSWITCH)


def interfaces(name: str) -> str:
    """The interfaces of the running domain, as virsh prints them."""
    xml = hoststate.virsh("dumpxml", name)
    return "\n".join(re.findall(r"<interface.*?</interface>", xml, re.DOTALL))


def devices(name: str) -> list[str]:
    """The host's devices of its interfaces."""
    return re.findall(r"target dev='([^']+)'", interfaces(name))


def settings(name: str) -> str:
    """The host's settings of the guest, and of the devices of its interfaces. libvirt
    gives a macvtap that it names itself a new number each time."""
    xml = re.sub(r"'macvtap\d+'", "'macvtap'", interfaces(name))
    lengths = [labhelp.text(f"/sys/class/net/{d}/tx_queue_len") for d in devices(name)]
    pins = [hoststate.virsh(pin, name) for pin in ("vcpupin", "emulatorpin")]
    return "\n".join([xml, *lengths, *pins])


def bridges() -> list[str]:
    return sorted(e.name for e in NET.iterdir() if e.name.startswith("vsr"))


@pytest.fixture
def routers(guests: list[LabGuest]) -> list[LabGuest]:
    """The libvirt routers."""
    return [g for g in guests if g.kind == "libvirt"]


@pytest.fixture
def alone(guests: list[LabGuest]) -> None:
    """Nobody else on the lower devices, so that bridges can have them."""
    if any(g.kind == "qemu" for g in guests):
        pytest.skip("a plain QEMU guest keeps its macvtaps on the lower devices")


@pytest.fixture
def configurator(routers: list[LabGuest], tmp_path: Path) -> Iterator[Configurator]:
    """One for the routers. The test fails when it does not restore the host exactly."""
    before = {g.name: settings(g.name) for g in routers}

    def ready() -> None:
        for guest in routers:
            labhelp.sh("lab-wait-forward", guest.name, "30")

    with (
        BenchLedger.open(tmp_path / "ledger.jsonl") as ledger,
        Configurator(labhelp.bench_spec(routers), ledger, ready=ready) as made,
    ):
        yield made
        made.restore()
        assert ledger.pending() == []
    assert {g.name: settings(g.name) for g in routers} == before
    assert bridges() == []
    ready()


@pytest.fixture
def openvswitch() -> Iterator[None]:
    labhelp.sh("systemctl", "start", "openvswitch-switch")
    yield
    labhelp.sh("systemctl", "stop", "openvswitch-switch", "ovs-vswitchd", "ovsdb-server")
    labhelp.sh("modprobe", "-r", "openvswitch", check=False)


def forwarded(guest: LabGuest) -> int:
    """Of 1000 frames."""
    words = ("--guest", guest.name, "--rate", "1000", "--seconds", "1")
    done = labhelp.sh("lab-traffic", *words)
    found = re.search(r'"forwarded": (\d+)', done.stdout)
    assert found is not None, done.stdout
    return int(found[1])


@labhelp.one_release("attachments of the bench", "trixie")
def test_bridge(alone: None, configurator: Configurator, routers: list[LabGuest]) -> None:
    configurator.check([BRIDGE])
    configurator.apply(BRIDGE)
    assert len(bridges()) == 2
    for guest in routers:
        assert interfaces(guest.name).count("type='bridge'") == 2
        for device in devices(guest.name):
            assert (NET / device / "master").exists()
        assert forwarded(guest) > 900
        assert len(guest.workers()) >= 2
    configurator.apply(replace(BRIDGE, name="emulated", vhost=False))
    for guest in routers:
        assert guest.workers() == []
        assert forwarded(guest) > 500


def test_openvswitch(
    alone: None, openvswitch: None, configurator: Configurator, routers: list[LabGuest]
) -> None:
    configurator.check([BRIDGE, OVS, UNTUNED])
    configurator.apply(OVS)
    assert "system@ovs-system" in labhelp.sh("ovs-appctl", "dpif/show").stdout
    for guest in routers:
        assert interfaces(guest.name).count("type='openvswitch'") == 2
        assert forwarded(guest) > 900
    configurator.apply(BRIDGE)
    assert labhelp.sh("ovs-vsctl", "list-br").stdout == ""
    configurator.apply(UNTUNED)
    assert bridges() == []
    assert labhelp.sh("ovs-vsctl", "show").stdout.count("Port") == 0


def kinds(name: str) -> set[str]:
    """What `ip` calls the devices of its interfaces."""
    shown = "".join(labhelp.sh("ip", "-d", "link", "show", d).stdout for d in devices(name))
    return set(re.findall(r"^\s+((?:napi_)?macvtap)\b", shown, re.MULTILINE))


def test_devices_of_the_module(
    alone: None, configurator: Configurator, routers: list[LabGuest]
) -> None:
    configurator.check([MODULE, BRIDGE])
    configurator.apply(MODULE)
    for guest in routers:
        assert kinds(guest.name) == {"napi_macvtap"}
        assert len(guest.workers()) >= 2
        assert forwarded(guest) > 900
    configurator.apply(BRIDGE)
    assert len(bridges()) == 2
    configurator.apply(replace(MODULE, name="two", queues=2))
    for guest in routers:
        assert kinds(guest.name) == {"napi_macvtap"}
        assert len(guest.workers()) == 4
        assert forwarded(guest) > 900
    configurator.apply(UNTUNED)
    assert [kinds(guest.name) for guest in routers] == [{"macvtap"}] * len(routers)


def test_queues_and_emulated_back_end(configurator: Configurator, routers: list[LabGuest]) -> None:
    workers = {g.name: len(g.workers()) for g in routers}
    configurator.apply(Configuration("four", queues=4))
    for guest in routers:
        assert interfaces(guest.name).count("queues='4'") == 2
        assert len(guest.workers()) == 8
        assert forwarded(guest) > 900
    configurator.apply(replace(EMULATED, mergeable=False))
    for guest in routers:
        assert guest.workers() == []
        assert interfaces(guest.name).count("mrg_rxbuf='off'") == 2
        assert forwarded(guest) > 500
    configurator.apply(Configuration("macvtap", attachment=BenchAttachment.MACVTAP))
    assert {g.name: len(g.workers()) for g in routers} == workers


@labhelp.one_release("attachments of the bench", "trixie")
def test_a_queue_length_survives(configurator: Configurator, routers: list[LabGuest]) -> None:
    length = NET / routers[0].device(0) / "tx_queue_len"
    before = length.read_text()
    length.write_text("123\n")
    configurator.apply(EMULATED)
    configurator.apply(UNTUNED)
    length = NET / routers[0].device(0) / "tx_queue_len"
    assert length.read_text() == "123\n"
    length.write_text(before)


@labhelp.one_release("attachments of the bench")
def test_libvirt_pins(restored: None, configurator: Configurator, routers: list[LabGuest]) -> None:
    pins = Configuration("pins", Tuning.LIBVIRT_PINS, cpus="1")
    configurator.check([pins])
    before = hoststate.capture()
    for _ in range(2):
        assert configurator.apply(pins) == ()
        for guest in routers:
            assert {labhelp.mask(t) == {1} for t in guest.data_plane()} == {True}
            assert re.search(r"0\s+1$", hoststate.virsh("vcpupin", guest.name), re.MULTILINE)
            assert re.search(r"(^|\s)1$", hoststate.virsh("emulatorpin", guest.name))
        configurator.apply(UNTUNED)
        assert hoststate.differences(before, hoststate.capture()) == []


@labhelp.one_release("attachments of the bench")
def test_policy(
    restored: None, configurator: Configurator, routers: list[LabGuest], irq_cpus: set[int]
) -> None:
    text = "---\n".join(labhelp.tuned_policy(g.name, "0") for g in routers)
    policy = Configuration("policy", Tuning.POLICY, policy=text)
    configurator.check([policy])
    configurator.apply(policy)
    for guest in routers:
        assert labhelp.untuned_lines(guest, irq_cpus) == []
    refused = labhelp.vsrtune("apply", check=False)
    assert refused.returncode != 0
    assert "is using the journal" in refused.stderr
    configurator.apply(UNTUNED)
    for guest in routers:
        assert "policy=0" in hoststate.sched(guest.workers()[0])


def test_policy_on_a_bridge(
    alone: None, configurator: Configurator, routers: list[LabGuest], tmp_path: Path
) -> None:
    """The threads of interfaces that were just attached are found and tuned; a command
    comes on top."""
    mark = tmp_path / "mark"
    text = labhelp.tuned_policy("*", "0").partition("queue:")[0]
    tuned = Configuration(
        "both",
        Tuning.POLICY,
        policy=text,
        apply=("touch", str(mark)),
        revert=("rm", str(mark)),
        attachment=BenchAttachment.BRIDGE,
        queues=2,
        ring=512,
    )
    configurator.check([tuned])
    print(configurator.apply(tuned))
    assert mark.exists()
    for guest in routers:
        assert len(guest.workers()) == 4
        for tid in guest.data_plane():
            assert 0 not in labhelp.mask(tid)
            assert f"priority={labhelp.PRIORITY}" in hoststate.sched(tid)
        assert interfaces(guest.name).count("rx_queue_size='512'") == 2
        assert forwarded(guest) > 900
    configurator.apply(UNTUNED)
    assert not mark.exists()
    for guest in routers:
        assert "rx_queue_size" not in interfaces(guest.name)


def test_class_deadline(configurator: Configurator, routers: list[LabGuest]) -> None:
    """Threads that sleep are woken by traffic until every one has its budget."""
    text = deadlinehelp.policy(routers[0], deadlinehelp.BUDGET, deadlinehelp.BUDGET)
    budgets = Configuration("budgets", Tuning.POLICY, policy=text)
    configurator.check([budgets])
    configurator.apply(budgets)
    for tid in routers[0].data_plane():
        assert hoststate.sched(tid).startswith("policy=6 ")
    configurator.apply(UNTUNED)
    for tid in routers[0].data_plane():
        assert hoststate.sched(tid).startswith("policy=0 ")


@labhelp.one_release("commands of the operator")
def test_command(configurator: Configurator, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = Configuration(
        "command", Tuning.COMMAND, apply=("touch", str(mark)), revert=("rm", str(mark))
    )
    configurator.check([command])
    configurator.apply(command)
    assert mark.exists()
    configurator.apply(UNTUNED)
    assert not mark.exists()
    failing = replace(command, apply=("sh", "-c", "echo the reason; exit 3"), revert=("true",))
    with pytest.raises(VsrtuneError, match=r"status 3.*the reason"):
        configurator.apply(failing)


def sysctls() -> dict[str, str]:
    """What a profile of TuneD may set."""
    found = {}
    for directory in ("vm", "net/core", "kernel"):
        for path in Path("/proc/sys", directory).iterdir():
            try:
                found[str(path)] = path.read_text()
            except OSError:
                continue
    moving = ("ns_last_pid", "random", "pty", "netdev_rss_key", "stat_refresh", "net_dev")
    return {k: v for k, v in found.items() if not any(m in k for m in moving)}


@labhelp.one_release("attachments of the bench", "trixie")
def test_tuned_virtual_host(configurator: Configurator) -> None:
    profile = Configuration(
        "tuned",
        Tuning.COMMAND,
        apply=("lab-tuned", "start", "virtual-host"),
        revert=("lab-tuned", "stop"),
    )
    before = sysctls()
    configurator.check([profile])
    configurator.apply(profile)
    assert sysctls()["/proc/sys/vm/dirty_background_ratio"] == "5\n"
    assert "virtual-host" in labhelp.sh("tuned-adm", "active").stdout
    configurator.apply(UNTUNED)
    assert sysctls() == before


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(VsrtuneError) as caught:
        work()
    assert caught.value.hint, caught.value
    return str(caught.value)


def test_refusals(configurator: Configurator, routers: list[LabGuest], tmp_path: Path) -> None:
    def check(configuration: Configuration) -> str:
        return refusal(lambda: configurator.check([configuration]))

    missing = check(OVS)
    assert "does not run" in missing or "cannot be a bridge's port" in missing
    assert "not all online" in check(Configuration("x", Tuning.LIBVIRT_PINS, cpus="77"))
    nowhere = Configuration("x", Tuning.COMMAND, apply=("true",), revert=("no-such-program",))
    assert "no program 'no-such-program'" in check(nowhere)
    nobody = Configuration("x", Tuning.POLICY, policy="guest: nobody\n")
    assert "names any of the routers" in refusal(lambda: configurator.apply(nobody))
    bad = Configuration("x", Tuning.POLICY, policy="guest: a\n---\ngest: b\n", policy_path="p")
    with pytest.raises(VsrtuneError, match="p:3"):
        configurator.check([bad])


def test_refuses_what_would_cut_others_off(
    guests: list[LabGuest], libvirt_guest: LabGuest, tmp_path: Path
) -> None:
    with BenchLedger.open(tmp_path / "ledger.jsonl") as ledger:
        with Configurator(labhelp.bench_spec([libvirt_guest]), ledger) as made:
            if len(guests) > 1:
                assert "cannot be a bridge's port" in refusal(lambda: made.check([BRIDGE]))
        gone = replace(libvirt_guest, name="no such guest")
        with Configurator(labhelp.bench_spec([gone]), ledger) as made:
            assert "no such libvirt guest" in refusal(lambda: made.check([BRIDGE]))


@labhelp.one_release("what vsrtune says of itself")
def test_refuses_a_tuned_host(guests: list[LabGuest], tmp_path: Path) -> None:
    labhelp.write_policies("0")
    with BenchLedger.open(tmp_path / "ledger.jsonl") as ledger:
        labhelp.vsrtune("apply")
        assert "vsrtune undo" in refusal(
            lambda: Configurator(labhelp.bench_spec(guests), ledger).__enter__()
        )
        labhelp.vsrtune("undo")
        labhelp.start()
        assert "systemctl stop" in refusal(
            lambda: Configurator(labhelp.bench_spec(guests), ledger).__enter__()
        )
        labhelp.stop()


@pytest.mark.parametrize("seconds", labhelp.shared([1.5, 2.2, 3.0, 4.0, 5.5, 7.0]))
def test_killed_at_any_moment(routers: list[LabGuest], tmp_path: Path, seconds: float) -> None:
    """What the ledger says is enough to put everything back."""
    before = {g.name: settings(g.name) for g in routers}
    child = subprocess.Popen([sys.executable, "-B", __file__, str(tmp_path / "ledger.jsonl")])
    time.sleep(seconds)
    child.kill()
    assert child.wait() == -signal.SIGKILL, "it ended by itself"
    with BenchLedger.open(tmp_path / "ledger.jsonl") as ledger:
        print([entry.kind for entry in ledger.pending()])
        assert [str(failure) for failure in ledger.resolve(CLEANERS)] == []
        assert ledger.pending() == []
    assert {g.name: settings(g.name) for g in routers} == before
    assert bridges() == []
    for guest in routers:
        labhelp.sh("lab-wait-forward", guest.name, "30")


def to_and_fro(ledger_path: Path) -> None:
    """Two configurations in turn, until somebody ends this."""
    routers = [g for g in labhelp.lab_guests() if g.kind == "libvirt"]
    # A bridge where nobody else is on the lower devices.
    attached = BRIDGE if len(routers) == len(labhelp.lab_guests()) else EMULATED
    pins = replace(attached, tuning=Tuning.LIBVIRT_PINS, cpus="1")
    with (
        BenchLedger.open(ledger_path) as ledger,
        Configurator(labhelp.bench_spec(routers), ledger) as made,
    ):
        while True:
            made.apply(pins)
            made.apply(UNTUNED)


if __name__ == "__main__":
    to_and_fro(Path(sys.argv[1]))
