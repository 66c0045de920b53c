"""Members of a group that are made from a template: real disks, real guests, nothing left.

The template is the first router with a disk, under another name: its kernel comes from
the host, so what is on the disk is a pattern, and who writes to a clone's is its QEMU.
"""

from __future__ import annotations

import hashlib
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import labhelp
import pvrhelp
import pytest
from labhelp import LabGuest
from test_attach import LEDGER, devices, kinds
from test_pvr import GROUPS, NEIGHBOURS, SHARED, alone_on, configured, group, lost_nothing

from vsrtune.attach.plan.clone_model import Template
from vsrtune.execute.ledger import read_pending
from vsrtune.group import clone_xml

IMAGES = Path("/var/lib/libvirt/images")
BASE = IMAGES / "router.qcow2"
FILE = """\
group:
  name: edge
  kind: pvr
  members: [edge1, edge2]
  lower: {in: p0, out: p1}
  template: router
"""
MEMBERS = ("edge1", "edge2")
DISK = f"""
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2'/>
      <source file='{BASE}'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <serial type='pty'/>"""
# Changes of a create: two devices, two flags, two overlays, two ups, two definitions, two
# starts. Of a delete, until what cannot be taken back: two downs.
CREATE, DELETE = 12, 2


@pytest.fixture(scope="module")
def template(
    guests: list[LabGuest], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LabGuest]:
    """The router that it would be, and its clones are."""
    if any(g.kind != "libvirt" for g in guests):
        pytest.skip("needs libvirt guests and no other")
    if labhelp.sh("modprobe", "-n", "napi_macvlan", check=False).returncode != 0:
        pytest.skip("this lab has no module napi_macvlan")
    first = guests[0]
    labhelp.sh("qemu-img", "create", "-q", "-f", "qcow2", str(BASE), "16M")
    labhelp.sh("qemu-io", "-c", "write -P 0xab 0 4M", str(BASE))
    text = labhelp.sh("virsh", "dumpxml", "--inactive", first.name).stdout
    text = re.sub(r"<name>.*?</name>", "<name>router</name>", text)
    text = re.sub(r"\s*<uuid>.*?</uuid>", "", text)
    text = re.sub(r"\s*<(serial|console) .*?</\1>", "", text, flags=re.DOTALL)
    path = tmp_path_factory.mktemp("clone") / "router.xml"
    path.write_text(text.replace("</devices>", f"{DISK}\n  </devices>"))
    labhelp.sh("virsh", "define", str(path))
    pvrhelp.add_neighbours(first.index, NEIGHBOURS)
    (GROUPS / "edge.yaml").write_text(FILE)
    yield first
    (GROUPS / "edge.yaml").unlink()
    pvrhelp.drop_neighbours(first.index, NEIGHBOURS)
    labhelp.sh("virsh", "undefine", "router")
    BASE.unlink()


def picture() -> str:
    """All that a group of clones could leave behind or change."""
    base = BASE.stat()
    return "\n".join(
        [
            # Those that run come first, by a number that each start gives.
            *sorted(labhelp.sh("virsh", "list", "--all", "--name").stdout.split()),
            labhelp.sh("virsh", "dumpxml", "--inactive", "router").stdout,
            hashlib.sha256(BASE.read_bytes()).hexdigest(),
            # Whose it is is libvirt's affair: it gives what a guest's disks stand on to QEMU's
            # user, and does not take that back, for others may use it still.
            f"{base.st_size} {base.st_mtime_ns} {base.st_mode:o}",
            *sorted(path.name for path in IMAGES.iterdir()),
            *sorted(path.name for path in Path("/etc/libvirt/qemu").glob("*.xml")),
            *devices(),
        ]
    )


@pytest.fixture
def alone(template: LabGuest, guests: list[LabGuest]) -> Iterator[LabGuest]:
    """The lower devices are free; the test fails when anything is left."""
    for guest in guests:
        labhelp.stop_guest(guest)
    before = picture()
    yield template
    if LEDGER.exists() and LEDGER.stat().st_size:
        labhelp.vsrtune("attach", "--recover", check=False)
        labhelp.vsrtune("group", "delete", "edge", check=False)
    assert picture() == before
    assert read_pending(LEDGER) == []


def info(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(
        labhelp.sh("qemu-img", "info", "-U", "--output=json", str(path)).stdout
    )
    return found


def overlay(member: str) -> Path:
    return IMAGES / f"{member}-vda.qcow2"


def write(member: str, byte: str) -> None:
    """As its guest would: by the backend of its device, since nobody else may write."""
    device = "/machine/peripheral/virtio-disk0/virtio-backend"
    # What QEMU keeps to itself until a flush nobody else can read. Whether it worked it says on
    # its own standard output; here it only says what is wrong with the words.
    for words in (f"write -P {byte} 0 64k", "flush"):
        command = f'qemu-io -d {device} "{words}"'
        told = labhelp.sh("virsh", "qemu-monitor-command", member, "--hmp", command).stdout
        assert told.strip() == "", told


def confined(member: str) -> str:
    """What AppArmor would let the guest open, as libvirt's helper finds out."""
    xml = labhelp.sh("virsh", "dumpxml", member).stdout
    uuid = labhelp.sh("virsh", "domuuid", member).stdout.strip()
    path = Path("/run/clone.xml")
    path.write_text(xml)
    helper = f"/usr/lib/libvirt/virt-aa-helper --dryrun -c -u libvirt-{uuid} < {path} 2>&1"
    return labhelp.sh("sh", "-c", helper).stdout


def test_clones_are_one_router_and_leave_nothing(alone: LabGuest) -> None:
    before = picture()
    told = group("create", "edge", "--dry-run")
    assert f"{overlay('edge1')} (qcow2 overlay of {BASE})" in told
    assert "define edge2 as a clone of router" in told
    assert picture() == before
    print(group("create", "edge"))
    assert devices() == list(SHARED)
    assert kinds() == {"napi_macvtap"}
    for member in MEMBERS:
        found = info(overlay(member))
        assert (found["format"], found["backing-filename"]) == ("qcow2", str(BASE))
        assert found["backing-filename-format"] == "qcow2"
        disks = labhelp.sh("virsh", "domblklist", member).stdout
        assert str(overlay(member)) in disks
        allowed = confined(member)
        assert f'"{overlay(member)}" rwk' in allowed, allowed
        assert re.search(rf'"{BASE}" rk?,', allowed), allowed
    # One router, in two guests.
    configured(alone)
    labhelp.wait_for(lambda: lost_nothing(alone), "all neighbours are found", 60)
    for name in SHARED:
        assert {number: counts["received"] > 0 for number, counts in alone_on(name).items()} == {
            0: True, 1: True,
        }  # fmt: skip
    assert {p["member"] for p in pvrhelp.places()} == set(MEMBERS)
    # What they write stays theirs.
    write("edge1", "0x01")
    write("edge2", "0x02")
    for member, byte in (("edge1", "0x01"), ("edge2", "0x02")):
        labhelp.sh("qemu-io", "-U", "-r", "-c", f"read -P {byte} 0 64k", str(overlay(member)))
        labhelp.sh("qemu-io", "-U", "-r", "-c", "read -P 0xab 64k 64k", str(overlay(member)))
    labhelp.sh("qemu-io", "-U", "-r", "-c", "read -P 0xab 0 4M", str(BASE))
    # The template cannot run beside them, also when none of them runs.
    for member in MEMBERS:
        said = labhelp.sh("virsh", "start", "router", check=False)
        print(said.stderr.strip())
        assert said.returncode != 0
        labhelp.sh("virsh", "destroy", member)
    assert labhelp.sh("virsh", "start", "router", check=False).returncode != 0
    # They are members like others.
    for member in MEMBERS:
        labhelp.sh("virsh", "start", member)
    configured(alone)
    group("drain", "edge", "edge2")
    group("scale", "edge", "2")
    configured(alone)
    print(group("delete", "edge"))
    assert picture() == before


def test_an_interrupted_create_leaves_nothing(alone: LabGuest) -> None:
    """Killed after one change, another one fails: in turns, and which is which does not matter
    to what takes them back."""
    before = picture()
    for n in range(1, CREATE + 1):
        interrupted("create", n)
        assert picture() == before, n
        assert read_pending(LEDGER) == [], n


def test_an_interrupted_delete_is_taken_back_or_done(alone: LabGuest) -> None:
    untouched = picture()
    group("create", "edge")
    configured(alone)
    before = picture()
    for n in range(1, DELETE + 1):
        interrupted("delete", n)
        assert picture() == before, n
        configured(alone)
    # From here on it is done: two stops, two undefines and two files, two devices.
    group("delete", "edge", check=False, fault=f"kill:{DELETE + 3}")
    assert picture() not in (before, untouched)
    labhelp.vsrtune("attach", "--recover")
    assert picture() == untouched


def interrupted(command: str, n: int) -> None:
    """A command that is killed after its nth change, or whose nth change fails."""
    fault = "kill" if n % 2 else "fail"
    told = group(command, "edge", check=False, fault=f"{fault}:{n}")
    if fault == "kill":
        assert "was taken back" in labhelp.vsrtune("attach", "--recover").stdout, n
    else:
        assert "everything is as it was before" in told, f"{n}: {told}"


def test_kept_clones_are_guests_of_their_own(alone: LabGuest) -> None:
    group("create", "edge")
    configured(alone)
    group("delete", "edge", "--keep-clones")
    assert read_pending(LEDGER) == []
    assert kinds() == {"macvtap"}
    macs: set[str] = set()
    for member in MEMBERS:
        assert labhelp.sh("virsh", "domstate", member).stdout.strip() == "running"
        macs |= set(
            re.findall(r"52:54:00:[0-9a-f:]{8}", labhelp.sh("virsh", "domiflist", member).stdout)
        )
        # Its definition starts it again.
        labhelp.sh("virsh", "destroy", member)
        labhelp.sh("virsh", "start", member)
        assert info(overlay(member))["backing-filename"] == str(BASE)
    assert len(macs) == 4
    for member in MEMBERS:
        labhelp.sh("virsh", "destroy", member)
        labhelp.sh("virsh", "undefine", member)
        overlay(member).unlink()


def test_what_is_in_the_way_is_named(alone: LabGuest) -> None:
    labhelp.sh("virsh", "start", "router")
    said = group("create", "edge", check=False)
    assert f"{GROUPS}/edge.yaml:6: router runs, and writes to the disks" in said
    labhelp.sh("virsh", "destroy", "router")
    overlay("edge2").write_text("theirs")
    said = group("create", "edge", check=False)
    assert f"edge2 would get {overlay('edge2')}, and there is a file" in said
    assert overlay("edge2").read_text() == "theirs"
    overlay("edge2").unlink()
    # Ended by somebody, with its definition: told, and what was made for it goes.
    group("create", "edge")
    labhelp.sh("virsh", "destroy", "edge2")
    labhelp.sh("virsh", "undefine", "edge2")
    said = group("delete", "edge")
    assert "edge2 was undefined by somebody meanwhile" in said
    assert f"removed {overlay('edge2')}" in said


# What tools that make guests give them. It is defined and never starts.
RICH = f"""\
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>rich</name>
  <genid/>
  <memory unit='MiB'>256</memory>
  <vcpu placement='static'>2</vcpu>
  <cputune><vcpupin vcpu='0' cpuset='1'/></cputune>
  <os><type arch='x86_64' machine='q35'>hvm</type><boot dev='hd'/></os>
  <features><acpi/><apic/></features>
  <cpu mode='host-passthrough'/>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' discard='unmap'/>
      <source file='{BASE}'/><target dev='vda' bus='virtio'/>
    </disk>
    <disk type='block' device='disk'>
      <driver name='qemu' type='raw'/><source dev='/dev/vda'/><target dev='vdb' bus='virtio'/>
    </disk>
    <disk type='file' device='cdrom'><target dev='sda' bus='sata'/></disk>
    <controller type='usb' model='qemu-xhci'/>
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='pci' index='1' model='pcie-root-port'/>
    <controller type='virtio-serial'/>
    <filesystem type='mount'>
      <source dir='/srv'/><target dir='srv'/><readonly/>
    </filesystem>
    {{nics}}
    <serial type='pty'/>
    <console type='pty'/>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <input type='tablet' bus='usb'/>
    <graphics type='vnc' port='-1' autoport='yes' listen='127.0.0.1'/>
    <video><model type='vga'/></video>
    <watchdog model='i6300esb' action='reset'/>
    <memballoon model='virtio'/>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
    <panic model='isa'/>
    <vsock model='virtio'><cid auto='no' address='7'/></vsock>
  </devices>
  <qemu:commandline><qemu:arg value='-D'/><qemu:arg value='/dev/null'/></qemu:commandline>
</domain>
"""


def elements(text: str) -> Counter[str]:
    """The parts of a definition, those of its devices one by one."""
    domain = ET.fromstring(text)
    found = [e for e in domain if e.tag != "devices"] + list(domain.iterfind("devices/*"))
    return Counter(ET.tostring(e, encoding="unicode").strip() for e in found)


def test_definitions_as_libvirt_writes_them(alone: LabGuest, tmp_path: Path) -> None:
    """Among them what libvirt adds of its own accord; a clone of it is one that libvirt takes."""
    nics = "".join(
        f"<interface type='direct'><mac address='52:54:00:00:01:0{n}'/>"
        f"<source dev='p{n}' mode='bridge'/><model type='virtio'/></interface>"
        for n in (0, 1)
    )
    path = tmp_path / "rich.xml"
    path.write_text(RICH.format(nics=nics))
    labhelp.sh("virsh", "define", str(path))
    text = labhelp.sh("virsh", "dumpxml", "--inactive", "--security-info", "rich").stdout
    group_file = tmp_path / "edge.yaml"
    group_file.write_text(FILE.replace("template: router", "template: rich"))
    told = group("create", str(group_file), "--dry-run")
    print(told)
    assert f"{IMAGES}/edge1-vdb.qcow2 (raw overlay of /dev/vda)" in told
    assert "its CPUs are every clone's too" in told
    uuid = labhelp.sh("virsh", "domuuid", "rich").stdout.strip()
    rich = Template("rich", uuid, text, machine=labhelp.text("/etc/machine-id"))
    own = clone_xml.own_uuid(rich, "edge", "edge1")
    made = clone_xml.copy(rich, "edge1", own, {}, lambda mac: mac.replace("00:01", "00:02"))
    path.write_text(made.xml)
    labhelp.sh("virsh", "define", str(path))
    again = labhelp.sh("virsh", "dumpxml", "--inactive", "edge1").stdout
    # libvirt 9 orders controllers anew; which of them has which address stays.
    parts = {re.match(r"<(\w+)", part)[1] for part in elements(again) - elements(text)}  # type: ignore[index]
    assert parts <= {"name", "uuid", "genid", "disk", "interface", "vsock"}, parts
    changed = Counter(map(str.strip, again.splitlines())) - Counter(
        map(str.strip, text.splitlines())
    )
    print("\n".join(sorted(changed)))
    kinds_of = {re.sub(r"<(/?\w+).*", r"\1", line) for line in changed}
    assert kinds_of <= {"name", "uuid", "genid", "mac", "source", "driver", "disk", "cid"}, changed
    for name in ("edge1", "rich"):
        labhelp.sh("virsh", "undefine", name)
