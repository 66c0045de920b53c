# SPDX-License-Identifier: GPL-2.0-or-later
"""An immutable set of CPU numbers in the kernel's list format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from vsrtune.core.errors import VsrtuneError

# The kernel's NR_CPUS limit on x86-64 is 8192; anything above is a typing error.
MAX_CPU = 8191

_RANGE = re.compile(r"(\d{1,40})(?:-(\d{1,40})(?::(\d{1,40})/(\d{1,40}))?)?", re.ASCII)
# No list needs to name every CPU more often than this.
_REPEATS = 4


class CpuSet:
    """CPU numbers 0..8191; compares, hashes and combines like a frozenset."""

    __slots__ = ("_cpus",)

    def __init__(self, cpus: Iterable[int] = ()) -> None:
        members = frozenset(cpus)
        if members and not (min(members) >= 0 and max(members) <= MAX_CPU):
            wrong = min(c for c in members if not 0 <= c <= MAX_CPU)
            raise VsrtuneError(f"CPU {wrong} is outside 0..{MAX_CPU}")
        self._cpus = members

    @classmethod
    def _of(cls, members: frozenset[int]) -> CpuSet:
        """A set of ``members``, which the caller knows to be in range."""
        made = cls.__new__(cls)
        made._cpus = members
        return made

    @staticmethod
    def parse(text: str) -> CpuSet:
        """Read ``0-3,7`` or the grouped form ``0-15:1/4`` (kernel ``bitmap_parselist``).

        An empty text is the empty set. Raises VsrtuneError on anything else.
        """
        return CpuSet._parse(text)

    # A host has few distinct lists, and thousands of threads that share them. Apart from ``parse``,
    # because the type of a cached function takes any argument.
    @staticmethod
    @lru_cache(maxsize=1024)
    def _parse(text: str) -> CpuSet:
        cpus: set[int] = set()
        named = 0
        for part in filter(None, (p.strip() for p in text.strip().split(","))):
            match = _RANGE.fullmatch(part)
            if match is None:
                shown = part if len(part) <= 40 else part[:37] + "..."
                raise VsrtuneError(f"{shown!r} is not a CPU list", hint="write CPUs as 0-3,7")
            first = int(match[1])
            last = int(match[2]) if match[2] is not None else first
            used = int(match[3]) if match[3] is not None else 1
            group = int(match[4]) if match[4] is not None else 1
            if last < first or group == 0 or used > group:
                raise VsrtuneError(f"{part!r} is not a CPU range", hint="write the lower CPU first")
            if last > MAX_CPU:
                raise VsrtuneError(f"CPU {last} is outside 0..{MAX_CPU}")
            named += last - first + 1
            if named > _REPEATS * (MAX_CPU + 1):
                raise VsrtuneError("the CPU list names CPUs over and over", hint="name each once")
            cpus.update(c for c in range(first, last + 1) if (c - first) % group < used)
        return CpuSet(cpus)

    @staticmethod
    @lru_cache(maxsize=1024)
    def single(cpu: int) -> CpuSet:
        """The set of one CPU."""
        return CpuSet((cpu,))

    @staticmethod
    def union(sets: Iterable[CpuSet]) -> CpuSet:
        """The CPUs of all these sets."""
        return CpuSet._of(frozenset[int]().union(*(s._cpus for s in sets)))

    @classmethod
    def from_mask(cls, text: str) -> CpuSet:
        """Read a hexadecimal mask such as ``ffffffff,00000003`` (/proc, sysfs). Raises ValueError
        for text that is no mask, VsrtuneError for CPUs outside 0..8191."""
        bits = int(text.strip().replace(",", "") or "0", 16)
        if bits < 0 or bits.bit_length() > MAX_CPU + 1:
            raise VsrtuneError(f"the CPU mask is not of CPUs 0..{MAX_CPU}")
        return cls(i for i in range(bits.bit_length()) if bits >> i & 1)

    def to_mask(self) -> str:
        """The hexadecimal mask, in groups of 32 bits as sysfs takes it; ``0`` when empty."""
        bits = sum(1 << cpu for cpu in self._cpus)
        groups = []
        while bits >> 32:
            groups.append(f"{bits & 0xFFFFFFFF:08x}")
            bits >>= 32
        return ",".join([f"{bits:x}", *reversed(groups)])

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
        return iter(sorted(self._cpus) if len(self._cpus) > 1 else self._cpus)

    def __bool__(self) -> bool:
        return bool(self._cpus)

    def __len__(self) -> int:
        return len(self._cpus)

    def __contains__(self, cpu: object) -> bool:
        return cpu in self._cpus

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CpuSet) and self._cpus == other._cpus)

    def __hash__(self) -> int:
        return hash(self._cpus)

    def __or__(self, other: CpuSet) -> CpuSet:
        return CpuSet._of(self._cpus | other._cpus)

    def __and__(self, other: CpuSet) -> CpuSet:
        if self._cpus <= other._cpus:
            return self
        return CpuSet._of(self._cpus & other._cpus)

    def __sub__(self, other: CpuSet) -> CpuSet:
        return _difference(self, other) if other._cpus else self

    def __le__(self, other: CpuSet) -> bool:
        return self._cpus <= other._cpus

    def isdisjoint(self, other: CpuSet) -> bool:
        """True when no CPU is in both."""
        return self._cpus.isdisjoint(other._cpus)

    def first(self) -> int:
        """The lowest CPU number; ValueError when empty."""
        return min(self._cpus)


@lru_cache(maxsize=1024)
def _difference(one: CpuSet, other: CpuSet) -> CpuSet:
    left = one._cpus - other._cpus
    return one if len(left) == len(one) else CpuSet._of(left)
