# SPDX-License-Identifier: GPL-2.0-or-later
"""Interrupts of network cards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.model.guest import Irq

_LINE = re.compile(r"\s*(\d{1,9}):((?:\s+\d+)*)\s+(.*)", re.ASCII)
# The last words when no driver has requested the interrupt: "49152-edge".
_NO_ACTION = re.compile(r"(?:.*\s)?(?:\d+-\w+|Level|Edge)", re.ASCII)


def parse_interrupts(text: str) -> dict[int, str]:
    """Names by interrupt number, from /proc/interrupts (kernel ``show_interrupts``:
    two blanks stand before the names of the actions, which are joined by ", ")."""
    names: dict[int, str] = {}
    for line in text.splitlines()[1:]:
        match = _LINE.match(line)
        if match is not None:
            name = match[3].rstrip().rpartition("  ")[2].strip()
            names[int(match[1])] = "" if _NO_ACTION.fullmatch(name) else name
    return names


def parse_counts(text: str) -> dict[int, int]:
    """The count of each interrupt over all CPUs, by number, from /proc/interrupts."""
    found = (_LINE.match(line) for line in text.splitlines()[1:])
    return {int(m[1]): sum(map(int, m[2].split())) for m in found if m is not None}


def joined(actions: str) -> str:
    """``/sys/kernel/irq/N/actions`` (kernel ``actions_show``) in the form of /proc/interrupts: ""
    when no driver has requested the interrupt."""
    return ", ".join(filter(None, (name.strip() for name in actions.split(","))))


def read_names(root: HostRoot) -> dict[int, str]:
    """Names by interrupt number. Raises OSError."""
    return parse_interrupts(root.read("/proc/interrupts"))


def read_irqs(root: HostRoot, numbers: Iterable[int], names: Mapping[int, str]) -> tuple[Irq, ...]:
    """The interrupts of one card that a driver has requested, in number order.

    ``effective`` falls back to ``smp_affinity_list`` on kernels without
    CONFIG_GENERIC_IRQ_EFFECTIVE_AFF_MASK.
    """
    irqs = []
    for number in sorted(numbers):
        if not names.get(number):
            continue
        affinity = text_of(root, f"/proc/irq/{number}/smp_affinity_list")
        if affinity is None:
            continue
        effective = text_of(root, f"/proc/irq/{number}/effective_affinity_list")
        served = CpuSet.parse(affinity if effective is None else effective)
        irqs.append(Irq(number, names[number], CpuSet.parse(affinity), served))
    return tuple(irqs)
