"""An immutable set of CPU numbers in the kernel's list format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from vsrtune.errors import VsrtuneError

# The kernel's NR_CPUS limit on x86-64 is 8192; anything above is a typing error.
MAX_CPU = 8191

_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+)/(\d+))?)?", re.ASCII)


class CpuSet:
    """CPU numbers 0..8191; compares, hashes and combines like a frozenset."""

    __slots__ = ("_cpus",)

    def __init__(self, cpus: Iterable[int] = ()) -> None:
        members = frozenset(cpus)
        for cpu in members:
            if not 0 <= cpu <= MAX_CPU:
                raise VsrtuneError(f"CPU {cpu} is outside 0..{MAX_CPU}")
        self._cpus = members

    @classmethod
    def parse(cls, text: str) -> CpuSet:
        """Read ``0-3,7`` or the grouped form ``0-15:1/4`` (kernel ``bitmap_parselist``).

        An empty text is the empty set. Raises VsrtuneError on anything else.
        """
        cpus: set[int] = set()
        for part in filter(None, (p.strip() for p in text.strip().split(","))):
            match = _RANGE.fullmatch(part)
            if match is None:
                raise VsrtuneError(f"{part!r} is not a CPU list", hint="write CPUs as 0-3,7")
            first = int(match[1])
            last = int(match[2]) if match[2] is not None else first
            used = int(match[3]) if match[3] is not None else 1
            group = int(match[4]) if match[4] is not None else 1
            if last < first or group == 0 or used > group:
                raise VsrtuneError(f"{part!r} is not a CPU range", hint="write the lower CPU first")
            if last > MAX_CPU:
                raise VsrtuneError(f"CPU {last} is outside 0..{MAX_CPU}")
            cpus.update(c for c in range(first, last + 1) if (c - first) % group < used)
        return cls(cpus)

    @classmethod
    def from_mask(cls, text: str) -> CpuSet:
        """Read a hexadecimal mask such as ``ffffffff,00000003`` (/proc, sysfs)."""
        bits = int(text.strip().replace(",", "") or "0", 16)
        return cls(i for i in range(bits.bit_length()) if bits >> i & 1)

    def __str__(self) -> str:
        spans: list[list[int]] = []
        for cpu in self:
            if spans and cpu == spans[-1][1] + 1:
                spans[-1][1] = cpu
            else:
                spans.append([cpu, cpu])
        return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)

    def __repr__(self) -> str:
        return f"CpuSet({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._cpus))

    def __len__(self) -> int:
        return len(self._cpus)

    def __contains__(self, cpu: object) -> bool:
        return cpu in self._cpus

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuSet) and self._cpus == other._cpus

    def __hash__(self) -> int:
        return hash(self._cpus)

    def __or__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self._cpus | other._cpus)

    def __and__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self._cpus & other._cpus)

    def __sub__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self._cpus - other._cpus)

    def __le__(self, other: CpuSet) -> bool:
        return self._cpus <= other._cpus

    def isdisjoint(self, other: CpuSet) -> bool:
        """True when no CPU is in both."""
        return self._cpus.isdisjoint(other._cpus)

    def first(self) -> int:
        """The lowest CPU number; ValueError when empty."""
        return min(self._cpus)
