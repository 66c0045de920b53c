"""The interrupt CPUs of a policy, which may stand in two places.

``cpus.irq`` says which CPUs serve the interrupts, so that threads stay away from them;
``irq.set: true`` has the interrupts moved there. ``irq.cpus`` is the same list, beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vsrtune.core.cpuset import CpuSet
from vsrtune.policy_yaml import KeyPath

LIST_KEYS: KeyPath = ("irq", "cpus")
SET_KEYS: KeyPath = ("irq", "set")
_OLD_KEYS: KeyPath = ("cpus", "irq")


@dataclass(frozen=True, slots=True)
class IrqError:
    """What is wrong with the two together: the key, the fault, and what to write."""

    keys: KeyPath
    what: str
    hint: str


def place(beside: CpuSet | None) -> KeyPath:
    """Where the CPUs are written; ``beside`` is ``irq.cpus``."""
    return _OLD_KEYS if beside is None else LIST_KEYS


def judge(
    told: CpuSet | None, told_line: int, beside: CpuSet | None, moved: bool | None
) -> IrqError | None:
    """The fault of ``cpus.irq`` (``told``, None when auto or unset), ``irq.cpus`` and
    ``irq.set`` together."""
    if told is not None and beside is not None and told != beside:
        return IrqError(
            LIST_KEYS,
            f"CPUs {beside} contradict cpus.irq, which says {told} (line {told_line})",
            "write the list once: irq.cpus stands for both",
        )
    if moved and told is None and beside is None:
        return IrqError(
            SET_KEYS,
            "the CPUs to which interrupts are to be moved are not named",
            "add irq: {cpus: 0}",
        )
    return None
