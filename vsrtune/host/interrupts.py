# SPDX-License-Identifier: GPL-2.0-or-later
"""Interrupts of network cards."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.model.guest import Irq

_LINE = re.compile(r"\s*(\d{1,9}):((?:\s+\d+)*)\s", re.ASCII)


def parse_counts(text: str) -> dict[int, int]:
    """The count of each interrupt over all CPUs, by number, from /proc/interrupts."""
    found = (_LINE.match(line) for line in text.splitlines()[1:])
    return {int(m[1]): sum(map(int, m[2].split())) for m in found if m is not None}


def joined(actions: str) -> str:
    """``/sys/kernel/irq/N/actions`` (kernel ``actions_show``) in the form of /proc/interrupts: ""
    when no driver has requested the interrupt."""
    return ", ".join(filter(None, (name.strip() for name in actions.split(","))))


def read_irqs(root: HostRoot, numbers: Iterable[int]) -> tuple[Irq, ...]:
    """The interrupts of one card that a driver has requested, in number order.

    ``effective`` falls back to ``smp_affinity_list`` on kernels without
    CONFIG_GENERIC_IRQ_EFFECTIVE_AFF_MASK.
    """
    irqs = []
    for number in sorted(numbers):
        name = joined(text_of(root, f"/sys/kernel/irq/{number}/actions") or "")
        if not name:
            continue
        affinity = text_of(root, f"/proc/irq/{number}/smp_affinity_list")
        if affinity is None:
            continue
        effective = text_of(root, f"/proc/irq/{number}/effective_affinity_list")
        served = CpuSet.parse(affinity if effective is None else effective)
        irqs.append(Irq(number, name, CpuSet.parse(affinity), served))
    return tuple(irqs)
