"""Recordings: complete, replayable, and without what is nobody's business."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import recorded_hosts
from hosttree import HostTree

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError, VsrtuneError
from vsrtune.host.filesystem import FileStat
from vsrtune.host.libvirt import DomainText
from vsrtune.host.procfs import PF_KTHREAD
from vsrtune.host.recorded import Answers, load
from vsrtune.model.guest import Confidence, Role
from vsrtune.model.snapshot import Problem
from vsrtune.observe import recording as recorder
from vsrtune.observe.tracing import TraceMemory

pytestmark = pytest.mark.usefixtures("tree")

MAC = "52:54:00:ab:cd:ef"
UUID = "c0ffee00-0000-4000-8000-000000000001"
XML = f"""\
<domain type='kvm' id='1'>
  <name>vr1</name>
  <uuid>{UUID}</uuid>
  <description>hunter2</description>
  <metadata>
    <x>hunter2</x>
    <vsrtune:originals xmlns:vsrtune='urn:vsrtune:originals:1'>
      <vsrtune:vcpu id='0' original='0-3' ours='1'/>
    </vsrtune:originals>
  </metadata>
  <cputune><vcpupin vcpu='0' cpuset='1'/></cputune>
  <sysinfo type='smbios'><system><entry name='serial'>hunter2</entry></system></sysinfo>
  <devices>
    <disk><source file='/hunter2.img'/><serial>hunter2</serial></disk>
    <graphics passwd='hunter2'/>
    <interface type='direct'>
      <mac address='{MAC}'/>
      <target dev='macvtap0'/>
      <model type='virtio'/>
      <alias name='net0'/>
      <filterref filter='hunter2'/>
    </interface>
  </devices>
</domain>
"""


class OneDomain:
    """libvirt with one guest, or failing."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def domains(self) -> tuple[DomainText, ...]:
        if self.uri == "fails":
            raise ObserveError("libvirt does not answer")
        pins = (CpuSet([1]),)
        return (DomainText("vr1", UUID, XML, pins, CpuSet([0, 1])),)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostTree:
    """A host to record, in the place of this one."""
    tree = HostTree().host()
    tree.qemu(
        50,
        *("-name", "guest=vr1,debug-threads=on"),
        *("-object", "secret,id=masterKey0,data=hunter2"),
        *("-uuid", UUID),
        *("-append", "password=hunter2"),
        *("-netdev", "tap,fd=32,vhost=on,id=hostnet0"),
        *("-device", f"virtio-net-pci,netdev=hostnet0,mac={MAC}"),
    )
    tree.thread(50, 51, "vhost-50", start=101)
    tree.thread(50, 52, "CPU 0/KVM", start=102)
    tree.thread(60, 60, "hunter2")
    tree.thread(61, 61, "irqbalance")
    tree.fd(50, 32, "/dev/tap8").fd(50, 33, "/dev/vhost-net").fd(50, 34, "/hunter2.img")
    tree.qemu(70, "-name", "pq1", "-qmp", "unix:/run/q,server=on")
    tree.thread(70, 71, "qemu-system-x86")
    tree.qmp(70, {"0": 71})
    tree.device("macvtap0", 8, has="macvtap lower_p0")
    tree.device("p0", 4, pci="pci0000:00/0000:00:05.0")
    tree.file("/sys/devices/pci0000:00/0000:00:05.0/msi_irqs/24", "msix\n")
    tree.file("/proc/irq/24/smp_affinity_list", "0-3\n")
    tree.file("/sys/kernel/irq/24/actions", "p0\n").file("/sys/kernel/irq/25/actions", "hunter2\n")
    monkeypatch.setattr(recorder, "LiveRoot", tree.root)
    monkeypatch.setattr(recorder, "LibvirtSource", OneDomain)
    monkeypatch.setattr(TraceMemory.__init__, "__defaults__", (tmp_path / "trace-results.json", ""))
    return tree


def test_a_recording_shows_what_the_host_showed(tmp_path: Path) -> None:
    file = tmp_path / "recorded"
    snapshot = recorder.record(file, note="Two guests.")
    assert snapshot.problems == ()
    assert [g.ref for g in snapshot.guests] == ["vr1", "qemu:pq1"]
    assert [(c.vcpu, c.cpus) for c in snapshot.guests[0].carried] == [(0, CpuSet([1]))]
    assert [t.key.tid for t in snapshot.guests[1].by_role(Role.VCPU)] == [71]
    assert [i.name for i in snapshot.host.nics[0].irqs] == ["p0"]
    assert [n.name for n in snapshot.host.neighbours] == ["irqbalance"]
    assert recorded_hosts.shown(file) == snapshot
    assert recorder.replay(file) == snapshot
    assert [path.name for path in tmp_path.iterdir()] == ["recorded"]
    note = load(file).note
    assert note[:3] == ("Two guests.", "", "Kernel: 6.12.0-test")
    assert any(line.startswith("Redactions:") for line in note)


def test_a_recording_has_the_cpusets_and_the_books_of_the_host(
    tree: HostTree, tmp_path: Path
) -> None:
    slice_ = "/sys/fs/cgroup/machine.slice"
    for path in (slice_, f"{slice_}/vr1.scope"):
        tree.file(f"{path}/cgroup.procs", "50\n").file(f"{path}/cgroup.events", "populated 1\n")
        tree.file(f"{path}/cpuset.cpus", "\n").file(f"{path}/cpuset.cpus.effective", "0-3\n")
        tree.file(f"{path}/cpuset.cpus.partition", "member\n")
    tree.thread(50, 52, "CPU 0/KVM", start=102, cgroup="/machine.slice/vr1.scope")
    tree.file("/sys/kernel/debug/sched/fair_server/cpu0/runtime", "50000000\n")
    tree.file("/sys/kernel/debug/sched/fair_server/cpu0/period", "1000000000\n")
    snapshot = recorder.record(tmp_path / "recorded")
    assert [c.path for c in snapshot.host.cpusets] == ["machine.slice", "machine.slice/vr1.scope"]
    assert [c.populated for c in snapshot.host.cpusets] == [True, True]
    assert snapshot.host.deadline[0].fair_server == 52428


def test_a_recording_tells_whose_devices_are(tree: HostTree, tmp_path: Path) -> None:
    tree.device("tap5", 15, has="tun_flags").device("tap6", 16, has="tun_flags")
    tree.device("macvtap1", 9, has="macvtap lower_p0").device("macvtap2", 10, has="macvtap")
    for number in (9, 10):
        tree.file(
            f"/sys/devices/virtual/net/macvtap{number - 8}/tap{number}/dev", f"236:{number}\n"
        )
        tree.fd(70, number, f"/dev/tap{number}")
        tree.stats[f"/proc/70/fd/{number}"] = FileStat(0, 0o020600, 5, 6, os.makedev(236, 9))
    tree.fd(70, 11, "/dev/net/tun", "iff:\ttap5\n")
    tree.qemu(80, "-name", "pq2").thread(80, 81, "CPU 0/KVM")
    tree.fd(80, 11, "/dev/net/tun", "iff:\ttap6\n")
    tree.link("/proc/self/ns/net", "net:[1]")
    tree.link("/proc/70/ns/net", "net:[1]").link("/proc/80/ns/net", "net:[2]")
    file = tmp_path / "recorded"
    snapshot = recorder.record(file)
    assert [[i.target for i in g.interfaces] for g in snapshot.guests] == [
        ["macvtap0"], ["macvtap1", "tap5"], [],
    ]  # fmt: skip
    assert recorder.replay(file) == snapshot


def test_a_recording_carries_what_the_module_tells(tree: HostTree, tmp_path: Path) -> None:
    for tid in (70, 71):
        tree.thread(tid + 10, tid + 10, f"napi/macvtap0-{tid}", ppid=2, flags=PF_KTHREAD)
    tree.thread(90, 90, "napi/hunter2-1", ppid=2, flags=PF_KTHREAD)
    base = "/sys/devices/virtual/net/macvtap0"
    tree.remove(f"{base}/macvtap")
    tree.napi_macvtap("macvtap0", 8, "p0", threaded=1, tapq0_worker_tid=51, rx_dropped_down=3)
    file = tmp_path / "recorded"
    snapshot = recorder.record(file)
    guest = snapshot.guests[0]
    # Both threads that have the device's name are kept, as the reason why neither is used.
    assert "threads 80, 81 all have its name" in guest.problems[0]
    (interface,) = guest.interfaces
    assert interface.counters is not None
    assert interface.counters.dropped == (("queue_full", 0), ("down", 3))
    assert [t.confidence for t in guest.by_role(Role.VHOST)] == [Confidence.EXACT]
    assert recorder.replay(file) == snapshot
    assert "hunter2" not in file.read_text()


def test_a_recording_keeps_secrets_and_strangers_out(tmp_path: Path) -> None:
    file = tmp_path / "recorded"
    snapshot = recorder.record(file)
    text = file.read_text()
    for private in ("hunter2", MAC, UUID, "0b007ed0-0000-4000-8000-000000000001"):
        assert private not in text
    recording = load(file)
    assert not any(path.startswith("/proc/60/") for path in recording.host.texts)
    guest = snapshot.guests[0]
    # The same replacement everywhere, so that command line and XML still agree.
    assert guest.interfaces[0].mac.startswith("02:")
    assert guest.interfaces[0].mac in recording.virt().domains()[0].live_xml
    assert guest.uuid in recording.host.texts["/proc/50/cmdline"]
    root = recording.root()
    assert root.listdir("/proc") == ["50", "61", "70"]
    assert root.listdir("/proc/50/fd") == ["32", "33"]


def test_a_libvirt_that_failed_fails_again(tmp_path: Path) -> None:
    snapshot = recorder.record(tmp_path / "recorded", "fails")
    assert snapshot.problems == (Problem("libvirt", "libvirt does not answer"),)


def test_a_file_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(VsrtuneError, match="exists and is left as it is"):
            recorder.record(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_file_that_appears_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(answers: Answers) -> None:
        (tmp_path / "file").write_text("mine")
        recorder_prune(answers)

    recorder_prune = recorder.prune
    monkeypatch.setattr(recorder, "prune", late)
    with pytest.raises(VsrtuneError, match="exists and is left as it is"):
        recorder.record(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(VsrtuneError, match="cannot record: No such file or directory") as caught:
        recorder.record(tmp_path / "none" / "file")
    assert caught.value.where == str(tmp_path / "none" / "file")


def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_SIZE", 1000)
    with pytest.raises(VsrtuneError, match="would be larger than"):
        recorder.record(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_two_recordings_of_one_host_differ_in_what_is_replaced_only(tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        recorder.record(tmp_path / name)
        texts.append((tmp_path / name).read_text())
    replaced = re.compile(r"02(:[0-9a-f]{2}){5}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
    assert texts[0] != texts[1]
    assert len({replaced.sub("", text) for text in texts}) == 1


def test_errors_are_recorded_too(tree: HostTree, tmp_path: Path) -> None:
    tree.errors["/proc/50/fdinfo/32"] = "EACCES"
    tree.fd(50, 35, "/dev/net/tun")
    tree.errors["/proc/50/fdinfo/35"] = "EACCES"
    snapshot = recorder.record(tmp_path / "recorded")
    assert len(snapshot.guests) == 2
    with pytest.raises(PermissionError):
        load(tmp_path / "recorded").root().read("/proc/50/fdinfo/35")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("mac=02:00:00:00:00:01", True),
        ("00:00:00:00:00:00 ff:ff:ff:ff:ff:ff", True),
        ("0000:00:05.0 12:34:56", True),
        ("52:54:00:00:00:01", False),
        ("X=BC:24:11:00:00:01,", False),
    ],
)
def test_redacted_addresses(text: str, kept: bool) -> None:
    redact = recorder.Redactor(b"salt")
    assert (redact(text) == text) is kept
    assert redact(text) == redact(text)
    assert redact(text) == redact(redact(text))
