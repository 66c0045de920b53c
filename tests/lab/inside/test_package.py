"""The package over its life: upgraded under a running daemon, removed, purged."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

CONFFILES = ("-o", "Dpkg::Options::=--force-confold")
# Where anything of ours could be; the lab's own places have other names.
PLACES = ("/etc", "/lib", "/run", "/tmp", "/usr", "/var")
# dpkg, apt and the journal remember; the last is the lab's module, made from the tree.
MEMORIES = ("/var/lib/dpkg", "/var/log", "/var/cache", "/run/lab", "/run/log", "/tmp/pytest-")


def package() -> Path:
    """The tree's package, as the lab installed it."""
    (found,) = Path("/run/lab").glob("vsrtune_*.deb")
    return found


def apt(*words: str) -> str:
    done = subprocess.run(
        ["apt-get", "-y", "-q", "--no-install-recommends", *CONFFILES, *words],
        capture_output=True, text=True, check=False,
        env={"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def version() -> str:
    return labhelp.sh("dpkg-query", "-W", "-f", "${Version}", "vsrtune").stdout


def bumped(directory: Path) -> Path:
    """The same package under a higher version."""
    labhelp.sh("dpkg-deb", "-R", str(package()), str(directory / "x"))
    control = directory / "x" / "DEBIAN" / "control"
    text = control.read_text()
    control.write_text(text.replace(f"Version: {version()}\n", f"Version: {version()}+next\n"))
    # apt's own user must be able to read it.
    made = Path("/var/cache/apt/archives/vsrtune-next.deb")
    labhelp.sh("dpkg-deb", "-b", str(directory / "x"), str(made))
    return made


class Watch:
    """Every value that the guests' threads had while it watched."""

    def __init__(self, guests: list[LabGuest]) -> None:
        self.seen: dict[int, set[str]] = {t: set() for g in guests for t in g.data_plane()}
        self.looks = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.wait(0.02):
            for tid, values in self.seen.items():
                values.add(f"{sorted(labhelp.mask(tid))} {hoststate.sched(tid)}")
            self.looks += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def installed() -> Iterator[None]:
    """In the end the tree's package is there again."""
    before = version()
    yield
    done = labhelp.sh("dpkg-query", "-W", "-f", "${Version}", "vsrtune", check=False)
    if done.stdout != before:
        labhelp.sh("dpkg", "--force-downgrade", "-i", str(package()))


@labhelp.one_release("what dpkg and systemd do", "trixie")
def test_upgraded_under_a_running_daemon_removed_and_purged(
    installed: None, tuned: set[int], guests: list[LabGuest], tmp_path: Path
) -> None:
    """``tuned`` compares the host with what it was, after the removal."""
    first, next_one = labhelp.main_pid(), bumped(tmp_path)
    with Watch(guests) as watch:
        apt("install", str(next_one))
    assert version().endswith("+next")
    assert labhelp.main_pid() not in (0, first)
    assert labhelp.sh("systemctl", "is-active", "vsrtune").stdout == "active\n"
    assert watch.looks > 20
    assert {tid: len(values) for tid, values in watch.seen.items() if len(values) != 1} == {}
    for guest in guests:
        assert labhelp.untuned_lines(guest, tuned) == []
    log = labhelp.daemon_log(200)
    assert "handing over" in log
    assert "adopted" in log

    # What the daemon keeps at its end, in a journal of its own, is put back all the same.
    settings = "VSRTUNE_ON_STOP=keep\nVSRTUNE_JOURNAL=/var/lib/vsrtune/other.jsonl\n"
    Path("/etc/default/vsrtune").write_text(settings)
    labhelp.sh("systemctl", "restart", "vsrtune")
    for guest in guests:
        assert labhelp.untuned_lines(guest, tuned) == []
    apt("remove", "vsrtune")
    for guest in guests:
        for tid in guest.data_plane():
            assert hoststate.sched(tid).startswith("policy=0 flags=0 nice=0 priority=0 ")
    assert list(labhelp.POLICIES.iterdir()), "policies are the operator's until purge"
    apt("purge", "vsrtune")
    assert left_behind() == []
    units = labhelp.sh("systemctl", "list-units", "--all", "--plain", "--no-legend").stdout
    assert [line for line in units.splitlines() if "vsrtune" in line] == []
    assert "vsrtune" not in Path("/etc/passwd").read_text()


def test_the_first_hour_as_the_readme_says(
    installed: None, untuned: None, libvirt_guest: LabGuest, irq_cpus: set[int], tmp_path: Path
) -> None:
    """Its first commands, each as it stands there but for the guest's name and the package."""
    labhelp.sh("rm", "-rf", "/etc/vsrtune/policies")
    apt("purge", "vsrtune")
    before = {tid: hoststate.sched(tid) for tid in libvirt_guest.data_plane()}
    labhelp.sh("dpkg-deb", "-x", str(package()), str(tmp_path))
    (brought,) = tmp_path.glob("usr/share/doc/vsrtune/README.md*")
    readme = labhelp.sh("zcat", "-f", str(brought)).stdout
    commands = readme.split("```\n")[1].replace("vr1", shlex.quote(libvirt_guest.ref))
    commands = commands.replace("make deb OUT=/tmp && apt", "apt -y --no-install-recommends")
    commands = commands.replace("/tmp/vsrtune_*_all.deb", str(package()))
    done = labhelp.sh("bash", "-exc", commands, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for tid in libvirt_guest.data_plane():
        assert hoststate.sched(tid).startswith(labhelp.realtime_start()), done.stdout
        assert not labhelp.mask(tid) & irq_cpus
    labhelp.sh("systemctl", "disable", "--now", "vsrtune")
    assert {tid: hoststate.sched(tid) for tid in libvirt_guest.data_plane()} == before


# An earlier package, which `lab run --share` brings.
EARLIER = Path("/mnt/share/previous.deb")


@pytest.mark.skipif(not EARLIER.exists(), reason=f"there is no {EARLIER}")
def test_upgraded_from_an_earlier_package_and_back(
    installed: None, restored: None, guests: list[LabGuest], irq_cpus: set[int]
) -> None:
    """With guests that run and the journal of the daemon before; what an earlier one cannot read it
    leaves alone."""

    def install(deb: Path) -> None:
        first = labhelp.main_pid()
        labhelp.sh("dpkg", "--force-downgrade", "-i", str(deb))
        if first:
            labhelp.started_again(first)
        for guest in guests if first else ():
            assert labhelp.untuned_lines(guest, irq_cpus) == []

    install(EARLIER)
    labhelp.write_policies("auto")
    labhelp.start()
    for guest in guests:
        assert labhelp.untuned_lines(guest, irq_cpus) == []
    install(package())
    assert "adopted" in labhelp.daemon_log(200)
    install(EARLIER)
    install(package())


@pytest.fixture
def no_module(tmp_path: Path) -> Iterator[None]:
    """Without the lab's own module, which dkms would not replace by one of the same version."""
    place = Path(f"/lib/modules/{os.uname().release}/updates/napi_macvlan.ko")
    labhelp.sh("modprobe", "-r", "napi_macvlan", check=False)
    shutil.move(place, tmp_path)
    labhelp.sh("depmod")
    yield
    place.parent.mkdir(exist_ok=True)  # dkms removes it with the last module
    shutil.move(tmp_path / place.name, place)
    labhelp.sh("depmod")


def test_the_modules_source_is_built_by_dkms(no_module: None) -> None:
    """For the kernel that runs; the other supported ones are built without a boot (make kmod)."""
    (brought,) = Path("/run/lab").glob("vsrtune-dkms_*.deb")
    made = shutil.copy(brought, "/var/cache/apt/archives")
    release = os.uname().release
    apt("install", made)
    status = labhelp.sh("dkms", "status", "napi-macvlan").stdout
    assert re.search(rf"{re.escape(release)}, x86_64: installed", status), status
    (built,) = Path(f"/lib/modules/{release}/updates/dkms").glob("napi_macvlan.ko*")
    labhelp.sh("modprobe", "napi_macvlan")
    labhelp.sh("ip", "link", "add", "nmvpkg", "link", "p0", "type", "napi_macvtap")
    labhelp.sh("ip", "link", "delete", "nmvpkg")
    labhelp.sh("rmmod", "napi_macvlan")
    apt("purge", "vsrtune-dkms")
    assert labhelp.sh("dkms", "status", "napi-macvlan").stdout == ""
    assert not built.exists()


def left_behind() -> list[str]:
    """Paths with our name in them."""
    found = labhelp.sh(
        "find", *PLACES, "-xdev", "(", "-name", "*vsrtune*", "-o", "-path", "*/vsrtune/*", ")",
        check=False,
    ).stdout.splitlines()  # fmt: skip
    return [path for path in found if not path.startswith(MEMORIES)]


@labhelp.core("trixie")
@labhelp.one_release("what systemd makes of the unit", "trixie")
def test_the_unit_is_confined(guests: list[LabGuest]) -> None:
    """Exposure by systemd's own scale, 0 to 10; docs/hardening.md has the peers' beside it."""
    for unit, most in (("vsrtune", 39), ("vsrtune-devices", 29)):
        words = ("systemd-analyze", "security", unit, f"--threshold={most}")
        done = labhelp.sh(*words, check=False)
        assert done.returncode == 0, done.stdout[-300:]
    labhelp.start()
    status = Path(f"/proc/{labhelp.main_pid()}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    mounts = Path(f"/proc/{labhelp.main_pid()}/mounts").read_text().splitlines()
    (root,) = [line.split() for line in mounts if line.split()[1] == "/"]
    assert root[3].split(",")[0] == "ro", "/etc and all else but its own directories"
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    # SYS_NICE, NET_ADMIN, SYS_PTRACE, DAC_OVERRIDE, SYS_ADMIN and no other.
    assert int(fields["CapEff"], 16) == sum(1 << n for n in (23, 12, 19, 1, 21))


@labhelp.one_release("what vsrtune says of policies", "trixie")
def test_a_policy_that_others_may_write_is_refused(restored: None, irq_cpus: set[int]) -> None:
    labhelp.write_policies("auto")
    path = labhelp.POLICIES / "test0.yaml"
    path.chmod(0o666)
    refused = labhelp.vsrtune("apply", check=False)
    assert refused.returncode == 2
    assert f"chmod go-w {path}" in refused.stderr
    assert labhelp.sh("systemctl", "start", "vsrtune", check=False).returncode != 0
    labhelp.sh("systemctl", "reset-failed", "vsrtune")
