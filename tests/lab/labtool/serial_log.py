"""What a kernel's log says of the kernel, and whether a lab's emulator is to blame.

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
    EMULATOR = "emulator death"
    EARLY = "kernel crash before vsrtune ran"


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
# die() of arch/x86/kernel/dumpstack.c: the bytes around the instruction that trapped.
_INT3 = re.compile(r"\bint3: 0000 \[#1\].*?\bCode: ([0-9a-f ]*)<[0-9a-f]{2}>", re.DOTALL)
_BREAKPOINT = "cc"
# An interrupt's entry, and below it in the stack what it interrupted.
_MASKED = re.compile(
    r"\] +asm_(?:sysvec_\w+|common_interrupt)\+\S+\n\S* *\S+ RIP: 0010:__svm_vcpu_run\+"
)
# As ../inlab/agent writes it before the package is configured and before the command.
_OURS = "lab: vsrtune's code runs"


def complaints(log: str) -> list[Complaint]:
    """The first complaint of each kind, the kernel's crash first. A crash that the kernel's own dump
    proves to be the emulator's is that, and its other lines do not count. Neither do those of
    a crash of the distribution's kernel while nothing of vsrtune was there."""
    found = {}
    for trouble, pattern in _PATTERNS.items():
        if match := pattern.search(log):
            found[trouble] = Complaint(trouble, match[1].strip())
    crash = found.get(Trouble.CRASH)
    if crash is None:
        return list(found.values())
    if stale_breakpoint(log):
        return [Complaint(Trouble.EMULATOR, f"it ran a breakpoint that is gone ({crash.line})")]
    if interrupted_while_masked(log[log.index(crash.line) :]):
        return [Complaint(Trouble.EMULATOR, f"it interrupted __svm_vcpu_run ({crash.line})")]
    if _OURS not in log[: log.index(crash.line)]:
        return [Complaint(Trouble.EARLY, crash.line)]
    return list(found.values())


def complains(line: str) -> bool:
    """Whether the kernel complains in a line without a time stamp."""
    return _ANY.match(line) is not None


def stale_breakpoint(log: str) -> bool:
    """Whether the first oops is a breakpoint trap at a place where memory holds no breakpoint.

    The kernel patches code under a temporary int3 (text_poke_bp_batch). An emulator that goes on
    executing its older translation traps after the kernel has taken the int3 away. A real
    CPU leaves the byte 0xcc before the instruction pointer.
    """
    match = _INT3.search(log)
    if match is None:
        return False
    before = match[1].split()
    return bool(before) and before[-1] != _BREAKPOINT


def interrupted_while_masked(dump: str) -> bool:
    """Whether the stack of a crash has an interrupt in KVM's __svm_vcpu_run.

    A CPU takes none there: svm_vcpu_run of arch/x86/kvm/svm/svm.c clears the global interrupt flag
    around it, because the segments are then the guest's. The entry reads the current task through
    GS, and faults without end.
    """
    return _MASKED.search(dump) is not None
