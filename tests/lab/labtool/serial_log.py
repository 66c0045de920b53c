"""What a kernel's log says of the kernel.

The module's own tests (kmod/tests/frames.py) use it, too; it needs nothing of the lab.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Trouble(StrEnum):
    """The words of a report."""

    CRASH = "kernel crash"
    WARNING = "kernel warning"
    # The kernel's clock went on while the machine below did not run it, or a CPU hangs. In the
    # second case the lab does not end by itself either.
    STALL = "stalled CPU"


@dataclass(frozen=True)
class Complaint:
    """The first line of its kind, without the time stamp."""

    trouble: Trouble
    line: str

    def __str__(self) -> str:
        return f"{self.trouble}: {self.line}"


_TIME = r"^\[ *\d+\.\d+\](?:\[[^]]*\])? "
# In the order of a report. No line is of two kinds.
_KINDS = {
    Trouble.CRASH: (
        "traps: PANIC",
        "Oops",
        "int3: ",
        # Plain accesses race in much of the kernel: a report counts when the module is in it.
        r"BUG[: ](?! ?workqueue)(?! ?KCSAN: (?![^=]*?\[napi_macvlan\]))",
        "Kernel panic",
        "general protection fault",
        "KASAN: ",
        "UBSAN: ",
        "list_(?:add|del) corruption",
        "refcount_t: ",
        ".*Watchdog detected hard LOCKUP",
    ),
    Trouble.WARNING: ("WARNING: ", "unregister_netdevice: waiting for "),
    Trouble.STALL: (
        "watchdog: BUG: soft lockup",
        "BUG: workqueue lockup",
        "rcu: INFO: .*stall",
        "rcu: .* starved ",
        "INFO: task ",
        "workqueue: .* hogged CPU",
    ),
}
_PATTERNS = {
    trouble: re.compile(f"{_TIME}((?:{'|'.join(starts)}).*)", re.MULTILINE)
    for trouble, starts in _KINDS.items()
}
# Also of a complaint, of whatever kind.
_REST = (
    "Call Trace:",
    "RIP: 0010",
    "INFO: lockdep",
    "NETDEV WATCHDOG: ",
    "kmemleak: .*leak",
    ".*page allocation failure",
    ".*[Uu]nable to handle",
    ".*corrupt",
)
_ANY = re.compile("|".join((*(s for starts in _KINDS.values() for s in starts), *_REST)))


def complaints(log: str) -> list[Complaint]:
    """The first complaint of each kind, the kernel's crash first."""
    matches = {trouble: pattern.search(log) for trouble, pattern in _PATTERNS.items()}
    return [Complaint(trouble, m[1].strip()) for trouble, m in matches.items() if m]


def complains(line: str) -> bool:
    """Whether the kernel complains in a line without a time stamp."""
    return _ANY.match(line) is not None
