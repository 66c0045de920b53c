"""Every directory of tests/bad_policies is one mistake and the exact message for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from golden import cases, matches
from planning_samples import change, cpus, host, nic, router, snapshot

from vsrtune.model import Role, Snapshot
from vsrtune.policy_files import check

CASES = Path(__file__).resolve().parents[1] / "bad_policies"


def _no_vcpus() -> Snapshot:
    guest = router()
    kept = tuple(t for t in guest.threads if t.role is not Role.VCPU)
    return snapshot(replace(guest, threads=kept, problems=("QMP did not answer",)))


def _scope(allowed: str) -> Snapshot:
    guest = router()
    for role in (Role.VCPU, Role.VHOST, Role.EMULATOR):
        narrow = cpus(allowed)
        inside = {"affinity": narrow, "cpuset_effective": narrow, "cpuset_limit": narrow}
        guest = change(guest, role, **inside, pin=narrow)
    return snapshot(guest)


# A case that needs a host names one of these in its snapshot.txt.
HOSTS: dict[str, Callable[[], Snapshot]] = {
    "router": lambda: snapshot(router()),
    "offline-3": lambda: snapshot(router(online="0-2"), on=host(offline="3")),
    "no-nic": lambda: snapshot(router(interfaces=())),
    "one-cpu": lambda: snapshot(router(online="0", interfaces=()), on=host(1)),
    "irqs-everywhere": lambda: snapshot(router(), on=host(nics=[nic("p0", "0-3")])),
    "no-vcpus": _no_vcpus,
    "scope-0-2": lambda: _scope("0-2"),
    "scope-0": lambda: _scope("0"),
}


@pytest.mark.parametrize("case", cases(CASES), ids=lambda p: p.name)
def test_message(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case)  # messages name the file as the operator did
    named = Path("snapshot.txt")
    on = HOSTS[named.read_text().strip()]() if named.exists() else None
    errors = check([Path("policy.yaml")], on)
    assert errors, "the policy is accepted"
    assert all(e.what and e.where and e.hint for e in errors)
    assert all(e.exit_code == 2 for e in errors)
    matches(Path("message.txt"), "".join(f"{e}\n" for e in errors))
