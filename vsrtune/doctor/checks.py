"""All checks of `vsrtune doctor`, and the findings of one host in the order of what matters.

A new check is a function in one of the modules below and its name in CHECKS there.
"""

from __future__ import annotations

from collections.abc import Iterable

from vsrtune.doctor import guest_checks, host_checks, module_checks
from vsrtune.doctor.model import Case, Check, Finding, run

OF_HOST: tuple[Check[Case], ...] = (*host_checks.CHECKS, *guest_checks.CHECKS)
OF_MODULE = module_checks.CHECKS


def traps() -> list[tuple[str, str]]:
    """Name of each check and what it looks for, for the reference."""
    host = [(check.name, check.trap) for check in OF_HOST]
    return host + [(check.name, check.trap) for check in OF_MODULE]


def check_all(case: Case, seen: module_checks.Seen | None) -> tuple[Finding, ...]:
    """Every finding, what matters most first. ``seen`` is None on a recorded host, of which
    nobody knows the module."""
    found = run(OF_HOST, case)
    if seen is not None:
        found += run(OF_MODULE, seen)
    return in_order(found)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors, warnings, what to know, what is fine; each in the order of the checks."""
    return tuple(sorted(findings, key=lambda found: -found.level.rank))
