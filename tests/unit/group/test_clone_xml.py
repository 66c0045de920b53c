"""The definition of a clone: what stays, what becomes its own, what cannot be had twice."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import recorded_hosts
from clone_samples import CDROM, DISK, MACHINE, MACS, NICS, UUID, definition, nic

from vsrtune.attach.plan.clone_model import File, Template
from vsrtune.core.errors import VsrtuneError
from vsrtune.group import clone_xml
from vsrtune.group.clone_xml import Copy
from vsrtune.group.members import free_mac
from vsrtune.host.recorded import load
from vsrtune.model import domain_xml

IMAGE = "/var/lib/libvirt/images"
SHARED = "<interface type='ethernet'><mac address='02:00:00:00:00:01'/><target dev='edge-in' managed='no'/></interface>"


def copied(text: str, directory: str = "", **interfaces: str) -> Copy:
    template = Template("router", UUID, text)
    return clone_xml.copy(
        template, "vr2", "11111111-2222-3333-4444-555555555555",
        {mac: interfaces[name] for name, mac in (("first", MACS[0]),) if name in interfaces},
        lambda mac: f"52:54:01:{mac[9:]}", directory,
    )  # fmt: skip


def devices(made: Copy, path: str) -> list[ET.Element]:
    return ET.fromstring(made.xml).findall(f"devices/{path}")


def differences(made: Copy, text: str) -> set[str]:
    """Paths at which the clone's definition is not the template's."""

    def flat(element: ET.Element, path: str = "") -> dict[str, str]:
        found = {f"{path}/@{k}": v for k, v in element.attrib.items()}
        found[path] = (element.text or "").strip()
        counts: dict[str, int] = {}
        for child in element:
            number = counts[child.tag] = counts.get(child.tag, 0) + 1
            found |= flat(child, f"{path}/{child.tag}{number}")
        return found

    old, new = flat(ET.fromstring(text)), flat(ET.fromstring(made.xml))
    return {path for path in {*old, *new} if old.get(path) != new.get(path)}


def test_all_but_its_own_is_the_templates() -> None:
    text = definition(
        DISK + CDROM + NICS, more="<qemu:commandline><qemu:arg value='-x'/></qemu:commandline>"
    )
    made = copied(text, first=SHARED)
    assert made.files == (File(f"{IMAGE}/vr2-vda.qcow2", f"{IMAGE}/router.qcow2", "qcow2"),)
    changed = differences(made, text)
    assert {path for path in changed if "interface1" not in path} == {
        "/name1", "/uuid1", "/devices1/disk1/source1/@file", "/devices1/interface2/mac1/@address",
    }  # fmt: skip
    first, second = devices(made, "interface")
    assert first.get("type") == "ethernet"
    assert second.find("mac").get("address") == "52:54:01:00:00:0b"  # type: ignore[union-attr]
    assert "qemu:commandline" in made.xml  # not ns0:
    assert made.notes == (
        "router: its <qemu:commandline> is every clone's too, whatever that names of the host",
    )


RAW = DISK.replace("type='qcow2'", "type='raw'").replace("router.qcow2", "router.img")
BLOCK = RAW.replace("type='file' device='disk'", "type='block' device='disk'").replace(
    f"file='{IMAGE}/router.img'", "dev='/dev/vg/router'"
)
TOLD = DISK.replace(
    "<target",
    "<backingStore type='file'><format type='raw'/><source file='/a'/><backingStore/></backingStore><target",
)


@pytest.mark.parametrize(
    ("disk", "directory", "file"),
    [
        (RAW, "", File(f"{IMAGE}/vr2-vda.qcow2", f"{IMAGE}/router.img", "raw")),
        (RAW, "/clones", File("/clones/vr2-vda.qcow2", f"{IMAGE}/router.img", "raw")),
        (BLOCK, "", File(f"{IMAGE}/vr2-vda.qcow2", "/dev/vg/router", "raw")),
        (RAW.replace(" type='raw'", ""), "", File(f"{IMAGE}/vr2-vda.qcow2", f"{IMAGE}/router.img", "raw")),
        (TOLD, "", File(f"{IMAGE}/vr2-vda.qcow2", f"{IMAGE}/router.qcow2", "qcow2")),
    ],
)  # fmt: skip
def test_overlays(disk: str, directory: str, file: File) -> None:
    made = copied(definition(disk + NICS), directory)
    assert made.files == (file,)
    (found,) = devices(made, "disk")
    assert found.get("type") == "file"
    assert found.find("driver").attrib == {"name": "qemu", "type": "qcow2", "cache": "none", "discard": "unmap"}  # type: ignore[union-attr]  # fmt: skip
    assert found.find("source").attrib == {"file": file.path}  # type: ignore[union-attr]
    assert clone_xml.disks(made.xml) == (file.path,)
    # Only what the template's definition says of the chain is said of the clone's.
    chain = ["".join(e.attrib.values()) for e in found.iterfind(".//backingStore/source")]
    assert chain == ([file.base, "/a"] if disk is TOLD else [])
    assert domain_xml.own_files(made.xml) == {file.path, *chain}


def test_what_is_read_only_stays() -> None:
    ro = DISK.replace("<serial>", "<readonly/><serial>")
    net = CDROM.replace("type='file' device", "type='network' device")
    text = definition(CDROM + ro + net + NICS)
    made = copied(text)
    assert made.files == ()
    assert not [path for path in differences(made, text) if "disk" in path]


VARS = "<loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>"
NVRAM = "/var/lib/libvirt/qemu/nvram"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"<nvram template='/x.fd'>{NVRAM}/router_VARS.fd</nvram>", f"<nvram template='/x.fd'>{NVRAM}/vr2_VARS.fd<"),
        (f"<nvram type='file'><source file='{NVRAM}/r.qcow2'/></nvram>", f'<source file="{NVRAM}/vr2_VARS.qcow2"'),
    ],
)  # fmt: skip
def test_nvram_of_its_own(old: str, new: str) -> None:
    made = copied(definition(os=VARS + old))
    assert new.replace("'", '"') in made.xml
    assert domain_xml.own_files(made.xml) == {file.path for file in made.files}
    assert made.files[0].format == ""
    assert made.files[0].path.startswith(f"{NVRAM}/vr2_VARS.")


def test_what_libvirt_gives_each_guest_anew() -> None:
    text = definition(
        f"""{DISK}{NICS}
    <interface type='bridge'>
      <mac address='52:54:00:00:00:0c'/>
      <source bridge='ovs'/>
      <virtualport type='openvswitch'><parameters interfaceid='{UUID}' profileid='x'/></virtualport>
      <target dev='mgmt0'/>
    </interface>
    <serial type='pty' tty='/dev/pts/1'><source path='/dev/pts/1'/><target port='0'/></serial>
    <console type='pty'><target type='serial' port='0'/></console>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <graphics type='vnc' port='-1' autoport='yes' passwd='secret'><listen type='address'/></graphics>
    <tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
    <vsock model='virtio'><cid auto='no' address='3'/></vsock>
    <filesystem type='mount'><source dir='/srv/x'/><target dir='x'/></filesystem>""",
        more="<genid>43dc0cf8-809b-4adb-9bea-a9abb5f3d90e</genid>"
        f"<sysinfo type='smbios'><system><entry name='uuid'>{UUID}</entry>"
        "<entry name='serial'>7</entry></system></sysinfo>",
    )
    made = copied(text)
    assert UUID not in made.xml
    for gone in ("mgmt0", "/dev/pts", 'address="3"', "43dc0cf8"):
        assert gone not in made.xml, gone
    for kept in ("secret", 'profileid="x"', '<cid auto="yes"', "<genid />", ">7<"):
        assert kept in made.xml, kept
    assert made.notes == (
        "router: the directory /srv/x is shared with the template and all its clones",
    )


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("<disk type='network'><source protocol='rbd' name='a'/><target dev='vda'/></disk>", "disk vda: a clone cannot have it: its type is network"),
        ("<disk type='volume'><source pool='a' volume='b'/><target dev='vda'/></disk>", "its type is volume"),
        (DISK.replace("<serial>", "<shareable/><serial>"), "it is shareable"),
        (BLOCK.replace("device='disk'", "device='lun'"), "it is a lun"),
        (DISK.replace("'qcow2'", "'vmdk'"), "its format is vmdk"),
        (DISK.replace("<serial>", "<encryption format='luks'/><serial>"), "it is encrypted"),
        ("<disk type='file' device='disk'><target dev='vdb'/></disk>", "disk vdb: a clone cannot have it: it names no file"),
        (DISK.replace("'vda'", "'vda/../../etc/x'"), "its target is no name that a file can have"),
        (DISK.replace(f"{IMAGE}/", "json:{"), "json:{router.qcow2 is no absolute path"),
        ("<serial type='file'><source path='/var/log/r'/></serial>", "serial file: a clone cannot have it: it is of type file on /var/log/r"),
        ("<serial type='pty'><log file='/l'/></serial>", "its <log> is one file"),
        ("<channel type='unix'><source mode='bind' path='/run/agent'/></channel>", "of type unix on /run/agent"),
        ("<serial type='tcp'><source mode='bind' host='::1' service='4555'/></serial>", "of type tcp on ::1:4555"),
        ("<graphics type='vnc' port='5901' autoport='no'/>", "its port 5901 is fixed"),
        ("<graphics type='spice' autoport='no' tlsPort='5902'/>", "its tlsPort 5902 is fixed"),
        ("<graphics type='vnc' autoport='yes' websocket='5700'/>", "its websocket 5700 is fixed"),
        ("<graphics type='vnc'><listen type='socket' socket='/run/v'/></graphics>", "its socket /run/v"),
        ("<hostdev mode='subsystem' type='pci'><source/></hostdev>", "hostdev pci: a clone cannot have it: it is one device of the host"),
        ("<interface type='hostdev'><mac address='02:00:00:00:00:11'/></interface>", "interface 02:00:00:00:00:11: a clone cannot have it: its type is hostdev"),
        (nic("02:00:00:00:00:12", "p2", 7).replace("'bridge'", "'passthrough'"), "passthrough wants p2 for one guest"),
        ("<interface type='ethernet'><mac address='02:00:00:00:00:13'/><target dev='x' managed='no'/></interface>", "it is on x, which libvirt does not make"),
        ("<shmem name='a'/>", "it is memory that is shared by name"),
        ("<memory model='nvdimm'><source><path>/n</path></source></memory>", "it is the file /n"),
        ("<tpm model='tpm-tis'><backend type='passthrough'><device path='/dev/tpm0'/></backend></tpm>", "of type passthrough"),
        ("<input type='evdev'><source dev='/dev/input/event1'/></input>", "one device of the host"),
        ("<filesystem type='mount'><source socket='/run/v.sock'/></filesystem>", "behind /run/v.sock serves one"),
        ("<lease><key>a</key></lease>", "one guest holds it"),
        ("<quantum type='link'/>", "quantum link: a clone cannot have it: vsrtune does not know what it takes"),
    ],
)  # fmt: skip
def test_what_only_one_guest_can_have_is_refused(device: str, said: str) -> None:
    with pytest.raises(VsrtuneError) as caught:
        copied(definition(NICS + device))
    assert said in str(caught.value)
    assert "router" in caught.value.where
    assert "virsh edit router" in caught.value.hint


def test_uuids_and_macs_are_the_same_each_time_and_nobody_elses() -> None:
    template = Template("router", UUID, "", machine=MACHINE)
    own = clone_xml.own_uuid(template, "edge", "vr2")
    assert own == clone_xml.own_uuid(template, "edge", "vr2")
    others = {
        clone_xml.own_uuid(replace(template, machine="5" * 32), "edge", "vr2"),
        clone_xml.own_uuid(template, "edge", "vr3"),
        clone_xml.own_uuid(template, "core", "vr2"),
    }
    assert len(others | {own, UUID}) == 5
    first = free_mac("words", (), b"\x52\x54\x00")
    assert first.startswith("52:54:00:")
    assert first == free_mac("words", (), b"\x52\x54\x00")
    again = free_mac("words", {first}, b"\x52\x54\x00")
    assert again not in (first, free_mac("other words", (), b"\x52\x54\x00"))


RECORDED = {
    f"{file.stem}-{number}": domain.live_xml
    for file in recorded_hosts.FILES
    for number, domain in enumerate(load(file).virt().domains())
}


@pytest.mark.parametrize("text", RECORDED.values(), ids=RECORDED)
def test_recorded_guests(text: str) -> None:
    if "managed" in text:
        with pytest.raises(
            VsrtuneError, match=r"nvt0, which libvirt does not make|its type is hostdev"
        ):
            copied(text)
        return
    made = copied(text)
    assert made.files == ()
    assert "macvtap" not in made.xml
    rest = {path for path in differences(made, text) if "interface" not in path}
    assert rest <= {"/name1", "/uuid1"}
    assert ET.fromstring(made.xml).findtext("name") == "vr2"
