"""Guests whose names hold what a program may trip over.

libvirt refuses a newline and a slash, and a name whose file NAME.xml.new the file system refuses
(more than 247 bytes); QEMU itself takes any name.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import hoststate
import labhelp
import pytest
from crowd import MEMORY_MIB, make_macvtap
from labhelp import LabGuest

DOMAIN = """\
<domain type='kvm'>
  <name>{name}</name>
  <memory unit='MiB'>{memory}</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc'>hvm</type></os>
  <devices>
    <interface type='direct'>
      <source dev='p0' mode='bridge'/><model type='virtio'/><driver name='vhost'/>
      <rom enabled='no'/>
    </interface>
    <memballoon model='none'/>
  </devices>
</domain>
"""
OF_LIBVIRT = ["a\"b'c", "a,b;c`d$e", "n" * 247, "ü" * 123]
PLAIN = ["a\nb", "a\"b'c", "a,b", "n" * 250, "\x1b[2J"]


def define(name: str, path: Path) -> subprocess.CompletedProcess[str]:
    path.write_text(DOMAIN.format(name=escape(name), memory=MEMORY_MIB))
    return labhelp.sh("virsh", "-q", "define", str(path), check=False)


@contextlib.contextmanager
def libvirt_guests(path: Path) -> Iterator[None]:
    """They are paused before their first instruction."""
    made: list[str] = []
    try:
        for name in OF_LIBVIRT:
            done = define(name, path)
            assert done.returncode == 0, done.stderr
            made.append(name)
            labhelp.sh("virsh", "-q", "start", "--paused", "--", name)
        yield
    finally:
        for name in made:
            labhelp.sh("virsh", "-q", "destroy", "--", name, check=False)
            labhelp.sh("virsh", "-q", "undefine", "--", name)


@contextlib.contextmanager
def plain_guests() -> Iterator[None]:
    """QEMUs of root's, stopped as well."""
    made: list[tuple[subprocess.Popen[bytes], str]] = []
    command = f"qemu-system-x86_64 -accel kvm -S -machine pc -m {MEMORY_MIB} -nodefaults"
    try:
        for number, name in enumerate(PLAIN):
            device = f"names{number}"
            tap = make_macvtap(device, 0xF000 + number)
            words = [*command.split(), "-display", "none"]
            words += ["-name", f"{name.replace(',', ',,')},debug-threads=on"]
            words += ["-netdev", f"tap,id=n0,vhost=on,fd={tap}"]
            words += ["-device", "virtio-net-pci,netdev=n0,romfile="]
            made.append((subprocess.Popen(words, pass_fds=[tap]), device))
            os.close(tap)
        yield
    finally:
        for process, device in made:
            process.kill()
            process.wait()
            labhelp.sh("ip", "link", "del", device)


def threads(pid: int) -> list[int]:
    """Its vcpu and its worker."""
    vcpus = [
        int(t) for t in os.listdir(f"/proc/{pid}/task") if hoststate.comm(int(t))[:4] == "CPU "
    ]
    return [*vcpus, *hoststate.vhost_workers(pid)]


@labhelp.one_release("names, which are the same text everywhere", "trixie")
@pytest.mark.parametrize("name", ["a\nb", "a/b"])
def test_libvirt_takes_no_such_name(tmp_path: Path, name: str) -> None:
    assert define(name, tmp_path / "domain.xml").returncode != 0


@labhelp.one_release("names, which are the same text everywhere", "trixie")
def test_guests_of_any_name_are_tuned_and_restored(
    restored: None, guests: list[LabGuest], irq_cpus: set[int], tmp_path: Path
) -> None:
    every = set(range(labhelp.lab_cpus()))
    lab = {guest.pid for guest in guests}
    with libvirt_guests(tmp_path / "domain.xml"), plain_guests():
        count = len(OF_LIBVIRT) + len(PLAIN)
        labhelp.wait_for(
            lambda: all(len(threads(p)) == 2 for p in set(hoststate.qemus()) - lab), "all run"
        )
        strangers = set(hoststate.qemus()) - lab
        assert len(strangers) == count
        labhelp.write_policies("auto")
        labhelp.start()

        def tuned(tid: int) -> bool:
            here = hoststate.sched(tid).startswith(labhelp.realtime_start())
            return here and not labhelp.mask(tid) & irq_cpus

        def untuned() -> list[int]:
            """A firmware that resets its device has another worker than before."""
            return [t for pid in strangers for t in threads(pid) if not tuned(t)]

        labhelp.wait_for(lambda: untuned() == [], "all are tuned")
        tids = [tid for pid in strangers for tid in threads(pid)]
        assert len(tids) == 2 * count
        names = {g["name"] for g in labhelp.show()["guests"]}
        assert {*OF_LIBVIRT, *PLAIN} <= names
        told = [line for line in labhelp.scrape() if line.startswith("vsrtune_guest_tuned{")]
        assert len(told) == count + len(guests)
        assert all(line.endswith(" 1.0") for line in told)
        log = labhelp.sh("journalctl", "-b", "-u", "vsrtune", "-o", "cat", "--no-pager").stdout
        assert "\x1b" not in log
        labhelp.stop()
        for tid in tids:
            assert labhelp.mask(tid) == every
            assert hoststate.sched(tid).startswith("policy=0 flags=0 nice=0 priority=0 ")
