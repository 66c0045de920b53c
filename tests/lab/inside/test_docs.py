"""What the package's documents tell an operator to type runs on a real host, and a starting
policy tunes it."""

from __future__ import annotations

import gzip
import io
import re
import shlex
import subprocess
import tarfile
from pathlib import Path

import labhelp
import pytest
from doccommands import commands
from labhelp import LabGuest

# The lab's dpkg leaves /usr/share/doc out, so they are read from the package itself.
PACKAGES = Path("/run/lab")
# Those that look, or whose doing ends with the test. Others have tests of their own: attach
# (test_attach.py), bench (test_bench.py), apply and the daemon (test_tune.py).
RUN = ("status", "show", "top", "plan", "verify", "doctor", "policy", "record", "undo")
GUESTS = re.compile(r"vyos1|vr1|qemu:fw|proxmox:101|GUEST")


def pages(package: Path) -> dict[str, str]:
    """The documents of the package; Debian compresses long ones."""
    done = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True)
    found = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        for member in files:
            name = member.name.removeprefix("./usr/share/doc/vsrtune/")
            content = files.extractfile(member) if member.isfile() else None
            if content is not None and name != member.name and ".md" in name:
                raw = content.read()
                found[name] = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
    return found


def documented(package: Path, guest: str, place: Path) -> list[tuple[str, ...]]:
    """The commands to run, each once, with this lab's guest and files of the test."""
    found = {}
    for text in pages(package).values():
        for command in commands(text):
            if not command.block or command.words[0] not in RUN or "..." in command.words[-1]:
                continue
            if any(word.startswith("tests/") for word in command.words):
                continue  # of a recorded host, which is in the source alone
            words = [GUESTS.sub(guest, w) for w in command.words]
            words = [
                str(place / Path(w).name) if w.startswith(("/etc/vsrtune/", "/tmp/")) else w
                for w in words
            ]
            if words[0] == "top":
                # Else an operator ends it.
                words.append("--once")
            if "--trace" in words:
                words[words.index("--trace") + 1] = "1"
            found[tuple(words)] = None
    return list(found)


@labhelp.one_release("the command line and its documents", "trixie")
def test_what_the_documents_say_can_be_typed(
    restored: None, libvirt_guest: LabGuest, tmp_path: Path
) -> None:
    (package,) = PACKAGES.glob("vsrtune_*.deb")
    policy = str(labhelp.POLICIES / "router.yaml")
    labhelp.vsrtune("policy", "init", libvirt_guest.ref, "-o", policy)
    lines = documented(package, libvirt_guest.ref, tmp_path)
    assert len(lines) >= 10
    # A policy is written before it is checked, a host recorded before it is looked at.
    lines.sort(key=lambda words: words[0] != "record" and words[:2] != ("policy", "init"))
    wrong = []
    for words in lines:
        for option in ("-o", "record"):
            if option in words:
                Path(words[words.index(option) + 1]).unlink(missing_ok=True)
        done = labhelp.vsrtune(*words, check=False)
        said = done.stdout + done.stderr
        findings = words[0] in ("doctor", "verify", "status") and done.returncode == 3
        missing_device = words[0] == "doctor" and done.returncode == 1
        if "Traceback" in said or not (done.returncode == 0 or findings or missing_device):
            wrong.append(f"{shlex.join(words)}: exit {done.returncode}\n{said}")
    assert wrong == []


@pytest.mark.usefixtures("restored")
def test_starting_policies_tune_every_guest(guests: list[LabGuest]) -> None:
    for number, guest in enumerate(guests):
        labhelp.vsrtune("policy", "init", guest.ref, "-o", str(labhelp.POLICIES / f"{number}.yaml"))
    labhelp.vsrtune("policy", "check")
    # Nothing is refused.
    labhelp.vsrtune("plan")
    labhelp.start()
    done = labhelp.vsrtune("verify", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for guest in guests:
        for tid in guest.data_plane():
            assert 0 not in labhelp.mask(tid)
