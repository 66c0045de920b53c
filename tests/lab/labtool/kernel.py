"""Read what an installed Debian kernel consists of: its core and its modules."""

from __future__ import annotations

import lzma
import re
import struct
import subprocess
import zlib
from pathlib import Path

from .errors import LabError

# Offsets of the boot protocol's setup header (Documentation/arch/x86/boot.rst).
_SETUP_SECTORS = 0x1F1
_PAYLOAD_OFFSET = 0x248


def installed(root: Path) -> list[str]:
    """Kernel versions under `root`, oldest first."""
    names = (path.name.removeprefix("vmlinuz-") for path in (root / "boot").glob("vmlinuz-*"))
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def uncompressed(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage.

    Unpacking a kernel takes many seconds of emulated CPU time at each boot, of
    the lab and of every guest; QEMU starts the unpacked one through PVH.
    """
    (offset, length) = struct.unpack_from("<II", image, _PAYLOAD_OFFSET)
    start = (image[_SETUP_SECTORS] + 1) * 512 + offset
    payload = image[start : start + length]
    if payload.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(payload)
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        # zstd warns about the size the kernel build appends after the frame.
        done = subprocess.run(["zstd", "-dcq"], input=payload, capture_output=True)
        if done.stdout.startswith(b"\x7fELF"):
            return done.stdout
    elif payload.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(31).decompress(payload)
    raise LabError(
        f"cannot unpack a kernel whose payload starts with {payload[:6].hex()}",
        hint="teach labtool/kernel.py this compression",
    )


class Modules:
    """The modules of one kernel version, with their dependencies."""

    def __init__(self, root: Path, version: str) -> None:
        self._directory = root / "lib" / "modules" / version
        self._files: dict[str, str] = {}
        self._needs: dict[str, list[str]] = {}
        for line in (self._directory / "modules.dep").read_text().splitlines():
            (path, _, needs) = line.partition(":")
            self._files[_name(path)] = path
            self._needs[_name(path)] = [_name(need) for need in needs.split()]
        builtin = (self._directory / "modules.builtin").read_text().splitlines()
        self._builtin = {_name(path) for path in builtin}

    def closure(self, wanted: tuple[str, ...]) -> list[tuple[str, bytes]]:
        """`wanted` and all they need as (name, unpacked module), in loading order.

        modules.dep lists the needs of a module so that the last is loaded first.
        What the kernel has built in, or does not have at all, is left out: crc32c,
        for one, was a module in 6.1 and is a library now.
        """
        order: dict[str, None] = {}
        for name in wanted:
            if name in self._files:
                order.update(dict.fromkeys([*reversed(self._needs[name]), name]))
        return [(name, self._read(name)) for name in order if name not in self._builtin]

    def _read(self, name: str) -> bytes:
        path = self._directory / self._files[name]
        data = path.read_bytes()
        return lzma.decompress(data) if path.suffix == ".xz" else data


def _name(path: str) -> str:
    return Path(path).name.partition(".")[0].replace("-", "_")
