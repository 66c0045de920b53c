"""QEMU command lines as libvirt, Proxmox and people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsrtune.core.errors import VsrtuneError
from vsrtune.host.qemu_cmdline import Netdev, essential, parse, split_options

LIBVIRT_9 = [
    "/usr/bin/qemu-system-x86_64",
    "-name", "guest=vr 1,debug-threads=on",
    "-S",
    "-object", '{"qom-type":"secret","id":"masterKey0","format":"raw","file":"/v/master-key.aes"}',
    "-machine", "pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram",
    "-accel", "kvm",
    "-uuid", "C0FFEE00-1111-4222-8333-444455556666",
    "-no-user-config",
    "-nodefaults",
    "-chardev", "socket,id=charmonitor,fd=30,server=on,wait=off",
    "-mon", "chardev=charmonitor,id=monitor,mode=control",
    "-netdev", '{"type":"tap","fd":"32","vhost":true,"vhostfd":"34","id":"hostnet0"}',
    "-device", '{"driver":"virtio-net-pci","netdev":"hostnet0","id":"net0","mac":"02:00:00:00:00:01","bus":"pci.1","addr":"0x0"}',
    "-netdev", '{"type":"tap","fds":"33:35","vhost":true,"vhostfds":"36:37","id":"hostnet1"}',
    "-device", '{"driver":"virtio-net-pci","mq":true,"vectors":6,"netdev":"hostnet1","id":"net1","mac":"02:00:00:00:00:02"}',
    "-msg", "timestamp=on",
]  # fmt: skip

PROXMOX = [
    "/usr/bin/kvm",
    "-id", "100",
    "-name", "router,,edge,debug-threads=on",
    "-no-shutdown",
    "-chardev", "socket,id=qmp,path=/var/run/qemu-server/100.qmp,server=on,wait=off",
    "-mon", "chardev=qmp,mode=control",
    "-chardev", "socket,id=qmp-event,path=/var/run/qmeventd.sock,reconnect=5",
    "-mon", "chardev=qmp-event,mode=control",
    "-smbios", "type=1,uuid=5b3f2c1e-0000-4000-8000-00000000aaaa",
    "-netdev", "type=tap,id=net0,ifname=tap100i0,script=/x/pve-bridge,vhost=on,queues=2",
    "-device", "virtio-net-pci,mac=BC:24:11:00:00:01,netdev=net0,bus=pci.0,id=net0,mq=on",
    "-netdev", "type=tap,id=net1,ifname=tap100i1,script=/x/pve-bridge",
    "-device", "e1000,mac=BC:24:11:00:00:02,netdev=net1,id=net1",
]  # fmt: skip


def test_libvirt() -> None:
    args = parse(LIBVIRT_9)
    assert args.name == "vr 1"
    assert args.uuid == "c0ffee00-1111-4222-8333-444455556666"
    assert args.libvirt
    assert args.guest
    assert args.qmp == ()
    assert args.netdevs == (
        Netdev("hostnet0", (32,), "", True, "02:00:00:00:00:01", "virtio", "net0"),
        Netdev("hostnet1", (33, 35), "", True, "02:00:00:00:00:02", "virtio", "net1"),
    )


def test_proxmox() -> None:
    args = parse(PROXMOX)
    assert args.name == "router,edge"
    assert not args.libvirt
    # The second monitor is a client of qmeventd: nobody can connect to it.
    assert args.qmp == ("/var/run/qemu-server/100.qmp",)
    assert args.netdevs == (
        Netdev("net0", (), "tap100i0", True, "bc:24:11:00:00:01", "virtio", "net0"),
        Netdev("net1", (), "tap100i1", False, "bc:24:11:00:00:02", "e1000", "net1"),
    )


@pytest.mark.parametrize(
    ("monitor", "sockets"),
    [
        (["-qmp", "unix:/run/a.qmp,server=on,wait=off"], ("/run/a.qmp",)),
        (["-qmp", "unix:/run/a.qmp,server,nowait"], ("/run/a.qmp",)),
        (["--qmp", "unix:a b.qmp,server"], ("a b.qmp",)),
        (["-qmp", "unix:/run/a.qmp"], ()),
        (["-qmp", "tcp:localhost:4444,server=on"], ()),
        (["-qmp", "stdio"], ()),
        (["-chardev", "socket,id=c,path=/m,server=on", "-mon", "c,mode=control"], ("/m",)),
        (["-chardev", "socket,id=c,path=/m,server=on", "-mon", "chardev=c"], ()),
        (["-chardev", "stdio,id=c", "-mon", "chardev=c,mode=control"], ()),
        (["-mon", "chardev=missing,mode=control"], ()),
    ],
)
def test_monitors(monitor: list[str], sockets: tuple[str, ...]) -> None:
    assert parse(["qemu", *monitor]).qmp == sockets


@pytest.mark.parametrize(
    ("netdev", "vhost"),
    [
        ("tap,id=n,fd=3", False),
        ("tap,id=n,fd=3,vhost=on", True),
        ("tap,id=n,fd=3,vhost=off,vhostfd=4", False),
        ("tap,id=n,fd=3,vhostfd=4", True),
        ("tap,id=n,fd=3,vhostforce=on", True),
    ],
)
def test_vhost(netdev: str, vhost: bool) -> None:
    assert parse(["qemu", "-netdev", netdev]).netdevs[0].vhost is vhost


def test_nic_option_is_back_end_and_device_in_one() -> None:
    args = parse(["qemu", "-nic", "tap,ifname=t0,model=virtio-net-pci,mac=02:00:00:00:00:0A"])
    assert args.netdevs == (Netdev("", (), "t0", False, "02:00:00:00:00:0a", "virtio"),)


def test_back_ends_without_a_host_device_are_left_out() -> None:
    assert parse(["qemu", "-netdev", "user,id=u", "-netdev", "vhost-user,id=v"]).netdevs == ()


def test_a_capability_probe_is_no_guest() -> None:
    assert not parse(["qemu", "-S", "-machine", "none,accel=kvm:tcg"]).guest
    assert not parse(["qemu", "-M", "none"]).guest


def test_an_empty_command_line_is_an_error() -> None:
    with pytest.raises(VsrtuneError):
        parse([])


@pytest.mark.parametrize(
    "argv", [["qemu", "-name"], ["qemu", "-netdev", "{bad"], ["qemu", "-nic", ""]]
)
def test_what_cannot_be_read_is_passed_over(argv: list[str]) -> None:
    args = parse(argv)
    assert (args.name, args.netdevs) == ("", ())


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.text().filter(lambda t: "\0" not in t)
    )
)
def test_split_options_reads_any_escaped_value(options: dict[str, str]) -> None:
    text = ",".join(f"{k}={v.replace(',', ',,')}" for k, v in options.items())
    if not text.lstrip().startswith("{"):
        assert split_options(text) == options


@pytest.mark.parametrize("argv", [LIBVIRT_9, PROXMOX])
def test_what_is_essential_reads_the_same(argv: list[str]) -> None:
    kept = essential(argv)
    assert parse(kept) == parse(argv)
    assert essential(kept) == kept


def test_secrets_are_not_essential() -> None:
    argv = ["qemu", "-object", "secret,id=s0,data=hunter2", "-smbios", "type=1,serial=hunter2"]
    argv += ["-netdev", "user,id=u,hostname=hunter2", "-chardev", "socket,id=x,path=/hunter2"]
    argv += ["-name", "a,process=hunter2", "-object", "secret,id=masterKey0,data=hunter2"]
    argv += ["-append", "password=hunter2", "-device", "vfio-pci,host=hunter2"]
    assert "hunter2" not in " ".join(essential(argv))
