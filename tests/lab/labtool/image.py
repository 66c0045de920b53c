"""Build the disk of a lab host: packages alone, in an image that is never written."""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import cache, cpio, hosttools, kernel, progress
from .errors import LabError
from .releases import Release

_DISK_SIZE = "6G"
BAKE_SCRIPT = Path(__file__).resolve().parent.parent / "inlab" / "bake"

# Loaded before the disk is there; also those of the ports and shares, which the
# agent needs before udev has looked at the machine.
_BOOT_MODULES = (
    "virtio_pci virtio_blk ext4 crc32c_generic 9p 9pnet_virtio virtio_console virtio_rng"
)
_ROUTER_MODULES = "virtio_pci virtio_net"

_APPLETS = "arp cat cp insmod ip ln mkdir mkfifo mount poweroff sh sleep switch_root umount"

# Kernel packages would build a generic initrd, which nothing here boots.
_NO_INITRD = (
    'mkdir -p "$1/etc/initramfs-tools";'
    ' echo update_initramfs=no >"$1/etc/initramfs-tools/update-initramfs.conf"'
)


@dataclass(frozen=True)
class Image:
    """What a lab boots. The router kernel is on the disk, where libvirt finds it."""

    place: Path

    @property
    def disk(self) -> Path:
        return self.place / "disk.img"

    @property
    def vmlinux(self) -> Path:
        return self.place / "vmlinux"

    @property
    def boot_modules(self) -> Path:
        return self.place / "boot-modules.cpio"

    @property
    def router_modules(self) -> Path:
        return self.place / "router-modules.cpio"


def get(release: Release, bake: Callable[[Image], None]) -> Image:
    """The image of `release`, built if need be; `bake` boots it once, writable."""
    key = cache.digest([repr(release).encode(), *_code(), BAKE_SCRIPT.read_bytes()])

    def build(place: Path) -> None:
        _build(release, Image(place))
        bake(Image(place))

    return Image(cache.entry("images", release.name, key, build))


def _code() -> Iterator[bytes]:
    """What builds an image, as its syntax: neither comments nor layout make one anew."""
    for path in (Path(module.__file__ or "") for module in (cpio, kernel)):
        yield ast.dump(ast.parse(path.read_bytes())).encode()
    yield ast.dump(ast.parse(Path(__file__).read_bytes())).encode()


def _build(release: Release, image: Image) -> None:
    hosttools.ensure(hosttools.IMAGE | hosttools.BOOT)
    if os.geteuid() != 0:
        hint = f"sudo lab build --release {release.name}"
        raise LabError("building an image needs root", hint=hint)
    root = image.place / "root"
    progress.step(f"building the {release.name} image: installing packages")
    _bootstrap(release, root, image.place / "build.log")
    progress.step("building the image: kernels and disk")
    kernels = kernel.installed(root)
    image.vmlinux.write_bytes(_vmlinux(root, kernels[-1]))
    (root / "boot/router-vmlinux").write_bytes(_vmlinux(root, kernels[0]))
    _pack_modules(root, kernels[-1], _BOOT_MODULES, image.boot_modules)
    _pack_modules(root, kernels[0], _ROUTER_MODULES, image.router_modules)
    _settle(root)
    hosttools.run_logged(
        # No journal and no lazy work: what is lost with a lab is thrown away anyway.
        f"mke2fs -q -t ext4 -O ^has_journal,^metadata_csum -m 0 -E lazy_itable_init=0"
        f" -d {root} {image.disk} {_DISK_SIZE}".split(),
        image.place / "build.log",
    )
    shutil.rmtree(root)


def _bootstrap(release: Release, root: Path, log: Path) -> None:
    options = ["--variant=minbase", f"--essential-hook={_NO_INITRD}", "--dpkgopt=force-confold"]
    if release.backports:
        newer = f"apt-get install -y -t {release.backports_suite} {' '.join(release.backports)}"
        options.append(f'--customize-hook=chroot "$1" {newer}')
    hosttools.mmdebstrap(release.suite, root, release.packages, release.sources, log, *options)


def _settle(root: Path) -> None:
    """What systemd would otherwise do at every first boot."""
    (root / "etc/machine-id").write_text("5f6c61625f76737274756e655f6c6162\n")
    (root / "etc/hostname").write_text("lab\n")
    (root / "etc/fstab").write_text("")
    (root / "etc/hosts").write_text("127.0.0.1 localhost lab\n")
    # A link that leads nowhere outside of the image, which is no file to a pattern.
    for wants in (root / "etc/systemd/system").glob("*.wants"):
        (wants / "irqbalance.service").unlink(missing_ok=True)


def _vmlinux(root: Path, version: str) -> bytes:
    return kernel.uncompressed((root / f"boot/vmlinuz-{version}").read_bytes())


def _pack_modules(root: Path, version: str, wanted: str, target: Path) -> None:
    archive = cpio.Archive()
    archive.char_device("dev/console", 5, 1)
    archive.file("bin/busybox", Path("/bin/busybox").read_bytes(), 0o755)
    for applet in _APPLETS.split():
        archive.symlink(f"bin/{applet}", "busybox")
    modules = kernel.Modules(root, version).closure(tuple(wanted.split()))
    for name, data in modules:
        archive.file(f"modules/{name}.ko", data)
    archive.file("modules/order", "".join(f"{name}\n" for name, _ in modules).encode())
    archive.write(target)
