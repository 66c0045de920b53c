"""Work done natively inside an image: at this machine's own speed, keeping nothing but its output.

The image's disk is mounted read-only through a loop device, under a layer in memory that
takes every write, in a mount namespace of its own: when the work ends, or is killed, nothing
stays mounted. Where a machine cannot do that, a container without loop devices for one, the
files are copied out of the disk with debugfs, which needs no mount; programs that want /proc
(dkms) may then fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import cache, hosttools, progress
from .errors import LabError
from .image import Image

_TIMEOUT = 900
_TAIL = 40
_DEVICES = ("null", "zero", "urandom")

# $1 is the disk, $2 an empty directory, $3 the job.
_MOUNT = """
set -eu
mount -t tmpfs -o mode=755 tmpfs "$2"
mkdir "$2/lower" "$2/upper" "$2/work" "$2/root"
mount -t ext4 -o ro,loop,noload "$1" "$2/lower"
mount -t overlay -o "lowerdir=$2/lower,upperdir=$2/upper,workdir=$2/work" overlay "$2/root"
mount -t proc proc "$2/root/proc"
mount --rbind /dev "$2/root/dev"
"""
_WORK = """
set -eu
cp -a "$3" "$2/root/job"
status=0
env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 HOME=/root \\
	chroot "$2/root" /bin/bash -eu /job/run || status=$?
cp -a "$2/root/job/out/." "$3/out"
exit $status
"""
# A private mount namespace takes its mounts with it, and they their loop device.
_ALONE = ("unshare", "--mount", "--propagation", "private", "--")


def output(image: Image, kind: str, script: Path) -> Path:
    """What the script leaves in the image's system, which reaches Debian's packages, made if need be."""

    def build(scratch: Path) -> None:
        progress.step(f"{script.name} in the image")
        shutil.copy(script, scratch / "run")
        shutil.copy("/etc/resolv.conf", scratch)
        status, said = run(image.disk, scratch)
        (scratch / "log").write_text(said)
        if status != 0:
            progress.block(script.name, said.splitlines()[-_TAIL:])
            raise LabError(f"{script.name} failed in the image, status {status}")

    key = cache.digest([image.place.name.encode(), script.read_bytes()])
    return cache.entry(kind, image.place.name.rpartition("-")[0], key, build) / "out"


def run(disk: Path, job: Path, timeout: float = _TIMEOUT) -> tuple[int, str]:
    """Run `job`/run by bash, as root, in the system that `disk` holds, for `timeout` seconds at most.

    There the directory `job` is /job, a copy; what the script leaves in /job/out is copied
    to `job`/out, however it ended. Returns its exit status and its output. Raises LabError
    when the disk could be opened neither way.
    """
    if os.geteuid() != 0:
        raise LabError("work inside an image needs root", hint="run the same command as root")
    (job / "out").mkdir()
    with tempfile.TemporaryDirectory(prefix="vsrtune-chroot-") as place:
        arguments = (str(disk), place, str(job))
        (refused, why) = _shell(_ALONE, _MOUNT, arguments)
        if refused == 0:
            return _shell(_ALONE, _MOUNT + _WORK, arguments, timeout)
        first = next(iter(why.splitlines()), f"status {refused}")
        progress.step(f"copying the image's files: this machine cannot mount them ({first})")
        _copy_out(disk, Path(place) / "root")
        return _shell((), _WORK, arguments, timeout)


def _shell(
    prefix: tuple[str, ...], script: str, arguments: tuple[str, ...], timeout: float = _TIMEOUT
) -> tuple[int, str]:
    done = subprocess.run(
        [*prefix, "/bin/sh", "-c", script, "chroot", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout


def _copy_out(disk: Path, root: Path) -> None:
    hosttools.ensure({"debugfs": "e2fsprogs"})
    root.mkdir()
    (_, said) = _shell((), 'exec debugfs -R "rdump / $2" "$1"', (str(disk), str(root)))
    if not (root / "usr").is_dir():
        raise LabError(
            f"{disk}: its files could not be copied to {root}: {said.strip()}",
            hint="allow mount and loop devices here, or make room in the temporary directory",
        )
    for name in _DEVICES:
        node = root / "dev" / name
        node.unlink(missing_ok=True)
        os.mknod(node, 0o20666, Path("/dev", name).stat().st_rdev)
